"""What test_distributed.py runs in one process and in several: every method, each from the same weights.

    torchrun --nproc-per-node 2 tests/distributed_program.py FOLDER POLICY what ...
"""

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpolab.arithmetic import Task, generate
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.calculator import CalculatorEnv
from grpolab.env.pool import GrpoPool
from grpolab.env.server import serve
from grpolab.models.load import load_policy
from grpolab.runs.run import Run
from grpolab.train import distributed, loop
from grpolab.train.dpo import DPOConfig, dpo
from grpolab.train.episodes import Limits, demonstrate
from grpolab.train.grpo import GRPOConfig, grpo, grpo_from
from grpolab.train.multiturn import multi_turn_grpo
from grpolab.train.preferences import load_preferences
from grpolab.train.reward_model import RewardConfig, RewardModel, reward_model
from grpolab.train.sft import SFTConfig, demonstrations, sft
from grpolab.train.sources import StepGroups

PROBLEMS, _ = generate(40, 0, seed=2, task=Task("+-", max_operand=20))
TIMES = {"seconds", "tokens_per_s", "pairs_per_s", "sampling_s", "update_s", "sampled_tokens_per_s", "updated_tokens_per_s",
         "env_s"}
COMMON = {"steps": 2, "lr": 1e-4, "warmup": 0}
GROUPS = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 24, "max_logp_diff": None}


def digits(text, problem, rollout):
    return float(sum(c.isdigit() for c in text) % 3)


def fallible(text, problem, rollout):
    if problem is PROBLEMS[0] or "7" in text:
        raise KeyError("seven")
    return digits(text, problem, rollout)


def ends(text, problem, rollout):
    return float(rollout.finish_reason == "eos")


def steps_of(what, policy, folder, run):
    """The rows of a method."""
    pairs = lambda: load_preferences(folder / "pairs.jsonl", policy.tokenizer)  # noqa: E731
    reference = lambda: load_policy("tiny", device="cpu", dtype="float64")  # noqa: E731
    match what:
        case "sft":
            return sft(policy, demonstrations(policy, PROBLEMS), SFTConfig(**COMMON, batch_size=5), run=run)
        case "dpo":
            return dpo(policy, reference(), pairs(), DPOConfig(**COMMON, batch_size=3), run=run)
        case "reward":
            return reward_model(policy, pairs(), RewardConfig(**COMMON, batch_size=3, centering=0.1), run=run)
        case "grpo" | "killed":
            config = GRPOConfig(**COMMON | GROUPS | {"steps": 3, "save_every": 1}, inner_epochs=2)
            return grpo(policy, None, PROBLEMS, config, reward=digits, run=run, watch={"ends": ends})
        case "options":
            config = GRPOConfig(**COMMON | GROUPS | {"prompts_per_step": 5}, minibatches=2, refills=1, kl_coef=0.1,
                                sampler_cap=2.0, advantage_kind="batch_standardised", aggregation="sequence")
            return grpo(policy, reference(), PROBLEMS, config, reward=fallible, run=run)


async def multi_turn(policy, run, told):
    tasks = [{"a": p.a, "op": p.op, "b": p.b} for p in PROBLEMS]
    config = GRPOConfig(**COMMON | GROUPS | {"prompts_per_step": 3})
    async with serve(CalculatorEnv, max_sessions=3) as server, GrpoPool(server.url, size=3) as pool:
        async for row in multi_turn_grpo(policy, None, tasks, config, pool, limits=Limits(max_turns=3), run=run):
            told.append(row)


def fresh(what, folder):
    policy = load_policy(folder / "policy", device="cpu")
    policy.model.double()
    return RewardModel.from_policy(policy) if what == "reward" else policy


