"""Multi-turn training on OpenEnv 0.10.0's own server: an environment with typed actions, and one with MCP tools."""

import json
import os
import random
from dataclasses import replace

import pytest
import torch
from env_harness import ROOT, start_process
from loop_helpers import fresh, rows_of

from grpolab.chat import encode_chat
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.action_format import MCP, TEXT
from grpolab.env.client import EnvSession
from grpolab.env.pool import GrpoPool
from grpolab.env.protocol import InvalidAction, ServerError
from grpolab.train.episodes import Limits, play_all
from grpolab.train.grpo import GRPOConfig
from grpolab.train.multiturn import multi_turn_grpo
from grpolab.train.sft import SFTConfig, sft

SEATS = 4
TOOLS = ("Tools:\nadd(a: integer, b: integer): The sum.\nanswer(n: integer): The end.\n"
         'Call one of them: {"name": "...", "arguments": {...}}')


@pytest.fixture(scope="module")
def start():
    """start(kind) -> the address of a server of OpenEnv 0.10.0; all are killed at the end."""
    python, processes = ROOT / ".venv" / "openenv-0.10.0" / "bin" / "python", []

    def begin(kind):
        if not python.exists():
            missing = "openenv 0.10.0 is not installed: make openenv"
            pytest.fail(missing) if os.environ.get("REQUIRE_OPENENV") else pytest.skip(missing)
        process, url = start_process(str(python), str(ROOT / "tests" / "openenv_peer.py"), kind, str(SEATS))
        processes.append(process)
        return url

    yield begin
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def typed_url(start):
    return start("typed")


@pytest.fixture(scope="module")
def tools_url(start):
    return start("tools")


def boxed(text):
    return {"number": int(text.partition("\\boxed{")[2].partition("}")[0])}


TYPED = replace(TEXT, to_action=boxed, to_text=lambda seen: seen["message"])


def taught(tiny, conversations, steps, batch_size):
    """A copy of the tiny policy that imitates the conversations: lists of what is said in turn."""
    policy, examples = fresh(tiny), []
    for texts in conversations:
        said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        examples.append(encode_chat(policy.tokenizer, said))
    rows_of(sft(policy, examples, SFTConfig(steps=steps, lr=3e-3, batch_size=batch_size)))
    return policy


def sums(n):
    rng = random.Random(0)
    return [(rng.randrange(3), rng.randrange(3), rng.random() < 0.5) for _ in range(n)]


@pytest.fixture(scope="module")
def answerer(_tiny):
    """Answers with a number, now and then a wrong one."""
    return taught(_tiny, [(f"What is {a} + {b}?", f"\\boxed{{{a + b + wrong}}}") for a, b, wrong in sums(64)], 30, 32)


@pytest.fixture(scope="module")
def caller(_tiny):
    """Writes tool calls: an addition first, or the answer at once; often a wrong one. Ten seconds, for a call is forty
    characters long, and a policy that cannot write one proves nothing."""
    conversations = []
    for a, b, wrong in sums(64):
        call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
        end = json.dumps({"name": "answer", "arguments": {"n": a + b + wrong}})
        conversations.append((f"{TOOLS}\nWhat is {a} + {b}?", *((call, str(a + b)) if a == 0 else ()), end))
    return taught(_tiny, conversations, 60, 6)


async def trained(policy, url, action_format, steps=3, **options):
    config = GRPOConfig(steps=steps, prompts_per_step=2, group_size=SEATS, lr=1e-4, max_new_tokens=56)
    before = [p.clone() for p in policy.model.parameters()]
    async with GrpoPool(url, size=SEATS, queue=5) as pool:
        rows = [row async for row in multi_turn_grpo(policy, None, [None], config, pool,
                                                     action_format=action_format, **options)]
    moved = any(not torch.equal(p, q) for p, q in zip(before, policy.model.parameters()))
    return rows, moved


async def episodes(policy, url, action_format, n=8, limits=None):
    async with GrpoPool(url, size=SEATS, queue=5) as pool, Sampler(policy) as sampler:
        params = SamplingParams(max_new_tokens=56)
        return await play_all(pool, sampler, [None] * n, seeds=range(n), params=params, limits=limits or Limits(),
                              action_format=action_format)


async def test_training_on_typed_actions(typed_url, answerer):
    rows, moved = await trained(answerer, typed_url, TYPED)
    assert moved and [row["lost"] for row in rows] == [0, 0, 0]
    assert all(0 <= row["reward"] <= 1 and row["turns"] > 0 for row in rows) and any(row["mixed"] for row in rows)
    assert max(row.get("diff_max", 0.0) for row in rows) < 1e-3


async def test_a_value_that_their_validator_refuses_ends_their_session_and_not_ours(typed_url, answerer):
    """Their server cannot serialise the validator's error and hangs up; the rule says what becomes of the episode."""
    action_format = replace(TYPED, to_action=lambda text: {"number": 10})
    found = await episodes(answerer, typed_url, action_format)
    assert {(e.rollout.finish_reason, e.rollout.reward, e.invalid) for e in found} == {("invalid", None, 1)}
    found = await episodes(answerer, typed_url, replace(action_format, on_invalid="penalise", penalty=-0.5))
    assert {(e.rollout.finish_reason, e.rollout.reward, e.invalid) for e in found} == {("invalid", -0.5, 1)}


@pytest.mark.full
async def test_training_on_tools(tools_url, caller):
    limits = Limits(max_turns=3, max_total_tokens=420)
    rows, moved = await trained(caller, tools_url, MCP, limits=limits)
    assert moved and [row["lost"] for row in rows] == [0, 0, 0] and any(row["mixed"] for row in rows)
    rates = [(row["reward"], row["tool_rate"], row["turns"]) for row in rows]
    assert all(0 <= reward <= 1 and tools > 0.5 and turns >= 1 for reward, tools, turns in rates) and rates[0][2] > 1, rates
    assert max(row.get("diff_max", 0.0) for row in rows) < 1e-3


async def test_what_the_tools_server_says(tools_url):
    async with EnvSession(tools_url) as session:
        first = await session.reset(seed=1)
        assert [tool["name"] for tool in (await session.mcp("tools/list"))["tools"]] == ["add", "answer"]
        assert (await session.state())["step_count"] == 0  # asking was no step
        with pytest.raises(ServerError, match=r"tools/nothing.*\(-32601\)"):
            await session.mcp("tools/nothing")
        assert MCP.texts(first)[0].startswith("What is ")
        for text, told in (('{"name": "add", "arguments": {"a": 2, "b": 3}}', "5"),
                           ('{"name": "nope"}', "error: Unknown tool: 'nope'")):
            assert MCP.texts(await MCP.act(session, text)) == [told]
        with pytest.raises(InvalidAction, match="write one tool call"):
            await MCP.act(session, '{"name": "add", "arguments": 3}')
        with pytest.raises(InvalidAction):
            await MCP.act(session, '{"name": "\\ud800"}')
        assert MCP.texts(await MCP.act(session, '{"name": "add"}'))[0].startswith("error: ")
        assert (await session.state())["step_count"] == 3


@pytest.mark.full
async def test_an_environment_without_tools_says_so(typed_url, answerer):
    with pytest.raises(ServerError, match="does not support MCP"):
        await episodes(answerer, typed_url, MCP)
