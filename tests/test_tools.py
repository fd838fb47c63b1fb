"""Tools as functions: what a policy may call in this process, and what becomes of calls that go wrong."""

import asyncio
import threading
import time
from dataclasses import dataclass
from datetime import date
from functools import partial, wraps

import pytest

from grpolab.chat import CHAT_TEMPLATE, prompt_ids
from grpolab.decode.audit import audit
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.client import Deadlines
from grpolab.env.guess import GuessEnv
from grpolab.env.pool import GrpoPool
from grpolab.env.protocol import DeadlineExceeded, FactoryError, InvalidAction, ServerError
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


def untyped(x): ...


def many(*names: str): ...


async def floor(number: int, wing: str = "A") -> dict:
    """The floor of a room."""
    await asyncio.sleep(0)
    return {"floor": number // 10, "wing": wing}


def right(run: ToolRun) -> float:
    return float(run.answer == run.task["answer"])


def call(tool, /, **arguments):
    return write_calls([ToolCall(tool, arguments)])


async def turns_of(tools, tokenizer, *texts, task=None):
    """What the environment says to each text, in one episode on a pool of one; an InvalidAction where it is no action."""
    form = tools.action_format(tokenizer)

    async def said(slot, text):
        try:
            return await form.act(slot, text)
        except InvalidAction as fault:
            return fault

    async with GrpoPool(tools, size=1) as pool:
        slot = pool.slots[0]
        await slot.reset(task=task or {"prompt": "Where?", "answer": "12"}, seed=3)
        return [await said(slot, text) for text in texts], form


def test_schemas_are_read_from_the_functions():
    assert schema_of(floor)["function"] == {"name": "floor", "description": "The floor of a room.", "parameters": {
        "type": "object", "additionalProperties": False, "required": ["number"],
        "properties": {"number": {"type": "integer"}, "wing": {"type": "string", "default": "A"}}}}
    assert Tools([room, floor], right).__name__ == "Tools(room, floor)"


@pytest.mark.parametrize(("tools", "why"), [
    ([untyped], "needs a type"), ([many], "able to name"), ([room, room], "two tools|one name"), ([], "no tool"),
    (type("Empty", (), {}), "no tool"), ([lambda x: x], "no named function"), ([partial(room, "Ann")], "no named function"),
    ([int], "no named function"), ([5], "no named function"), ("room", "a list of functions"), (object(), "not an object"),
])
def test_functions_that_cannot_be_called_by_name_are_refused(tools, why):
    with pytest.raises(ValueError, match=why):
        Tools(tools, right)
    for deadline in (0, "5", float("inf")):
        with pytest.raises(ValueError, match="deadline"):
            Tools([room], right, deadline=deadline)
    with pytest.raises(ValueError, match="reward=None"):
        Tools([room], None)

    def locked(lock: threading.Lock) -> str: ...

    with pytest.raises(ValueError, match="JSON cannot say"):
        schema_of(locked)


def test_calls_are_answered_in_their_order_and_the_answer_is_paid(tiny):
    both = write_calls([ToolCall("floor", {"number": "31"}), ToolCall("room", {"name": "Ann"})])
    (first, last), form = asyncio.run(turns_of(Tools([room, floor], right), tiny.tokenizer, both, "12"))
    assert form.texts(first) == ['{"floor": 3, "wing": "A"}', "12"] and not first.done and first.reward is None
    assert (last.done, last.reward, form.measure([first, last])) == (True, 1.0, {"calls": 2, "tool_errors": 0})


class Unspeakable(Exception):
    def __str__(self):
        raise AttributeError


@dataclass
class Place:
    room: int
    since: date


RAISED = {"exit": SystemExit(3), "interrupt": KeyboardInterrupt("^C"), "cancel": asyncio.CancelledError("own"),
          "bad": Unspeakable(), "late": TimeoutError("the database")}


def boom(kind: str) -> str:
    if kind in RAISED:
        raise RAISED[kind]
    if kind == "hang":
        time.sleep(30)
    if kind == "stop":
        raise StopIteration
    return {"large": "x" * 10_000_000, "empty": "", "surrogate": "\ud800"}[kind]


async def late() -> str:
    await asyncio.sleep(30)


async def raises(kind: str) -> str:
    await asyncio.sleep(0)
    raise RAISED[kind]


@wraps(late)
def blocks() -> str:
    time.sleep(30)


blocks.__name__ = "blocking"


def place() -> Place:
    return Place(12, date(2026, 1, 2))


@pytest.mark.parametrize(("text", "told"), [
    (call("boom", kind="exit"), "error: SystemExit: 3"),
    (call("boom", kind="hang"), "error: TimeoutError: longer than 0.3 s"),
    (call("boom", kind="stop"), "error: RuntimeError: coroutine raised StopIteration"),
    (call("boom", kind="other"), "error: KeyError: 'other'"),
    (call("boom", kind="interrupt"), "error: KeyboardInterrupt: ^C"),
    (call("boom", kind="bad"), "error: Unspeakable: (no message)"),
    (call("raises", kind="cancel"), "error: CancelledError: own"),
    (call("raises", kind="late"), "error: TimeoutError: the database"),
    (call("blocking"), "error: TimeoutError: longer than 0.3 s"),
    (call("late") + call("late"), ["error: TimeoutError: longer than 0.3 s"] * 2),  # one bound for both
    (call("nothing"), "error: there is no tool 'nothing'; there are boom, late, raises, blocking"),
    (call("boom", knd=1), "error: kind: Missing required argument; knd: Unexpected keyword argument"),
    (call("boom", kind=[1]), "error: kind: Input should be a valid string"),
])
def test_what_a_call_does_wrong_is_told_and_counted(tiny, text, told):
    began, told = time.monotonic(), told if isinstance(told, list) else [told]
    tools = Tools([boom, late, raises, blocks], right, deadline=0.3)
    (result, last), form = asyncio.run(turns_of(tools, tiny.tokenizer, text, "12"))
    assert form.texts(result) == told and time.monotonic() - began < 10
    assert last.reward == 1.0 and form.measure([last]) == {"calls": 0, "tool_errors": len(told)}


def test_one_call_a_turn_where_the_template_knows_no_more(tiny):
    tokenizer = tiny.tokenizer.__class__.from_pretrained(tiny.tokenizer.name_or_path)
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "{% for call in message", "{% if message['tool_calls'] and message['tool_calls'] | length > 1 %}"
        "{{ raise_exception('one call') }}{% endif %}{% for call in message")
    two = call("room", name="Ann") * 2
    (refused, made), _ = asyncio.run(turns_of(Tools([room], right), tokenizer, two, call("room", name="Ann")))
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{% if message['role']", "{{ loop.length }}{% if message['role']")
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        Tools([room], right).action_format(tokenizer)
    assert str(refused) == "this turn has 2 calls, and a turn can have 1; none was made" and made.metadata["calls"] == 1


def test_results_are_bounded_text_and_what_is_no_text_is_json(tiny):
    texts = [*(call("boom", kind=kind) for kind in ("large", "empty", "surrogate")), call("place")]
    results, form = asyncio.run(turns_of(Tools([boom, place], right), tiny.tokenizer, *texts))
    large, empty, surrogate, json_text = [form.texts(result)[0] for result in results]
    assert large == "x" * MAX_RESULT + " ... (10000000 characters)" and (empty, surrogate) == ("(empty)", "?")
    assert json_text == '{"room": 12, "since": "2026-01-02"}'


def test_a_call_that_cannot_be_read_is_told_and_not_made(tiny):
    cut = call("room", name="Ann") + "<tool_call>"
    (malformed, last), _ = asyncio.run(turns_of(Tools([room], right), tiny.tokenizer, cut, "x"))
    assert "cannot be read" in str(malformed) and last.metadata == {"calls": 0, "tool_errors": 0}


class Notes:
    """One for each episode, reset with what the task declares."""

    def reset(self, first, seed):
        self.lines = [first, str(seed)]

    def write(self, line: str) -> int:
        self.lines.append(line)
        return len(self.lines)

    async def read(self) -> str:
        return "|".join(self.lines)

    @staticmethod
    def page() -> int:
        return 1

    @property
    def length(self):
        raise AssertionError

    def _private(self):
        raise AssertionError


async def test_a_class_is_tools_with_a_state_of_each_episode(tiny):
    tools = Tools(Notes, lambda run: len(run.calls))
    assert set(t["function"]["name"] for t in tools.schemas) == {"write", "read", "page"}
    form = tools.action_format(tiny.tokenizer)
    async with GrpoPool(tools, size=2) as pool:
        for _ in range(2):
            for slot, first in zip(pool.slots, "ab"):
                await slot.reset(task={"prompt": "?", "first": first}, seed=5)
            for slot, first in zip(pool.slots, "ab"):
                assert form.texts(await form.act(slot, call("write", line="x"))) == ["3"]
                assert form.texts(await form.act(slot, call("read"))) == [f"{first}|5|x"]
                assert (await form.act(slot, "done")).reward == 2.0


async def test_a_class_for_trl_is_one_for_tools(tiny):
    """Its `reset` takes the columns and may say more to the question; the reward sees the object."""
    class Counter:
        def reset(self, **columns):
            self.count = columns["start"]
            return f" From {self.count}."

        def increment(self, step: int) -> int:
            """Add to it.

            Args:
                step: how much
            """
            self.count += step
            return self.count

    tools = Tools(Counter, lambda run: run.tools.count)
    form = tools.action_format(tiny.tokenizer)
    async with GrpoPool(tools, size=1) as pool:
        started = await pool.slots[0].reset(task={"prompt": "Count.", "start": 5}, seed=1)
        assert form.texts(started) == ["Count. From 5."]
        assert form.texts(await form.act(pool.slots[0], call("increment", step=2))) == ["7"]
        assert (await form.act(pool.slots[0], "done")).reward == 7.0


@pytest.mark.parametrize("reward", [lambda run: 1 / 0, lambda run: float("nan"), lambda run: None])
def test_a_reward_that_fails_costs_the_episode(tiny, reward):
    with pytest.raises(ServerError):
        asyncio.run(turns_of(Tools([room], reward), tiny.tokenizer, "12"))


# --- sessions in this process -----------------------------------------------------------------------------------------

async def test_environments_that_fail_in_this_process_fail_by_name():
    class Broken:
        def __init__(self):
            raise OSError("no disk")

    class Hung(GuessEnv):
        def step(self, action):
            time.sleep(30)

    with pytest.raises(FactoryError, match="Broken.*no disk"):
        await GrpoPool(Broken, size=2).connect()
    async with GrpoPool(Hung, size=1, deadlines=Deadlines(step=0.2)) as pool:
        await pool.reset_group(seed=1)
        with pytest.raises(DeadlineExceeded):
            await pool.run_group_step([{"text": "5"}])
        await pool.slots[0].reset(seed=1)  # on a new session
    with pytest.raises(ValueError, match="give the class"):
        GrpoPool(GuessEnv())


# --- training ---------------------------------------------------------------------------------------------------------

@pytest.mark.full
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
