"""Real agent frameworks, unchanged, at the served policy: their tool loops train it, on exactly what was sampled.

pydantic-ai sends calls and results back as OpenAI has them, so a loop is one rollout. smolagents rewrites calls into words of
its own ("Calling tools: ...") and asks for its last answer without tools: there a new rollout begins.
"""

import asyncio

import pytest
import test_serve_tools

from grpolab.serve.agents import agent_grpo
from grpolab.serve.service import serve_policy
from grpolab.serve.sessions import Session
from grpolab.train.grpo import GRPOConfig

PACKAGES, pytestmark = "agents", pytest.mark.usefixtures("packages")
NAMES, _caller, caller = test_serve_tools.NAMES, test_serve_tools._caller, test_serve_tools.caller


@pytest.fixture
def sampled(monkeypatch):
    """(session id, prompt ids, sampled ids) of each answer, as they were recorded when they went out."""
    answers, honest = [], Session.record

    def record(self, prompt, rollout, *rest):
        answers.append((self.id, rollout.prompt, rollout.tokens))
        return honest(self, prompt, rollout, *rest)

    monkeypatch.setattr(Session, "record", record)
    return answers


def room(name: str, day: int = 1) -> str:
    """The room of a person."""
    return {"Ann": "12", "Bob": "7"}.get(name, "30")


async def pydantic_agent(url, name, **settings):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="-"))
    answer = await Agent(model, tools=[room], model_settings=settings).run(f"Where is {name}?")
    return float(answer.output == room(name))


@pytest.mark.full
@pytest.mark.slow
def test_a_hundred_loops_of_pydantic_ai_train_the_policy(caller, sampled):
    async def main():
        config = GRPOConfig(steps=1, prompts_per_step=25, group_size=4, max_new_tokens=90, lr=1e-5)
        rows = [row async for row in agent_grpo(caller, None, list(NAMES) * 7, config, pydantic_agent)]
        return rows[0]

    row = asyncio.run(main())
    assert row["agent_errors"] == row["agent_timeouts"] == row["silent"] == row["rewritten"] == row["abstained"] == 0
    assert len({id for id, _, _ in sampled}) == 100 and len(sampled) > 180  # the call and the answer of each
    assert 0 < row["reward"] <= 1


async def test_a_loop_of_pydantic_ai_is_one_rollout_of_exact_ids(caller, sampled):
    async with serve_policy(caller, seed=0) as service:
        for name in NAMES:
            sampled.clear()
            session = service.open_session(max_tokens=90)
            await pydantic_agent(session.url, name, temperature=0.3)
            rollout = service.rollout(session)
            (_, prompt, call), (_, later, answer) = sampled
            assert rollout.prompt == prompt and later[: len(prompt) + len(call)] == prompt + call
            assert rollout.prompt + rollout.tokens == later + answer
            between = len(later) - len(prompt) - len(call)
            assert rollout.mask == (1,) * len(call) + (0,) * between + (1,) * len(answer)


def test_what_smolagents_rewrites_is_several_rollouts_and_loses_no_token(caller, sampled):
    def run(url):
        from smolagents import OpenAIServerModel, ToolCallingAgent, tool

        @tool
        def room(name: str) -> str:
            """The room of a person.

            Args:
                name: Who it is.
            """
            return "12"

        words = {"system_prompt": "", "managed_agent": {"task": "", "report": ""},
                 "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
                 "final_answer": {"pre_messages": "", "post_messages": ""}}
        model = OpenAIServerModel("tiny", api_base=url, api_key="-")
        ToolCallingAgent([room], model, max_steps=4, prompt_templates=words, verbosity_level=0).run("Where is Ann?")

    async def main():
        caller.model.config.max_position_embeddings = 4096  # its histories are long
        async with serve_policy(caller, seed=0) as service:
            session = service.open_session(max_tokens=40)
            await asyncio.to_thread(run, session.url)
            return service.rollouts(session)

    rollouts = asyncio.run(main())
    assert 1 < len(rollouts) < len(sampled)
    trained = [t for r in rollouts for t, m in zip(r.tokens, r.mask) if m]
    assert sorted(trained) == sorted(t for _, _, tokens in sampled for t in tokens)
    starts = {r.prompt for r in rollouts}
    assert starts <= {prompt for _, prompt, _ in sampled}
