"""Strangers at the service: connections that rest, many sessions at once, callers who vanish anywhere, a model of another
family whose tokens are parts of characters."""

import asyncio
import contextlib
import gc
import http.client
import json
import random
import time
import weakref
from urllib.parse import urlsplit

import pytest
import torch
from openai import AsyncOpenAI
from test_serve import ASK, IDS, chat, served
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from grpolab.decode.audit import audit
from grpolab.models.load import Policy
from grpolab.serve.completions import CompletionResponse


@pytest.fixture
def of_bytes():
    """A small random GPT-2 over bytes and a few merges, so that most characters are several tokens and many are none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator(["h\u00e9llo \u00fc \U0001f642 the quick brown fox"] * 5, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    torch.manual_seed(0)
    shape = dict(n_positions=256, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(fast), **shape)).eval()
    return Policy(model, fast, "bytes", (fast.eos_token_id,))


def test_stops_and_streams_of_a_model_whose_tokens_are_parts_of_characters(of_bytes):
    """A stop that begins or ends inside a token is found, is not said, and a stream says what the whole answer says."""
    rng = random.Random(1)

    async def main():
        async with served(of_bytes) as (_, client):
            for i in range(25):
                asked = dict(model="bytes", prompt="h\u00e9", seed=i, max_tokens=30, n=2, logprobs=0, extra_body=IDS)
                plain = (await client.completions.create(**asked)).choices[0].text
                at = rng.randrange(1, max(2, len(plain) - 3))
                stops = [plain[at : at + rng.randint(1, 4)], *rng.choice(([], ["\u00e9"], ["\ufffd\ufffd"], ["the"]))]
                asked["stop"] = [s for s in stops if s]
                whole = {c.index: (c.text, c.token_ids, c.finish_reason)
                         for c in (await client.completions.create(**asked)).choices}
                said = {index: ("", [], None) for index in whole}
                async for chunk in await client.completions.create(stream=True, **asked):
                    for c in chunk.choices:
                        text, ids, _ = said[c.index]
                        said[c.index] = (text + c.text, ids + c.token_ids, c.finish_reason)
                assert said == whole, asked
                for text, ids, _ in whole.values():
                    assert not any(s in text for s in asked["stop"]) and of_bytes.decode(ids).startswith(text), asked

    asyncio.run(main())


def test_a_connection_may_rest_longer_than_clients_let_it(tiny):
    """Clients give an idle connection up after some 5 s. Were the server's patience as short, requests would meet its end."""
    async def main():
        async with served(tiny) as (service, _):
            place = urlsplit(service.url)
            connection = http.client.HTTPConnection(place.hostname, place.port, timeout=10)

            def ask():
                connection.request("GET", "/v1/models")
                return json.loads(connection.getresponse().read())["data"][0]["id"]

            assert await asyncio.to_thread(ask) == "tiny"
            socket = connection.sock
            await asyncio.sleep(6)
            assert await asyncio.to_thread(ask) == "tiny" and connection.sock is socket
            connection.close()

    asyncio.run(main())


def test_a_hundred_sessions_at_once(tiny):
    """Each is one rollout of its own two turns, whose log-probs are the policy's."""
    async def main():
        async with served(tiny) as (service, client):
            sessions = [service.open_session(seed=i) for i in range(100)]

            async def play(session):
                own, said = client.with_options(base_url=session.url), list(ASK)
                for _ in range(2):
                    reply = await chat(own, said, max_tokens=4)
                    said += [reply.choices[0].message, {"role": "user", "content": session.id}]
                return service.rollout(session)

            rollouts = await asyncio.gather(*map(play, sessions))
            assert len(service.sessions) == 0 and service.counts["requests"] == 200
        for session, rollout in zip(sessions, rollouts):
            assert session.id in tiny.tokenizer.decode(rollout.tokens)
        assert audit(tiny, rollouts[::10]).max_error < 1e-4

    asyncio.run(main())


def test_callers_who_vanish_leave_nothing(tiny, monkeypatch):
    """Before, in and after an answer, in sessions that are collected under them: no answer or row stays in memory, and those
    who stay get what they would alone."""
    answers, born = [], CompletionResponse.__init__

    def counted(self, *of):
        answers.append(weakref.ref(self))
        born(self, *of)

    monkeypatch.setattr(CompletionResponse, "__init__", counted)
    rng = random.Random(0)

    async def main():
        async with served(tiny) as (service, client):
            began = time.monotonic()
            alone = (await chat(client, seed=9, n=2, max_tokens=60)).choices
            seconds = time.monotonic() - began  # of an answer on this machine

            async def vanish(i):
                session = service.open_session()
                own = client.with_options(base_url=session.url)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.uniform(0, 4 * seconds)):
                        for _ in range(3):
                            asked = chat(own, n=2, max_tokens=60, stream=i % 3 == 0, extra_body={"ignore_eos": True})
                            if i % 3 == 0:
                                async for _ in await asked:
                                    pass
                            else:
                                await asked
                if i % 2:
                    service.rollouts(session)
                return session

            staying = [chat(client, seed=9, n=2, max_tokens=60) for _ in range(4)]
            *sessions, a, b, c, d = await asyncio.gather(*(vanish(i) for i in range(40)), *staying)
            assert [r.choices for r in (a, b, c, d)] == [alone] * 4

            def left():
                """What is still there of all that was asked."""
                gc.collect()
                return [*(a for a in answers if a() is not None), *service.jobs, *(r for s in sessions for r in s.open)]

            until = time.monotonic() + 30
            while left() and time.monotonic() < until:  # the server may hear of a request after its caller has gone
                await asyncio.sleep(0.05)
            assert left() == [] and service.rows == 0 and not service.sampler.busy
            assert len(answers) > 10 and service.counts["cancelled"] > 3 and service.counts["failed"] == 0
            assert all(len(r.mask) for s in sessions[::2] for r in service.rollouts(s))

    asyncio.run(main())


def test_a_session_that_outgrows_the_context_says_so(tiny):
    """With the numbers, and what was recorded stays."""
    async def main():
        async with served(tiny) as (service, client):
            session, said = service.open_session(), list(ASK)
            async with AsyncOpenAI(base_url=session.url, api_key="-", max_retries=0) as own:
                with pytest.raises(Exception, match="the context is 512 tokens here.*shorten it") as told:
                    for _ in range(20):
                        reply = await chat(own, said, max_tokens=30, extra_body={"ignore_eos": True})
                        said += [reply.choices[0].message, {"role": "user", "content": "more " * 8}]
            assert told.value.code == "context_length_exceeded"
            rollout = service.rollout(session)
            assert len(rollout.prompt) + len(rollout.tokens) <= 512 and sum(rollout.mask) % 30 == 0
            assert (await chat(client, max_tokens=4)).choices

    asyncio.run(main())
