"""The weight bridges: an update reaches a server, and what goes wrong is an error, never rollouts of other weights. Most
servers here are services in this process with a model of their own."""

import asyncio
import contextlib
import copy
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from env_harness import free_port
from test_remote import PROMPTS, imitation, moved, of_vllm, process

peft = pytest.importorskip("peft")

from grpolab.decode.audit import audit  # noqa: E402
from grpolab.decode.sampler import Sampler  # noqa: E402
from grpolab.decode.sampling import SamplingParams  # noqa: E402
from grpolab.models import lora  # noqa: E402
from grpolab.models.load import Policy, load_policy  # noqa: E402
from grpolab.models.lora import LoRA  # noqa: E402
from grpolab.runs.run import repository  # noqa: E402
from grpolab.serve import state  # noqa: E402
from grpolab.serve.http_client import Caller, RemoteError  # noqa: E402
from grpolab.serve.remote import RemoteSampler  # noqa: E402
from grpolab.serve.service import serve_policy  # noqa: E402
from grpolab.serve.weight_sync import AdapterSwap, Restart, SharedFile, read_weights, write_weights  # noqa: E402

ADAPTER = LoRA(rank=4, alpha=8.0, target=("q_proj", "v_proj"), seed=3)
SHORT = SamplingParams(seed=1, max_new_tokens=12)
CLOSE = 1e-4  # nats, between the trainer's log-prob of a token and its server's


def adapted(adapter=ADAPTER, by=0.1):
    policy = load_policy("tiny", adapter=adapter)
    turn(policy, by)
    return policy


def turn(policy, by):
    """Another adapter: an optimiser step, so to speak."""
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.copy_(by * torch.randn(p.shape, generator=torch.Generator().manual_seed(int(by * 1000))))
    policy.version += 1


def copied(policy, by=None):
    """Another process's policy, so to speak; with `by`, a step further."""
    other = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.name, policy.eos_ids, version=policy.version)
    if by is not None:
        moved(other, by)
    return other


async def agree(remote, policy, version):
    """The server samples what the policy here says, and says which version it is. The wrong weights would be off by more."""
    groups = await remote.sample(PROMPTS, group_size=2, params=SHORT)
    rollouts = [r for g in groups for r in g]
    assert {r.policy_version for r in rollouts} == {version}
    assert audit(policy, rollouts).max_error < CLOSE
    return rollouts


@contextlib.asynccontextmanager
async def shared(policy, path, served=None, **options):
    """A service with a model of its own, and a RemoteSampler of the policy that publishes to it through the file."""
    async with serve_policy(served or copied(policy), weights=path) as service:
        async with RemoteSampler(service.url, policy, bridge=SharedFile(path), **options) as remote:
            yield service, remote


# --- whole weights through a file -------------------------------------------------------------------------------------


async def test_two_trainers_at_one_server_do_not_sample_from_each_others_weights(tiny, tmp_path):
    """Both are at the same version, so the version does not tell."""
    one, two = copied(tiny, 1), copied(tiny, 2)
    async with shared(one, tmp_path / "w", max_staleness=0) as (service, first):
        async with RemoteSampler(service.url, two, bridge=SharedFile(tmp_path / "w"), max_staleness=0) as second:
            await first.publish()
            await agree(first, one, 1)
            for remote, policy, other in ((second, two, first), (first, one, second)):
                await remote.publish()
                await agree(remote, policy, 1)
                with pytest.raises(RemoteError, match="has the weights version-1-.*this sampler published version-1-"):
                    await other.sample(PROMPTS, params=SHORT)
        assert (tmp_path / "w").exists()  # the other trainer's by now
    assert not (tmp_path / "w").exists()


async def test_a_server_takes_in_what_was_published_and_nothing_else(tiny, tmp_path):
    """Another trainer's file came between the write and the request."""
    path, policy, other = tmp_path / "w", copied(tiny, 1), copied(tiny, 2)
    async with shared(policy, path) as (service, remote):
        await remote.publish()
        ask = remote.caller.ask

        async def late(method, where, *rest):
            if where == "/weights":
                write_weights(path, other.model, 1)
            return await ask(method, where, *rest)

        remote.caller.ask = late
        with pytest.raises(RemoteError, match="409.*other weights .of version 1. than those that were published"):
            await remote.publish()
        remote.caller.ask = ask
        with pytest.raises(RemoteError, match="publish again"):
            await remote.sample(PROMPTS)
        await remote.publish()
        await agree(remote, policy, 1)


