"""Environments of `verifiers`, unchanged, at the served policy: its rubric is the reward, what was sampled is trained on."""

import pytest
import test_serve_tools
from test_agent_frameworks import room

from grpolab.serve.agents import agent_grpo
from grpolab.serve.service import serve_policy
from grpolab.train.grpo import GRPOConfig

PACKAGES, pytestmark = "verifiers", [pytest.mark.full, pytest.mark.usefixtures("packages")]  # they weigh some hundreds of MB
NAMES, caller = test_serve_tools.NAMES, test_serve_tools.caller


def rooms(tool=room):
    """An environment with a tool and a rubric of two rewards, and the agent that plays it."""
    import verifiers as vf
    from datasets import Dataset
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    def asked(completion):
        return float(any(message["role"] == "tool" for message in completion))

    tasks = Dataset.from_list([{"question": f"Where is {name}?", "answer": room(name)} for name in NAMES])
    env = vf.ToolEnv(dataset=tasks, tools=[tool], rubric=vf.Rubric(funcs=[right, asked], weights=[1.0, 0.5]), max_turns=3)

    async def agent(base_url, task, **sampling):
        async with AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
            played = await env.run_rollout(task, OpenAIChatCompletionsClient(client), "tiny", sampling)
        if played.get("error"):
            raise RuntimeError(played["error"])
        agent.played.append(played)
        return played["reward"]

    agent.played = []
    return list(env.get_dataset()), agent


async def test_a_rollout_of_a_tool_environment_is_one_of_exact_ids(caller, monkeypatch):
    tasks, agent = rooms()
    async with serve_policy(caller, seed=0) as service:
        for task in tasks:
            session = service.open_session(max_tokens=90)
            reward = await agent(session.url, task, temperature=0.3)
            turns, rollout = list(session.turns), service.rollout(session)
            sampled = [t for turn in turns for t in turn.rollout.tokens]
            assert [t for t, m in zip(rollout.tokens, rollout.mask) if m] == sampled
            played = agent.played[-1]
            wrote = played["completion"][-1]["content"]
            heard = [message["content"] for message in played["completion"] if message["role"] == "tool"]
            assert heard in ([], [task["answer"]]) and reward == (wrote == task["answer"]) + 0.5 * bool(heard)
    assert any(len(played["completion"]) == 3 and played["reward"] == 1.5 for played in agent.played)


@pytest.mark.slow
async def test_a_policy_is_trained_by_the_rubric(caller):
    tasks, agent = rooms()
    config = GRPOConfig(steps=1, prompts_per_step=2, group_size=4, max_new_tokens=90, lr=1e-5)
    (row,) = [row async for row in agent_grpo(caller, None, tasks, config, agent, timeout=120)]
    assert row["agent_errors"] == row["rewritten"] == row["abstained"] == 0 and len(agent.played) == 8
    assert row["reward"] == pytest.approx(sum(played["reward"] for played in agent.played) / 8) and row["reward"] > 0


async def test_a_run_that_verifiers_calls_an_error_gets_no_reward(caller):
    """It gives such a run the reward 0."""
    tasks, agent = rooms()
    async with serve_policy(caller) as service:
        session = service.open_session(limit=20)  # in which no prompt fits
        with pytest.raises(RuntimeError):
            await agent(session.url, tasks[0])
