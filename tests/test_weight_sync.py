"""The weight bridges: an update reaches a server that is a process of its own, and what goes wrong leaves it as it was."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_remote import PROMPTS, imitation, moved, of_vllm, process

peft = pytest.importorskip("peft")

from grpolab.decode.audit import audit  # noqa: E402
from grpolab.decode.sampling import SamplingParams  # noqa: E402
from grpolab.models import lora  # noqa: E402
from grpolab.models.load import load_policy  # noqa: E402
from grpolab.models.lora import LoRA  # noqa: E402
from grpolab.runs.run import repository  # noqa: E402
from grpolab.serve.http_client import Caller, RemoteError  # noqa: E402
from grpolab.serve.remote import RemoteSampler  # noqa: E402
from grpolab.serve.service import serve_policy  # noqa: E402
from grpolab.serve.weight_sync import AdapterSwap, Restart  # noqa: E402

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


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


async def agree(remote, policy, version):
    """The server samples what the policy here says, and says which version it is. The wrong weights would be off by more."""
    groups = await remote.sample(PROMPTS, group_size=2, params=SHORT)
    rollouts = [r for g in groups for r in g]
    assert {r.policy_version for r in rollouts} == {version}
    assert audit(policy, rollouts).max_error < CLOSE
    return rollouts


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
        seen = []
        for by in (0.3, 0.5):
            turn(policy, by)
            with pytest.raises(RemoteError, match="409.*none before"):
                await remote.sample(PROMPTS, params=SHORT)
            assert await remote.publish() == policy.version and remote.synced_s > 0
            seen.append(await agree(remote, policy, policy.version))
            assert audit(adapted(by=0.9), seen[-1]).max_error > 100 * CLOSE  # so that agreement says something
        names = [card["id"] for card in (await remote.caller.ask("GET", "/v1/models"))["data"]]
        assert names == ["tiny", f"policy-v{policy.version}"] == ["tiny", remote.model]
        assert len(list(folder.iterdir())) == 1  # what was saved for the versions before is gone
        with pytest.raises(RemoteError, match="404.*policy-v2.*is not served here; it is 'tiny' or 'policy-v3'"):
            await RemoteSampler(url, policy, model="policy-v3").caller.ask(
                "POST", "/v1/completions", {"model": "policy-v2", "prompt": "1"})
    async with RemoteSampler(url, other, bridge=AdapterSwap(folder)) as remote:  # of another form
        other.version = 7
        assert await remote.publish() == 7
        await agree(remote, other, 7)
    assert not list(folder.iterdir())


async def test_an_adapter_that_does_not_fit_leaves_the_server_as_it_was(swapped, tmp_path):
    """Wrong shapes, missing tensors, unknown projections, no adapter at all: each is named, and the old one stays."""
    url, folder = swapped
    policy = adapted()

    def saved(name, change):
        path = folder / name
        path.mkdir()
        lora.save(policy.model, path)
        change(path)
        return str(path)

    def config(path, **changes):
        about = json.loads((path / lora.CONFIG).read_text())
        (path / lora.CONFIG).write_text(json.dumps(about | changes))

    def tensors(path, change):
        from safetensors.torch import load_file, save_file
        found = load_file(path / lora.WEIGHTS)
        save_file(change(found), path / lora.WEIGHTS)

    wrong = [
        (saved("rank", lambda p: config(p, r=8)), "in another shape"),
        (saved("wide", lambda p: tensors(p, lambda t: {k: torch.zeros(9, 9) for k in t})), "in another shape"),
        (saved("less", lambda p: tensors(p, lambda t: dict(list(t.items())[1:]))), "lacks"),
        (saved("where", lambda p: config(p, target_modules=["nowhere"])), "nowhere"),
        (saved("text", lambda p: (p / lora.WEIGHTS).write_bytes(b"\x80\x04K\x01.")), "no readable adapter"),
        (str(folder / "none"), "no readable adapter"),
        (str(tmp_path), "outside the folder"), ("../..", "outside the folder"), ("/etc", "outside the folder"),
    ]

    async with RemoteSampler(url, policy, bridge=AdapterSwap(folder)) as remote:
        await remote.publish()
        before = await agree(remote, policy, policy.version)
        for path, said in wrong:
            with pytest.raises(RemoteError, match=said):
                await remote.caller.ask("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path}, text=True)
            assert await agree(remote, policy, policy.version) == before
        for body in ({}, {"lora_name": "x"}, {"lora_name": "x", "lora_path": 3}, {"lora_name": "tiny", "lora_path": "less"},
                     {"lora_name": "x", "lora_path": "less", "policy_version": "3"}, {"lora_name": "x", "y": 1}):
            with pytest.raises(RemoteError, match="400"):
                await remote.caller.ask("POST", "/v1/load_lora_adapter", body, text=True)
        large = adapted(LoRA(rank=4, target=("q_proj",)))
        with torch.no_grad():  # of a wider model
            for layer in lora.layers(large.model):
                layer.lora_A["default"].weight = torch.nn.Parameter(torch.zeros(4, 256))
        with pytest.raises(RemoteError, match="409.*another shape"):
            await remote.publish(large)
        assert await agree(remote, policy, policy.version) == before


async def test_what_cannot_be_swapped(tiny, tmp_path):
    async with serve_policy(tiny) as service:
        async with RemoteSampler(service.url, tiny, bridge=AdapterSwap(tmp_path / "a")) as remote:
            with pytest.raises(ValueError, match="has no adapter to swap"):
                await remote.publish()
            with pytest.raises(RemoteError, match="404.*--adapters"):
                await remote.publish(adapted())
            assert not list((tmp_path / "a").iterdir())
    with pytest.raises(RemoteError, match="is it running"):
        await RemoteSampler(f"http://127.0.0.1:{free_port()}", tiny, bridge=AdapterSwap(tmp_path)).publish(adapted())


def test_the_same_call_on_a_server_of_vllms_make(tmp_path):
    """Its answers to adapters are texts, it keeps each name until it is told otherwise, and its rollouts say no version."""
    policy, served, asked, right = adapted(), ["m", "policy-v0"], [], [True]

    def load(body):
        asked.append(body)
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

    async def main(url):
        async with RemoteSampler(url, policy, bridge=AdapterSwap(tmp_path), max_staleness=0) as remote:
            assert await remote.publish() == 1 and served == ["m", "policy-v1"]
            assert Path(asked[0]["lora_path"], lora.WEIGHTS).is_file()
            groups = await remote.sample(PROMPTS, group_size=2, params=SHORT)
            assert {r.policy_version for g in groups for r in g} == {1}
            policy.version += 1
            with pytest.raises(RemoteError, match="of version 1, the policy is at 2.*publish more often"):
                await remote.sample(PROMPTS, params=SHORT)
            right.clear()  # it took in an adapter and does not compute with it
            with pytest.raises(RemoteError, match="does not compute what 'tiny' does"):
                await remote.publish()
            assert asked[-1]["lora_name"] == "policy-v1" == remote.model and Path(asked[-1]["lora_path"]).is_dir()

    with imitation(answers) as url:
        asyncio.run(main(url))


def test_exchanging_adapters_in_a_model(tmp_path):
    """A failed exchange restores numbers, modules and modes; one of the same form keeps the modules themselves."""
    policy, same, other = adapted(), adapted(by=0.7), adapted(LoRA(rank=2, target=("o_proj",)))
    for name, p in (("same", same), ("other", other)):
        p.save(tmp_path / name)
    ids = torch.arange(30)[None] % 90 + 5
    state = {k: v.clone() for k, v in policy.model.state_dict().items()}
    (tmp_path / "other" / lora.WEIGHTS).rename(tmp_path / "kept")
    with pytest.raises(ValueError, match="no readable adapter"):
        lora.exchange(policy.model, tmp_path / "other")
    wrong = adapted(LoRA(rank=2, target=("o_proj", "k_proj")))
    wrong.save(tmp_path / "wrong")
    (tmp_path / "wrong" / lora.WEIGHTS).rename(tmp_path / "other" / lora.WEIGHTS)
    with pytest.raises(ValueError, match="also holds"):
        lora.exchange(policy.model, tmp_path / "other")
    now = policy.model.state_dict()
    assert now.keys() == state.keys() and all(torch.equal(now[k], state[k]) for k in state) and not policy.model.training
    modules = lora.layers(policy.model)
    lora.exchange(policy.model, tmp_path / "same")
    assert all(a is b for a, b in zip(modules, lora.layers(policy.model)))
    with torch.no_grad():
        assert torch.equal(policy.model(ids).logits, same.model(ids).logits)
        (tmp_path / "kept").rename(tmp_path / "other" / lora.WEIGHTS)
        lora.exchange(policy.model, tmp_path / "other")
        assert torch.equal(policy.model(ids).logits, other.model(ids).logits)
    assert len(lora.layers(policy.model)) == 4 and not policy.model.training


# --- a server that is started again -----------------------------------------------------------------------------------


@pytest.fixture
def own_environment(monkeypatch):
    """The server's process finds this package."""
    monkeypatch.setenv("PYTHONPATH", str(repository()))


