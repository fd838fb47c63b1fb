"""Weight bridges among strangers: a second trainer, a file that others touch, a full disk, another server at the port, an
answer that does not come. What is sampled is the policy's, or an error says why not."""

import asyncio
import contextlib
import copy
import resource
import sys
import time

import pytest
from test_remote import PROMPTS, moved
from test_weight_sync import SHORT, adapted, agree, free_port, turn

pytest.importorskip("peft")

from grpolab.decode.audit import audit  # noqa: E402
from grpolab.decode.sampler import Sampler  # noqa: E402
from grpolab.decode.sampling import SamplingParams  # noqa: E402
from grpolab.models.load import Policy  # noqa: E402
from grpolab.serve import state as service_module  # noqa: E402
from grpolab.serve.http_client import RemoteError  # noqa: E402
from grpolab.serve.remote import RemoteSampler  # noqa: E402
from grpolab.serve.service import serve_policy  # noqa: E402
from grpolab.serve.shared_weights import SharedWeights  # noqa: E402
from grpolab.serve.weight_sync import AdapterSwap, Restart, SharedFile  # noqa: E402


def copied(policy, by=None):
    """Another process's policy, so to speak; with `by`, a step further."""
    other = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.name, policy.eos_ids, version=policy.version)
    if by is not None:
        moved(other, by)
    return other


@contextlib.asynccontextmanager
async def shared(policy, path, **options):
    """A service with a model of its own, and a RemoteSampler of the policy that publishes to it through the file."""
    async with serve_policy(copied(policy), weights=path) as service:
        async with RemoteSampler(service.url, policy, bridge=SharedFile(path), **options) as remote:
            yield service, remote


async def test_two_trainers_at_one_server_do_not_sample_from_each_others_weights(tiny, tmp_path):
    """Both are at the same version, so the version does not tell."""
    path = tmp_path / "w.safetensors"
    one, two = copied(tiny, 1), copied(tiny, 2)

    async with shared(one, path, max_staleness=0) as (service, first):
        await first.publish()
        await agree(first, one, 1)
        async with RemoteSampler(service.url, two, bridge=SharedFile(path), max_staleness=0) as second:
            await second.publish()
            await agree(second, two, 1)
            with pytest.raises(RemoteError, match="has the weights version-1-.*this sampler published version-1-"):
                await first.sample(PROMPTS, params=SHORT)
            with pytest.raises(ValueError, match="is another trainer's file now"):
                await first.publish()
            await agree(second, two, 1)
            first.bridge.close()
            assert path.exists()  # it is the second's
        assert not path.exists()


async def test_a_server_takes_in_what_was_published_and_nothing_else(tiny, tmp_path):
    """Another trainer's file came between the write and the request."""
    path = tmp_path / "w.safetensors"
    policy, other = copied(tiny, 1), copied(tiny, 2)

    async with shared(policy, path) as (service, remote):
        await remote.publish()
        ask = remote.caller.ask

        async def late(method, where, *rest, **options):
            if where == "/weights":
                SharedFile(path)._write(other)
            return await ask(method, where, *rest, **options)

        remote.caller.ask = late
        with pytest.raises(RemoteError, match="409.*other weights .of version 1. than those that were published"):
            await remote.publish()
        remote.caller.ask = ask
        await agree(remote, policy, 1)
        for wrong in ({"checksum": "1"}, {"checksum": 1, "more": 2}):
            with pytest.raises(RemoteError, match="400: (checksum|more)"):
                await ask("POST", "/weights", wrong)


async def test_two_trainers_with_adapters_of_one_name(tmp_path):
    one, two = adapted(by=0.3), adapted(by=0.6)

    async with serve_policy(copied(adapted()), name="tiny", adapters=tmp_path) as service:
        async with RemoteSampler(service.url, one, bridge=AdapterSwap(tmp_path)) as first:
            async with RemoteSampler(service.url, two, bridge=AdapterSwap(tmp_path)) as second:
                await first.publish()
                await agree(first, one, 1)
                await second.publish()
                await agree(second, two, 1)
                with pytest.raises(RemoteError, match="another trainer publishes to it"):
                    await first.sample(PROMPTS, params=SHORT)
                await first.publish()
                await agree(first, one, 1)