def trained(what, folder, out) -> tuple[dict, dict]:
    """One method from the start: its rows, the gradient of its first step, its rollouts and its weights."""
    policy, told, gradients = fresh(what, folder), [], []
    honest = loop.apply_gradient

    def keeping(policy, *rest):
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
        return honest(policy, *rest)

    grpo_module = sys.modules["grpolab.train.grpo"]
    loop.apply_gradient = grpo_module.apply_gradient = keeping
    run = Run(what, root=out / f"rank-{distributed.world().rank}")

    async def follow():
        async for row in steps_of(what, policy, folder, run):
            told.append(row)

    try:
        asyncio.run(multi_turn(policy, run, told) if what == "multiturn" else follow())
    finally:
        loop.apply_gradient = grpo_module.apply_gradient = honest
    recorded = run.rollouts() if run.recorder.files() else None
    tensors = {"gradient": gradients[0], "weights": torch.cat([p.detach().flatten() for p in policy.model.parameters()])}
    return tensors, {
        "rows": [{k: v for k, v in row.items() if k not in TIMES} for row in told], "metrics": len(run.metrics),
        "rollouts": None if recorded is None else
        [[r.step, r.group, r.prompt, list(r.tokens), int(r.seed), r.reward, r.used] for r in recorded.itertuples()],
        "files": sorted(".start" if p.name.startswith(".start-") else p.name for p in run.folder.iterdir()),
        "version": policy.version,
    }


def main(folder, out, *methods):
    torch.set_num_threads(1)
    found = {what: trained(what, Path(folder), Path(out)) for what in methods}
    name = Path(out) / f"{distributed.world().rank}-of-{distributed.world().size}"
    save_file({f"{what} {k}": v for what, (tensors, _) in found.items() for k, v in tensors.items()}, f"{name}.safetensors")
    Path(f"{name}.json").write_text(json.dumps({what: told for what, (_, told) in found.items()}))


def failing(folder, out, how, at):
    """GRPO with a checkpoint after every step, in which rank 1 is stopped, killed, or gives a reward that is none, as it scores
    its `at`-th completion."""
    seen, honest = iter(range(10**9)), digits

    def reward(text, problem, rollout):
        if distributed.world().rank == 1 and next(seen) == int(at):
            if how == "error":
                return "one"
            kept, until = Run("killed", root=Path(out) / "rank-0"), time.monotonic() + 60
            while not kept.checkpointed() and time.monotonic() < until:  # rank 0 writes step 1 while this rank samples step 2
                time.sleep(0.01)
            os.kill(os.getpid(), getattr(signal, how))
        return honest(text, problem, rollout)

    globals()["digits"] = reward  # `steps_of` passes it on
    main(folder, out, "killed")