@pytest.mark.parametrize("kind", ["whole", pytest.param("adapter", marks=pytest.mark.full)])
def test_a_server_is_started_again_with_the_new_weights(tiny, tmp_path, own_environment, kind):
    """Whoever asks is answered before or after it; other clients' requests end with an error of the server."""
    policy = tiny if kind == "whole" else adapted()
    port = free_port()

    async def main():
        async with RemoteSampler(f"http://127.0.0.1:{port}", policy, bridge=Restart(tmp_path), max_staleness=1) as remote:
            assert await remote.publish() == policy.version
            (saved,) = (f for f in tmp_path.iterdir() if f.is_dir())
            assert (saved / lora.CONFIG).is_file() == (kind == "adapter")
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
            assert len([f for f in tmp_path.iterdir() if f.is_dir()]) == 1
        with pytest.raises(RemoteError, match="is it running"):
            await RemoteSampler(remote.url, policy).sample(PROMPTS)
        assert [f.name for f in tmp_path.iterdir()] == ["server.log"]

    asyncio.run(main())


OTHER = """
import runpy, sys
_, weights, port, version = sys.argv
if version == "1":
    sys.exit("no room for these weights")
sys.argv = ["grpolab", "serve-policy", weights, "--port", port, "--policy-version", version]
runpy.run_module("grpolab", run_name="__main__")
"""


