"""Tokens a second through the service, beside the Sampler called directly.

    OMP_NUM_THREADS=1 python benchmarks/service.py                          # tiny in two minutes, SmolLM2 in many more
    OMP_NUM_THREADS=1 python benchmarks/service.py --models tiny --rounds 5
    OMP_NUM_THREADS=1 python benchmarks/service.py --vllm http://host:8000/v1 --models smollm2-135m

Callers ask at once and each asks again as soon as it was answered, with token ids, a seed and a fixed length, so every way
makes the same tokens and a log-prob for each. `sampler` awaits a Sampler in this process. The others go over HTTP: to a
service in this process (which shares its interpreter with the callers) and to `grpolab serve-policy` in another, each by
RemoteSampler and by OpenAI's own client. `--vllm` adds a server of vLLM's, which has to serve the same model. Ways take turns
within a round, and a ratio compares two of one round, so that whatever else the machine does falls on both.
benchmarks/results/service.json keeps a row a model and number of callers.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import records  # noqa: E402
import torch  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402

from grpolab.decode.sampler import Sampler  # noqa: E402
from grpolab.decode.sampling import SamplingParams  # noqa: E402
from grpolab.models.load import load_policy  # noqa: E402
from grpolab.serve.remote import RemoteSampler  # noqa: E402
from grpolab.serve.service import serve_policy  # noqa: E402

CALLERS = (1, 8, 32)
PROMPT, NEW = 40, 64
REQUESTS = {"tiny": 32, "smollm2-135m": 4}  # of all callers together, and at least two of each
DIRECT = "sampler"
Way = Callable[[list[int], int], Awaitable[list[int]]]


def prompt(i: int) -> list[int]:
    """The ids of request i, the same for each way; all are of the tiny vocabulary."""
    return [5 + (7 * i + k * k) % 40 for k in range(PROMPT)]


def params(i: int) -> SamplingParams:
    return SamplingParams(seed=i, max_new_tokens=NEW, ignore_eos=True)


def by_sampler(sampler: Sampler | RemoteSampler) -> Way:
    async def ask(ids, i):
        ((rollout,),) = await sampler.sample([ids], params=params(i))
        return list(rollout.tokens)

    return ask


def by_openai(client: AsyncOpenAI, model: str) -> Way:
    async def ask(ids, i):
        reply = await client.completions.create(model=model, prompt=ids, max_tokens=NEW, seed=i, logprobs=0,
                                                extra_body={"return_token_ids": True, "ignore_eos": True})
        return reply.choices[0].token_ids

    return ask


async def together(way: Way, callers: int, requests: int) -> tuple[float, list[list[int]]]:
    """Tokens a second of so many callers that share the requests, and what each request got."""
    numbers, made = iter(range(requests)), [[]] * requests

    async def caller():
        for i in numbers:
            made[i] = await way(prompt(i), i)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return sum(map(len, made)) / (time.perf_counter() - began), made


@contextmanager
def elsewhere(model: str):
    """The address of `grpolab serve-policy` in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "grpolab", "serve-policy", model, "--port", "0"], text=True,
                               stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        yield next(line for line in process.stdout if line.startswith("serving")).split()[-1]
    finally:
        process.terminate()
        process.wait(20)


async def race(model: str, callers: tuple[int, ...], rounds: int, requests: int, vllm: str | None) -> list[dict]:
    """The rows of a model."""
    policy = load_policy(model, device="cpu")
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        sampler = await enter(Sampler(policy))
        here = (await enter(serve_policy(await enter(Sampler(policy))))).url + "/v1"
        there = stack.enter_context(elsewhere(model))
        ways = {DIRECT: by_sampler(sampler)}
        for place, url in (("same process", here), ("another process", there), ("vLLM", vllm)):
            if url is not None:
                remote = await enter(RemoteSampler(url, policy))
                client = await enter(AsyncOpenAI(base_url=url, api_key="-", max_retries=0))
                (served,) = [m.id for m in (await client.models.list()).data]
                ways |= {f"{place}, RemoteSampler": by_sampler(remote), f"{place}, openai": by_openai(client, served)}
        return [await row(model, n, ways, rounds, max(requests, 2 * n)) for n in callers]


async def row(model: str, callers: int, ways: dict[str, Way], rounds: int, requests: int) -> dict:
    """Each way in each round, in an order that turns; its ratio to the Sampler's of the same round."""
    speeds, made = {name: [] for name in ways}, {}
    for way in ways.values():
        await together(way, callers, callers)  # engines are chosen, connections are made
    for turn in range(rounds):
        names = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in names:
            speed, made[name] = await together(ways[name], callers, requests)
            speeds[name].append(speed)
    ratios = {name: [a / b for a, b in zip(found, speeds[DIRECT])] for name, found in speeds.items() if name != DIRECT}
    found = {"model": model, "callers": callers, "requests": requests, "rounds": rounds,
             "tokens_per_s": {name: statistics.median(found) for name, found in speeds.items()},
             "ratios": {name: {"median": statistics.median(r), "least": min(r), "most": max(r)} for name, r in ratios.items()},
             "differ": {name: sum(a != b for a, b in zip(tokens, made[DIRECT])) for name, tokens in made.items()}}
    print(line(found), flush=True)
    return found


def line(found: dict) -> str:
    told = "  ".join(f"{name} {r['median']:.2f} [{r['least']:.2f}, {r['most']:.2f}]" for name, r in found["ratios"].items())
    return f"{found['model']:13} {found['callers']:3} callers: {found['tokens_per_s'][DIRECT]:6.0f} tokens/s; of it: {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(REQUESTS), choices=REQUESTS)
    parser.add_argument("--callers", nargs="+", type=int, default=CALLERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, help="of all callers together, instead of REQUESTS")
    parser.add_argument("--vllm", help="address of a server of vLLM's with the same model, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--out", type=records.record_path, default=ROOT / "benchmarks" / "results" / "service.json")
    args = parser.parse_args()
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
               "torch": torch.__version__, "openai": importlib.metadata.version("openai"), "load": os.getloadavg()[0]}
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for model in args.models:
        new = asyncio.run(race(model, tuple(args.callers), args.rounds, args.requests or REQUESTS[model], args.vllm))
        done = {(r["model"], r["callers"]) for r in new}
        rows = [r for r in rows if (r["model"], r["callers"]) not in done] + new
        machine["load_after"] = os.getloadavg()[0]
        command = "OMP_NUM_THREADS=1 python benchmarks/service.py"
        result = {"command": command, "prompt": PROMPT, "new": NEW, "machine": machine, "rows": rows}
        records.write(args.out, result)


if __name__ == "__main__":
    main()