async def test_a_server_that_was_started_again_with_its_first_weights(tiny, tmp_path):
    """They are of version 0, as what was published is, and not the policy's."""
    path, port, policy = tmp_path / "w", free_port(), copied(tiny, 1)
    policy.version = 0
    async with RemoteSampler(f"http://127.0.0.1:{port}", policy, bridge=SharedFile(path), max_staleness=0) as remote:
        async with serve_policy(copied(tiny), weights=path, port=port):
            await remote.publish()
            await agree(remote, policy, 0)
        async with serve_policy(copied(tiny), weights=path, port=port):
            with pytest.raises(RemoteError, match="has the weights version-0, .*or it was started again. Publish again"):
                await remote.sample(PROMPTS, params=SHORT)
            await remote.publish()
            await agree(remote, policy, 0)


async def test_a_server_that_is_ahead_of_the_policy(tiny):
    """Its weights are of a training of before, so they are not this policy's."""
    ahead = copied(tiny, 1)
    ahead.version = 50
    async with serve_policy(ahead) as service:
        with pytest.raises(RemoteError, match="of version 50, the policy is at 0"):
            await RemoteSampler(service.url, tiny, max_staleness=2).sample(PROMPTS, params=SHORT)


async def test_a_server_that_computes_something_else_with_the_same_weights(tiny, tmp_path):
    """Shapes and names agree, and the mark; the forward differs, as of another architecture or configuration."""
    strange = copied(tiny)
    for module in strange.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 3.0
    async with shared(tiny, tmp_path / "w", strange) as (_, remote):
        with pytest.raises(RemoteError, match="does not compute what 'tiny' does"):
            await remote.publish()


class One(torch.nn.Module):
    def __init__(self, n=4, value=0.0, dtype=torch.float32):
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((n,), value, dtype=dtype))
        self.b = torch.nn.Parameter(torch.full((3, 5), value, dtype=dtype))


def test_a_file_that_does_not_fit_changes_nothing(tmp_path):
    path, model = tmp_path / "w", One(value=7.0)
    mark = write_weights(path, One(value=1.0), 4)
    whole = path.read_bytes()
    for content in (b"", b"x" * 5, b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}", whole[:-9], whole + b"more"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="no published weights"):
            read_weights(path, model)
    for other in (One(n=5), One(dtype=torch.bfloat16), torch.nn.Linear(2, 2)):
        write_weights(path, other, 1)
        with pytest.raises(ValueError, match="another model.*'a'"):
            read_weights(path, model)
    assert all(bool((p == 7.0).all()) for p in model.parameters())
    path.write_bytes(whole)
    assert read_weights(path, model) == (4, mark) and bool((model.b == 1.0).all())


async def test_a_file_that_others_touch_and_a_service_that_reads_none(tiny, tmp_path):
    """The server goes on with the weights that it has; the next publish makes the file again."""
    path, policy = tmp_path / "w", copied(tiny)
    async with shared(policy, path) as (_, remote):
        await remote.publish()
        before = await agree(remote, policy, 0)
        for spoil in (path.unlink, lambda: path.write_text("hello"), lambda: write_weights(path, One(), 1)):
            spoil()
            with pytest.raises(RemoteError, match="409"):
                await remote.caller.ask("POST", "/weights", {})
        assert await agree(remote, policy, 0) == before
        moved(policy, 1)
        await remote.publish()
        await agree(remote, policy, 1)
        for wrong in ({"mark": 1}, {"more": 2}):
            with pytest.raises(RemoteError, match="400: (mark|more)"):
                await remote.caller.ask("POST", "/weights", wrong)
    assert not path.exists()
    async with serve_policy(tiny) as service, RemoteSampler(service.url, tiny, bridge=SharedFile(path)) as remote:
        with pytest.raises(RemoteError, match="start it with"):
            await remote.publish()
        with pytest.raises(ValueError, match="publish needs a bridge"):
            await RemoteSampler(service.url, tiny).publish()


@pytest.mark.parametrize("kind", ["shared", "swap", "restart"])
async def test_a_disk_that_is_full(tiny, tmp_path, kind):
    """A RemoteError that says so, nothing half-written, and no server was asked. Here a limit on the size of a file."""
    policy = tiny if kind == "shared" else adapted()
    bridge = {"shared": SharedFile(tmp_path / "w"), "swap": AdapterSwap(tmp_path), "restart": Restart(tmp_path)}[kind]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with RemoteSampler(f"http://127.0.0.1:{free_port()}", policy, bridge=bridge) as remote:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
        try:
            with pytest.raises(RemoteError, match="could not be written.*too large"):
                await remote.publish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


