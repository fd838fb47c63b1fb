"""Every number that the README and benchmarks/RESULTS.md give, made from the records beside this file.

    make results     # after any record in benchmarks/results/ changed; a test compares what stands there with what this writes

A section without its record is left out; nothing is typed in by hand. Longer than other files: a function a section.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(HERE))

from report_smollm2 import administration, arithmetic, gym, real_model, style  # noqa: E402
from tables import points, rate, record, share, table, times  # noqa: E402

from grpolab.evaluate import Interval, mean_interval  # noqa: E402
from grpolab.files import atomic_write  # noqa: E402
from grpolab.lab.metrics import readable  # noqa: E402

BEGIN, END = "<!-- made by `make results` -->", "<!-- end -->"
LADDER, MINUTES, ROLLOUT = (f"<!-- {name}: made by `make results` -->" for name in ("ladder", "minutes", "rollout"))
WORKLOADS = {"single": "batch 1", "fixed": "fixed length", "grpo": "GRPO, 8 prompts × 8", "spread": "geometric lengths"}
METHODS = {"grpo": "GRPO", "sft": "SFT", "dpo": "DPO"}


# --- RESULTS.md -------------------------------------------------------------------------------------------------------


def notebooks(results: Path) -> str | None:
    records = {path.stem: json.loads(path.read_text()) for path in sorted((results / "notebooks").glob("*.json"))}
    if not records:
        return None
    rows = [[name, r["minutes"], r["threads"] or "all", f"{sum(c['passed'] for c in r['checks'])} of {len(r['checks'])}"]
            for name, r in records.items()]
    text = "`make notebooks` executes the series on the embedded model and stores it with these values.\n\n"
    text += table(["notebook", "minutes", "threads", "checks passed"], rows)
    for name, r in records.items():
        checks = [[c["name"], readable(c["measured"]), c["bound"]] for c in r["checks"]]
        text += f"\n\n**{name}**\n\n" + table(["check", "measured", "bound"], checks)
    return text


def grpo_seeds(results: Path) -> str | None:
    found = record("grpo_seeds", results)
    if not found:
        return None
    best, base = str(found["best"]), found["base"]
    rows = [["base, plain form", "", "", "", base["greedy"], base["sampled"]]]
    curve, passes = [], [["base, plain form", "", *map(share, base["pass_at"].values())]]
    for seed, r in found["seeds"].items():
        sft, kept, grpo = r["sft"][best], r["rejection"], r["grpo"]
        shown = found["demonstrations"]
        rows += [
            ["best SFT", seed, f"{shown} demonstrations", sft["seconds"], sft["greedy"], sft["sampled"]],
            ["SFT on its own right rollouts", seed, f"{shown} and {kept['rollouts']:,} rollouts, {kept['kept']:,} kept",
             kept["seconds"], kept["greedy"], kept["sampled"]],
            ["GRPO", seed, f"{shown} and {grpo['rollouts']:,} rollouts", grpo["seconds"], grpo["greedy"], grpo["sampled"]],
        ]
        if "bf16" in r:
            half, learned_from = r["bf16"], f"{shown} and {grpo['rollouts']:,} rollouts"
            rows.append(["GRPO, bf16 parameters", seed, learned_from, half["seconds"], half["greedy"], half["sampled"]])
        passes += [[name, seed, *map(share, row["pass_at"].values())] for name, row in (("best SFT", sft), ("GRPO", grpo))]
        curve += [[seed, steps, row["seconds"], row["greedy"], share(row["sampled"]), row["choosing"]]
                  for steps, row in sorted(r["sft"].items(), key=lambda item: int(item[0]))]
    if "four_times" in found:
        more = found["four_times"]
        rows.append(["SFT, more demonstrations", "0", f"{more['answers']} demonstrations", more["seconds"], more["greedy"],
                     more["sampled"]])
    gains = [[seed, points(r["grpo"]["gain"]), points(r["grpo"]["gain_sampled"])] for seed, r in found["seeds"].items()]
    text = (f"`{found['command']}`, {found['held_out']} held-out questions, {found['practice']} to practise on; another number "
            "of threads rounds differently, and so a run takes another path. Seconds are of training, on a machine that did "
            "other work beside it.\n\n")
    text += table(["policy", "seed", "learned from", "seconds", "greedy exact match", "sampled at T = 1"], rows)
    text += "\n\nGRPO over the best SFT, paired on the same questions:\n\n"
    text += table(["seed", "greedy gain", "sampled gain"], gains)
    text += "\n\nOne of k samples is right (200 questions):\n\n"
    text += table(["policy", "seed", *(f"k = {k}" for k in base["pass_at"])], passes)
    text += "\n\nSFT steps on the same demonstrations; the last column is on the 400 questions that chose the best:\n\n"
    return text + table(["seed", "steps", "seconds", "greedy", "sampled", "greedy, choosing"], curve)


STUDENT = {3: 4.303, 8: 2.365}  # number of values -> the quantile of Student's t for a 95 % interval of their mean
POLICIES = {"sft": "best SFT", "mixed": "SFT, half of it plain sums", "majority": "no checker: the base's majority of 8",
            "rejection": "rejection sampling", "grpo": "GRPO"}


def right(row: dict, kind: str, chosen: str | None = None, planted: str = "") -> float:
    """The rate of right answers in a row of baselines.json: on the questions where `planted` is `chosen`, or all."""
    counts = [int(c) for c, of in zip(row[kind], planted or row[kind]) if chosen is None or of == chosen]
    return sum(counts) / len(counts) / (4 if kind == "sampled" else 1)


def over_seeds(values: list[float]) -> Interval:
    """Mean with its 95 % interval over seeds."""
    return mean_interval(values, STUDENT[len(values)])


def rate_over_seeds(values: list[float]) -> Interval:
    """The same of rates, which lie between 0 and 1."""
    found = over_seeds(values)
    return replace(found, low=max(0.0, found.low), high=min(1.0, found.high))


def compared(found: dict, kind: str, a: str = "grpo", b: str = "rejection") -> Interval:
    """Policy a − policy b, paired by seed."""
    return over_seeds([right(of[a], kind) - right(of[b], kind) for of in found["seeds"].values()])


def baselines(results: Path) -> str | None:
    found = record("baselines", results)
    if not found or len(found["seeds"]) not in STUDENT:
        return None
    planted, kinds = found["planted"], (("greedy", None), ("sampled", None), ("greedy", "1"), ("greedy", "0"))
    rows = [["base, plain form", 1, *(f"{right(found['base'], kind, chosen, planted):.1%}" for kind, chosen in kinds)]]
    for name, words in POLICIES.items():
        of = [seed[name] for seed in found["seeds"].values() if name in seed]
        if len(of) in STUDENT:
            rows.append([words, len(of), *(over_seeds([right(row, kind, chosen, planted) for row in of])
                                           for kind, chosen in kinds)])
    text = (f"`{found['command']}`: {len(planted)} held-out questions, {len(found['seeds'])} seeds named beforehand, each with "
            f"its own 100 demonstrations; {found['threads']} thread. Means over seeds with Student's interval. *Planted* are "
            "questions whose pair of last digits the base's own text states wrongly on purpose. Rejection sampling and GRPO "
            "start from the same best SFT and sample 51,200 rollouts each.\n\n")
    text += table(["policy", "seeds", "greedy", "sampled at T = 1", "greedy, planted", "greedy, the rest"], rows)
    pairs = (("grpo", "rejection"), ("grpo", "sft"), ("rejection", "sft"))
    rows = [[f"{POLICIES[a]} − {POLICIES[b]}", *(f"{(d := compared(found, kind, a, b)).points}: {d.verdict}"
                                                 for kind in ("greedy", "sampled"))] for a, b in pairs]
    text += "\n\nPaired by seed:\n\n" + table(["difference", "greedy", "sampled at T = 1"], rows)
    each_seed = [[seed, *(f"{right(of[name], 'greedy'):.1%}" for name in ("sft", "rejection", "grpo")),
                  of["rejection"]["tokens"], of["grpo"]["tokens"]] for seed, of in found["seeds"].items()]
    head = ["seed", "best SFT", "rejection sampling", "GRPO", "tokens sampled, rejection", "tokens sampled, GRPO"]
    return text + "\n\nGreedy, seed by seed:\n\n" + table(head, each_seed)


WAYS = {"student": "the student, best SFT", "teacher_sft": "SFT on the teacher's completions",
        "reverse_kl": "distillation, reverse KL", "forward_kl": "distillation, forward KL",
        "sampled": "distillation, sampled tokens", "rejection": "rejection sampling", "grpo": "GRPO"}


def distillation(results: Path) -> str | None:
    found = record("distillation", results)
    if not found or len(found["seeds"]) not in STUDENT:
        return None
    seeds, start = list(found["seeds"].values()), [right(of["student"], "greedy") for of in found["seeds"].values()]
    rows = []
    for way, words in WAYS.items():
        of = [seed[way] for seed in seeds]
        gain = over_seeds([right(row, "greedy") - before for row, before in zip(of, start)])
        rows.append([words, *(over_seeds([right(row, kind) for row in of]) for kind in ("greedy", "sampled")),
                     "" if way == "student" else f"{gain.points}: {gain.verdict}",
                     *(f"{mean(row[name] for row in of):,.0f}" if name in of[0] else "" for name in ("tokens", "seconds"))])
    text = (f"`{found['command']}`: each way has {found['completions']:,} completions of 800 questions; {len(seeds)} seeds "
            f"named beforehand, means with Student's interval, {found['threads']} thread. The teacher, SFT on 3,200 "
            f"demonstrations, is right on {right(found['teacher'], 'greedy'):.1%} greedily and "
            f"{right(found['teacher'], 'sampled'):.1%} sampled.\n\n")
    return text + table(["way", "greedy", "sampled at T = 1", "greedy − student", "tokens sampled", "seconds"], rows)


SHAPED = {"start": "SFT, the start", "right": "the checker alone", "sum": "checker and brevity, summed",
          "gated": "the same, gated by the checker"}


def several_rewards(results: Path) -> str | None:
    found = record("several_rewards", results)
    if not found or len(found["seeds"]) not in STUDENT:
        return None
    seeds = list(found["seeds"].values())
    rows = []
    for name, words in SHAPED.items():
        of, rule = [seed[name] for seed in seeds], [right(seed["right"], "greedy") for seed in seeds]
        gain = over_seeds([right(row, "greedy") - r for row, r in zip(of, rule)])
        rows.append([words, *(rate_over_seeds([right(row, kind) for row in of]) for kind in ("greedy", "sampled")),
                     f"{gain.points}: {gain.verdict}" if name in ("sum", "gated") else "",
                     f"{mean(row['length'][-1] for row in of):.1f}" if name != "start" else ""])
    text = (f"`{found['command']}`: 40 steps of GRPO from the same SFT policy, advantages divided by the group's standard "
            f"deviation; {len(seeds)} seeds, means with Student's interval, {found['threads']} thread.\n\n")
    return text + table(["reward", "greedy", "sampled at T = 1", "greedy − the checker alone", "tokens at the end"], rows)


def span(values: list[float], digits: str) -> str:
    """The least and the largest of the seeds' values."""
    low, high = (format(f(values), digits) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def estimators(results: Path) -> str | None:
    found = record("estimators", results)
    if not found:
        return None
    seeds = list(found["seeds"].values())

    def column(part, key, name, sampler=None):
        return [row[key] for of in seeds for row in of[part] if row["estimator"] == name and sampler in (None, row["sampler"])]

    def relative(name):
        return [a / b for a, b in zip(column("on_policy", "noise", name), column("on_policy", "noise", "no baseline"))]

    names = list(dict.fromkeys(row["estimator"] for row in seeds[0]["on_policy"]))
    others = list(dict.fromkeys(row["estimator"] for row in seeds[0]["off_policy"]))
    samplers = list(dict.fromkeys(row["sampler"] for row in seeds[0]["off_policy"]))
    text = (f"`{found['command']}`: {len(seeds)} problems of {15 * len(seeds[0]['success'])} completions, least to largest "
            f"value; {found['threads']} thread. The two tables are exact: every group of "
            f"{seeds[0]['on_policy'][0]['samples']} and {seeds[0]['off_policy'][0]['samples']} rollouts "
            "with its probability. Scale and cosine are of the mean gradient beside the true one; noise is "
            "the variance over the squared scale, here of that without a baseline.\n\n")
    text += table(["on-policy", "scale", "bias", "cosine", "noise"], [
        [name, *(span(column("on_policy", key, name), digits) for key, digits in (("scale", ".3f"), ("bias", ".3f"),
                                                                                   ("cosine", ".4f"))),
         span(relative(name), ".2f") + "×"] for name in names])
    text += "\n\nCosine of the mean gradient and the true one where another sampler wrote the completions:\n\n"
    text += table(["estimator", *samplers], [
        [name, *(span(column("off_policy", "cosine", name, who), ".2f") for who in samplers)] for name in others])
    drawn = list(dict.fromkeys(row["estimator"] for row in seeds[0]["samples"]))
    sizes = sorted({row["samples"] for row in seeds[0]["samples"]})
    error = max(row["batch_cosine_error"] for of in seeds for row in of["samples"])
    text += (f"\n\nMean cosine of a batch's gradient, sampled: {seeds[0]['samples'][0]['how']} each, the largest standard "
             f"error is {error:.3f}.\n\n")
    return text + table(["samples", *map(str, sizes)], [[name, *(span([
        row["batch_cosine"] for of in seeds for row in of["samples"] if (row["estimator"], row["samples"]) == (name, n)], ".2f")
        for n in sizes)] for name in drawn])


def longer_answers(results: Path) -> str | None:
    found = record("longer_answers", results)
    if not found:
        return None
    text = (f"`{found['command']}`: notebook 09's model and task, a tenth of the demonstrations long, {found['held_out']} "
            "held-out questions. A guess is right in half of them.\n\n")
    rows = []
    for steps in dict.fromkeys(steps for of in found["seeds"].values() for steps in of):
        runs = [of[steps] for of in found["seeds"].values() if steps in of]
        became = sum(run["grpo"]["long"] > 0.5 for run in runs)
        solved = sum(run["grpo"]["right"] > 0.95 for run in runs)
        walk = sorted(run["sft"]["long_right"] or 0.0 for run in runs)
        rows.append([steps, len(runs), f"{walk[0]:.0%} to {walk[-1]:.0%}, median {median(walk):.0%}", became, solved])
    head = ["SFT steps", "seeds", "long answers right after SFT", "became long by GRPO", "above 95 % after GRPO"]
    return text + table(head, rows)


def long_prompts(results: Path) -> str | None:
    found = record("long_prompts", results)
    if not found:
        return None
    rows = [[r["prompt"], r["tokens once a rollout"], r["tokens once a group"],
             *(f"{seconds:.2f} s" for seconds in r["seconds"].values()), times([r["ratio"]]), f"{r['gradients apart']:.0e}"]
            for r in found["rows"]]
    head = ["prompt", "tokens, once a rollout", "tokens, once a group", "update, once a group", "once a rollout", "ratio",
            "gradients apart"]
    text = (f"`{found['command']}`: processor time of a GRPO update whose prompt is computed once a group of "
            f"{found['group_size']}, or once a rollout; completions of {found['completion']} tokens; one process, in turns.")
    return f"{text}\n\n" + table(head, rows)


def seeds(results: Path) -> str | None:
    """Of each notebook the claims that its gate judged, a column a seed."""
    found = record("seeds", results)
    if not found:
        return None
    text = (f"What the gates measured: seed 0 is the stored run, the others are of `{found['command']}`. These are the claims; "
            "the identities hold for every seed. A cross marks what missed its bound.")
    for name, runs in found["notebooks"].items():
        stored = record(f"notebooks/{name}", results)
        columns = {"0": stored["checks"] if stored else []} | {seed: run["claims"] for seed, run in runs.items()}
        by_name = {seed: {c["name"]: c for c in checks} for seed, checks in columns.items()}
        bounds = {c["name"]: c["bound"] for run in runs.values() for c in run["claims"]}
        rows = [[check, bound, *(value_of(of.get(check)) for of in by_name.values())] for check, bound in bounds.items()]
        text += f"\n\n**{name}**\n\n" + table(["claim", "bound", *(f"seed {seed}" for seed in columns)], rows)
    return text


def value_of(check: dict | None) -> str:
    """The value of a check; nothing where it was not made."""
    return readable(check["measured"]) + ("" if check["passed"] else " ✗") if check else ""


def smollm2(results: Path) -> str | None:
    rows = []
    for name in ("sft", "decode_engine", "dpo", "grpo", "reward_model"):
        r = record(f"smollm2_{name}", results)
        if r:
            v = r["values"]
            before = v.get("exact_before", v.get("base_exact", ""))
            after = v.get("exact_after", v.get("exact", ""))
            after = ", ".join(f"{k} {x}" for k, x in after.items()) if isinstance(after, dict) else after
            gains = [points(v[of]) if isinstance(v.get(of), str) else "" for of in ("gain", "gain_sampled")]
            rows.append([r["gate"], r["machine"], f"{before} → {after}" if after else "", *gains, v.get("accuracy", ""),
                         r["passed"]])
    head = ["notebook", "machine", "greedy exact match", "gain", "sampled gain", "pairs told apart", "gate passed"]
    return ("`grpolab run NN -p model smollm2-135m`, recorded with the notebooks of the first release; those of today have "
            "other questions in part.\n\n" + table(head, rows)) if rows else None


def decode(results: Path) -> str | None:
    found = record("decode", results)
    if not found:
        return None
    rows = [[r["model"], WORKLOADS[r["workload"]], r["rollouts"], f"{r['ratio']:.2f}×",
             f"{r['ratio_worst']:.2f} … {r['ratio_best']:.2f}", f"{r['target']:g}×", r["rounds"], r["peer"],
             f"{r['tokens_per_s']['sampler']:,.0f}", f"{r['profile']['of_fp32_arithmetic']:.0%}"]
            for r in found["rows"]]
    head = ["model", "workload", "rollouts", "ratio", "worst … best", "goal", "rounds", "peer", "our tokens/s",
            "of the machine's arithmetic"]
    return ("Wall clock against `generate()` with its best batching, sampling at T = 1 with log-probabilities, prefill "
            "included: `OMP_NUM_THREADS=2 python benchmarks/decode.py`.\n\n" + table(head, rows))


def trl(results: Path) -> str | None:
    found = record("trl", results)
    if not found:
        return None
    rows = []
    for r in found["rows"]:
        goal = r["goal"]["memory"]
        rows.append([r["model"], r["precision"], METHODS[r["method"]], f"{r['speed']:.2f}×", f"{r['goal']['speed']:g}×",
                     f"{r['grpolab']['step_s']:.3g}", f"{r['memory']:.2f}", f"{goal:.2f}" if goal else "",
                     r["goal"]["memory_of"].replace("_gb", "").replace("_", " ")])
    head = ["model", "precision", "method", "speed", "goal", "our seconds a step", "memory, ours / TRL's", "goal", "memory of"]
    workload = "; ".join(f"{METHODS[k]}: {v}" for k, v in found["workload"].items())
    return (f"A training step against TRL {found['rows'][0]['machine']['versions']['trl']}, same weights, batch, lengths and "
            f"AdamW ({workload}): `OMP_NUM_THREADS=2 python benchmarks/against_trl.py`.\n\n" + table(head, rows))


def lora(results: Path) -> str | None:
    found = record("lora", results)
    if not found:
        return None
    rows = []
    for r in found["rows"]:
        full, own = r["full"], r["lora"]
        pairs = [a / b for a, b in zip(own["step_s"], full["step_s"])]
        rows.append([METHODS[r["method"]], f"{full['trained'] / 1e6:.1f} M", f"{own['trained'] / 1e6:.2f} M",
                     f"{full['peak_gb']:.2f} GB", f"{own['peak_gb']:.2f} GB", f"{own['peak_gb'] / full['peak_gb']:.2f}",
                     times(pairs)])
    head = ["method", "trained, all weights", "trained, adapter", "peak, all weights", "peak, adapter", "adapter / all",
            "seconds a step, adapter / all"]
    workload = "; ".join(f"{METHODS[r['method']]}: {r['workload']}" for r in found["rows"])
    return (
        f"{found['model']} in {found['precision']} with all weights trained and with a LoRA adapter on its attention alone "
        f"({workload}); each measurement in a process of its own, in turn, {found['rounds']} times {found['steps']} steps, "
        f"threads: {found['threads']}, seconds beside other work on the machine: `{found['command']}`.\n\n" + table(head, rows)
    )


def pool(results: Path) -> str | None:
    found = record("pool", results)
    if not found:
        return None
    steps = {(row["who"], str(row["sessions"])): row["steps_per_s"] for row in found["table"]}
    peer = next(row["who"] for row in found["table"] if row["who"] != "grpolab")
    rows = [[n, f"{r['median']:.2f}×", f"{r['least']:.2f} … {r['most']:.2f}", f"{steps['grpolab', n]:,.0f}",
             f"{steps[peer, n]:,.0f}"] for n, r in found["ratios"].items()]
    group = found["group"]
    return (f"Client and server against {peer}'s, same environment, each with its default settings, {found['rounds']} rounds: "
            "`python benchmarks/pool.py`.\n\n"
            + table(["sessions", "ratio of steps a second", "least … most", "ours", "theirs"], rows)
            + f"\n\nA group of {group['sessions']} episodes of {group['turns']} steps takes {group['wall_s'] * 1e3:.0f} ms; "
            f"the environment's own waiting is {group['env_s'] * 1e3:.0f} ms of it.")


def aws(results: Path) -> str | None:
    found = record("aws", results)
    if not found:
        return None
    rows = [[{"aws": "one `aws` process a step"}.get(r["who"], f"session in a {r['who']}"), r["sessions"],
             f"{r['steps_per_s']:.1f}", f"{r['median_ms']:.1f}",
             f"{r['mib_per_session']:.0f}" if r["mib_per_session"] else "–"] for r in found["table"]]
    faster = [f"{median(ratios):.0f} times ({min(ratios):.0f} … {max(ratios):.0f}) with {n} at once"
              for n, ratios in found["ratios"].items()]
    return (f"Simulated AWS accounts over the environment's socket, each step graded, {found['rounds']} rounds of "
            f"{found['steps']} steps a session, against the `aws` command in a process of its own: `{found['command']}`.\n\n"
            + table(["who", "at once", "steps a second", "median ms", "MiB a session"], rows)
            + f"\n\nSteps a second of sessions in processes, of one `aws` process a step: {'; '.join(faster)}.")


def threads(results: Path) -> str | None:
    found = record("threads", results)
    if not found:
        return None
    rows = [[r["model"], r["dtype"], f"{r['let_go']:,.0f}", f"{r['kept']:,.0f}", f"{r['ratio']:.2f}×",
             f"{r['worst']:.2f} … {r['best']:.2f}"] for r in found["rows"]]
    return (f"A sampler decodes {found['prompts']} prompts × {found['group']} rollouts of {found['new_tokens']} tokens in its "
            f"thread, {found['threads']} threads on {found['processors']} processors, after the main thread has run a parallel "
            "loop. GNU OpenMP keeps threads for the next one, and where all that it keeps are more than the processors they "
            "sleep after each loop; the sampler's caller lets its own go before it waits. A ratio is of one of "
            f"{found['rounds']} rounds: `{found['command']}`.\n\n"
            + table(["model", "precision", "tokens/s, let go", "kept", "ratio", "worst … best"], rows))


def service(results: Path) -> str | None:
    found = record("service", results)
    if not found:
        return None
    rows = [[r["model"], r["callers"], f"{r['tokens_per_s']['sampler']:,.0f}", way, f"{r['tokens_per_s'][way]:,.0f}",
             f"{of['median']:.2f}", f"{of['least']:.2f} … {of['most']:.2f}"]
            for r in found["rows"] for way, of in r["ratios"].items()]
    head = ["model", "callers", "Sampler, tokens/s", "through the service", "tokens/s", "of the Sampler's", "least … most"]
    rounds = "; ".join(sorted({f"{r['model']}: {r['rounds']} rounds of {r['requests']} requests" for r in found["rows"]}))
    return (f"Callers that ask at once, and again as soon as they are answered: prompts of {found['prompt']} tokens, "
            f"{found['new']} new ones with a log-prob each. The same requests to a Sampler in the callers' process, and over "
            f"HTTP to a service there or in a process of its own, by two clients. A ratio is of one round ({rounds}): "
            f"`{found['command']}`.\n\n" + table(head, rows))


def bridges(results: Path) -> str | None:
    found = record("bridges", results)
    if not found:
        return None
    rows = [[r["model"], {"grpolab": "ours", "vllm": "vLLM"}[r["server"]], r["bridge"],
             f"{r['travels_mb']:,.1f} MB", len(r["sync_s"]), f"{median(r['sync_s']):.2f}", f"{median(r['busy_sync_s']):.2f}",
             f"{median(r['tokens_per_s_after']):,.0f}", f"{median(r['tokens_per_s']):,.0f}", f"{r['server_peak_mb']:,} MB",
             r["behind_max"], r["failed"]]
            for r in found["rows"]]
    head = ["model", "server", "bridge", "travels", "syncs", "seconds a sync", "beside other requests", "tokens/s right after",
            "tokens/s later", "server's peak memory", "versions behind, at most", "requests that failed"]
    return (f"From `publish` to a server that samples with the new weights; medians of so many syncs, a batch is "
            f"{found['batch']}, {found['threads']} thread. Beside the syncs of the seventh column a second client samples all "
            "the while: how many versions its rollouts were behind as they arrived, and how many of its requests ended with an "
            f"error, as at a restart ({found['machine']}): `{found['command']}`.\n\n" + table(head, rows))


SECTIONS = {
    "The series": notebooks, "Three seeds": seeds, "GRPO and rejection sampling, eight seeds": baselines,
    "GRPO over seeds": grpo_seeds, "On-policy distillation, three seeds": distillation,
    "A reward for form beside the checker": several_rewards, "Estimators of the policy gradient": estimators,
    "Longer answers, ten seeds": longer_answers,
    "SmolLM2-135M-Instruct": smollm2,
    "SmolLM2: arithmetic": arithmetic, "SmolLM2: a task of reasoning-gym": gym, "SmolLM2: a style by rules": style,
    "SmolLM2: AWS accounts": administration,
    "Decode engine": decode, "Threads at rest": threads, "Training step": trl, "Long prompts": long_prompts, "LoRA": lora,
    "Environment pool": pool, "AWS accounts": aws, "Policy service": service, "Weight bridges": bridges,
}


def results_page(results: Path) -> str:
    """The text of RESULTS.md."""
    text = ("# Results\n\nMade by `make results` from the records in [results/](results/); each section names the command that "
            "fills its record. Rates are in brackets with their 95 % intervals.\n")
    for title, section in SECTIONS.items():
        body = section(results)
        text += f"\n## {title}\n\n{body}\n" if body else ""
    return text


# --- the README's table -----------------------------------------------------------------------------------------------


def without(notebook: str, results: Path) -> str:
    """Of the seeds beside the stored one, those with which a claim of the notebook's gate does not hold."""
    of = (record("seeds", results) or {"notebooks": {}})["notebooks"].get(notebook, {})
    failed = [seed for seed, run in of.items() if not run["passed"]]
    return f", not with seed {' and '.join(failed)}" if failed else ""


def solved_seeds(results: Path) -> str:
    """In how many of its seeds notebook 09's run ended above 95 %."""
    found = record("longer_answers", results)
    runs = [of["400"] for of in found["seeds"].values() if "400" in of] if found else []
    return f", above 95 % with {sum(run['grpo']['right'] > 0.95 for run in runs)} of {len(runs)} seeds" if runs else ""


def readme_table(results: Path) -> str:
    """The one table of the README: a line a claim."""
    rows = []
    found = record("baselines", results)
    stored = {path.stem[:2]: json.loads(path.read_text())["values"] for path in (results / "notebooks").glob("*.json")}
    if "01" in stored:
        sft = stored["01"]
        rows.append(["SFT: answers in the asked format", f"{rate(sft['base_format'])} → {rate(sft['format'])}"])
    if "03" in stored:
        rows.append(["DPO: gain in sampled exact match", stored["03"]["gain_sampled"]])
    if "05" in stored:
        rows.append(["reward model: held-out pairs told apart", rate(stored["05"]["accuracy"])])
    if found and len(found["seeds"]) in STUDENT:
        rows.append(["base model in its own plain form, greedy", f"{right(found['base'], 'greedy'):.1%}"])
        for kind in ("greedy", "sampled"):
            sft, kept, learned = (over_seeds([right(of[name], kind) for of in found["seeds"].values()])
                                  for name in ("sft", "rejection", "grpo"))
            rows.append([f"best SFT → GRPO, mean of {len(found['seeds'])} seeds: {kind} exact match",
                         f"{sft.value:.1%} → {learned}"])
            rows.append([f"the same by rejection sampling, as many rollouts: {kind}", f"{sft.value:.1%} → {kept}"])
    if "07" in stored:
        turns = stored["07"]
        rows.append(["multi-turn GRPO: success with the calculator", f"{rate(turns['before'])} → {rate(turns['after'])}"])
    if "08" in stored:
        game = stored["08"]
        rows.append(["guessing game, guesses a game: imitation → GRPO, and the best strategy",
                     f"{rate(game['guesses_before'])} → {rate(game['guesses_after'])}, {game['optimum']:.2f}"
                     + without("08_guess", results)])
    if "09" in stored:
        long = stored["09"]
        rows.append(["parity: SFT with 10 % chain of thought → GRPO",
                     f"{rate(long['greedy_before_0.1'])} → {rate(long['greedy_after_0.1'])}" + solved_seeds(results)])
    rows += real_model(results)
    for title, name, key in (("decode engine", "decode", "ratio"), ("a training step", "trl", "speed")):
        measured = record(name, results)
        if measured:
            peer = "`generate()`" if name == "decode" else "TRL"
            rows.append([f"{title}: times as fast as {peer}", times([row[key] for row in measured["rows"]])])
    measured = record("pool", results)
    if measured:
        ratios = [r["median"] for r in measured["ratios"].values()]
        rows.append(["environment pool: steps a second, of OpenEnv's", times(ratios)])
    return table(["measured", "value"], rows)


def ladder(series: Path, results: Path) -> str:
    """A line a notebook: its title, what its own first cell says that one learns, and the minutes of its record."""
    rows = []
    for path in sorted(series.glob("[0-9][0-9]_*.ipynb")):
        text = "".join(json.loads(path.read_text())["cells"][0]["source"])
        title = re.search(r"^# (.*)$", text, re.M)
        learn = re.search(r"^\| you will learn \| (.*) \|$", text, re.M)
        if not title or not learn:
            raise ValueError(f"{path.name}: its first cell needs a line `# NN · title` and a row `| you will learn | ... |`")
        kept = record(f"notebooks/{path.stem}", results)
        rows.append([f"[{title[1]}](notebooks/{path.name})", learn[1], kept["minutes"] if kept else "not recorded"])
    return table(["notebook", "you will learn", "minutes"], rows)


def minutes(results: Path) -> str:
    """How long the series took as one command, over its last recorded times: other work on the machine makes it longer."""
    whole = record("series", results)
    low, high = (round(f(whole["minutes"])) for f in (min, max))
    took = f"{low} to {high}" if high > low else f"{high}"
    return (f"The recorded `make run` of {whole['notebooks']} notebooks took {took} minutes on {whole['processors']} processor "
            f"cores, {whole['jobs']} at a time, after the installation; `make test` executes them again after its own tests.")


def rollout(results: Path) -> str:
    """The first held-out question on which the last two policies of the record differ, with what each wrote."""
    found = record("rollouts", results)
    if not found:
        return ""
    verdicts = [[w["correct"] for w in q["written"].values()] for q in found["questions"]]
    chosen = next((q for q, v in zip(found["questions"], verdicts) if v[-2] != v[-1]), found["questions"][0])
    width = max(map(len, chosen["written"]))
    lines = [f"{name:<{width}}  {'✓' if w['correct'] else '✗'}  {one_line(w['text'])}"
             for name, w in chosen["written"].items()]
    return "\n".join(["```text", chosen["question"], *lines, "```"])


def one_line(text: str, most: int = 60) -> str:
    text = text.replace("\n", "↵").replace("`", "'")
    return text if len(text) <= most else text[:most] + "…"


def with_table(readme: str, made: str, begin: str = BEGIN) -> str:
    """The README's text with what was made between the mark `begin` and the next end."""
    before, rest = readme.split(begin)
    return f"{before}{begin}\n{made}\n{END}{rest.split(END, 1)[1]}"


def front(readme: str, results: Path, series: Path) -> str:
    """The README with all that is made for it."""
    parts = {BEGIN: readme_table(results), LADDER: ladder(series, results), MINUTES: minutes(results),
             ROLLOUT: rollout(results)}
    for begin, made in parts.items():
        readme = with_table(readme, made, begin)
    return readme


def main() -> None:
    results, readme = HERE / "results", ROOT / "README.md"
    print(atomic_write(HERE / "RESULTS.md", results_page(results)))
    print(atomic_write(readme, front(readme.read_text(), results, ROOT / "notebooks")))


if __name__ == "__main__":
    main()
