"""What test_ranks.py runs in one process and in several: every method, each from the same weights.

    torchrun --nproc-per-node 2 tests/ranks_program.py FOLDER POLICY what ...
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpolab.arithmetic import Task, generate
from grpolab.env.calculator import CalculatorEnv
from grpolab.env.pool import GrpoPool
from grpolab.env.server import serve
from grpolab.lab.run import Run
from grpolab.models import load_policy
from grpolab.train import loop, ranks
from grpolab.train.dpo import DPOConfig, dpo
from grpolab.train.episodes import Limits
from grpolab.train.grpo import GRPOConfig, grpo
from grpolab.train.multiturn import multi_turn_grpo
from grpolab.train.preferences import load_preferences
from grpolab.train.reward_model import RewardConfig, RewardModel, reward_model
from grpolab.train.sft import SFTConfig, demonstrations, sft

PROBLEMS, _ = generate(40, 0, seed=2, task=Task("+-", max_operand=20))
TIMES = {"seconds", "tokens_per_s", "pairs_per_s", "sampling_s", "update_s", "sampled_tokens_per_s", "updated_tokens_per_s",
         "env_s"}  # fmt: skip
COMMON = {"steps": 2, "lr": 1e-4, "warmup": 0}
GROUPS = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 24, "max_logp_diff": None}


def digits(text, problem, rollout):
    return float(sum(c.isdigit() for c in text) % 3)


def fallible(text, problem, rollout):
    if problem is PROBLEMS[0] or "7" in text:
        raise KeyError("seven")
    return digits(text, problem, rollout)


class AtOnce:
    def batch(self, texts, problems, rollouts):
        return [digits(*each) for each in zip(texts, problems, rollouts)]


def ends(text, problem, rollout):
    return float(rollout.finish_reason == "eos")


def steps_of(what, policy, folder, run):
    """The rows of a method."""
    pairs = lambda: load_preferences(folder / "pairs.jsonl", policy.tokenizer)  # noqa: E731
    reference = lambda: load_policy(folder / "policy", device="cpu", dtype="float64", tell=False)  # noqa: E731
    match what:
        case "sft":
            return sft(policy, demonstrations(policy, PROBLEMS), SFTConfig(**COMMON, batch_size=5), run=run)
        case "packed":  # and a rank without an example
            config = SFTConfig(**COMMON, batch_size=1, pack_width=256, checkpoint_activations=True)
            return sft(policy, demonstrations(policy, PROBLEMS), config, run=run)
        case "dpo":
            return dpo(policy, reference(), pairs(), DPOConfig(**COMMON, batch_size=3), run=run)
        case "reward":
            return reward_model(policy, pairs(), RewardConfig(**COMMON, batch_size=3, centering=0.1), run=run)
        case "grpo":
            config = GRPOConfig(**COMMON | GROUPS | {"steps": 3, "save_every": 1}, inner_epochs=2)
            return grpo(policy, None, PROBLEMS, config, reward=digits, run=run, watch={"ends": ends})
        case "options":
            config = GRPOConfig(**COMMON | GROUPS | {"prompts_per_step": 5}, minibatches=2, refills=1, kl_coef=0.1,
                                sampler_cap=2.0, advantage_kind="batch_standardised", aggregation="sequence")
            return grpo(policy, reference(), PROBLEMS, config, reward=fallible, run=run)
        case "at_once":
            config = GRPOConfig(**COMMON | GROUPS | {"prompts_per_step": 1})
            return grpo(policy, None, PROBLEMS, config, reward=AtOnce(), run=run)


async def multi_turn(policy, run, told):
    tasks = [{"a": p.a, "op": p.op, "b": p.b} for p in PROBLEMS]
    config = GRPOConfig(**COMMON | GROUPS | {"prompts_per_step": 3})
    async with serve(CalculatorEnv, max_sessions=3) as server, GrpoPool(server.url, size=3) as pool:
        async for row in multi_turn_grpo(policy, None, tasks, config, pool, limits=Limits(max_turns=3), run=run):
            told.append(row)


def fresh(what, folder):
    adapter = {}
    if what == "lora":
        from grpolab.adapters import LoRA

        adapter = {"adapter": LoRA(rank=2)}
    policy = load_policy(folder / "policy", device="cpu", tell=False, **adapter)
    policy.model.double()
    return RewardModel.from_policy(policy) if what == "reward" else policy


def trained(what, folder, out) -> tuple[dict, dict]:
    """One method from the start: its rows, the gradient of its first step, its rollouts and its weights."""
    policy, told, gradients = fresh(what, folder), [], []
    honest = loop.apply_gradient

    def keeping(policy, *rest):
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
        return honest(policy, *rest)

    grpo_module = sys.modules[GRPOConfig.__module__]
    loop.apply_gradient = grpo_module.apply_gradient = keeping
    run = Run(what, root=out / f"rank-{ranks.world().rank}")

    async def follow():
        async for row in steps_of("sft" if what == "lora" else what, policy, folder, run):
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
        "files": sorted(p.name for p in run.folder.iterdir()), "version": policy.version,
    }  # fmt: skip


def main(folder, out, *methods):
    torch.set_num_threads(1)
    found = {what: trained(what, Path(folder), Path(out)) for what in methods}
    name = Path(out) / f"{ranks.world().rank}-of-{ranks.world().size}"
    save_file({f"{what} {k}": v for what, (tensors, _) in found.items() for k, v in tensors.items()}, f"{name}.safetensors")
    Path(f"{name}.json").write_text(json.dumps({what: told for what, (_, told) in found.items()}))


def failing(folder, out, how, at, patience="60"):
    """GRPO, in which rank 1 is stopped, killed or gives a reward that is none as it scores its `at`-th completion."""
    ranks.PATIENCE = float(patience)
    seen, honest = iter(range(10**9)), digits

    def reward(text, problem, rollout):
        if ranks.world().rank == 1 and next(seen) == int(at):
            if how == "error":
                return "one"
            os.kill(os.getpid(), getattr(signal, how))
        return honest(text, problem, rollout)

    globals()["digits"] = reward  # `steps_of` passes it on
    main(folder, out, "grpo")


if __name__ == "__main__":
    if sys.argv[3] == "failing":
        failing(*sys.argv[1:3], *sys.argv[4:])
    else:
        main(*sys.argv[1:])