async def test_a_server_that_was_started_again_with_its_first_weights(tiny, tmp_path):
    """They are of version 0, as what was published is, and not the policy's."""
    path, port = tmp_path / "w.safetensors", free_port()
    policy = copied(tiny, 1)
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
    """Shapes and names agree, and the checksum; the forward differs, as of another architecture or configuration."""
    strange = copied(tiny)
    for module in strange.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 3.0

    path = tmp_path / "w.safetensors"
    async with serve_policy(strange, weights=path) as service:
        async with RemoteSampler(service.url, tiny, bridge=SharedFile(path)) as remote:
            with pytest.raises(RemoteError, match="does not compute what 'tiny' does"):
                await remote.publish()


@pytest.mark.parametrize("fault", ["deleted", "another program's"])
async def test_a_file_that_others_touch(tiny, tmp_path, fault):
    """Server and trainer live on, the server with the weights that it has; the next publish makes a file that is gone again."""
    path, policy = tmp_path / "w.safetensors", copied(tiny)

    async with shared(policy, path) as (service, remote):
        await remote.publish()
        if fault == "deleted":
            path.unlink()
        if fault == "another program's":
            (tmp_path / "other").write_text("hello")
            (tmp_path / "other").rename(path)
        before = await agree(remote, policy, 0)
        with pytest.raises(RemoteError, match="409"):
            await remote.caller.ask("POST", "/weights", {})
        assert await agree(remote, policy, 0) == before
        moved(policy, 1)
        if fault == "another program's":
            with pytest.raises(ValueError, match="another trainer's file"):
                await remote.publish()
            path.unlink()
        await remote.publish()
        await agree(remote, policy, 1)


@pytest.mark.parametrize("kind", ["shared", "swap", "restart"])
def test_a_disk_that_is_full(tiny, tmp_path, kind):
    """A RemoteError that says so, nothing half-written, and no server was asked. Here a limit on the size of a file."""
    policy = tiny if kind == "shared" else adapted()
    bridge = {"shared": SharedFile(tmp_path / "w"), "swap": AdapterSwap(tmp_path), "restart": Restart(tmp_path)}[kind]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def main():
        async with RemoteSampler(f"http://127.0.0.1:{free_port()}", policy, bridge=bridge) as remote:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
            try:
                await remote.publish()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(RemoteError, match="could not be written.*too large"):
        asyncio.run(main())
    assert not list(tmp_path.iterdir())


async def test_publishing_without_a_pause_and_cancelled_at_any_moment(tiny, tmp_path):
    """What others sample all the while is of one version each, whose weights made it; the last publish counts."""
    path, policy = tmp_path / "w.safetensors", copied(tiny)

    states, rollouts, done = {}, [], asyncio.Event()
    async with shared(policy, path) as (service, remote):
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


@pytest.mark.parametrize("how", ["no answer", "cancelled"])
async def test_an_adapter_whose_answer_does_not_come_is_taken_back(tmp_path, how):
    """The server had put it in when the trainer lost it."""
    policy = adapted(by=0.3)

    async with serve_policy(copied(policy), name="tiny", adapters=tmp_path) as service:
        async with RemoteSampler(service.url, policy, bridge=AdapterSwap(tmp_path)) as remote:
            await remote.publish()
            before, was = await agree(remote, policy, 1), copied(policy)
            ask = remote.caller.ask

            async def lost(method, path, body=None, **options):
                answer = await ask(method, path, body, **options)
                if path == "/v1/load_lora_adapter" and body["policy_version"] == 2:
                    raise RemoteError("gave no answer") if how == "no answer" else asyncio.CancelledError()
                return answer

            remote.caller.ask = lost
            turn(policy, 0.6)
            with pytest.raises(RemoteError if how == "no answer" else asyncio.CancelledError):
                await remote.publish()
            assert await agree(remote, was, 1) == before
            assert len(list(tmp_path.iterdir())) == 1
            remote.caller.ask = ask
            await remote.publish()
            await agree(remote, policy, 2)


ANSWERS_ONCE = """
import http.server, json, pathlib, sys, time
flag, host, port, weights = sys.argv[1:]
if pathlib.Path(flag).exists():
    time.sleep(120)
pathlib.Path(flag).touch()
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"ok" if self.path == "/health" else json.dumps({"data": [{"id": "tiny", "root": weights}]}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *args): ...
http.server.HTTPServer((host, int(port)), Answer).serve_forever()
"""


