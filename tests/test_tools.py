"""Tools as functions: what a policy may call in this process, and what becomes of calls that go wrong."""

import asyncio
import json
import threading
import time

import pytest

from grpolab.chat import prompt_ids
from grpolab.decode.audit import audit
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.client import Deadlines
from grpolab.env.guess import GuessEnv
from grpolab.env.pool import GrpoPool
from grpolab.env.protocol import DeadlineExceeded, FactoryError, ServerError
from grpolab.tool_calls import ToolCall, write_calls
from grpolab.train.episodes import Limits, demonstrate
from grpolab.train.grpo import GRPOConfig
from grpolab.train.multiturn import multi_turn_grpo, play_all
from grpolab.train.sft import SFTConfig, sft
from grpolab.train.tools import MAX_RESULT, ToolRun, Tools, schema_of

ROOMS = {"Ann": "12", "Bob": "7", "Eve": "30", "Tom": "5"}


def room(name: str) -> str:
    """The room of a person."""
    return ROOMS[name]


async def floor(number: int, wing: str = "A") -> dict:
    """The floor of a room."""
    await asyncio.sleep(0)
    return {"floor": number // 10, "wing": wing}


def right(run: ToolRun) -> float:
    return float(run.answer == run.task["answer"])


def call(tool, /, **arguments):
    return write_calls([ToolCall(tool, arguments)])


async def turns_of(tools, tokenizer, *texts, task=None):
    """What the environment says to each text, in one episode on a pool of one."""
    form = tools.action_format(tokenizer)
    async with GrpoPool(tools, size=1) as pool:
        slot = pool.slots[0]
        await slot.reset(task=task or {"prompt": "Where?", "answer": "12"}, seed=3)
        return [await form.act(slot, text) for text in texts], form


def test_schemas_are_read_from_the_functions():
    assert schema_of(floor)["function"] == {"name": "floor", "description": "The floor of a room.", "parameters": {
        "type": "object", "additionalProperties": False, "required": ["number"],
        "properties": {"number": {"type": "integer"}, "wing": {"type": "string", "default": "A"}}}}
    assert Tools([room, floor], right).__name__ == "Tools(room, floor)"


@pytest.mark.parametrize(("tools", "why"), [
    ([lambda x: x], "types of"), ([lambda *names: 1], "cannot name"), ([room, room], "two tools|one name"), ([], "no tool"),
    (type("Empty", (), {}), "no tool"),
])
def test_functions_that_cannot_be_called_by_name_are_refused(tools, why):
    with pytest.raises(ValueError, match=why):
        Tools(tools, right)
    with pytest.raises(ValueError, match="deadline"):
        Tools([room], right, deadline=0)


def test_what_json_cannot_say_is_no_parameter():
    def locked(lock: threading.Lock) -> str: ...

    with pytest.raises(ValueError, match="JSON cannot say"):
        schema_of(locked)


def test_calls_are_answered_in_their_order_and_the_answer_is_paid(tiny):
    both = write_calls([ToolCall("floor", {"number": "31"}), ToolCall("room", {"name": "Ann"})])
    (first, last), form = asyncio.run(turns_of(Tools([room, floor], right), tiny.tokenizer, both, "12"))
    assert form.texts(first) == ['{"floor": 3, "wing": "A"}', "12"] and not first.done and first.reward is None
    assert (last.done, last.reward, form.measure([first, last])) == (True, 1.0, {"calls": 2, "tool_errors": 0})


def boom(kind: str) -> str:
    if kind == "exit":
        raise SystemExit(3)
    if kind == "hang":
        time.sleep(30)
    if kind == "stop":
        raise StopIteration
    return {"large": "x" * 10_000_000, "empty": "", "surrogate": "\ud800"}[kind]


async def late() -> str:
    await asyncio.sleep(30)


@pytest.mark.parametrize(("text", "told"), [
    (call("boom", kind="exit"), "error: SystemExit: 3"),
    (call("boom", kind="hang"), "error: TimeoutError: longer than 0.3 s"),
    (call("boom", kind="stop"), "error: RuntimeError: coroutine raised StopIteration"),
    (call("boom", kind="other"), "error: KeyError: 'other'"),
    (call("late"), "error: TimeoutError: longer than 0.3 s"),
    (call("nothing"), "error: there is no tool 'nothing'; there are boom, late"),
    (call("boom", knd=1), "error: kind: Missing required argument; knd: Unexpected keyword argument"),
    (call("boom", kind=[1]), "error: kind: Input should be a valid string"),
])
def test_what_a_call_does_wrong_is_told_and_counted(tiny, text, told):
    began = time.monotonic()
    (result, last), form = asyncio.run(turns_of(Tools([boom, late], right, deadline=0.3), tiny.tokenizer, text, "12"))
    assert form.texts(result) == [told] and time.monotonic() - began < 10
    assert last.reward == 1.0 and form.measure([last]) == {"calls": 0, "tool_errors": 1}


def test_results_are_bounded_text(tiny):
    texts = [call("boom", kind=kind) for kind in ("large", "empty", "surrogate")]
    results, form = asyncio.run(turns_of(Tools([boom], right), tiny.tokenizer, *texts))
    large, empty, surrogate = [form.texts(result)[0] for result in results]
    assert large == "x" * MAX_RESULT + " ... (10000000 characters)" and (empty, surrogate) == ("(empty)", "?")


def test_a_call_that_cannot_be_read_is_told_and_not_made(tiny):
    cut = call("room", name="Ann") + "<tool_call>"
    (malformed, last), _ = asyncio.run(turns_of(Tools([room], right), tiny.tokenizer, cut, "x"))
    assert "cannot be read" in malformed.why and last.metadata == {"calls": 0, "tool_errors": 0}


class Notes:
    """One for each episode, reset with what the task declares."""

    def reset(self, first, seed):
        self.lines = [first, str(seed)]

    def write(self, line: str) -> int:
        self.lines.append(line)
        return len(self.lines)

    async def read(self) -> str:
        return "|".join(self.lines)

    def _private(self):
        raise AssertionError


def test_a_class_is_tools_with_a_state_of_each_episode(tiny):
    async def main():
        tools = Tools(Notes, lambda run: len(run.calls))
        assert set(t["function"]["name"] for t in tools.schemas) == {"write", "read"}
        form = tools.action_format(tiny.tokenizer)
        async with GrpoPool(tools, size=2) as pool:
            for _ in range(2):
                for slot, first in zip(pool.slots, "ab"):
                    await slot.reset(task={"prompt": "?", "first": first}, seed=5)
                for slot, first in zip(pool.slots, "ab"):
                    assert form.texts(await form.act(slot, call("write", line="x"))) == ["3"]
                    assert form.texts(await form.act(slot, call("read"))) == [f"{first}|5|x"]
                    assert (await form.act(slot, "done")).reward == 2.0

    asyncio.run(main())


@pytest.mark.parametrize("reward", [lambda run: 1 / 0, lambda run: float("nan"), lambda run: "much"])
def test_a_reward_that_fails_costs_the_episode(tiny, reward):
    with pytest.raises(ServerError):
        asyncio.run(turns_of(Tools([room], reward), tiny.tokenizer, "12"))


# --- sessions in this process -----------------------------------------------------------------------------------------

def test_any_environment_can_be_played_in_this_process():
    async def main():
        before = threading.active_count()
        async with GrpoPool(GuessEnv, size=3) as pool:
            await pool.reset_group(seed=1)
            results = await pool.run_group_step([{"text": "50"}] * 3)
            assert len({json.dumps(r.observation) for r in results}) == 1
            assert (await pool.slots[0].state())["step_count"] == 1
            assert {span.phase for span in pool.trace} >= {"connect", "admit", "reset", "step"}
        for _ in range(100):
            if threading.active_count() == before:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(threading.enumerate())

    asyncio.run(main())


def test_environments_that_fail_in_this_process_fail_by_name():
    class Broken:
        def __init__(self):
            raise OSError("no disk")

    class Hung(GuessEnv):
        def step(self, action):
            time.sleep(30)

    async def main():
        with pytest.raises(FactoryError, match="Broken could not be made.*no disk"):
            await GrpoPool(Broken, size=2).connect()
        async with GrpoPool(Hung, size=1, deadlines=Deadlines(step=0.2)) as pool:
            await pool.reset_group(seed=1)
            with pytest.raises(DeadlineExceeded):
                await pool.run_group_step([{"text": "5"}])
            await pool.slots[0].reset(seed=1)  # on a new session
        with pytest.raises(TypeError, match="token"):
            GrpoPool(GuessEnv, token="x")

    asyncio.run(main())


# --- training ---------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_policy_is_trained_on_what_it_wrote_and_reads_what_it_called(tiny):
    """After demonstrations of a call: exact ids and log-probs, results with mask 0, groups that train."""
    async def main():
        tools, limits = Tools([room], right), Limits(max_turns=2, max_total_tokens=220)
        form = tools.action_format(tiny.tokenizer)
        rows = [{"prompt": f"Where is {name}?", "answer": answer} for name, answer in ROOMS.items()]
        shown = [demonstrate(tiny.tokenizer, tools(), row, [call("room", name=name), ROOMS[name]], action_format=form)
                 for name, row in zip(ROOMS, rows)]
        async for _ in sft(tiny, shown, SFTConfig(steps=60, batch_size=4, lr=2e-3)):
            pass
        params = SamplingParams(max_new_tokens=90)
        async with GrpoPool(tools, size=8) as pool:
            async with Sampler(tiny) as sampler:
                episodes = await play_all(pool, sampler, rows * 4, seeds=range(16), params=params, limits=limits,
                                          action_format=form)
            for row, episode in zip(rows * 4, episodes):
                rollout = episode.rollout
                assert rollout.prompt == tuple(prompt_ids(tiny.tokenizer, row["prompt"], tools.schemas))
                sampled = [t for t, m in zip(rollout.tokens, rollout.mask) if m]
                wrote = tiny.tokenizer.decode(sampled, skip_special_tokens=True)
                assert wrote.startswith("".join(text for text, _ in episode.turns))  # but for a turn that was cut
                assert rollout.reward == float(rollout.finish_reason == "done" and episode.turns[-1][0] == row["answer"])
            assert audit(tiny, [e.rollout for e in episodes]).max_error < 1e-4
            assert sum(e.calls for e in episodes) > 8 and any(set(ROOMS.values()) & set(e.heard) for e in episodes)
            config = GRPOConfig(steps=2, prompts_per_step=4, group_size=4, max_new_tokens=90, lr=1e-4)
            steps = multi_turn_grpo(tiny, None, rows, config, pool, action_format=form, limits=limits)
            rows_of_steps = [row async for row in steps]
        assert all(row["calls"] > 0.5 and row["tool_errors"] <= 1 and row["lost"] == 0 for row in rows_of_steps)

    asyncio.run(main())
