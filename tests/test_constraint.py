"""Constrained decoding: what is sampled is what was asked for, and the record says from which distribution it was."""

import asyncio
import json
import sys
import time
from dataclasses import replace

import openai
import pytest
import test_serve
import test_serve_tools
import torch
from test_serve_tools import ask
from test_tool_calls import ROOM

from grpolab.chat import prompt_ids, user
from grpolab.decode import constraint as constraint_module
from grpolab.decode.constraint import Constraint, Grammars
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.serve.agents import agent_grpo
from grpolab.serve.answer_format import answer_check
from grpolab.serve.openai_schema import ChatRequest
from grpolab.serve.remote import RemoteSampler
from grpolab.serve.service import serve_policy
from grpolab.train.grpo import GRPOConfig

PACKAGES, pytestmark = "agents", pytest.mark.usefixtures("packages")
of_bytes, caller = test_serve.of_bytes, test_serve_tools.caller
SMALL = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
         "required": ["a", "b"], "additionalProperties": False}


def wanted(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def rule(schema, **options):
    return ChatRequest(model="tiny", messages=user("x"), response_format=wanted(schema), **options).grammar


@pytest.fixture
def grammars(_tiny, packages):
    return Grammars(_tiny)


@pytest.mark.parametrize("params", [
    SamplingParams(seed=3, max_new_tokens=60), SamplingParams(seed=3, max_new_tokens=60, temperature=0.7, top_k=5)])
def test_log_probs_are_those_of_what_the_mask_leaves(tiny, grammars, params):
    """logp = log p(token) - log(kept mass), and the kept mass is what the mask keeps of the model's own distribution."""
    constraint = grammars.compile(rule(SMALL))
    prompt = prompt_ids(tiny.tokenizer, "What is 2 + 3?")
    with Sampler(tiny) as sampler:
        (group,) = sampler.sample_sync([prompt], group_size=3, params=replace(params, constraint=constraint))
    for rollout in group:
        logits = tiny.model(torch.tensor([rollout.prompt + rollout.tokens])).logits[0, len(rollout.prompt) - 1 : -1].detach()
        scaled, allowed, newest = (logits / params.temperature).log_softmax(-1), constraint.start(), None
        for t, token in enumerate(rollout.tokens):
            mask, newest = torch.from_numpy(allowed(newest)), token
            kept = scaled[t].exp()[mask].sum()
            if params.top_k:
                kept = scaled[t].exp()[mask].topk(min(params.top_k, int(mask.sum()))).values.sum()
            assert mask[token] and mask.sum() < len(mask)
            assert rollout.kept_mass[t] == pytest.approx(float(kept), rel=1e-3)
            assert rollout.logps[t] == pytest.approx(float(scaled[t][token] - kept.log()), abs=1e-3)
            assert rollout.raw_logps[t] == pytest.approx(float(logits[t].log_softmax(-1)[token]), abs=1e-3)
    assert min(group[0].kept_mass) < 0.9  # the mask did something


def test_neighbours_do_not_change_a_row(tiny, grammars):
    """In any bit: constrained rows have none of the others' mask, the others none at all."""
    prompt = prompt_ids(tiny.tokenizer, "What is 2 + 3?")
    kinds = [SamplingParams(seed=s, max_new_tokens=30, constraint=c, greedy=g) for s, c, g in (
        (1, None, False), (2, grammars.compile(rule(SMALL)), False), (3, grammars.compile(rule({"type": "integer"})), False),
        (4, grammars.compile(rule(SMALL)), True), (5, None, True))]
    with Sampler(tiny) as sampler:
        alone = [sampler.submit([prompt], group_size=2, params=params).result() for params in kinds]
        together = [request.result() for request in [sampler.submit([prompt], group_size=2, params=p) for p in kinds]]
    assert alone == together
    assert not any(rollout.kept_mass for i in (0, 3, 4) for rollout in alone[i][0])
    assert all(alone[i][0][0].tokens[:1] == tuple(tiny.tokenizer.encode("{")) for i in (1, 3))


@pytest.mark.parametrize("schema", [
    {"type": "integer", "minimum": 10, "maximum": 99}, {"enum": [None, "a b", 3]}, {"oneOf": [{"const": 1}, {"const": 7}]},
    {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2}}, "$ref": "#/$defs/a"}, SMALL,
    {"type": "string", "pattern": "^[a-c]{1,3}\"?$"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
], ids=str)
def test_what_is_sampled_is_of_the_schema(tiny, grammars, schema):
    check, constraint = answer_check(wanted(schema)), grammars.compile(rule(schema))
    with Sampler(tiny) as sampler:
        (group,) = sampler.sample_sync([prompt_ids(tiny.tokenizer, "x")], group_size=16, params=SamplingParams(
            seed=0, max_new_tokens=200, constraint=constraint))
    ended = [tiny.decode(r.tokens) for r in group if r.finish_reason == "eos"]
    assert len(ended) > 4 and [check(text) for text in ended] == [None] * len(ended)