async def test_weights_for_a_sampler_that_cannot_start(tiny, tmp_path):
    async with serve_policy(Sampler(tiny, engine="none"), weights=tmp_path / "w") as service:
        with pytest.raises(RemoteError, match="409.*engine must be one of"):
            await Caller(service.url).ask("POST", "/weights", {})


async def test_publishing_without_a_pause_and_cancelled_at_any_moment(tiny, tmp_path):
    """What others sample all the while is of one version each, whose weights made it; the last publish counts."""
    policy = copied(tiny)
    states, rollouts, done = {}, [], asyncio.Event()
    async with shared(policy, tmp_path / "w") as (service, remote):
        await remote.publish()

        async def others():
            free = RemoteSampler(service.url, policy)
            while not done.is_set():
                params = SHORT if len(rollouts) % 2 else SamplingParams(seed=len(rollouts), max_new_tokens=24)
                for group in await free.sample(PROMPTS, params=params):
                    rollouts.extend(group)

        asking = asyncio.ensure_future(others())
        for i in range(12):
            with policy.lock:
                states[policy.version] = copy.deepcopy(policy.model.state_dict())
            publishing = asyncio.ensure_future(remote.publish())
            await asyncio.sleep(0.004 * (i % 6))
            publishing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await publishing
            with policy.lock:
                moved(policy, i)
        states[policy.version] = copy.deepcopy(policy.model.state_dict())
        await remote.publish()
        await agree(remote, policy, policy.version)
        done.set()
        await asking
    assert len({r.policy_version for r in rollouts}) > 1
    for version in {r.policy_version for r in rollouts}:
        tiny.model.load_state_dict(states[version])
        assert audit(tiny, [r for r in rollouts if r.policy_version == version]).max_error < 1e-3
    assert not list(tmp_path.iterdir())


async def test_new_weights_wait_for_those_who_use_the_sampler_itself(tiny, tmp_path):
    """A service of a Sampler that others use, too: their rollouts are of one version as well."""
    policy, served = copied(tiny, 1), copied(tiny)
    async with Sampler(served) as sampler, shared(policy, tmp_path / "w", sampler) as (_, remote):
        await remote.sample(PROMPTS, params=SHORT)
        long = SamplingParams(seed=1, max_new_tokens=300, ignore_eos=True)
        direct = asyncio.ensure_future(sampler.sample(PROMPTS, params=long))
        await asyncio.sleep(0.05)
        await remote.publish()
        await agree(remote, policy, 1)
        rollouts = [r for g in await direct for r in g]
    assert {r.policy_version for r in rollouts} == {0} and audit(tiny, rollouts).max_error < 1e-3


async def test_completions_that_do_not_end_keep_the_weights_that_they_began_with(tiny, tmp_path, monkeypatch):
    policy = copied(tiny)
    monkeypatch.setattr(state, "DRAIN_ROWS", 0.1)
    async with shared(policy, tmp_path / "w") as (service, remote):
        await remote.publish()
        long = SamplingParams(seed=1, max_new_tokens=450, ignore_eos=True)
        async with RemoteSampler(service.url, policy) as free:
            asking = asyncio.ensure_future(free.sample(PROMPTS, group_size=128, params=long))
            while service.rows < 128:  # not yet what it asks first, to know the server
                assert not asking.done()
                await asyncio.sleep(0.005)
            moved(policy, 1)
            with pytest.raises(RemoteError, match="503.*still run after 0 s; the weights are as they were"):
                await remote.publish()
            assert service.policy.version == 0
            asking.cancel()
        monkeypatch.undo()
        await remote.publish()
        await agree(remote, policy, 1)


# --- an adapter put into a server that runs on ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """A server that takes in adapters: its url and their folder."""
    folder = tmp_path_factory.mktemp("adapters")
    with process("--adapters", str(folder)) as (url, _):
        yield url, folder