def test_a_restart_that_is_cancelled_does_not_wait_for_the_version_before(tiny, tmp_path, monkeypatch):
    """The server before takes minutes to start again."""
    command = (sys.executable, "-c", ANSWERS_ONCE, str(tmp_path / "flag"), "{host}", "{port}", "{weights}")
    policy = copied(tiny)

    async def nothing(_):
        pass

    async def main():
        bridge = Restart(tmp_path / "weights", command)
        (tmp_path / "weights").mkdir()
        async with RemoteSampler(f"http://127.0.0.1:{free_port()}", policy, bridge=bridge) as remote:
            await bridge.publish(remote.caller, policy, nothing)
            first = bridge.pid
            publishing = asyncio.ensure_future(bridge.publish(remote.caller, policy, nothing))
            while bridge.pid in (first, None):
                await asyncio.sleep(0.05)
            publishing.cancel()
            async with asyncio.timeout(30):
                with pytest.raises(asyncio.CancelledError):
                    await publishing
            assert bridge.pid is None

    asyncio.run(main())


def test_a_restart_removes_nothing_that_it_did_not_save(tiny, tmp_path):
    for name in ("v1-final", "venv-3.12", "v3-20240101"):
        (tmp_path / name).mkdir()

    async def main():
        ended = (sys.executable, "-c", "raise SystemExit(3)", "{weights}")
        async with RemoteSampler(f"http://127.0.0.1:{free_port()}", tiny, bridge=Restart(tmp_path, ended)) as remote:
            with pytest.raises(RemoteError, match="status 3"):
                await remote.publish()

    asyncio.run(main())
    assert {f.name for f in tmp_path.iterdir()} == {"v1-final", "venv-3.12", "v3-20240101", "server.log"}


def test_new_weights_wait_for_those_who_use_the_sampler_itself(tiny, tmp_path):
    """A service of a Sampler that others use, too: their rollouts are of one version as well."""
    path, policy, served = tmp_path / "w.safetensors", copied(tiny, 1), copied(tiny)

    async def main():
        async with Sampler(served) as sampler, serve_policy(sampler, weights=path) as service:
            async with RemoteSampler(service.url, policy, bridge=SharedFile(path)) as remote:
                await remote.sample(PROMPTS, params=SHORT)
                long = SamplingParams(seed=1, max_new_tokens=300, ignore_eos=True)
                direct = asyncio.ensure_future(sampler.sample(PROMPTS, params=long))
                await asyncio.sleep(0.05)
                await remote.publish()
                await agree(remote, policy, 1)
                return [r for g in await direct for r in g]

    rollouts = asyncio.run(main())
    assert {r.policy_version for r in rollouts} == {0} and audit(tiny, rollouts).max_error < 1e-3


async def test_completions_that_do_not_end_keep_the_weights_that_they_began_with(tiny, tmp_path, monkeypatch):
    path, policy = tmp_path / "w.safetensors", copied(tiny)
    monkeypatch.setattr(service_module, "DRAIN_ROWS", 0.1)

    async with shared(policy, path) as (service, remote):
        await remote.publish()
        long = SamplingParams(seed=1, max_new_tokens=450, ignore_eos=True)
        async with RemoteSampler(service.url, policy) as free:
            asking = asyncio.ensure_future(free.sample(PROMPTS, group_size=128, params=long))
            while service.rows < 128:  # not yet what it asks first, to know the server
                assert not asking.done()
                await asyncio.sleep(0.005)
            moved(policy, 1)
            with pytest.raises(RemoteError, match="503.*still in progress after 0 s; the weights are as they were"):
                await remote.publish()
            assert service.policy.version == 0
            asking.cancel()
        monkeypatch.undo()
        await remote.publish()
        await agree(remote, policy, 1)


def test_a_write_that_a_cancelled_publish_left_is_not_overlapped(tiny, tmp_path, monkeypatch):
    """Each policy has a lock of its own, and both would write half of the file, with a checksum of the mixture."""
    write, inside, most = SharedWeights.write, [], []

    def slow(shared, model, version):
        inside.append(version)
        most.append(len(inside))
        time.sleep(0.05)
        inside.remove(version)
        return write(shared, model, version)

    monkeypatch.setattr(SharedWeights, "write", slow)
    bridge = SharedFile(tmp_path / "w.safetensors")

    class Server:
        async def ask(self, *_):
            return {"policy_version": 1}

    async def check(_):
        pass

    async def main():
        await asyncio.gather(*(bridge.publish(Server(), copied(tiny, by), check) for by in range(3)))

    asyncio.run(main())
    bridge.close()
    assert most == [1, 1, 1]