def test_tokens_that_are_parts_of_characters(of_bytes):
    """A byte-level tokenizer, which llguidance reads itself; a character may be several tokens."""
    constraint = Grammars(of_bytes).compile(rule({"enum": ["\u00e9\u00fc\U0001f642", "the fox", {"\u00e9": [1]}]}))
    with Sampler(of_bytes) as sampler:
        (group,) = sampler.sample_sync([[5]], group_size=32, params=SamplingParams(
            seed=0, max_new_tokens=99, constraint=constraint))
    said = {json.dumps(json.loads(of_bytes.decode(r.tokens))) for r in group if r.finish_reason == "eos"}
    assert len(said) == 3 and all(len(r.kept_mass) == len(r.tokens) for r in group)


@pytest.mark.full
async def test_an_answer_has_the_form_that_its_request_asks_for(caller):
    async with serve_policy(caller, constrained=True) as service:
        client = openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="-", max_retries=0)
        async with client:
            for stream in (False, True):
                answer = await ask(client, user("Where is Ann?"), tools=openai.NOT_GIVEN, response_format=wanted(SMALL), seed=1,
                                   stream=stream)
                chunks = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
                text = "".join(c.delta.content or "" for c in chunks) if stream else chunks[0].message.content
                assert set(json.loads(text)) == {"a", "b"} and chunks[-1].grpolab["format_error"] is None
                assert len(chunks[-1].grpolab["kept_mass"]) == len(text) + 1 and chunks[-1].finish_reason == "stop"
            for choice in ("required", {"type": "function", "function": {"name": "note"}}):
                for parallel in (True, False):  # neither was ever shown to this policy, and at this temperature it errs
                    note = {"type": "function", "function": {"name": "note", "parameters": SMALL}}
                    tools = [note] if choice == "required" else [ROOM, note]
                    reply = await ask(client, user("9?"), tools=tools, tool_choice=choice, temperature=2.0, seed=3,
                                      max_tokens=200, parallel_tool_calls=parallel)
                    calls = [call.function for call in reply.choices[0].message.tool_calls]
                    assert calls and all(call.name == "note" for call in calls) and (parallel or len(calls) == 1)
                    assert all(answer_check(wanted(SMALL))(call.arguments) is None for call in calls)
                    assert reply.choices[0].message.content is None and reply.choices[0].grpolab["unparsed_calls"] == 0
            said = {"type": "object", "properties": {"x": {"const": "</tool_call>"}}, "required": ["x"]}
            closes = {"type": "function", "function": {"name": "closes", "parameters": said | {"additionalProperties": False}}}
            reply = await ask(client, user("9?"), tools=[closes], tool_choice="required", parallel_tool_calls=False)
            assert json.loads(reply.choices[0].message.tool_calls[0].function.arguments) == {"x": "</tool_call>"}
            called = (await ask(client, user("Where is Ann?"), response_format=wanted(SMALL))).choices[0]
            assert called.message.tool_calls[0].function.arguments == '{"name": "Ann"}'  # a call is no answer
            free = (await ask(client, user("Where is Ann?"))).choices[0]
            assert free.grpolab["kept_mass"] == [] and free.message.tool_calls
        assert service.status()["format_errors"] == service.status()["unparsed_calls"] == 0


async def test_a_session_that_is_trained_on_is_not_constrained(caller):
    """As with top_p: refused where the loss takes it for the policy's own, and in the record elsewhere."""
    async def agent(url, name):
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            asked = dict(tool_choice="required") if name == "Ann" else dict(response_format=wanted(SMALL))
            await ask(client, user(name), temperature=1.0, **asked)

    async with serve_policy(caller, constrained=True) as service:
        config = GRPOConfig(steps=1, prompts_per_step=2, group_size=2)
        with pytest.raises(openai.BadRequestError, match="trained on.*tool_choice|trained on.*response_format"):
            _ = [row async for row in agent_grpo(caller, None, ["Ann", "Bob"], config, agent, service=service)]
        session = service.open_session()
        await agent(session.url, "Bob")
        rollout = service.rollout(session)
        assert len(rollout.kept_mass) == len(rollout.tokens) and min(rollout.kept_mass) < 0.5


