"""/generate, in vLLM's form: what it samples, and what it refuses."""

import pytest

from grpolab.decode.sampling import SamplingParams
from tests.test_serve import post, served

ASK = {"prompt": {"prompt_token_ids": [5, 6, 7]}, "logprobs": 0}  # as Atropos' VLLMServer sends it


async def test_it_samples_what_the_sampler_does(tiny):
    async with served(tiny) as (service, _):
        status, answer = await post(service, ASK | {"n": 2, "seed": 5, "max_tokens": 6, "stop": ["zz"]}, "/generate")
        (group,) = await service.sampler.sample([[5, 6, 7]], group_size=2, params=SamplingParams(seed=5, max_new_tokens=6))
        hello = {"prompt": "Hello", "max_tokens": 10**6, "temperature": 0, "stop_token_ids": [3]}
        _, text = await post(service, hello, "/generate")
    assert status == 200 and answer["prompt_token_ids"] == [5, 6, 7] and answer["system_fingerprint"] == "version-0"
    assert [tuple(ids) for ids in answer["token_ids"]] == [r.tokens for r in group]
    for line, rollout in zip(answer["logprobs"], group, strict=True):  # as the client reads them
        assert [int(next(iter(item[0]))) for item in line] == list(rollout.tokens)
        assert [next(iter(item[0].values())) for item in line] == list(rollout.logps)
    assert answer["finish_reasons"] == [{"eos": "stop", "length": "length"}[r.finish_reason] for r in group]
    assert answer["text"] == [tiny.decode(r.tokens) for r in group]
    assert text["prompt"] == "Hello"
    assert len(text["prompt_token_ids"]) + len(text["token_ids"][0]) <= tiny.context  # a larger max_tokens gets the rest


@pytest.mark.parametrize(("change", "status", "why"), [
    ({"prompt": None}, 400, "prompt: Field required"),
    ({"prompt": {}}, 400, "a prompt has prompt or prompt_token_ids"),
    ({"prompt": {"prompt_token_ids": [5.5]}}, 400, "prompt"), ({"prompt": {"prompt_token_ids": [[5]]}}, 400, "prompt"),
    ({"prompt": {"prompt_token_ids": "5 6"}}, 400, "is a list of token ids"), ({"prompt": {"prompt": [5]}}, 400, "is a text"),
    ({"prompt": {"prompt_token_ids": [10**6]}}, 400, "1000000"),
    ({"prompt": ["one", "two"]}, 400, "prompt: List should have at most 1 item"),
    ({"prompt": {"prompt_token_ids": [5] * 5000}}, 400, "the context is"),
    ({"logprobs": 1}, 400, "the sampled token alone"),
    ({"prompt_logprobs": 1}, 400, "does not support 'prompt_logprobs'"),
    ({"n": 0}, 400, "n: "), ({"max_tokens": 0}, 400, "nothing would be sampled"), ({"stream": True}, 400, "stream: /generate"),
    ({"model": "other"}, 404, "'other' is not served here"),
])
async def test_what_it_cannot_honour_is_refused_by_name(tiny, change, status, why):
    async with served(tiny) as (service, _):
        got, answer = await post(service, {k: v for k, v in (ASK | change).items() if v is not None}, "/generate")
    assert got == status and why in answer["error"]["message"]
