"""Which estimators of the policy gradient are biased, by how much, and does it matter? Exactly, on three small problems.

    OMP_NUM_THREADS=1 python benchmarks/estimators.py     # some two minutes a seed; fills results/estimators.json

`grpolab.train.estimators.successor` with the seeds 0, 1 and 2, named beforehand: 15 completions of two prompts. On-policy each
estimator with all groups of four; off-policy (older policies, a bf16 sampler, top-p) with all groups of two; and how the
cosine of a batch grows with its samples, from 500 sampled batches of 4, 16, 64 and 256 groups.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import records
import torch

from grpolab.decode.sampling import SamplingParams, truncate
from grpolab.train import advantages, losses
from grpolab.train.estimators import (
    ON_POLICY,
    Batch,
    Problem,
    Sampler,
    bench,
    logps_of,
    policy_gradient,
    stale,
    successor,
)

RESULTS = Path(__file__).parent / "results" / "estimators.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/estimators.py"
SEEDS, SIZE, OLD_SIZE, UPDATES, GROUPS, DRAWS = range(3), 4, 2, (1, 4, 16), (4, 16, 64, 256), 500
DRAWN = ("no baseline", "leave one out", "mean over tokens (DAPO)", "mean per sequence")


def bf16(problem: Problem) -> Sampler:
    """The policy's weights and arithmetic in bf16."""
    logps = logps_of(problem.half, problem.tokens, problem.mask)
    return Sampler(logps, logps)


def top_p(problem: Problem, p: float, *, with_mass: bool = False) -> Sampler:
    """The policy cut to its nucleus. Without the mass that the cut left it reports its logps before the cut."""
    whole = problem.versions[-1]
    cut = truncate(whole.flatten(0, -2), SamplingParams(top_p=p)).log_softmax(-1).view_as(whole)
    drawn = logps_of(cut, problem.tokens, problem.mask)
    return Sampler(drawn, drawn if with_mass else problem.now)


def masked_weights(batch: Batch, cap: float = 2.0) -> torch.Tensor:
    """Leave one out, each token weighed by pi / pi_sampler, and left out where that is not in [1 / cap, cap] (IcePop)."""
    near = (batch.logps.detach() - batch.sampler_logps).abs() <= math.log(cap)
    a = advantages.advantages(batch.rewards, "leave_one_out").flatten()
    return losses.policy_loss(batch.logps, batch.logps.detach(), a, batch.mask * near, denominator=len(a),
                              sampler_logps=batch.sampler_logps, sampler_cap=cap)[0]


def sequence_weights(batch: Batch) -> torch.Tensor:
    """Leave one out, with the whole rollout's pi / pi_sampler, unbounded, on the rewards: exact where no weight is infinite."""
    weights = losses.sequence_logps(batch.logps.detach() - batch.sampler_logps, batch.mask).exp().view_as(batch.rewards)
    a = batch.rewards - (batch.rewards.sum(1, keepdim=True) - batch.rewards) / (batch.rewards.shape[1] - 1)
    return policy_gradient(None, old="policy")(batch._replace(rewards=weights * a))


FREE = (math.inf, math.inf)  # a clip that clips nothing
OFF_POLICY = {
    "nothing corrected": policy_gradient(old="policy"),
    "token ratio, no clip": policy_gradient(clip_eps=FREE),
    "clip 0.2": policy_gradient(),
    "clip 0.2 and 0.28": policy_gradient(clip_eps=(0.2, 0.28)),
    "clip 0.2, dual 3": policy_gradient(dual_clip=3.0),
    "GSPO": ON_POLICY["GSPO"],
    "GSPO's ratio, no clip, summed": policy_gradient(ratio="sequence", clip_eps=FREE),
    "CISPO": ON_POLICY["CISPO"],
    "weights truncated at 2": policy_gradient(old="weighed"),
    "weights masked beyond 2": masked_weights,
    "weights of sequences": sequence_weights,
}


def rows(table) -> list[dict]:
    """JSON knows neither inf nor nan: None."""
    return [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            for row in table.to_dict("records")]


def one_seed(seed: int) -> dict:
    problem = successor(seed)
    samplers = {f"{k} updates old": stale(problem, k) for k in UPDATES} | {"bf16": bf16(problem)}
    samplers |= {f"top-p {p}": top_p(problem, p) for p in (0.95, 0.9)}
    samplers["top-p 0.9, with its mass"] = top_p(problem, 0.9, with_mass=True)
    drawn = {name: ON_POLICY[name] for name in DRAWN}
    return {"success": problem.success.tolist(), "on_policy": rows(bench(problem, ON_POLICY, group_size=SIZE)),
            "off_policy": rows(bench(problem, OFF_POLICY, samplers, group_size=OLD_SIZE)),
            "samples": rows(bench(problem, drawn, groups=GROUPS, group_size=SIZE, draws=DRAWS))}


def main(seeds: list[int]) -> None:
    record = {"command": COMMAND, "threads": torch.get_num_threads(), "seeds": {}}
    for seed in seeds:
        record["seeds"][str(seed)] = one_seed(seed)
        records.write(RESULTS, record)
        print(seed, record["seeds"][str(seed)]["success"], flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=list(SEEDS))
    main(parser.parse_args().seeds)