@pytest.mark.parametrize(("schema", "why"), [
    ({"allOf": [{"type": "string", "pattern": f"[ab]*{'ab'[i % 2]}[ab]{{{i}}}"} for i in range(30)]}, "simpler"),
    ({"type": "integer", "multipleOf": 982451}, "simpler"), ({"not": {"type": "object"}}, "not"), (False, "atisfiable"),
    ({"type": "array", "prefixItems": [True] * 9000, "minItems": 9000}, None), ({"type": "string", "minLength": 10**9}, None),
    ({"type": "array", "minItems": 10**9}, None), ({"type": "string", "pattern": "(a|a?)" * 400}, "complex|simpler"),
    ({"type": "string", "format": "nonsense"}, "nonsense"),
    ({"type": "integer", "x-guidance": {"lenient": True}, "not": {}}, "not"),
    ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "nothing satisfies"),
], ids=lambda x: str(x)[:40])
async def test_a_hostile_schema_costs_its_own_request_alone(caller, schema, why):
    async with serve_policy(caller, constrained=True) as service, openai.AsyncOpenAI(
            base_url=service.url + "/v1", api_key="-", max_retries=0) as client:
        async def hostile():
            began = time.monotonic()
            try:
                await ask(client, user("x"), tools=openai.NOT_GIVEN, response_format=wanted(schema), max_tokens=20)
            except (openai.BadRequestError, openai.InternalServerError) as error:
                return str(error), time.monotonic() - began
            return "", time.monotonic() - began

        (told, seconds), good = await asyncio.gather(hostile(), ask(client, user("Where is Ann?"), seed=1))
        assert good.choices[0].message.tool_calls and good.choices[0].grpolab["kept_mass"] == []
        assert seconds < 30 and (told == "" if why is None else any(word in told for word in why.split("|"))), told
        again = await ask(client, user("Where is Ann?"), seed=1)
        assert again.choices[0].token_ids == good.choices[0].token_ids and service.rows == 0


async def test_a_grammar_of_another_vocabulary_is_refused(tiny, of_bytes):
    constraint = Grammars(of_bytes).compile(rule({"type": "string"}))
    async with Sampler(tiny) as sampler:
        with pytest.raises(ValueError, match=f"{constraint.vocab} tokens and the policy has"):
            await sampler.sample([[5]], params=SamplingParams(constraint=constraint))


async def test_a_grammar_that_fails_midway_fails_its_own_request(tiny, grammars, monkeypatch):
    constraint, honest = grammars.compile(rule({"type": "string"})), Constraint.start

    def failing(self):
        allowed, left = honest(self), iter(range(3))
        return lambda newest: allowed(newest) if next(left, None) is not None else 1 / 0

    monkeypatch.setattr(Constraint, "start", failing)
    async with Sampler(tiny) as sampler:
        prompts = [prompt_ids(tiny.tokenizer, "x")]
        bad = sampler.submit(prompts, group_size=2, params=SamplingParams(seed=0, constraint=constraint))
        good = sampler.submit(prompts, group_size=2, params=SamplingParams(seed=0))
        with pytest.raises(ZeroDivisionError):
            await bad.wait()
        assert await good.wait() == await sampler.sample(prompts, group_size=2, params=SamplingParams(seed=0))


def test_a_slow_grammar_is_ended_while_it_compiles(grammars, monkeypatch):
    """Also one that sleeps, which a limit of the processor's time does not count."""
    monkeypatch.setattr(constraint_module, "TRIAL", "import time; time.sleep(60)")
    monkeypatch.setattr(constraint_module, "CPU_SECONDS", 0.05)
    began = time.monotonic()
    with pytest.raises(ValueError, match="take a simpler schema"):
        grammars.compile("start: /a/")
    assert time.monotonic() - began < 20


async def test_without_the_extra_it_is_named(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"grpolab\[constrained\]"):
        async with serve_policy(tiny, constrained=True):
            pass


async def test_what_cannot_be_kept_is_refused(tiny, grammars):
    constraint = grammars.compile(rule(SMALL))
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(constraint=constraint, ignore_eos=True)
    async with serve_policy(tiny) as service, RemoteSampler(service.url, tiny) as sampler:
        with pytest.raises(ValueError, match="--constrained"):
            await sampler.sample([[5]], params=SamplingParams(constraint=constraint))
