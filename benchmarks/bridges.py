"""What each weight bridge costs: seconds a sync, tokens a second after it, memory, staleness of what is sampled.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/bridges.py                # our service
    make vllm && OMP_NUM_THREADS=1 .venv/bin/python benchmarks/bridges.py --vllm    # and vLLM's server, on SmolLM2

Trainer and server are processes of their own. In a quiet round the policy takes a step (its numbers move a little), is
published, and a batch is sampled twice: right after the sync and once more. In a busy round a second client samples all the
while: `behind` is by how many versions its rollouts were behind the policy as they arrived, `failed` how many of its requests
ended with an error of the server, as they do where the server is started again. Each bridge has a server of its own, one after
the other. The record keeps a row a model, server and bridge, as they come.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import records  # noqa: E402
import torch  # noqa: E402

from grpolab import SamplingParams, load_policy  # noqa: E402
from grpolab.models import lora  # noqa: E402
from grpolab.models.lora import LoRA  # noqa: E402
from grpolab.serve.http_client import RemoteError  # noqa: E402
from grpolab.serve.mapped import Mapped  # noqa: E402
from grpolab.serve.remote import RemoteSampler  # noqa: E402
from grpolab.serve.weight_sync import AdapterSwap, Restart, SharedFile  # noqa: E402

ADAPTER = LoRA(rank=8, target=("q_proj", "k_proj", "v_proj", "o_proj"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
KINDS = ("one copy", "one copy, unpacked", "shared memory", "adapter swap", "adapter, restart", "whole, restart")
VLLM = ROOT / ".venv" / "vllm" / "bin" / "python"
VLLM_ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def vllm(weights: str) -> tuple[str, ...]:
    """vLLM's server of a saved folder, in the precision of ours."""
    return (str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", weights, "--served-model-name", "{name}",
            "--host", "{host}", "--port", "{port}", "--dtype", "float32", "--max-model-len", "512", "--enable-lora",
            "--max-lora-rank", "8", "--enforce-eager")


def step(policy, number: int) -> None:
    """Move what is trained a little, as an optimiser step does."""
    generator = torch.Generator().manual_seed(number)
    with policy.lock, torch.no_grad():
        for name, p in policy.model.named_parameters():
            if p.requires_grad and "lora_A" not in name:
                p.add_(1e-3 * torch.randn(p.shape, generator=generator))
        policy.version += 1


def peak_mb(pid: int) -> float:
    """The most memory that a process and its children held, each at its own time (VmHWM)."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(own.split()[1]) / 1024 + sum(peak_mb(int(child)) for child in children)


def held_mb(pid: int) -> float:
    """What a process and its children hold now, of shared pages their share (Pss)."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(own.split()[1]) / 1024 + sum(held_mb(int(child)) for child in children)


