"""Atropos' trajectory API: against the real `run-api` of atroposlib 0.4.0, and shapes that it would let through."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from dataclasses import replace

import pytest

from grpolab.arithmetic import generate
from grpolab.chat import prompt_ids
from grpolab.decode.sampling import SamplingParams
from grpolab.rollouts import Group, Rollout
from grpolab.runs.run import repository
from grpolab.serve.atropos import AtroposEnv, AtroposTrainer, as_group, as_scored, atropos_source
from grpolab.serve.http_client import RemoteError
from grpolab.serve.remote import RemoteSampler
from grpolab.serve.service import serve_policy
from grpolab.train.grpo import GRPOConfig, grpo_from

ROOT = repository()
HOME = os.environ.get("ATROPOS_ENVIRONMENT") or str(ROOT / ".venv" / "atropos")  # that `make atropos` makes


@pytest.fixture
def api():
    """The real server as a process: its url."""
    program = os.path.join(HOME, "bin", "run-api")
    if not os.path.exists(program):
        missing = "atroposlib 0.4.0 is not installed: make atropos"
        pytest.fail(missing) if os.environ.get("REQUIRE_ATROPOS") else pytest.skip(missing)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([program, "--host", "127.0.0.1", "--port", str(port)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            break
        assert process.poll() is None
        time.sleep(0.1)
    yield url
    process.terminate()
    process.wait(10)


def rollout(tokens, reward, prompt=(5, 6), mask=None):
    n = len(tokens)
    mask = mask or (1,) * n
    logps = tuple(-0.5 * m for m in mask)
    return Rollout(prompt, tuple(tokens), tuple(mask), logps, logps, "eos", reward=reward)


PAIR = Group((rollout([7, 8, 9, 1], 1.0, mask=(1, 0, 1, 1)), rollout([7, 1], 0.0)))


def test_a_group_goes_out_and_comes_back():
    """With the masks and log-probs as the API has them: -100 and 1.0 where the policy chose nothing."""
    item = as_scored(PAIR)
    assert item["tokens"] == [[5, 6, 7, 8, 9, 1], [5, 6, 7, 1]] and item["scores"] == [1.0, 0.0]
    assert item["masks"] == [[-100, -100, 7, -100, 9, 1], [-100, -100, 7, 1]]
    assert item["inference_logprobs"] == [[1.0, 1.0, -0.5, 1.0, -0.5, -0.5], [1.0, 1.0, -0.5, -0.5]]
    assert as_group(json.loads(json.dumps(item)), vocab=100, temperature=1.0, context=6, eos_ids=(1,)) == PAIR
    for reward in (None, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="leave it out"):
            as_scored(Group((rollout([7], reward),)))


WRONG = [
    (dict(inference_logprobs=None), "--openai.server_type vllm"),
    (dict(inference_logprobs=[]), "inference_logprobs"),
    (dict(scores=[1.0]), "half a group"),
    (dict(tokens=[]), "half a group"),
    (dict(masks=[[-100, 7], [-100, -100, 7, 1]]), "6 tokens, 2 masks"),
    (dict(tokens=[[5, 6, 7, 8, 9, 500], [5, 6, 7, 1]]), "500, outside the vocabulary 0..99"),
    (dict(scores=[float("nan"), 0.0]), "score nan"),
    (dict(masks=[[-100] * 6, [-100, -100, 7, 1]]), "masked"),
    (dict(masks=[[5, 6, 7, 8, 9, 1], [-100, -100, 7, 1]]), "without a prompt"),
    (dict(inference_logprobs=[[1.0] * 6, [1.0, 1.0, -0.5, -0.5]]), "log-prob 1.0, which is none"),
    (dict(generation_params={"temperature": 0.7}), "temperature 0.7"),
    (dict(advantages=[[1.0]]), "'advantages'"),
    (dict(overrides=[{"set_advantage_to_zero": True}]), "'overrides'"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_what_the_api_lets_through_is_refused_here(change, said):
    with pytest.raises(ValueError, match=said):
        as_group(as_scored(PAIR) | change, vocab=100, temperature=1.0)


def test_an_end_a_length_and_a_mask_are_what_they_say():
    item = as_scored(PAIR)
    assert [r.finish_reason for r in as_group(item, 100, 1.0, eos_ids=(2,))] == ["length", "length"]
    with pytest.raises(ValueError, match="a sequence of 6 tokens came, and this trainer registered for at most 5"):
        as_group(item, 100, 1.0, context=5)
    with pytest.raises(ValueError, match="a mask holds 3 where the token is 7"):
        as_group(item | {"masks": [[-100, -100, 3, -100, 9, 1], item["masks"][1]]}, 100, 1.0)
    assert as_group(item | {"overrides": [{}, {}]}, 100, 1.0, eos_ids=(1,)) == PAIR  # nothing is overridden


def test_a_group_that_does_not_fit_costs_itself(tiny):
    class Trainer:
        max_token_len = 6

        class caller:
            async def ask(*_):
                return {"queue_size": 0}

        async def batch(self):
            return batches.pop()

    item = as_scored(PAIR)
    batches = [[item | {"scores": [float("nan"), 0.0]}], [item | {"scores": [float("nan"), 0.0]}, item]]
    source = atropos_source(Trainer(), tiny, GRPOConfig())
    with pytest.warns(UserWarning, match="1 of 2 groups were left out: a sequence came with the score nan"):
        drawn = asyncio.run(source(0))
    assert len(drawn.groups) == 1 and drawn.row["refused_groups"] == 1
    with pytest.raises(ValueError, match="no group of the batch can be trained on"):
        asyncio.run(source(1))


def test_training_from_an_environment(tiny, api):
    """An environment of ours posts groups that a served policy sampled; the policy is trained on them as they come."""
    rows, _ = generate(8, 0, seed=1)
    config = GRPOConfig(steps=3, lr=1e-3, max_new_tokens=8, group_size=4, prompts_per_step=2)

    async def environment(url):
        async with AtroposEnv(api, "ones", group_size=4, max_token_len=64) as env, RemoteSampler(url, tiny) as sampler:
            for i in range(12):
                params = SamplingParams(max_new_tokens=8, seed=i)
                (group,) = await sampler.sample([prompt_ids(tiny.tokenizer, rows[i % 8].question)], group_size=4, params=params)
                await env.post(group.with_rewards([tiny.decode(r.tokens).count("1") / 8 for r in group]))
                while (await env.caller.ask("GET", "/status"))["queue_size"] > 2:
                    await asyncio.sleep(0.05)

    async def main():
        async with serve_policy(tiny) as service:
            async with AtroposTrainer(api, batch_size=8, max_token_len=64, timeout=60) as trainer:
                posting = asyncio.ensure_future(environment(service.url))
                source = atropos_source(trainer, tiny, config)
                rows = [row async for row in grpo_from(tiny, None, source, config, longest=64)]
                posting.cancel()
                await asyncio.wait([posting])
        return rows

    rows_of = asyncio.run(main())
    assert len(rows_of) == 3 and tiny.version > 0
    assert rows_of[0]["staleness"] == 0 and rows_of[0]["logp_diff_max"] < 1e-3  # the first is on-policy, exactly
    assert all(r["staleness"] <= 3 for r in rows_of)


async def test_an_environment_waits_for_its_trainer_and_leaves(api):
    with pytest.raises(RemoteError, match="knows no trainer"):  # as after a restart of the server
        await AtroposTrainer(api, batch_size=4, max_token_len=64).batch()
    with pytest.raises(RemoteError, match="no trainer after 0.3 s"):
        async with AtroposEnv(api, "e", group_size=2, max_token_len=64, timeout=0.3):
            pass
    async with AtroposTrainer(api, batch_size=4, max_token_len=64, timeout=0.5) as trainer:
        for batch_size in (8, 4):  # equal numbers too: both would share the groups
            with pytest.raises(RemoteError, match=f"another trainer, .'batch_size': 4, .*where this one is .*{batch_size}"):
                async with AtroposTrainer(api, batch_size=batch_size, max_token_len=64):
                    pass
        async with AtroposTrainer(api, batch_size=4, max_token_len=64, name=trainer.name):
            pass  # an earlier start of the same
        async with AtroposEnv(api, "e", group_size=2, max_token_len=64) as env:
            with pytest.raises(ValueError, match="registered for groups of 2"):
                await env.post(Group((*PAIR, PAIR[0])))
            with pytest.raises(ValueError, match="at most 6 tokens"):
                await AtroposEnv(api, "e", group_size=2, max_token_len=5).post(PAIR)
            await env.post(PAIR)
            with pytest.raises(RemoteError, match="gave no batch in 0.5 s, with 1 groups"):
                await trainer.batch()
            await env.post(Group(tuple(replace(r, reward=2.0) for r in PAIR)))
            batch = await trainer.batch()
            assert sorted(tuple(item["scores"]) for item in batch) == [(1.0, 0.0), (2.0, 2.0)]
            assert sorted(as_group(i, 100, 1.0)[0].tokens for i in batch) == [(7, 8, 9, 1)] * 2


def test_an_api_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def main():
        async with AtroposTrainer(f"http://127.0.0.1:{port}", batch_size=4, max_token_len=8):
            pass

    with pytest.raises(RemoteError, match=f"{port}/register gave no answer"):
        asyncio.run(main())
