"""One copy of the weights for two processes."""

import asyncio
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from openai import APIError, AsyncOpenAI

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import load_policy
from grpolab.serve.http_client import RemoteError
from grpolab.serve.mapped import UNDER_WAY, Mapped, attach
from grpolab.serve.remote import RemoteSampler
from grpolab.serve.service import serve_policy
from grpolab.serve.weight_sync import SharedFile
from tests.test_serve import post

PARAMS = SamplingParams(seed=0, max_new_tokens=8, ignore_eos=True)


def step(policy, size=1e-3):
    with policy.lock, torch.no_grad():
        for p in policy.model.parameters():
            p.add_(size)
        policy.version += 1


async def test_a_step_of_the_trainer_is_the_servers_without_sending(tmp_path):
    path = tmp_path / "weights"
    trainer, served = load_policy("tiny"), load_policy("tiny")
    before = [p.detach().clone() for p in served.model.parameters()]
    async with serve_policy(served, weights=path, adapters=tmp_path) as service:
        async with RemoteSampler(service.url, trainer, bridge=Mapped(path)) as remote:
            await remote.publish()
            with pytest.raises(RemoteError, match="409.*a trainer's own"):  # which an adapter would change
                await remote.caller.ask("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x"})
            step(trainer)
            for a, b, old in zip(trainer.model.parameters(), served.model.parameters(), before):
                assert torch.equal(a, b) and not torch.equal(b, old)  # before anything is published
            answer = (await post(service, {"prompt": "2 + 3", "max_tokens": 2}, "/generate"))[1]
            assert answer["system_fingerprint"].startswith("version-1-")  # and a request is told so
            (group,) = await remote.sample([[5, 6, 7]], params=PARAMS)  # as between two publishes of --sync-every 2
            assert group[0].policy_version == 1
            await remote.publish()
            (group,) = await remote.sample([[5, 6, 7]], params=PARAMS)
            assert group[0].policy_version == 1 and remote.synced_s < 5
        assert not list(tmp_path.iterdir())
        step(trainer)  # is the trainer's own again
        assert not torch.equal(next(trainer.model.parameters()), next(served.model.parameters()))


def test_neither_side_maps_a_policy_on_a_gpu(tmp_path):
    trainer, elsewhere = load_policy("tiny"), load_policy("tiny")
    elsewhere.model.to("meta")
    bridge = Mapped(tmp_path / "weights")
    bridge._share(trainer)
    try:
        for maps in (lambda: attach(bridge.path, elsewhere, bridge.mark), lambda: Mapped(tmp_path / "b")._share(elsewhere)):
            with pytest.raises(ValueError, match="is on meta, and only weights of processors can be mapped: use SharedFile"):
                maps()
        assert elsewhere.device.type == "meta"
    finally:
        bridge.close()


async def test_another_trainer_may_send_its_weights_by_the_file(tiny, tmp_path):
    """They do not go into the memory of the trainer whose weights were mapped before, whose locks are closed."""
    path, other = tmp_path / "weights", load_policy("tiny")
    trainer, served = load_policy("tiny"), load_policy("tiny")
    other.version = 7
    step(other)
    async with serve_policy(served, weights=path) as service:
        async with RemoteSampler(service.url, trainer, bridge=Mapped(path)) as first:
            await first.publish()
            held = os.listdir("/proc/self/fd")
            async with RemoteSampler(service.url, other, bridge=SharedFile(path)) as second:
                assert await second.publish() == 8
                for p, mine, its in zip(trainer.model.parameters(), other.model.parameters(), served.model.parameters()):
                    assert not torch.equal(p, mine) and torch.equal(its, mine)
                (group,) = await second.sample([[5, 6, 7]], params=PARAMS)
                assert group[0].policy_version == 8
        for _ in range(3):
            async with RemoteSampler(service.url, trainer, bridge=Mapped(path)) as again:
                await again.publish()
        assert len(os.listdir("/proc/self/fd")) <= len(held)


@pytest.mark.parametrize("engine", ["auto", "unpacked"])
async def test_no_token_is_of_half_written_weights(tmp_path, engine):
    """A trainer that stops in mid-step: neither a completion that is under way nor a new one gets a token until the step is
    whole, and the new one's is then drawn from the new weights alone."""
    path, halfway, go_on = tmp_path / "weights", threading.Event(), threading.Event()
    trainer, served = load_policy("tiny"), load_policy("tiny")
    asked = {"prompt": {"prompt_token_ids": [5, 6, 7]}, "max_tokens": 1}

    def half_then_whole() -> None:
        parameters = list(trainer.model.parameters())
        with trainer.lock, torch.no_grad():
            for part in (parameters[::2], parameters[1::2]):
                for p in part:
                    p.mul_(1.5)
                halfway.set()
                go_on.wait(30)
            trainer.version += 1

    async with Sampler(served, engine=engine) as sampler, serve_policy(sampler, weights=path) as service:
        async with RemoteSampler(service.url, trainer, bridge=Mapped(path)) as remote:
            await remote.publish()
            await post(service, asked, "/generate")
            under_way = asyncio.ensure_future(remote.sample([[5, 6, 7]], params=replace(PARAMS, max_new_tokens=500)))
            while sampler.stats.steps < 10:
                await asyncio.sleep(0.01)
            stepping = asyncio.ensure_future(asyncio.to_thread(half_then_whole))
            assert await asyncio.to_thread(halfway.wait, 30)
            steps, answering = sampler.stats.steps, asyncio.ensure_future(post(service, asked, "/generate"))
            await asyncio.sleep(0.4)
            drawn = sampler.stats.steps - steps, answering.done()
            go_on.set()
            await stepping
            _, answer = await answering
            ((rollout,),) = await under_way
    assert drawn == (0, False) and set(rollout.versions) == {0, 1}
    ((((token, logp),),),) = [[of.items() for of in place] for place in answer["logprobs"][0]]
    with torch.no_grad():
        whole = trainer.model(torch.tensor([[5, 6, 7]])).logits[0, -1].log_softmax(-1)
    assert answer["system_fingerprint"].startswith("version-1-") and logp == pytest.approx(whole[int(token)].item(), abs=1e-4)