async def test_an_adapter_goes_into_a_server_that_runs_on(swapped):
    url, folder = swapped
    policy, other = adapted(), adapted(LoRA(rank=2, target=("o_proj", "down_proj")))
    async with RemoteSampler(url, policy, bridge=AdapterSwap(folder), max_staleness=0) as remote:
        for by in (0.3, 0.5):
            turn(policy, by)
            assert await remote.publish() == policy.version and remote.synced_s > 0
            rollouts = await agree(remote, policy, policy.version)
            assert audit(adapted(by=0.9), rollouts).max_error > 100 * CLOSE  # so that agreement says something
        names = [card["id"] for card in (await remote.caller.ask("GET", "/v1/models"))["data"]]
        assert names == ["tiny", f"policy-v{policy.version}"] == ["tiny", remote.model]
        assert len(list(folder.iterdir())) == 1  # what was saved for the versions before is gone
        with pytest.raises(RemoteError, match="404.*policy-v2.*is not served here; it is 'tiny' or 'policy-v3'"):
            await remote.caller.ask("POST", "/v1/completions", {"model": "policy-v2", "prompt": "1"})
    async with RemoteSampler(url, other, bridge=AdapterSwap(folder)) as remote:  # of another form
        other.version = 7
        assert await remote.publish() == 7
        await agree(remote, other, 7)
    assert not list(folder.iterdir())


