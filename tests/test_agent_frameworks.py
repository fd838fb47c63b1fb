"""Real agent frameworks, unchanged, at the served policy: their tool loops train it, on exactly what was sampled.

pydantic-ai sends calls and results back as OpenAI has them, so a loop is one rollout. smolagents rewrites calls into words of
its own ("Calling tools: ...") and asks for its last answer without tools: there a new rollout begins.
"""

import asyncio
import json
from functools import partial

import openai
import pytest
import test_serve_tools
from loop_helpers import rows_of

from grpolab.serve import agents
from grpolab.serve.agents import agent_grpo
from grpolab.serve.openai_schema import Refused
from grpolab.serve.service import serve_policy
from grpolab.serve.sessions import Session
from grpolab.serve.state import Service
from grpolab.train.grpo import GRPOConfig

PACKAGES, pytestmark = "agents", pytest.mark.usefixtures("packages")
NAMES, caller = test_serve_tools.NAMES, test_serve_tools.caller


@pytest.fixture
def sampled(monkeypatch):
    """(session id, prompt ids, sampled ids) of each answer, as they were recorded when they went out."""
    answers, honest = [], Session.record

    def record(self, prompt, rollout, *rest):
        answers.append((self.id, rollout.prompt, rollout.tokens))
        return honest(self, prompt, rollout, *rest)

    monkeypatch.setattr(Session, "record", record)
    return answers


@pytest.fixture
def trained(monkeypatch):
    """The runs that a training takes its loss from."""
    runs, honest = [], agents.as_groups

    def as_groups(tasks, by_task, kind):
        runs.extend(run for members in by_task for run in members)
        return honest(tasks, by_task, kind)

    monkeypatch.setattr(agents, "as_groups", as_groups)
    return runs


def room(name: str, day: int = 1) -> str:
    """The room of a person."""
    return {"Ann": "12", "Bob": "7"}.get(name, "30")


IDS = {"extra_body": {"return_token_ids": True}}


def answers_of(response):
    """(prompt ids, sampled ids) of each choice in the body of an answer: what went over the wire."""
    if response.status_code == 200 and response.request.url.path.endswith("/chat/completions"):
        body = json.loads(response.content)
        return [(tuple(body["prompt_token_ids"]), tuple(choice["token_ids"])) for choice in body["choices"]]
    return []


def pydantic_model(url, wire=None, **client):
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def keep(response):
        await response.aread()
        wire.extend(answers_of(response))

    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [keep]} if wire is not None else {})
    asking = openai.AsyncOpenAI(base_url=url, api_key="-", http_client=http, **client)
    return OpenAIChatModel("tiny", provider=OpenAIProvider(openai_client=asking))


async def pydantic_agent(url, name, wire=None, **settings):
    from pydantic_ai import Agent

    model, ids = pydantic_model(url, wire), IDS if wire is not None else {}
    answer = await Agent(model, tools=[room], model_settings=ids | settings).run(f"Where is {name}?")
    await model.client.close()
    return float(answer.output == room(name))


def smolagents_agent(url, name):
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
    with openai.DefaultHttpxClient() as http:
        model = OpenAIServerModel("tiny", api_base=url, api_key="-", client_kwargs={"http_client": http})
        ToolCallingAgent([room], model, max_steps=4, prompt_templates=words, verbosity_level=0).run(f"Where is {name}?")


def check_trained(trained, wire, runs):
    """Each sampled id of the wire is trained on, in its place behind its own prompt, and nothing else is."""
    assert len(trained) == runs and all(run.rollouts and run.trained for run in trained)
    found = []
    for run in trained:
        for r in run.rollouts:
            ids, mask = r.prompt + r.tokens, (0,) * len(r.prompt) + r.mask
            begins = [t for t in range(1, len(ids)) if mask[t] and not mask[t - 1]]
            ends = [next((u for u in range(t, len(ids)) if not mask[u]), len(ids)) for t in begins]
            found += [(ids[:t], ids[t:u]) for t, u in zip(begins, ends)]
    assert sorted(found) == sorted(wire)


@pytest.mark.full
def test_its_loops_train_the_policy(caller, sampled, trained):
    wire, config = [], GRPOConfig(steps=1, prompts_per_step=4, group_size=4, max_new_tokens=90, lr=1e-5)
    (row,) = rows_of(agent_grpo(caller, None, NAMES, config, partial(pydantic_agent, wire=wire)))
    assert row["agent_errors"] == row["agent_timeouts"] == row["silent"] == row["rewritten"] == row["abstained"] == 0
    assert len({id for id, _, _ in sampled}) == 16 and len(sampled) > 28  # the call and the answer of each
    check_trained(trained, wire, 16)
    assert 0 < row["reward"] <= 1


@pytest.mark.parametrize("failing", [*(pytest.param(how, marks=pytest.mark.full) for how in ("503", "slow")), "tool"])
async def test_what_a_framework_tries_again_is_in_the_record_once(caller, sampled, monkeypatch, failing):
    """After an answer of 503, one that did not come in time, and a tool that asks for another call."""
    from pydantic_ai import Agent, ModelRetry

    honest, tries, wire = Service.admit, [], []

    async def admit(self, rows):
        tries.append(rows)
        if failing == "503" and len(tries) in (1, 3):
            raise Refused(503, "not now")
        if failing == "slow" and len(tries) == 1:
            await asyncio.sleep(6)
        return await honest(self, rows)

    def asked_again(name: str, day: int = 1) -> str:
        """The room of a person."""
        if failing == "tool" and len(wire) == 1:
            raise ModelRetry("try again")
        return room(name)

    asked_again.__name__ = "room"
    monkeypatch.setattr(Service, "admit", admit)
    async with serve_policy(caller, seed=0) as service:
        session = service.open_session(max_tokens=90)
        model = pydantic_model(session.url, wire, max_retries=2, timeout=4 if failing == "slow" else 60)
        await Agent(model, tools=[asked_again], model_settings=IDS | {"temperature": 0.3}).run("Where is Bob?")
        await model.client.close()
        while service.counts["cancelled"] < (failing == "slow"):  # the one that nobody waits for
            await asyncio.sleep(0.05)
        rollout = service.rollout(session)
    assert len(tries) == len(wire) + {"503": 2, "slow": 1, "tool": 0}[failing] and len(wire) >= 2
    assert wire == [(prompt, tokens) for _, prompt, tokens in sampled]
    check_trained([agents.AgentRun((rollout,), 1.0)], wire, 1)
    assert session.cancelled == (failing == "slow")


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
    async def main():
        caller.model.config.max_position_embeddings = 4096  # its histories are long
        async with serve_policy(caller, seed=0) as service:
            session = service.open_session(max_tokens=40)
            await asyncio.to_thread(smolagents_agent, session.url, "Ann")
            return service.rollouts(session)

    rollouts = asyncio.run(main())
    assert 1 < len(rollouts) < len(sampled)
    trained = [t for r in rollouts for t, m in zip(r.tokens, r.mask) if m]
    assert sorted(trained) == sorted(t for _, _, tokens in sampled for t in tokens)
    starts = {r.prompt for r in rollouts}
    assert starts <= {prompt for _, prompt, _ in sampled}