def prepare(folder):
    """A policy that calls the calculator, answers, and ends its turns, though not always well; and pairs."""
    policy, rng = load_policy("tiny", device="cpu"), random.Random(0)
    demos = []
    for i in range(96):
        problem = rng.choice(PROBLEMS)
        turns = [f"calc: {problem.a} {problem.op} {problem.b}"] * (i % 3 != 0) + [problem.target]
        demos.append(demonstrate(policy.tokenizer, CalculatorEnv(), vars(problem), turns))

    async def teach():
        async for _ in sft(policy, demos, SFTConfig(steps=30, lr=2e-3, batch_size=16)):
            pass

    asyncio.run(teach())
    policy.save(folder / "policy")
    rows = [{"prompt": f"What is {p.a} {p.op} {p.b}?", "chosen": p.target, "rejected": "1" * i}
            for i, p in enumerate(PROBLEMS[:7], start=1)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- what must be refused, and what is left of a fault ----------------------------------------------------------------


def forked(size, work, patience, stopped=()):
    """{rank: what `work()` returned or raised, and its seconds} of so many processes, which were forked and not launched. One
    that is stopped is killed in the end."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    children = {}
    for rank in range(size):
        inlet, outlet = os.pipe()
        children[rank] = os.fork(), inlet
        if children[rank][0] == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            distributed.PATIENCE, began = patience, time.monotonic()
            try:
                told = work()
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"
            os.write(outlet, json.dumps([told, time.monotonic() - began]).encode())
            os._exit(0)
        os.close(outlet)
    found = {}
    for rank, (process, inlet) in sorted(children.items(), key=lambda item: item[0] in stopped):
        if rank in stopped:
            os.kill(process, signal.SIGKILL)
        with open(inlet) as file:
            text = file.read()
        os.waitpid(process, 0)
        found[rank] = json.loads(text) if text else None
    return found


def said(work):
    """What an attempt raised, and "" for nothing."""
    try:
        asyncio.run(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(folder):
    """What two ranks refuse, one after another; after each of them they train on together."""
    rank, policy = distributed.world().rank, load_policy(folder / "policy", device="cpu")
    start = next(policy.model.parameters()).detach().clone()
    config = GRPOConfig(**COMMON | GROUPS)

    async def train(steps):
        async for _ in steps:
            pass

    def examples(shift=0):
        return demonstrations(policy, PROBLEMS[shift : shift + 4])

    def moved(by):
        with torch.no_grad():
            next(policy.model.parameters()).copy_(start + by * rank)
        return sft(policy, examples(), SFTConfig(steps=1))

    class Astray:
        """A curriculum of which every rank has another."""

        tasks = PROBLEMS

        def next_tasks(self, n):
            return PROBLEMS[rank : rank + n]

        def record_result(self, task, rate): ...

    async def own_groups(step):
        groups = await sampler.sample([[1, 2, 3]] * 2, group_size=4, params=SamplingParams(seed=rank, max_new_tokens=4))
        return StepGroups([g.with_rewards([0.0, 1.0, 0.0, 1.0]) for g in groups])

    async def elsewhere():
        distributed.exchange(["the one", "the other"][rank])

    sampler, told = Sampler(policy), {}
    told["weights"] = said(train(moved(0.5)))
    told["together"] = said(train(moved(0.0)))
    told["place"] = said(elsewhere())
    told["data"] = said(train(sft(policy, examples(rank), SFTConfig(steps=1))))
    told["configuration"] = said(train(sft(policy, examples(), SFTConfig(steps=1, lr=1e-4 * (1 + rank)))))
    told["tasks"] = said(train(grpo(policy, None, Astray(), config, reward=digits)))
    told["groups"] = said(train(grpo_from(policy, None, own_groups, config, longest=40)))
    told["drift"] = said(train(drifting(sft(policy, examples(), SFTConfig(steps=2)), policy)))
    return told


async def drifting(rows, policy):
    """Rank 1's weights move by themselves after a step."""
    async for row in rows:
        yield row
        with torch.no_grad():
            next(policy.model.parameters())[0, 0] += 0.5 * distributed.world().rank


def kill(folder, out):
    """Rank 1 of two is killed in step 1."""
    torch.set_num_threads(1)
    ended = forked(2, lambda: failing(folder, out, "SIGKILL", 5), 60.0)
    assert ended[1] is None and "a rank is lost" in ended[0][0], ended


def faults(folder, out):
    """Every scenario in processes of its own, which this one has loaded everything for."""
    torch.set_num_threads(1)

    def in_step(how, size, **options):
        target = Path(out) / how
        target.mkdir()
        found = forked(size, lambda: failing(folder, target, how, 5), **options)
        return {"ended": found, "saved": Run("killed", root=target / "rank-0").checkpointed()}

    found = {
        "killed": in_step("SIGKILL", 3, patience=60.0), "silent": in_step("SIGSTOP", 2, patience=3.0, stopped=(1,)),
        "error": in_step("error", 2, patience=60.0),
        "resumed": forked(2, lambda: main(folder, Path(out) / "SIGKILL", "killed"), 60.0),
        "refusals": forked(2, lambda: refusals(Path(folder)), 60.0),
    }
    (Path(out) / "faults.json").write_text(json.dumps(found))


if __name__ == "__main__":
    named = {"kill": kill, "faults": faults}
    named[sys.argv[3]](*sys.argv[1:3]) if sys.argv[3] in named else main(*sys.argv[1:])