async def test_an_adapter_that_does_not_fit_leaves_the_server_as_it_was(swapped, tmp_path):
    """Wrong shapes, missing tensors, no adapter at all: each is named, and the old one stays."""
    url, folder = swapped
    policy = adapted()

    def saved(name, change):
        path = folder / name
        path.mkdir()
        lora.save(policy.model, path)
        change(path)
        return str(path)

    def wider(path):
        about = json.loads((path / lora.CONFIG).read_text())
        (path / lora.CONFIG).write_text(json.dumps(about | {"r": 8}))

    wrong = [
        (saved("rank", wider), "in another shape"),
        (saved("text", lambda p: (p / lora.WEIGHTS).write_bytes(b"\x80\x04K\x01.")), "no readable adapter"),
        (str(folder / "none"), "no readable adapter"),
        (str(tmp_path), "outside the folder"), ("../..", "outside the folder"),
    ]
    async with RemoteSampler(url, policy, bridge=AdapterSwap(folder)) as remote:
        await remote.publish()
        before = await agree(remote, policy, policy.version)
        for path, why in wrong:
            with pytest.raises(RemoteError, match=why):
                await remote.caller.ask("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
        for body in ({}, {"lora_name": "x"}, {"lora_name": "x", "lora_path": 3}, {"lora_name": "tiny", "lora_path": "less"},
                     *({"lora_name": "x", "lora_path": "less", "policy_version": v} for v in ("3", -1, 2**63)),
                     {"lora_name": "x", "lora_path": "a\0b"}):
            with pytest.raises(RemoteError, match="400"):
                await remote.caller.ask("POST", "/v1/load_lora_adapter", body)
        assert await agree(remote, policy, policy.version) == before


async def test_an_adapter_that_is_gone_is_not_served(tmp_path):
    """It went while a request for it waited, or when whole weights came."""
    policy, go_on = adapted(), threading.Event()
    lora.save(policy.model, tmp_path)
    async with serve_policy(copied(policy), adapters=tmp_path, weights=tmp_path / "w") as service:
        ask = Caller(service.url).ask
        asked = {"prompt": [5], "max_tokens": 1, "model": "p-v1"}
        await ask("POST", "/v1/load_lora_adapter", {"lora_name": "p-v1", "lora_path": "."})
        await ask("POST", "/v1/completions", asked)
        waiting = [asyncio.ensure_future(service.sampler.run(go_on.wait))]
        for path, body in (("/v1/load_lora_adapter", {"lora_name": "p-v2", "lora_path": "."}), ("/v1/completions", asked)):
            waiting.append(asyncio.ensure_future(ask("POST", path, body)))
            await asyncio.sleep(0.2)
        go_on.set()
        *_, late = await asyncio.gather(*waiting, return_exceptions=True)
        assert "404" in str(late) and "'p-v2'" in str(late)
        write_weights(tmp_path / "w", policy.model, 1)
        await ask("POST", "/weights", {})
        with pytest.raises(RemoteError, match="404.*'p-v2' is not served"):
            await ask("POST", "/v1/completions", asked | {"model": "p-v2"})


async def test_what_cannot_be_swapped(tiny, tmp_path):
    async with serve_policy(tiny) as service:
        for policy, error, why in ((tiny, ValueError, "has no adapter to swap"), (adapted(), RemoteError, "404.*--adapters")):
            async with RemoteSampler(service.url, policy, bridge=AdapterSwap(tmp_path / "a")) as remote:
                with pytest.raises(error, match=why):
                    await remote.publish()
    assert not list((tmp_path / "a").iterdir())


async def test_the_same_call_on_a_server_of_vllms_make(tmp_path):
    """Its answers to adapters are texts, it keeps each name until it is told otherwise, and its rollouts say no version."""
    policy, served, loaded, right = adapted(), ["m", "policy-v0", "policy-vision"], [], [True]

    def load(body):
        loaded.append(body)
        served.append(body["lora_name"])
        return f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def unload(body):
        served.remove(body["lora_name"])
        return "Success"

    def complete(body):
        assert body["model"] in served
        answer = of_vllm(policy.tokenizer)["/v1/completions"](body)
        if body.get("seed") == 0 and right:  # what a publish compares
            ids = torch.tensor([body["prompt"][0] + [5, 1]])
            logps = policy.model(ids).logits.log_softmax(-1)[0, -3:-1, [5, 1]].diagonal()
            answer["choices"][0]["logprobs"] = {"token_logprobs": logps.tolist()}
        return answer

    answers = {"/v1/models": lambda _: {"data": [{"id": name, "max_model_len": 512} for name in served]},
               "/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload, "/v1/completions": complete}
    with imitation(answers) as url:
        async with RemoteSampler(url, policy, bridge=AdapterSwap(tmp_path), max_staleness=0) as remote:
            assert await remote.publish() == 1 and served == ["m", "policy-vision", "policy-v1"]
            assert Path(loaded[0]["lora_path"], lora.WEIGHTS).is_file()
            groups = await remote.sample(PROMPTS, group_size=2, params=SHORT)
            assert {r.policy_version for g in groups for r in g} == {1}
            policy.version += 1
            with pytest.raises(RemoteError, match="of version 1, the policy is at 2.*publish more often"):
                await remote.sample(PROMPTS, params=SHORT)
            right.clear()  # it took in an adapter and does not compute with it
            with pytest.raises(RemoteError, match="does not compute what 'tiny' does"):
                await remote.publish()
            with pytest.raises(RemoteError, match="publish again"):
                await remote.sample(PROMPTS, params=SHORT)


@pytest.mark.parametrize("how", [RemoteError, pytest.param(asyncio.CancelledError, marks=pytest.mark.full)])
async def test_an_adapter_whose_answer_does_not_come_is_not_sampled_from(tmp_path, how):
    """The server had put it in when the trainer lost the answer; an adapter of another trainer with the same name and version
    is not sampled from either."""
    policy, other = adapted(by=0.3), adapted(by=0.6)
    async with serve_policy(copied(policy), name="tiny", adapters=tmp_path) as service:
        async with (RemoteSampler(service.url, policy, bridge=AdapterSwap(tmp_path)) as remote,
                    RemoteSampler(service.url, other, bridge=AdapterSwap(tmp_path)) as second):
            await second.publish()
            await agree(second, other, 1)
            await remote.publish()
            await agree(remote, policy, 1)
            with pytest.raises(RemoteError, match="another trainer publishes to it"):
                await second.sample(PROMPTS, params=SHORT)
            ask = remote.caller.ask

            async def lost(method, path, body=None):
                answer = await ask(method, path, body)
                if path == "/v1/load_lora_adapter":
                    raise how("gave no answer")
                return answer

            remote.caller.ask = lost
            turn(policy, 0.6)
            with pytest.raises(how):
                await remote.publish()
            remote.caller.ask = ask
            with pytest.raises(RemoteError, match="publish again"):
                await remote.sample(PROMPTS, params=SHORT)
            await remote.publish()
            await agree(remote, policy, 2)
    assert not list(tmp_path.iterdir())


# --- a server that is started again; each start takes seconds, so these have no minute's limit ------------------------


@pytest.fixture
def own_environment(monkeypatch):
    """The server's process finds this package."""
    monkeypatch.setenv("PYTHONPATH", str(repository()))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_a_server_is_started_again_with_the_new_weights(tiny, tmp_path, own_environment, kind):
    """Whoever asks is answered before or after it; other clients' requests end with an error of the server."""
    policy = tiny if kind == "whole" else adapted()
    port = free_port()
    for name in ("v1-final", "v3-20240101"):
        (tmp_path / name).mkdir()  # somebody else's, which stays

    def saved():
        return [f for f in tmp_path.iterdir() if f.is_dir() and f.name not in ("v1-final", "v3-20240101")]

    async def main():
        async with RemoteSampler(f"http://127.0.0.1:{port}", policy, bridge=Restart(tmp_path), max_staleness=1) as remote:
            assert await remote.publish() == policy.version
            assert (saved()[0] / lora.CONFIG).is_file() == (kind == "adapter")
            await agree(remote, policy, policy.version)
            mine = asyncio.ensure_future(remote.sample(PROMPTS, params=SamplingParams(max_new_tokens=100, ignore_eos=True)))
            stranger = Caller(remote.url)
            endless = {"model": "tiny", "prompt": "1", "n": 64, "max_tokens": 500, "ignore_eos": True}
            theirs = asyncio.ensure_future(stranger.ask("POST", "/v1/completions", endless))
            while (await stranger.ask("GET", "/status"))["rows"] < 64:
                await asyncio.sleep(0.01)
            moved(policy, 1) if kind == "whole" else turn(policy, 0.4)
            publishing = asyncio.ensure_future(remote.publish())
            await asyncio.sleep(0)
            late = asyncio.ensure_future(remote.sample(PROMPTS, params=SHORT))
            assert await publishing == policy.version
            assert [r.policy_version for g in await mine for r in g] == [policy.version - 1] * 3  # drained
            assert [r.policy_version for g in await late for r in g] == [policy.version] * 3
            with pytest.raises(RemoteError, match="shutting down|gave no answer"):
                await theirs
            await agree(remote, policy, policy.version)
            assert len(saved()) == 1
        with pytest.raises(RemoteError, match="is it running"):
            await RemoteSampler(remote.url, policy).sample(PROMPTS)
        assert {f.name for f in tmp_path.iterdir()} == {"server.log", "v1-final", "v3-20240101"}

    asyncio.run(main())


OWNER = """
import asyncio, signal, sys, os
from grpolab.models.load import load_policy
from grpolab.serve.weight_sync import Restart
from grpolab.serve.remote import RemoteSampler

async def main():
    async with RemoteSampler(sys.argv[1], load_policy("tiny"), bridge=Restart(sys.argv[2])) as remote:
        await remote.publish()
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.full
def test_a_server_ends_with_a_trainer_that_is_killed(tmp_path, own_environment):
    port = free_port()
    done = subprocess.run([sys.executable, "-c", OWNER, f"http://127.0.0.1:{port}", str(tmp_path)], timeout=200)
    assert done.returncode == -signal.SIGKILL  # so the server had answered
    until = time.monotonic() + 30
    while socket.socket().connect_ex(("127.0.0.1", port)) == 0:
        assert time.monotonic() < until, "the server lives on"
        time.sleep(0.1)


@pytest.mark.full
async def test_servers_that_cannot_be_started(tiny, tmp_path):
    """In bounded time, with what is wrong: no program, one that ends, no answer, a port that is taken. None is left, also where
    the publish is cancelled."""
    async def publish(bridge, port, why):
        async with RemoteSampler(f"http://127.0.0.1:{port}", tiny, bridge=bridge, timeout=20) as remote:
            with pytest.raises(RemoteError, match=why):
                await remote.publish()
            assert bridge.process is None

    await publish(Restart(tmp_path, ("no-such-program", "{weights}")), free_port(),
                  "status 127 before it answered: no-such-program: No such file")
    ended = (sys.executable, "-c", "import sys; sys.exit('no room')", "{weights}")
    await publish(Restart(tmp_path, ended), free_port(), "status 1 before it answered: no room")
    silent = (sys.executable, "-c", "import time; print('hello', flush=True); time.sleep(60)", "{weights}")
    await publish(Restart(tmp_path, silent, seconds=1), free_port(), "did not answer in 1 s: hello")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        await publish(Restart(tmp_path), port, f"no server can be started at http://127.0.0.1:{port}")
    bridge = Restart(tmp_path, silent)
    async with RemoteSampler(f"http://127.0.0.1:{free_port()}", tiny, bridge=bridge) as remote:
        publishing = asyncio.ensure_future(remote.publish())
        while bridge.process is None:
            await asyncio.sleep(0.05)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(20):
                await publishing
        assert bridge.process is None
    assert [f.name for f in tmp_path.iterdir()] == ["server.log"]
    with pytest.raises(ValueError, match="weights. among them"):
        Restart(tmp_path, ("vllm", "serve"))