@contextlib.contextmanager
def started(command: list[str], log: Path):
    """A server that runs on: its process, once it says that it serves (ours) or for the caller to wait for."""
    with open(log, "wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield server
    finally:
        server.terminate()
        server.wait(60)


@contextlib.asynccontextmanager
async def serving(model: str, kind: str, policy, folder: Path, peer: str):
    """A RemoteSampler whose server is up, and a function that gives the server's process id."""
    port = free_port()
    url, base = f"http://127.0.0.1:{port}", str(folder / "base")
    if "restart" in kind:
        command = Restart.own if peer == "grpolab" else vllm("{weights}")
        bridge = Restart(folder / "weights", command)
        async with RemoteSampler(url, policy, bridge=bridge) as remote:
            await remote.publish()
            yield remote, lambda: bridge.process.pid
        return
    shared = Path("/dev/shm") / f"grpolab-bridges-{os.getpid()}.safetensors"
    if peer == "grpolab":
        command = [sys.executable, "-m", "grpolab", "serve-policy", model, "--port", str(port), "--weights", str(shared),
                   "--adapters", str(folder / "adapters")] + ["--no-packed"] * kind.endswith("unpacked")
    else:
        load_policy(model).save(base)
        command = [part.format(name=policy.name, host="127.0.0.1", port=port) for part in vllm(base)]
    bridges = {"one copy": Mapped, "one copy, unpacked": Mapped, "shared memory": SharedFile}
    bridge = bridges[kind](shared) if kind in bridges else AdapterSwap(folder / "adapters")
    try:
        with started(command, folder / "server.log") as server:
            async with RemoteSampler(url, policy, bridge=bridge) as remote:
                while True:
                    with contextlib.suppress(RemoteError):
                        await remote.caller.ask("GET", "/health")
                        break
                    if server.poll() is not None:
                        raise RuntimeError((folder / "server.log").read_text()[-2000:])
                    await asyncio.sleep(0.2)
                await remote.publish()
                yield remote, lambda: server.pid
    finally:
        shared.unlink(missing_ok=True)


async def measure(model: str, kind: str, peer: str, rounds: int, tokens: int) -> dict:
    policy = load_policy(model, adapter=ADAPTER if "adapter" in kind else None)
    prompts = [policy.tokenizer.encode(f"What is {a} + 7?") for a in range(10, 18)]
    params = SamplingParams(seed=0, max_new_tokens=tokens, ignore_eos=True)
    folder, sync, after, later, busy, behind, failed = Path(tempfile.mkdtemp()), [], [], [], [], [], 0

    async def rate(remote) -> float:
        began = time.perf_counter()
        groups = await remote.sample(prompts, group_size=4, params=params)
        return sum(len(r.tokens) for g in groups for r in g) / (time.perf_counter() - began)

    try:
        async with serving(model, kind, policy, folder, peer) as (remote, pid):
            await rate(remote)
            for number in range(rounds):
                step(policy, number)
                await remote.publish()
                sync.append(remote.synced_s)
                after.append(await rate(remote))
                later.append(await rate(remote))
            done = asyncio.Event()

            async def other():
                nonlocal failed
                client = RemoteSampler(remote.url, policy)
                while not done.is_set():
                    client.model, client._version = remote.model or client.model, remote._version  # none until it has asked
                    try:
                        for group in await client.sample(prompts[:2], group_size=4, params=params):
                            behind.extend(policy.version - r.policy_version for r in group)
                    except RemoteError:
                        failed += 1
                        await asyncio.sleep(0.05)

            asking = asyncio.ensure_future(other())
            for number in range(rounds):
                await asyncio.sleep(0.3)
                step(policy, 1000 + number)
                await remote.publish()
                busy.append(remote.synced_s)
            done.set()
            await asking
            peak, both = peak_mb(pid()), held_mb(os.getpid())  # the server is a child of ours
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row = {"model": model, "server": peer, "bridge": kind, "sync_s": sync, "busy_sync_s": busy, "tokens_per_s_after": after,
           "tokens_per_s": later, "server_peak_mb": round(peak), "version": VERSION,
           "both_mb": round(both), "behind_max": max(behind, default=0), "failed": failed,
           "behind_mean": statistics.fmean(behind) if behind else 0.0,
           "travels_mb": round(sum(p.nbytes for n, p in policy.model.named_parameters()
                                   if not lora.layers(policy.model) or "lora_" in n) / 2**20, 2)}
    quiet, loud, first, second = map(statistics.median, (sync, busy, after, later))
    print(f"{model:13} {peer:8} {kind:17} {quiet:6.2f} s, busy {loud:6.2f} s, {first:6.0f} tokens/s after, {second:6.0f} "
          f"later, {peak:6.0f} MB, behind at most {row['behind_max']}, {failed} failed", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny", "smollm2-135m"])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="of each of the 32 completions of a batch")
    parser.add_argument("--vllm", action="store_true", help="also vLLM's server (make vllm), with the largest of the models")
    parser.add_argument("--out", type=records.record_path, default=ROOT / "benchmarks" / "results" / "bridges.json")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.update(VLLM_ENV)
    cases = [(model, kind, "grpolab") for model in args.models for kind in args.kinds]
    if args.vllm:
        cases += [(args.models[-1], kind, "vllm") for kind in args.kinds if kind in ("adapter swap", "whole, restart")]
    about = {"command": "OMP_NUM_THREADS=1 python benchmarks/bridges.py --vllm",
             "batch": f"8 prompts × 4 completions of {args.tokens} tokens", "threads": torch.get_num_threads(),
             "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"}
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for case in cases:
        new = asyncio.run(measure(*case, args.rounds, args.tokens))
        rows = [r for r in rows if any(r[k] != new[k] for k in ("model", "server", "bridge"))] + [new]
        records.write(args.out, about | {"rows": rows})


if __name__ == "__main__":
    main()