@pytest.mark.full
def test_weights_that_do_not_start_bring_the_version_before_back(tiny, tmp_path, own_environment):
    command = (sys.executable, "-c", OTHER, "{weights}", "{port}", "{version}")

    async def main():
        bridge = Restart(tmp_path, command, seconds=120)
        async with RemoteSampler(f"http://127.0.0.1:{free_port()}", tiny, bridge=bridge) as remote:
            await remote.publish()
            before = await agree(remote, tiny, 0)
            moved(tiny, 1)
            with pytest.raises(RemoteError, match="status 1.*no room for these weights.*runs again with version 0"):
                await remote.publish()
            after = await remote.sample(PROMPTS, group_size=2, params=SHORT)
            assert [r for g in after for r in g] == before

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


def test_servers_that_cannot_be_started(tiny, tmp_path, own_environment):
    """In bounded time, with what is wrong: no program, no answer, a port that is taken, another vocabulary."""
    async def publish(bridge, port):
        async with RemoteSampler(f"http://127.0.0.1:{port}", tiny, bridge=bridge, timeout=20) as remote:
            return await remote.publish()

    with pytest.raises(RemoteError, match="status 127 before it answered: no-such-program: No such file"):
        asyncio.run(publish(Restart(tmp_path, ("no-such-program", "{weights}")), free_port()))
    with pytest.raises(RemoteError, match="did not answer in 1 s: hello"):
        silent = (sys.executable, "-c", "import time; print('hello', flush=True); time.sleep(60)", "{weights}")
        asyncio.run(publish(Restart(tmp_path, silent, seconds=1), free_port()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RemoteError, match=f"port {port} of 127.0.0.1 has another server"):
            asyncio.run(publish(Restart(tmp_path), port))
    with pytest.raises(ValueError, match="weights. among them"):
        Restart(tmp_path, ("vllm", "serve"))