KILLED = """
import asyncio, os, sys, torch
from grpolab.models.load import load_policy
from grpolab.serve.mapped import UNDER_WAY, Mapped
from grpolab.serve.remote import RemoteSampler

async def main():
    policy = load_policy("tiny")
    async with RemoteSampler(sys.argv[1], policy, bridge=Mapped(sys.argv[2])) as remote:
        await remote.publish()
        with policy.lock, torch.no_grad():
            next(policy.model.parameters()).add_(1.0)
            os._exit(9)

asyncio.run(main())
"""


@pytest.mark.parametrize("ask", [{"stream": True, "max_tokens": 4}, {"echo": True, "logprobs": 0, "max_tokens": 0}])
async def test_half_written_weights_are_neither_recorded_nor_scored(tmp_path, ask):
    path, session = tmp_path / "weights", "/sessions/a" * ("stream" in ask)
    async with serve_policy(load_policy("tiny"), weights=path) as service:
        trainer = load_policy("tiny")
        async with RemoteSampler(service.url, trainer, bridge=Mapped(path)) as remote:
            await remote.publish()
            trainer.lock.state[UNDER_WAY] = 1  # as a trainer leaves it that is killed in mid-step
            async with AsyncOpenAI(base_url=f"{service.url}{session}/v1", api_key="-", max_retries=0) as client:
                for _ in range(2):
                    with pytest.raises(APIError, match="half-written"):
                        async for _ in await client.completions.create(model="tiny", prompt="2 + 3", **ask):
                            pass
                    assert (await post(service, {"mark": "another"}, "/weights"))[0] == 409  # it goes on with those it has
            assert not session or not service.sessions.get("a").turns


@pytest.mark.full
async def test_a_trainer_that_is_killed_in_mid_step_leaves_weights_that_are_refused(tmp_path):
    path = tmp_path / "weights"
    async with serve_policy(load_policy("tiny"), weights=path) as service:
        killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", KILLED, service.url, str(path)],
                                         env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})
        assert killed.returncode == 9
        status, answer = await post(service, {"prompt": "2 + 3"}, "/generate")
        assert status == 503 and "half-written" in answer["error"]["message"]
        async with RemoteSampler(service.url, load_policy("tiny"), bridge=Mapped(path)) as remote:
            await remote.publish()  # of the next trainer
            assert (await post(service, {"prompt": "2 + 3"}, "/generate"))[0] == 200


async def test_a_trainer_whose_place_was_taken_is_refused_and_removes_nothing(tmp_path):
    path = tmp_path / "weights"
    async with serve_policy(load_policy("tiny"), weights=path) as service:
        async with RemoteSampler(service.url, load_policy("tiny"), bridge=Mapped(path)) as second:
            async with RemoteSampler(service.url, load_policy("tiny"), bridge=Mapped(path)) as first:
                await first.publish()
                await second.publish()
                with pytest.raises(RemoteError, match="another trainer"):
                    await first.publish()
            await second.publish()
        assert not list(tmp_path.iterdir())


async def test_another_model_is_refused_and_the_server_goes_on(tmp_path):
    path = tmp_path / "weights"
    async with serve_policy(load_policy("tiny"), weights=path) as service:
        other = load_policy("tiny", dtype="bfloat16")
        async with RemoteSampler(service.url, other, bridge=Mapped(path)) as remote:
            with pytest.raises(RemoteError, match="another model"):
                await remote.publish()
        assert (await post(service, {"prompt": "2 + 3"}, "/generate"))[0] == 200


@pytest.mark.parametrize("bridge", [SharedFile, Mapped])
async def test_publishing_writes_over_nothing_but_weights(tmp_path, bridge):
    path = tmp_path / "weights"
    async with serve_policy(load_policy("tiny"), weights=path) as service:
        async with RemoteSampler(service.url, load_policy("tiny"), bridge=bridge(path)) as remote:
            for mine in (b"mine" * 2000, b"\0" * 32768 + b"a disk"):
                path.write_bytes(mine)
                with pytest.raises((ValueError, RemoteError), match="weights holds something else"):
                    await remote.publish()
                assert path.read_bytes() == mine
            path.write_bytes(b"")  # as mkstemp leaves it
            await remote.publish()
