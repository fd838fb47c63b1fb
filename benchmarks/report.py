"""Every number that the README and benchmarks/RESULTS.md give, made from the records beside this file.

    make results     # after any record in benchmarks/results/ changed; a test compares the pages with what this writes

A section without its record is left out. Longer than other files: a function a section.
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

from grpolab.env.aws.generate import instances  # noqa: E402
from grpolab.evaluate import (  # noqa: E402
    Interval,
    clustered_interval,
    crossed_interval,
    mean_interval,
    share_interval,
    student_t,
    wilson,
)
from grpolab.files import atomic_write  # noqa: E402
from grpolab.lab import board  # noqa: E402
from grpolab.lab.metrics import readable  # noqa: E402

BEGIN, END = "<!-- made by `make results` -->", "<!-- end -->"
LADDER, MINUTES, ROLLOUT, BOARD = (
    f"<!-- {name}: made by `make results` -->" for name in ("ladder", "minutes", "rollout", "board"))
METHODS = {"grpo": "GRPO", "sft": "SFT", "dpo": "DPO"}


def record(name: str, results: Path):
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def table(rows: list[dict]) -> str:
    """Rows by column name; a column that a row lacks is empty there."""
    head = list(dict.fromkeys(name for row in rows for name in row))
    lines = [head, ["---"] * len(head), *([row.get(name, "") for name in head] for row in rows)]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def rate(interval: str) -> str:
    """The value of "45.4% [42.3%, 48.5%]" without its interval."""
    return interval.split(" ")[0]


def share(interval: str) -> str:
    """"99.5% [98.5%, 100.5%]", a normal interval of older records, cut where a share cannot be."""
    value, low, high = (float(x) for x in re.findall(r"-?[0-9.]+(?=%)", interval))
    return f"{value:.1f}% [{max(0.0, low):.1f}%, {min(high, 100.0):.1f}%]"


def points(difference: str) -> str:
    """"31.7% [28.7%, 34.7%]", a difference of rates, in percentage points."""
    return difference.replace("%", "") + " points"


def span(values: list[float], digits: str = ".2f", unit: str = "") -> str:
    """The least and the largest value."""
    low, high = (format(f(values), digits) for f in (min, max))
    return low + unit if low == high else f"{low} to {high}{unit}"


def missed(goals: list[tuple[str, str, str]]) -> str:
    """A line on what stayed below its goal: (what, measured, goal) each."""
    return "Goals missed: " + "; ".join(f"{what} {measured} (goal {goal})" for what, measured, goal in goals) if goals else ""


# --- over seeds -------------------------------------------------------------------------------------------------------


def right(row: dict, kind: str, chosen: str | None = None, planted: str = "") -> float:
    """The rate of right answers in a row of flags: on the questions where `planted` is `chosen`, or all."""
    counts = [int(c) for c, of in zip(row[kind], planted or row[kind]) if chosen is None or of == chosen]
    return sum(counts) / len(counts) / (4 if kind == "sampled" else 1)


def over_seeds(values: list[float]) -> Interval:
    """Mean with its 95 % interval over seeds."""
    return mean_interval(values, student_t(len(values) - 1))


def rate_over_seeds(values: list[float]) -> Interval:
    """The same of rates, which lie between 0 and 1."""
    whole = over_seeds(values)
    return replace(whole, low=max(0.0, whole.low), high=min(1.0, whole.high))


def compared(found: dict, kind: str, a: str, b: str) -> str:
    """Policy a − policy b, paired by seed."""
    gain = over_seeds([right(of[a], kind) - right(of[b], kind) for of in found["seeds"].values()])
    return f"{gain.points}: {gain.verdict}"


# --- sections: a record -> paragraphs and tables (lists of rows) ------------------------------------------------------


def seeds(found: dict, results: Path) -> list:
    rows = []
    for path in sorted((results / "notebooks").glob("*.json")):
        stored, other = json.loads(path.read_text()), found["notebooks"].get(path.stem, {})
        of = {"0": stored["checks"]} | {seed: run["claims"] for seed, run in other.items()}
        bounds = {c["name"]: c["bound"] for checks in of.values() for c in checks if c.get("claim", True)}
        by_name = {seed: {c["name"]: c for c in checks} for seed, checks in of.items()}
        rows += [{"notebook": path.stem[:2], "claim": name, "bound": bound} | {
            f"seed {seed}": value_of(checks.get(name)) for seed, checks in by_name.items()} for name, bound in bounds.items()]
    return ["The claims that the notebooks' gates judge; their identities hold for every seed and stand in the notebooks. Seed "
            "0 is the stored run (`make notebooks`), the others are of the command. A cross marks what missed its bound.", rows]


def value_of(check: dict | None) -> str:
    """The value of a check; nothing where it was not made."""
    return readable(check["measured"]) + ("" if check["passed"] else " ✗") if check else ""


POLICIES = {"sft": "best SFT", "mixed": "SFT, half of it plain sums", "majority": "no checker: the base's majority of 8",
            "rejection": "rejection sampling", "grpo": "GRPO"}


def baselines(found: dict, results: Path) -> list:
    planted = found["planted"]
    columns = {"greedy": ("greedy", None), "sampled at T = 1": ("sampled", None), "greedy, planted": ("greedy", "1"),
               "greedy, the rest": ("greedy", "0")}
    rows = [{"policy": "base, plain form", "seeds": 1} | {
        name: f"{right(found['base'], kind, chosen, planted):.1%}" for name, (kind, chosen) in columns.items()}]
    for name, words in POLICIES.items():
        of = [seed[name] for seed in found["seeds"].values() if name in seed]
        rows.append({"policy": words, "seeds": len(of)} | {
            column: over_seeds([right(row, kind, chosen, planted) for row in of])
            for column, (kind, chosen) in columns.items()})
    pairs = (("grpo", "rejection"), ("grpo", "sft"), ("rejection", "sft"))
    each = [{"seed": seed} | {POLICIES[name]: f"{right(of[name], 'greedy'):.1%}" for name in ("sft", "rejection", "grpo")}
            for seed, of in found["seeds"].items()]
    return [f"{len(planted)} held-out questions, {len(found['seeds'])} seeds named beforehand, each with its own 100 "
            f"demonstrations; {found['threads']} thread. Means over seeds with Student's interval. *Planted* are questions "
            "whose pair of last digits the base's own text states wrongly on purpose. Rejection sampling and GRPO start from "
            "the same best SFT and sample 51,200 rollouts each.", rows, "Paired by seed:",
            [{"difference": f"{POLICIES[a]} − {POLICIES[b]}", "greedy": compared(found, "greedy", a, b),
              "sampled at T = 1": compared(found, "sampled", a, b)} for a, b in pairs], "Greedy, seed by seed:", each]


def grpo_seeds(found: dict, results: Path) -> list:
    best, base, demos = str(found["best"]), found["base"], found["demonstrations"]
    rows = [{"policy": "base, plain form", "seed": "", "greedy": base["greedy"], "sampled at T = 1": base["sampled"]}
            | {f"one of {k} right": share(v) for k, v in base["pass_at"].items()}]
    for seed, of in found["seeds"].items():
        runs = {f"best SFT, {demos} demonstrations": of["sft"][best], "rejection sampling": of["rejection"], "GRPO": of["grpo"]}
        for name, row in (runs | ({"GRPO, bf16 parameters": of["bf16"]} if "bf16" in of else {})).items():
            rows.append({"policy": name, "seed": seed, "greedy": row["greedy"], "sampled at T = 1": row["sampled"]} | {
                f"one of {k} right": share(v) for k, v in row.get("pass_at", {}).items()})
    if more := found.get("four_times"):
        rows.append({"policy": f"SFT, {more['answers']} demonstrations", "seed": 0, "greedy": more["greedy"],
                     "sampled at T = 1": more["sampled"]})
    first = next(iter(found["seeds"].values()))
    return [f"{found['held_out']} held-out questions, 200 for one of k; one set of demonstrations for all seeds. Rejection "
            f"sampling drew {first['rejection']['rollouts']:,} rollouts, GRPO {first['grpo']['rollouts']:,}.", rows]


WAYS = {"student": "the student, best SFT", "teacher_sft": "SFT on the teacher's completions",
        "reverse_kl": "distillation, reverse KL", "forward_kl": "distillation, forward KL",
        "mixed": "distillation, forward KL, λ = 0.5", "sampled": "distillation, reverse KL of sampled tokens",
        "rejection": "rejection sampling", "grpo": "GRPO"}


def distillation(found: dict, results: Path) -> list:
    seeds, rows = list(found["seeds"].values()), []
    for way, words in WAYS.items():
        of = [seed[way] for seed in seeds]
        row = {"way": words, "greedy": over_seeds([right(r, "greedy") for r in of]),
               "sampled at T = 1": over_seeds([right(r, "sampled") for r in of])}
        if way != "student":
            points = [r["curve"] for r in of]
            row |= {f"greedy with {batches * found['batch']:,}": f"{mean(c[k]['greedy'] for c in points):.1%}"
                    for k, batches in enumerate(found["batches"][:-1])}
            row |= {f"greedy − {words}": compared(found, "greedy", way, other) if way != other else ""
                    for other, words in (("student", "student"), ("teacher_sft", "SFT on the teacher's"))}
            row |= {"step size": f"{best_rate(found, way):g}"}
            row |= {f"{name}": f"{mean(c[-1][name] for c in points):,.0f}" for name in ("tokens", "seconds")}
        rows.append(row)
    teacher = [f"{right(found['teacher'], kind):.1%}" for kind in ("greedy", "sampled")]
    return [f"Each way has {found['batches'][-1] * found['batch']:,} completions, eight of each question; {len(seeds)} seeds "
            f"named beforehand, means with Student's interval, {found['threads']} thread. Fewer completions are a run of their "
            f"own. The teacher, GRPO from another seed's SFT, is right on {teacher[0]} greedily and {teacher[1]} sampled. Step "
            "sizes are the best of four on that seed; seconds are those that the process computed.", rows]


def best_rate(found: dict, way: str) -> float:
    return float(max(found["pilot"][way], key=found["pilot"][way].get))


CORRECTED = {"none": "no correction", "clip": "clipped ratio", "weights": "importance weights"}
OTHERS = {"start": "SFT, the start", "rejection": "rejection sampling, as many completions"}


def staleness(found: dict, results: Path) -> list:
    """Held-out rates by staleness and correction, and what a step took."""
    seeds, rows, timed = list(found["seeds"].values()), [], found.get("timing", {})
    for name in seeds[0]:
        s, _, kind = name.partition(", ")
        of = [seed[name] for seed in seeds]
        row = {"policy": OTHERS.get(name, f"staleness {s}"), "correction": CORRECTED[kind] if kind and s != "0" else "–",
               "greedy": over_seeds([right(r, "greedy") for r in of])}
        if "reward" in of[0]:
            row |= {"greedy − staleness 0": "" if s == "0" else compared(found, "greedy", name, "0, clip"),
                    "reward, last 8 steps": f"{mean(mean(r['reward'][-8:]) for r in of):.3f}",
                    "nats a token from the drawing weights": f"{mean(mean(r['diff_abs_mean'][-8:]) for r in of):.4f}"}
        rows.append(row)
    clock = [{"staleness": s, "checker": how, "seconds a step": f"{t['seconds']:.2f}",
              "of which waiting": f"{t['waiting']:.2f}", "processor seconds": f"{t['cpu']:.2f}",
              "mean staleness": f"{t['staleness']:.2f}"}
             for name, t in timed.items() if isinstance(t, dict) for s, how in [name.split(", ", 1)]]
    parts = [f"{found['steps']} steps of {found['completions']} completions, lr {found['lr']:g}; {len(seeds)} seeds named "
             f"beforehand, means with Student's interval, {found['threads']} thread. Staleness 0 is synchronous GRPO.", rows]
    if clock:
        parts += [f"Seconds a step beside other work (load {timed['load'][0]:.1f} on {timed['cores']} cores); the slow checker "
                  "takes half a second to a second a completion.", clock]
    return parts


SHAPED = {"start": "SFT, the start", "right": "the checker alone", "sum": "checker and brevity, summed",
          "gated": "the same, gated by the checker"}


def several_rewards(found: dict, results: Path) -> list:
    seeds, rows = list(found["seeds"].values()), []
    for name, words in SHAPED.items():
        of = [seed[name] for seed in seeds]
        row = {"reward": words, "greedy": rate_over_seeds([right(r, "greedy") for r in of]),
               "sampled at T = 1": rate_over_seeds([right(r, "sampled") for r in of])}
        row |= {"greedy − the checker alone": compared(found, "greedy", name, "right")} if name in ("sum", "gated") else {}
        row |= {"tokens at the end": f"{mean(r['length'][-1] for r in of):.1f}"} if name != "start" else {}
        rows.append(row)
    return [f"40 steps of GRPO from the same SFT policy, advantages divided by the group's standard deviation; {len(seeds)} "
            f"seeds, means with Student's interval, {found['threads']} thread.", rows]


def estimators(found: dict, results: Path) -> list:
    seeds = list(found["seeds"].values())

    def rows_of(part: str) -> dict[str, list[dict]]:
        """Estimator -> its rows of all seeds."""
        names = dict.fromkeys(row["estimator"] for row in seeds[0][part])
        return {name: [row for of in seeds for row in of[part] if row["estimator"] == name] for name in names}

    exact, off, sampled = (rows_of(part) for part in ("on_policy", "off_policy", "samples"))
    on = [{"on-policy": name, "scale": span([r["scale"] for r in of], ".3f"), "bias": span([r["bias"] for r in of], ".3f"),
           "cosine": span([r["cosine"] for r in of], ".4f"), "variance": span([r["variance"] for r in of]),
           "noise": span([a["noise"] / b["noise"] for a, b in zip(of, exact["no baseline"])]) + "×"}
          for name, of in exact.items() if name not in off or name in ("GSPO", "CISPO")]
    stale = [{"estimator": name} | {who: span([r["cosine"] for r in of if r["sampler"] == who])
                                    for who in dict.fromkeys(r["sampler"] for r in of)} for name, of in off.items()]
    batches = [{"samples": name} | {n: span([r["batch_cosine"] for r in of if r["samples"] == n])
                                    for n in sorted({r["samples"] for r in of})} for name, of in sampled.items()]
    error = max(row["batch_cosine_error"] for of in seeds for row in of["samples"])
    return [f"{len(seeds)} problems of {15 * len(seeds[0]['success'])} completions, least to largest value; {found['threads']} "
            f"thread. The two tables are exact: every group of {seeds[0]['on_policy'][0]['samples']} and "
            f"{seeds[0]['off_policy'][0]['samples']} rollouts with its probability. Scale and cosine are of the mean gradient "
            "beside the true one, the variance in its squared length; noise is the variance over the squared scale, here of "
            "that without a baseline. On-policy the corrections of the second table are leave-one-out.", on,
            "Cosine of the mean gradient and the true one where another sampler wrote the completions:", stale,
            f"Mean cosine of a batch's gradient, sampled: {seeds[0]['samples'][0]['how']} each, the largest standard error is "
            f"{error:.3f}.", batches]


CRITIC = {"start": "SFT, the start", "rejection": "rejection sampling", "grpo": "GRPO", "ppo_1": "PPO, λ = 1",
          "ppo_95": "PPO, λ = 0.95", "ppo_50": "PPO, λ = 0.5"}


def critic(found: dict, results: Path) -> list:
    seeds, rows = list(found["seeds"].values()), []
    for name, words in CRITIC.items():
        of = [seed[name] for seed in seeds]
        row = {"way": words, "reward": over_seeds([r["reward"] for r in of]),
               "guesses a game": span([mean(r["guesses"]) for r in of])}
        if name.startswith("ppo"):
            apart = over_seeds([r["reward"] - seed["grpo"]["reward"] for r, seed in zip(of, seeds)])
            row |= {"reward − GRPO": f"{apart.value:+.3f} [{apart.low:+.3f}, {apart.high:+.3f}]: {apart.verdict}",
                    "variance explained at last": span([r["explained by step"][-1] for r in of])}
        if "tokens" in of[0]:
            row |= {"tokens written": f"{mean(r['tokens'] for r in of):,.0f}",
                    "seconds": span([r["seconds"] for r in of], ".0f")}
        rows.append(row | {"reward": f"{row['reward'].value:.3f} [{row['reward'].low:.3f}, {row['reward'].high:.3f}]"})
    return [f"Notebook 08's game, {found['episodes']:,} episodes for each way; {len(seeds)} seeds, means with Student's "
            f"interval, {found['threads']} thread. The critic's step size was chosen on another seed, among "
            f"{len(found['pilot'])}.", rows]


def board_search(found: dict, results: Path) -> list:
    rows = [{"recipe": name, "greedy": f"{of['accuracy']:.1%}", "sampled tokens": f"{of['tokens']:,}",
             "seconds": f"{of['seconds']:.0f}", "entered": f"missed: {of['missed']:.1%}" if "missed" in of else ""}
            for name, of in found["tried"].items()]
    return [f"{len(rows)} recipes for the [board](../docs/board.md), one run each with seed {found['seed']}, on 300 questions "
            "that are neither practised nor held out. *Missed*: entered, and below the target on the held-out questions, as "
            "the mean of three seeds.", rows]


def longer_answers(found: dict, results: Path) -> list:
    starts, rows = [], []
    for steps in dict.fromkeys(steps for of in found["seeds"].values() for steps in of):
        runs = [of[steps] for of in found["seeds"].values() if steps in of]
        walk = [run["sft"]["long_right"] or 0.0 for run in runs]
        starts.append({"SFT steps": steps, "seeds": len(runs), "long answers right after SFT":
                       f"{span(walk, '.0%')}, median {median(walk):.0%}"})
        for name in (name for name, measured in runs[0].items() if isinstance(measured, dict)):
            kind, _, rounds = name.partition(" ")
            rows.append({"SFT steps": steps, "policy": {"sft": "SFT", "grpo": "GRPO"}.get(kind) or
                         f"rejection sampling, {rounds} rounds",
                         "right": rate_over_seeds([run[name]["right"] for run in runs]),
                         "mostly long": sum(run[name]["long"] > 0.5 for run in runs),
                         "above 95 %": sum(run[name]["right"] > 0.95 for run in runs)})
    rates = ", ".join(f"{float(lr):g}: {right:.0%}" for lr, right in found["tuned"].items())
    return [f"Notebook 09's model and task, a tenth of the demonstrations long, {found['held_out']} held-out questions, "
            "answered greedily. A guess is right in half of them.", starts,
            "Mean over the seeds with its 95 % interval, and with how many seeds; rejection sampling with the sampled tokens "
            f"of GRPO. On two other seeds its learning rates reached {rates}; the best one was taken.", rows]


# --- SmolLM2-135M-Instruct --------------------------------------------------------------------------------------------

RECIPES = ("larger", "few", "first")  # of smollm2_arithmetic.py, the last one that was tried first
KINDS = {"grpo": "GRPO", "short": "GRPO, short", "long": "GRPO, long", "wide": "GRPO, wide", "twice": "GRPO, two turns"}


def runs_of(found: dict, *kinds: str) -> list[tuple[str, str, dict]]:
    """(kind, seed, run) of each run that the record holds."""
    names = [name.split(" ") for name in found if name.split(" ")[0] in kinds and " " in name]
    return [(kind, seed, found[f"{kind} {seed}"]) for kind, seed in sorted(names, key=lambda n: (kinds.index(n[0]), n[1]))]


def below(goal: int, runs: list[tuple[str, str]]) -> str:
    """A line on the gains, (name, "6.4% [...]") each, that stayed below so many points."""
    return missed([(name, f"{rate(gain).rstrip('%')} points", str(goal)) for name, gain in runs
                   if float(rate(gain).rstrip("%")) < goal])


def arithmetic(found: dict, results: Path) -> list:
    """All recipes that were tried, the last one first."""
    settings, base, gains = found["settings"], found["base"], []
    rows = [{"policy": "as it is, in chat", "seed": "", "greedy": base["chat"]},
            {"policy": f"as it is, plain lines after {settings['examples']} solved ones", "greedy": base["plain"]},
            {"policy": "as it is, asked like the trained ones", "greedy": base["asked"]["greedy"]}]
    for name in RECIPES:
        recipe = record(f"smollm2_arithmetic_{name}", results) or {}
        for key, run in recipe.items():
            if key.startswith("sft "):
                rows.append({"policy": f"`{name}`: SFT, {recipe['settings']['demonstrations']} demonstrations, lr "
                                       f"{key.split(' ')[1]}, after {run['steps']} steps"} | answered(run))
        for _, seed, run in runs_of(recipe, "grpo"):
            grpo = recipe["settings"]["grpo"]
            rows.append({"policy": f"`{name}`: GRPO, {grpo['steps']} steps of {grpo['prompts_per_step'] * grpo['group_size']} "
                                   f"rollouts, lr {grpo['lr']:g}", "seed": seed} | answered(run)
                        | {"gain over the best SFT": points(run["gain"])})
            gains.append((f"`{name}`", run["gain"]))
    return [f"Sums and differences up to {settings['operands']}, asked as `28 + 47`, answered by the number alone; "
            f"{settings['held_out']} held-out questions. {settings['model']} in {settings['dtype']}. GRPO begins at the SFT "
            f"checkpoint that is best on {settings['choosing']} other questions; a second SFT at the same rate is of a longer "
            "run, which tells whether the others were cut short. Rejection sampling was not run: whether GRPO is better than "
            "it is not known.", rows, below(10, gains)]


def answered(run: dict) -> dict:
    after = run["after"]
    return {"greedy": after["greedy"], "sampled at T = 1": after["sampled"], "one of eight": after["pass_at"]["8"],
            "minutes": f"{run['seconds'] / 60:.1f}"}


GYM = {"sft": "SFT on the right answers", "rejection": "rejection sampling", "grpo": "GRPO"}


def gym(found: dict, results: Path) -> list:
    settings, base, grpo = found["settings"], found["base"], found["settings"]["grpo"]
    looks = [{"candidate": name + (" (chosen)" if name == found["chosen"] else ""), "greedy": f"{v['greedy']:.0%}",
              "sampled": f"{v['sampled']:.0%}", "one of four": f"{v['one of four']:.0%}"} for name, v in found["looks"].items()]
    chance = (f", naming somebody in the text at random {base['chance']:.0%}: the model as it is does no better than that"
              if "chance" in base else "")
    rows = [{"policy": "before", "seed": "", "solved": base["solved"]}]
    rows += [{"policy": GYM[way], "seed": seed, "solved": run["after"]["solved"], "gain": points(run["gain"]),
              "minutes": f"{run['seconds'] / 60:.1f}"} for way, seed, run in runs_of(found, *GYM)]
    gaps = []
    for other in ("sft", "rejection"):
        seeds = [seed for _, seed, _ in runs_of(found, "grpo") if f"{other} {seed}" in found]
        each = [flag_change(*(found[f"{way} {seed}"]["after"]["flags"] for way in (other, "grpo"))) for seed in seeds]
        gaps += [{"GRPO −": GYM[other], "seed": seed, "difference": f"{gap.points}: {gap.verdict}"}
                 for seed, gap in zip(seeds, each)]
        if len(each) > 1:
            gap = over_seeds([gap.value for gap in each])
            gaps.append({"GRPO −": GYM[other], "seed": "over the seeds", "difference": f"{gap.points}: {gap.verdict}"})
    sft, rounds = settings["sft"], settings["rejection"]
    return [f"{found['chosen']} of reasoning-gym, with its own scorer. {settings['model']} in {settings['dtype']}; GRPO: "
            f"{grpo['steps']} steps of {grpo['prompts_per_step']} prompts × {grpo['group_size']} rollouts; SFT: {sft['steps']} "
            f"steps of {sft['batch_size']} of the {settings['practice']} practice tasks with their right answers; rejection "
            f"sampling: {rounds['rounds']} rounds of {rounds['tasks']} tasks × {rounds['samples']} rollouts, each with "
            f"{rounds['sft']['steps']} such steps on the right ones; lr {grpo['lr']:g} for all. {settings['held_out']} "
            f"held-out tasks, answered greedily; always giving the commonest answer would solve {base['commonest']:.0%}"
            f"{chance}. Each task comes after {settings['shots']} solved ones. Each recipe stood before its first run. The "
            f"task was chosen before training, from what the model as it is does with {settings['looked_at']} tasks of each:",
            looks, rows, gaps]


REASONED = {"sft": "SFT on worked solutions", "longer": "the same, longer", "rejection": "rejection sampling", "grpo": "GRPO"}
TOLD = {"right": "right", "last number": "last number right", "true steps": "only true equations"}


def marked(flags: str, which: str) -> str:
    """The flags at the places that `which` marks with 1."""
    return "".join(flag for flag, mark in zip(flags, which, strict=True) if mark == "1")


def reasoning(found: dict, results: Path) -> list:
    settings, sft, grpo, rounds = (found["settings"], *(found["settings"][name] for name in ("sft", "grpo", "rejection")))
    runs, rows, lines, new = runs_of(found, *REASONED), [], [], found["new numbers"]
    long, shown = found["otherwise"]["long"], found["otherwise"]["shown"]
    as_it_is = {"as it is": found["base"], f"as it is, up to {long['new_tokens']} tokens": {"greedy": long},
                f"as it is, after {shown['worked']} worked solutions": {"greedy": shown}}

    def only(flags: str) -> str:
        return marked(flags, new)

    for name, seed, run in [*((n, "", r) for n, r in as_it_is.items()), *((REASONED[kind], s, run) for kind, s, run in runs)]:
        greedy, sampled = run["greedy"], run.get("sampled")
        rows.append({"policy": name, "seed": seed} | {f"{TOLD[what]}, greedy": flag_rate(greedy[what]) for what in TOLD} | {
            "right, greedy, new numbers": flag_rate(only(greedy["right"])),
            "right, sampled": flag_rate(sampled["right"]) if sampled else "", "tokens an answer": greedy["tokens"],
            "equations, greedy (true)": f"{greedy['equations']} ({greedy['true equations']})",
            "sampled tokens of the training": f"{run['tokens']:,}" if "tokens" in run else ""})
    for one, other in (("longer", "sft"), ("grpo", "sft"), ("rejection", "sft"), ("grpo", "longer"), ("grpo", "rejection")):
        seeds = [seed for kind, seed, _ in runs if kind == one and f"{other} {seed}" in found]
        for what, how, of in (("right", "greedy", str), ("right", "greedy", only), ("right", "sampled", str),
                              ("right", "sampled", only), ("true steps", "greedy", only)):
            each = [flag_change(*(of(found[f"{name} {s}"][how][what]) for name in (other, one))) for s in seeds]
            line = {"difference": f"{REASONED[one]} − {REASONED[other]}",
                    "of": f"{TOLD[what]}, {how}" + ", new numbers" * (of is only)}
            line |= {f"seed {seed}": f"{change.points}: {change.verdict}" for seed, change in zip(seeds, each)}
            if len(seeds) > 1:
                pairs = [[of(found[f"{name} {s}"][how][what]) for name in (one, other)] for s in seeds]
                gap = crossed_interval([[int(a) - int(b) for a, b in zip(*pair, strict=True)] for pair in pairs])
                line["over seeds and problems"] = f"{gap.points}: {gap.verdict}"
            lines.append(line)
    longer = "".join(f" The longer SFT has {run['steps']} steps." for _, _, run in runs_of(found, "longer")[:1])
    return ["Word problems of two or three steps from six templates. The held-out ones have the templates in common with the "
            f"others, no question twice; there are {settings['held_out']}. {new.count('1')} of them have new numbers; the "
            "template and the numbers of the others occur together in the training, with other names or things. "
            f"{settings['model']} in "
            f"{settings['dtype']}. SFT: {sft['steps']} steps of {sft['batch_size']} of {settings['demonstrations']} worked "
            f"solutions, lr {sft['lr']:g}. From there GRPO, {grpo['steps']} steps of {grpo['prompts_per_step']} prompts × "
            f"{grpo['group_size']} rollouts, lr {grpo['lr']:g}, and rejection sampling, {rounds['rounds']} rounds of "
            f"{rounds['sft']['steps']} steps of SFT on at most {rounds['kept_per_prompt']} right answers of a problem, lr "
            f"{rounds['sft']['lr']:g}.{longer} Right: the answer ended, with \"The answer is N.\" and the right N; this is the "
            "reward. Only true equations: the text holds an equation of two terms and no false one; no reward asks for that.",
            rows, lines]


CHAT_PAIRS = (("grpo", "rejection"), ("grpo", "dpo"), ("grpo", "sft"), ("dpo", "sft"))
LEARNED = {"sft": "SFT on the chosen", "dpo": "DPO", "rejection": "rejection sampling", "grpo": "GRPO"}


def flag_rate(flags: str) -> Interval:
    return wilson(flags.count("1"), len(flags))


def flag_change(before: str, after: str) -> Interval:
    """The paired difference of two rates on the same prompts; its normal interval is cut where a difference cannot be."""
    change = mean_interval([int(b) - int(a) for a, b in zip(before, after, strict=True)])
    return replace(change, low=max(-1.0, change.low), high=min(1.0, change.high))


def english(found: dict, results: Path) -> list:
    settings, base, hows = found["settings"], found["base"], ("greedy", "sampled")
    runs = sorted(runs_of(found, *LEARNED), key=lambda run: (run[1], list(LEARNED).index(run[0])))
    seeds = sorted({seed for _, seed, _ in runs})
    rows = [{"policy": "as it is", "seed": "", "all rules, greedy": flag_rate(base["greedy"]["all rules"]), "gain, greedy": "",
             "all rules, sampled": flag_rate(base["sampled"]["all rules"]), "gain, sampled": "",
             "tokens an answer": base["greedy"]["tokens"]}]
    moved = []
    for kind, seed, run in runs:
        name = LEARNED[kind]
        row = {"policy": name, "seed": seed}
        for how in hows:
            row |= {f"all rules, {how}": flag_rate(run[how]["all rules"]),
                    f"gain, {how}": flag_change(base[how]["all rules"], run[how]["all rules"]).points}
        rows.append(row | {"tokens an answer": run["greedy"]["tokens"], "minutes": f"{run['seconds'] / 60:.1f}",
                           "sampled tokens": f"{run['tokens']:,}" if "tokens" in run else ""})
        changes = {rule: flag_change(base["greedy"]["rules"][rule], run["greedy"]["rules"][rule])
                   for rule, flags in base["greedy"]["rules"].items() if len(flags) > 1}
        parts = [f"{verdict} in {', '.join(names)}" for verdict in ("ahead", "behind")
                 if (names := [f"{rule} ({c.points})" for rule, c in changes.items() if c.verdict == verdict])]
        moved.append(f"{name}, seed {seed}: " + ("; ".join(parts) or "no difference seen in any rule"))
    first = [run for run in runs if run[1] == seeds[0]]
    rules = [{"rule": rule, "prompts": len(flags), "as it is": flag_rate(flags)}
             | {LEARNED[kind]: flag_rate(run["greedy"]["rules"][rule]) for kind, _, run in first}
             for rule, flags in base["greedy"]["rules"].items()]
    lines = [{"difference": f"{LEARNED[one]} − {LEARNED[other]}", "seed": seed} | {
                how: f"{c.points}: {c.verdict}" for how in hows
                for c in [flag_change(found[f"{other} {seed}"][how]["all rules"], found[f"{one} {seed}"][how]["all rules"])]}
             for seed in seeds for one, other in CHAT_PAIRS if f"{one} {seed}" in found and f"{other} {seed}" in found]
    over = []
    for one, other in (*((kind, "base") for kind in LEARNED), *CHAT_PAIRS):
        names = [("base" if other == "base" else f"{other} {seed}", f"{one} {seed}") for seed in seeds]
        both = [(found[before], found[after]) for before, after in names if before in found and after in found]
        if len(both) > 1:
            gaps = {how: over_seeds([flag_change(a[how]["all rules"], b[how]["all rules"]).value for a, b in both])
                    for how in hows}
            over.append({f"over {len(both)} seeds": f"{LEARNED[one]} − {LEARNED.get(other, 'as it is')}"}
                        | {how: f"{gap.points}: {gap.verdict}" if gap.low < gap.high else
                           f"{gap.points.partition(' [')[0]} with each seed" for how, gap in gaps.items()})
    kinds = []
    for kind in dict.fromkeys(settings["kinds"]):
        at = [i for i, of in enumerate(settings["kinds"]) if of == kind]
        cells = {"as it is": base} | {LEARNED[of]: run for of, _, run in first}
        kinds.append({"kind of prompt": kind, "prompts": len(at)} | {
            name: sum(run["greedy"]["all rules"][i] == "1" for i in at) for name, run in cells.items()})
    pairs = [found[f"samples {seed}"]["train"] for seed in seeds]
    about = {key: " / ".join(f"{of[key]:,}" if key != "all rules" else of[key] for of in pairs)
             for key in ("pairs", "completions", "tokens", "all rules")}
    none = [row["kind of prompt"] for row in kinds if not any(row[LEARNED[of]] for of, _, _ in first)]
    return [f"{settings['practice']} prompts to practise on and {settings['held_out']} held-out ones, each with rules that a "
            f"program checks. {settings['model']} in {settings['dtype']} with LoRA (rank {settings['adapter']['rank']}), "
            f"answers of at most {settings['new_tokens']} tokens, sampled at temperature {settings['temperature']}. DPO, SFT "
            f"and the reward model learn from {about['pairs']} pairs, by the seed, of {about['completions']} completions by "
            f"the model as it is ({about['tokens']} tokens; {about['all rules']} keep all rules). GRPO: "
            f"{settings['grpo']['steps']} steps of "
            f"{settings['grpo']['prompts_per_step']} prompts × {settings['grpo']['group_size']} completions; rejection "
            f"sampling gets as many sampled tokens. Gains are paired with the model as it is; minutes leave out the "
            f"sampling of the pairs, and can be compared within a seed only. Recipe and held-out prompts were frozen before "
            f"the run. Of the three seeds named beforehand were run: {', '.join(seeds)}.", rows, lines, over or "",
            "Intervals over seeds hold the luck of the sampling and of the training, not that of the prompts." if over else "",
            f"By rule, greedy, seed {seeds[0]}:", rules, "\n".join(f"- {line}." for line in moved),
            f"Prompts of each kind whose greedy answer keeps all rules, seed {seeds[0]}:", kinds,
            f"No policy keeps all rules of any held-out prompt of the kinds: {', '.join(none)}." if none else "",
            *(reward_pairs(run, seed) for _, seed, run in runs_of(found, "reward"))]


def reward_pairs(run: dict, seed: str) -> str:
    """A sentence on a reward model; pairs of one prompt are a cluster."""
    def share(flags: str) -> Interval:
        return share_interval([int(flag) for flag in flags], run["prompts"])

    ahead = clustered_interval([int(a) - int(b) for a, b in zip(run["held_out"], run["shorter"])], run["prompts"])
    return (f"The reward model with LoRA (seed {seed}) puts the chosen side of {len(run['held_out'])} pairs of held-out "
            f"prompts above the rejected one in {share(run['held_out'])}, and of the pairs that it learned from in "
            f"{flag_rate(run['train'])}. To call the shorter side the better one is right in {share(run['shorter'])}; the "
            f"difference is {ahead.points}: {ahead.verdict}.")


def atropos(found: dict, results: Path) -> list:
    base, recipe = found["base"]["greedy"], found["settings"]["recipe"]
    rows = [{"policy": "as it is", "held out, greedy": str(flag_rate(base))}]
    for name, run in found.items():
        if name.startswith("grpo "):
            first, last = (sum(part) / 4 for part in (run["rewards"][:4], run["rewards"][-4:]))
            rows.append({"policy": f"GRPO, seed {name.split()[1]}", "held out, greedy": str(flag_rate(run["greedy"])),
                         "gain": flag_change(base, run["greedy"]).points, "reward, first → last four steps":
                         f"{first:.2f} → {last:.2f}", "staleness, at most": f"{max(run['staleness']):.0f}",
                         "seconds a sync": f"{run['sync_s']:.2f}", "minutes": f"{run['seconds'] / 60:.1f}"})
    return ["`grpolab up`: Atropos' API, a served policy, an environment on atroposlib's BaseEnv and the trainer, "
            f"{recipe['steps']} steps of {recipe['prompts-per-step']} groups of {recipe['group-size']}, with an adapter "
            "swapped in the running server. The environment sends only groups whose rewards differ. It shows that the chain "
            "learns; no other method is measured beside it.", rows]


def templates_of(settings: dict, seed: int) -> list[str]:
    """The template of each held-out task of the set with this seed, in the order of its flags."""
    return [t.template for tier in settings["tiers"] for t in instances(tier, settings["held_out"], seed, "held_out")]


def success_of(measured: dict, settings: dict, templates: list[str]) -> dict[str, Interval]:
    """The success on each tier and on both, and of the sampled answers; tasks of one template are a cluster."""
    n, flags = settings["held_out"], {tier: [int(flag) for flag in of] for tier, of in measured["flags"].items()}
    rates = {"both tiers": share_interval(sum(flags.values(), []), templates)}
    rates |= {tier: share_interval(of, templates[i * n : i * n + n]) for i, (tier, of) in enumerate(flags.items())}
    if counts := measured.get("counts"):
        rates["sampled"] = share_interval([int(count) / settings["samples"] for count in counts], templates)
    return rates


def greedily_ahead(before: dict, after: dict, templates: list[str]) -> Interval:
    """The difference of greedy success, with tasks of one template as one sample."""
    flags = zip("".join(before["flags"].values()), "".join(after["flags"].values()), strict=True)
    return clustered_interval([int(b) - int(a) for a, b in flags], templates)


def on_set(measured: dict, name: str) -> dict:
    """What was measured on the set of tasks with this name."""
    return measured if name == "first" else measured[f"{name} set"]


def administration(found: dict, results: Path) -> list:
    settings, tiers, gains, rows = found["settings"], found["settings"]["tiers"], [], []
    sets = {name: templates_of(settings, seed) for seed, name in enumerate(("first", "second", "third"))}

    def row(policy, seed, of, measured, run=None, best=None):
        row = {"policy": policy, "seed": seed, "tasks": of, **success_of(measured, settings, sets[of])}
        if run:
            gain = greedily_ahead(best, measured, sets[of])
            row |= {"gain over the best SFT": gain.points, "minutes": f"{run['seconds'] / 60:.1f}"}
            gains.append((f"{policy}, {of} set" if of != "first" else policy, str(gain)))
        rows.append(row)

    for name, how in (("alone", "as it is"), ("after solved ones", f"as it is, after {settings['shots']} solved tasks")):
        row(how, "", "first", found["base"][name])
    row("best SFT", "", "first", found["best"])
    for kind, seed, run in runs_of(found, "short", "long", "wide"):
        row(KINDS[kind], seed, "first", run["after"], run, found["best"])
    for of in sets if "best twice" in found else ():
        best = on_set(found["best twice"], of)
        row("best SFT, two turns", "", of, best)
        for kind, seed, run in runs_of(found, "twice"):
            row(KINDS[kind], seed, of, on_set(run["after"], of), run, best)
    return [f"Tasks of the tiers {' and '.join(tiers)} in simulated AWS accounts, one command an episode; in two turns the "
            f"policy reads the output of its first command and may write a second one. {settings['model']} in "
            f"{settings['dtype']}; SFT on {settings['demonstrations']} reference solution of each template. Of each tier "
            f"{settings['held_out']} held-out instances a set, with no value that training has in a slot of its kind, answered "
            f"greedily and {settings['samples']} times at temperature 1. The sets share a few: the second was measured halfway "
            "and after the recipe of two turns, the third was sampled after the hyperparameters were frozen. "
            "All intervals are over the templates. All of it was graded by an earlier grader, which was more lenient "
            "with policies of IAM and with alarms. Rejection sampling was run for the short recipe alone, in the next section.",
            rows, below(10, gains)]


def administration_over_seeds(found: dict, results: Path) -> list:
    settings = found["settings"]
    names = {"sft": "SFT", "rejection": "rejection sampling", "grpo": "GRPO", "many": "SFT on many", "longer": "longer SFT"}
    templates = templates_of(settings, 0)

    def ahead(before: dict, after: dict) -> dict:
        """Greedy and sampled differences, with tasks of one template as one sample."""
        counts = zip(before["counts"], after["counts"], strict=True)
        return {"greedy": greedily_ahead(before, after, templates),
                "sampled": clustered_interval([(int(b) - int(a)) / settings["samples"] for a, b in counts], templates)}

    rows, gaps, without, left = [], [], {True: [], False: []}, []
    for _, seed, grown in runs_of(found, "grpo"):
        of = {name: found[f"{name} {seed}"] for name in names if f"{name} {seed}" in found}
        for name, run in of.items():
            row = {"policy": names[name], "seed": seed, **success_of(run["after"], settings, templates)}
            if name != "sft":
                gains = ahead(of["sft"]["after"], run["after"])
                row |= {f"over SFT, {how}": gain.points for how, gain in gains.items()}
            rows.append(row | {"sampled tokens": f"{run['tokens']:,}" if "tokens" in run else ""})
        gaps += [{"seed": seed, "GRPO −": names[name]} | {how: f"{gap.points}: {gap.verdict}"
                                                         for how, gap in ahead(of[name]["after"], grown["after"]).items()}
                 for name in ("rejection", "many", "longer") if name in of]
        if other := found.get(f"left out {seed}"):
            left.append(seed)
            for template, flag in zip(templates, "".join(other["after"]["flags"].values()), strict=True):
                without[template in other["without"]].append((int(flag), template))

    over = []
    for a, b in (("grpo", "sft"), ("rejection", "sft"), ("many", "sft"), ("grpo", "rejection"), ("grpo", "many"),
                 ("many", "rejection"), ("longer", "sft"), ("grpo", "longer"), ("many", "longer")):
        seeds = [seed for _, seed, _ in runs_of(found, a) if f"{b} {seed}" in found]
        if len(seeds) > 1:
            each = [ahead(found[f"{b} {seed}"]["after"], found[f"{a} {seed}"]["after"]) for seed in seeds]
            over.append({"over the seeds": f"{names[a]} − {names[b]}", "seeds": ", ".join(seeds)}
                        | {how: over_seeds([gap[how].value for gap in each]).points for how in ("greedy", "sampled")})
    rounds = settings["rejection"]
    lines = [f"The tasks above, one command an episode, {settings['model']} in {settings['dtype']}. Each seed has its own "
             "demonstrations, one of each template, and its own SFT on them; GRPO (the short recipe) and rejection sampling "
             f"begin at the best of it and have equally many rollouts. Rejection sampling: {rounds['rounds']} rounds of "
             f"{rounds['tasks']} tasks and {rounds['samples']} samples, then SFT on the answers that solved their task. SFT on "
             "many begins at the model as it is and has the reference solutions of all these tasks, too, and "
             f"{settings['many']['steps']} steps; longer SFT has as many steps on the demonstrations alone. Intervals are over "
             "the templates, those of the last table over the seeds.", rows, gaps, over]
    for how, crossed in found.get("summary", {}).get("crossed", {}).items():
        seeds, whole = found["summary"]["seeds"], crossed_interval(crossed)
        lines += [f"GRPO with each seed from the SFT of each seed, {how}: {whole.points} over that SFT ({whole.verdict}; the "
                  "interval is over the seeds of both).",
                  [{"SFT": f"seed {start}"} | {f"GRPO, seed {seed}": f"{100 * gain:+.1f}" for seed, gain in zip(seeds, row)}
                   | {"mean": f"{100 * mean(row):+.1f}"} for start, row in zip(seeds, crossed)]]
    if without[True]:
        unseen, seen = (share_interval(*zip(*without[never])) for never in (True, False))
        lines.append(f"SFT on many without every {settings['left out']}th template solves {unseen} of the held-out tasks of "
                     f"these templates, which it never saw demonstrated, and {seen} of the others (greedy, seeds "
                     f"{', '.join(left)}; {len(without[True])} and {len(without[False])} answers, intervals over templates).")
    return lines


def asking(found: dict, results: Path) -> list:
    settings, grpo, rows, gains = found["settings"], found["settings"]["grpo"], [], []

    def row(policy, run, seed="", **more):
        shares = {f"{what}, {how}": run[how][key] for how in ("greedy", "sampled")
                  if how in run for key, what in (("right", "right answers"), ("calls", "right calls"))}
        asked = [right == "1" for right, called in zip(run["greedy"]["flags"], run["greedy"]["called"]) if called == "1"]
        shares["right where it asked, greedy"] = f"{sum(asked)} of {len(asked)}"
        rows.append({"policy": policy, "seed": seed} | shares | more)

    def ahead(of: dict, run: dict, name: str) -> dict:
        gain = {how: mean_interval([int(a) - int(b) for a, b in zip(run[how]["flags"], of[how]["flags"], strict=True)])
                for how in ("greedy", "sampled")}
        gains.extend((f"{name}, {how}", str(g)) for how, g in gain.items())
        return gain

    for name, run in found.get("base", {}).items():
        row("as it is" if name == "as it is" else f"as it is, after {settings['shots']} solved ones", run)
    starts = [name for name in ("sft", "rewarded sft") if name in found]
    for name in starts:
        row({"sft": "best SFT", "rewarded sft": "best SFT on rewarded demonstrations"}[name], found[name])
    lines = []
    for _, seed, run in runs_of(found, "grpo"):
        row("GRPO", run, seed, tokens=f"{run['tokens']:,}")
        others = {"best SFT": max((found[name] for name in starts), key=lambda r: float(rate(r["greedy"]["right"])[:-1]))}
        for rounds in settings["rejection"]["rounds"]:
            if other := found.get(f"rejection {seed} {rounds}"):
                others[f"rejection sampling, {rounds} rounds"] = other
                row(f"rejection sampling, {rounds} rounds", other, seed, tokens=f"{other['tokens']:,}")
        for name, other in others.items():
            gain = ahead(other, run, f"seed {seed}, over {name}")
            lines.append({"GRPO − ": name, "seed": seed} | {how: f"{g.points}: {g.verdict}" for how, g in gain.items()})
    return [f"A simpler notebook 14: two shops with names, and three tools that say yes or no. The demonstrations ask the "
            f"right tool in {found['sft']['asking']} of {found['sft']['shown']} episodes and guess in the others, which is "
            f"right in half of them. {settings['model']} in {settings['dtype']} with LoRA (rank "
            f"{settings['adapter']['rank']}). GRPO: {grpo['steps']} steps of "
            f"{grpo['prompts_per_step']} questions × {grpo['group_size']} episodes, lr {grpo['lr']:g}; rejection sampling gets "
            f"as many sampled tokens. {settings['held_out']} held-out questions, whose shops occur nowhere in training, "
            "answered greedily and once at temperature 1. Asking pays only where the policy then gives the answer that it was "
            "told: see the column `right where it asked`. Seeds of the command that are missing were not run.",
            rows, lines, below(15, gains)]


# --- speed and memory -------------------------------------------------------------------------------------------------

WORKLOADS = {"single": "batch 1", "fixed": "fixed length", "grpo": "GRPO, 8 prompts × 8", "spread": "geometric lengths"}


def origin(row: dict) -> dict:
    """The vector instructions of the machine and the commit of the code that made a row."""
    return {"instructions": row["machine"].get("instructions", "not noted"),
            "commit": (row.get("provenance") or {}).get("commit", "not noted")}


def decode(found: dict, results: Path) -> list:
    rows = [{"model": r["model"], "workload": WORKLOADS[r["workload"]], **origin(r), "rollouts": r["rollouts"],
             "ratio": f"{r['ratio']:.2f}×", "worst … best": f"{r['ratio_worst']:.2f} … {r['ratio_best']:.2f}",
             "peer": r["peer"],
             "our tokens/s": f"{r['tokens_per_s']['sampler']:,.0f}",
             "to llama.cpp": f"{r['llama']['ratio']:.2f}×" if "llama" in r else "",
             "of the machine's arithmetic": f"{r['profile']['of_fp32_arithmetic']:.0%}"} for r in found["rows"]]
    late = [(f"{r['model']}, {WORKLOADS[r['workload']]}, {origin(r)['instructions']}", f"{r['ratio']:.2f}×",
             f"{r['target']:g}×") for r in found["rows"] if r["ratio"] < r["target"]]
    return ["Wall clock against `generate()` with its best batching, sampling at T = 1 with log-probabilities, prefill "
            "included. llama.cpp decodes the same BF16 weights.", rows, missed(late)]


def threads(found: dict, results: Path) -> list:
    rows = [{"model": r["model"], "precision": r["dtype"], "tokens/s, threads let go": f"{r['let_go']:,.0f}",
             "kept": f"{r['kept']:,.0f}", "ratio": f"{r['ratio']:.2f}×", "worst … best": f"{r['worst']:.2f} … {r['best']:.2f}"}
            for r in found["rows"]]
    return [f"A sampler decodes in its thread after the main thread has run a parallel loop, {found['threads']} threads on "
            f"{found['processors']} processors. GNU OpenMP keeps threads for the next loop; the sampler's caller lets its own "
            "go before it waits.", rows]


def of_rounds(row: dict) -> str:
    """The ratios' range, and of how many rounds; nothing where the record is of one, or older than the list."""
    each = row.get("rounds", [])
    return f"{min(each):.2f} … {max(each):.2f} ({len(each)})" if len(each) > 1 else ""


def trl(found: dict, results: Path) -> list:
    rows, goals = [], []
    for r in found["rows"]:
        method, goal = METHODS[r["method"]], r["goal"]
        name = f"{r['model']}, {r['precision']}, {method}, {r['lengths']} lengths"
        rows.append({"model": r["model"], "precision": r["precision"], "method": method, "lengths": r["lengths"], **origin(r),
                     "speed": f"{r['speed']:.2f}×", "worst … best (rounds)": of_rounds(r),
                     "our seconds a step": f"{r['grpolab']['step_s']:.3g}",
                     "memory, ours / TRL's": f"{r['memory']:.2f}",
                     "memory of": goal["memory_of"].replace("_gb", "").replace("_", " ")})
        goals += [(name, f"{r['speed']:.2f}×", f"{goal['speed']:g}×")] if r["speed"] < goal["speed"] else []
        late = goal["memory"] and r["memory"] > goal["memory"]
        goals += [(f"{name}, memory", f"{r['memory']:.2f}", f"{goal['memory']:.2f}")] if late else []
    workload = "; ".join(f"{METHODS.get(k, k)}: {v}" for k, v in found["workload"].items())
    return [f"A training step against TRL {found['rows'][0]['machine']['versions']['trl']}, same weights, batch, lengths and "
            f"AdamW ({workload}).", rows, missed(goals)]


def accelerator(found: dict, results: Path) -> list:
    rows = [{"device": r["device"], "model": r["model"], "precision": r["dtype"],
             "decoding, times generate()": span([r["decode"][k] for k in ("ratio_worst", "ratio", "ratio_best")]) + "×",
             "tokens/s": f"{r['decode']['tokens_per_s']['sampler']:,.0f}", "seconds a GRPO step": f"{r['grpo']['step_s']:.3f}",
             "its update": f"{r['grpo']['update_s']:.3f}",
             "peak": "–" if r["grpo"]["peak_gb"] is None else f"{r['grpo']['peak_gb']:.2f} GB",
             "identities that hold": f"{sum(of['holds'] for of in r['identities'].values())} of {len(r['identities'])}"}
            for r in found["rows"]]
    return ["8 prompts x 8 rollouts; a GRPO step has completions of 32 tokens. In 16 bits: bfloat16, but float16 with scaled "
            "losses where the GPU only emulates bfloat16 or --dtypes asks for it.", rows]


def long_prompts(found: dict, results: Path) -> list:
    rows = [{"prompt": r["prompt"], "tokens, once a rollout": r["tokens once a rollout"],
             "once a group": r["tokens once a group"]} | {f"seconds, {name}": f"{s:.2f}" for name, s in r["seconds"].items()}
            | {"once a group, of plain sequences": f"{r['of plain sequences']:.2f}×"}
            | ({"ratio": f"{r['ratio']:.2f}×", "gradients apart": f"{r['gradients apart']:.0e}"} if "ratio" in r else {})
            for r in found["rows"]]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [f"Processor time of a GRPO update whose prompt is computed once a group of {found['group_size']}, or once a "
            f"rollout; completions of {found['completion']} tokens. Plain sequences have the tokens of a group one behind the "
            "other, under plain causal attention.", [{name: row.get(name, "") for name in names} for row in rows]]


def prompt_lookup(found: dict, results: Path) -> list:
    rows = [{"model": r["model"], "what": r["what"], "rows": r["rows"], "temperature": f"{r['temperature']:g}"}
            | {f"{of['lookup']} tokens": f"{span([of['worst'], of['ratio'], of['best']])}×, {of['steps']} steps"
               for of in r["by_lookup"] if of["lookup"]} | {"steps without": r["by_lookup"][0]["steps"]} for r in found["rows"]]
    return [f"Times as fast as without drafts, by the sampler's own seconds, over {found['rounds']} rounds "
            f"({found['threads']} threads, {found['instructions']}). The rollouts are the same in every bit.", rows]


def lora(found: dict, results: Path) -> list:
    rows = [{"method": METHODS[r["method"]], "trained, all weights": f"{full['trained'] / 1e6:.1f} M",
             "adapter": f"{own['trained'] / 1e6:.2f} M", "peak, all weights": f"{full['peak_gb']:.2f} GB",
             "peak, adapter": f"{own['peak_gb']:.2f} GB", "adapter / all": f"{own['peak_gb'] / full['peak_gb']:.2f}",
             "seconds a step, adapter / all": span([a / b for a, b in zip(own["step_s"], full["step_s"])]) + "×"}
            for r in found["rows"] for full, own in [(r["full"], r["lora"])]]
    workload = "; ".join(f"{METHODS[r['method']]}: {r['workload']}" for r in found["rows"])
    return [f"{found['model']} in {found['precision']} with all weights trained and with an adapter on its attention "
            f"({workload}); {found['rounds']} times {found['steps']} steps, {found['threads']} thread.", rows]


def pool(found: dict, results: Path) -> list:
    steps = {(row["who"], str(row["sessions"])): row["steps_per_s"] for row in found["table"]}
    peer, group = next(row["who"] for row in found["table"] if row["who"] != "grpolab"), found["group"]
    rows = [{"sessions": n, "steps a second, ours / theirs": f"{r['median']:.2f}×",
             "least … most": f"{r['least']:.2f} … {r['most']:.2f}", "ours": f"{steps['grpolab', n]:,.0f}",
             "theirs": f"{steps[peer, n]:,.0f}"} for n, r in found["ratios"].items()]
    return [f"Client and server against {peer}'s, same environment, default settings, {found['rounds']} rounds.", rows,
            f"A group of {group['sessions']} episodes of {group['turns']} steps takes {group['wall_s'] * 1e3:.0f} ms; the "
            f"environment's own waiting is {group['env_s'] * 1e3:.0f} ms of it."]


def aws(found: dict, results: Path) -> list:
    rows = [{"who": {"aws": "one `aws` process a step"}.get(r["who"], f"session in a {r['who']}"), "at once": r["sessions"],
             "steps a second": f"{r['steps_per_s']:.1f}", "median ms": f"{r['median_ms']:.1f}",
             "MiB a session": f"{r['mib_per_session']:.0f}" if r["mib_per_session"] else "–"} for r in found["table"]]
    return [f"Simulated AWS accounts over the environment's socket, each step graded, {found['rounds']} rounds of "
            f"{found['steps']} steps a session, against the `aws` command in a process of its own.", rows]


def service(found: dict, results: Path) -> list:
    rows = [{"model": r["model"], "callers": r["callers"], "Sampler, tokens/s": f"{r['tokens_per_s']['sampler']:,.0f}",
             "through the service": way, "tokens/s": f"{r['tokens_per_s'][way]:,.0f}",
             "of the Sampler's": f"{of['median']:.2f}", "least … most": f"{of['least']:.2f} … {of['most']:.2f}"}
            for r in found["rows"] for way, of in r["ratios"].items()]
    return [f"Callers that ask at once, and again as soon as they are answered: prompts of {found['prompt']} tokens, "
            f"{found['new']} new ones with a log-prob each. The same requests to a Sampler in the callers' process, and over "
            "HTTP to a service there or in a process of its own, by two clients.", rows]


def bridges(found: dict, results: Path) -> list:
    rows = [{"model": r["model"], "server": {"grpolab": "ours", "vllm": "vLLM"}[r["server"]], "bridge": r["bridge"],
             "travels": f"{r['travels_mb']:,.1f} MB", "seconds a sync": f"{median(r['sync_s']):.2f}",
             "beside other requests": f"{median(r['busy_sync_s']):.2f}",
             "tokens/s right after": f"{median(r['tokens_per_s_after']):,.0f}", "later": f"{median(r['tokens_per_s']):,.0f}",
             "server's peak memory": f"{r['server_peak_mb']:,} MB",
             "both processes": f"{r['both_mb']:,} MB" if "both_mb" in r else "–", "versions behind, at most": r["behind_max"],
             "requests that failed": r["failed"], "by version": r["version"]} for r in found["rows"]]
    return [f"From `publish` to a server that samples with the new weights; medians, a batch is {found['batch']}, "
            f"{found['threads']} thread ({found['machine']}). The last two columns are of a second client that samples all the "
            "while. `both processes`: what trainer and server hold at the end, pages that they share counted once; – where "
            "it was not measured. `one copy` (`unpacked`: the server with `--no-packed`), `shared memory`, `adapter swap` and "
            "the restarts are `--weight-bridge shared` (on processors, else the file), `lora_only`, `lora_restart` and `none` "
            "of `grpolab grpo`.", rows]


# --- RESULTS.md: question -> (title, record, what makes the section, command where the record does not say it) --------

QUESTIONS = {
    "Do the notebooks' claims hold?": [("Three seeds", "seeds", seeds)],
    "What does reinforcement add to imitation?": [
        ("GRPO and rejection sampling, eight seeds", "baselines", baselines), ("GRPO over seeds", "grpo_seeds", grpo_seeds),
        ("On-policy distillation, three seeds", "distillation", distillation),
        ("Sampling ahead, three seeds", "async_grpo", staleness),
        ("A reward for form beside the checker", "several_rewards", several_rewards),
        ("Estimators of the policy gradient", "estimators", estimators),
        ("A critic beside GRPO, three seeds", "critic", critic),
        ("The search for the board's recipes", "board_search", board_search),
        ("Longer answers, ten seeds", "longer_answers", longer_answers)],
    "What does SmolLM2-135M-Instruct learn?": [
        ("SmolLM2: arithmetic", "smollm2_arithmetic_larger", arithmetic),
        ("SmolLM2: word problems, in steps", "smollm2_reasoning", reasoning),
        ("SmolLM2: a task of reasoning-gym", "smollm2_gym", gym), ("SmolLM2: rules of chat", "smollm2_english", english),
        ("SmolLM2: AWS accounts", "smollm2_aws", administration),
        ("SmolLM2: AWS accounts, with rejection sampling", "smollm2_aws_seeds", administration_over_seeds),
        ("SmolLM2: through Atropos", "smollm2_atropos", atropos),
        ("SmolLM2: a tool to be asked", "smollm2_tools", asking)],
    "How fast is it, and how large?": [
        ("Decode engine", "decode", decode, "OMP_NUM_THREADS=2 python benchmarks/decode.py"),
        ("Prompt lookup", "prompt_lookup", prompt_lookup, "OMP_NUM_THREADS=2 python benchmarks/prompt_lookup.py"),
        ("Threads at rest", "threads", threads),
        ("Training step", "trl", trl, "OMP_NUM_THREADS=2 python benchmarks/against_trl.py"),
        ("GPUs and Macs", "accelerator", accelerator, "python benchmarks/accelerator.py"),
        ("Long prompts", "long_prompts", long_prompts), ("LoRA", "lora", lora),
        ("Environment pool", "pool", pool, "python benchmarks/pool.py"), ("AWS accounts", "aws", aws),
        ("Policy service", "service", service), ("Weight bridges", "bridges", bridges)],
}


def results_page(results: Path) -> str:
    """The text of RESULTS.md."""
    text = ("# Results\n\nMade by `make results` from the records in [results/](results/). Rates are in brackets with their "
            "95 % intervals. Seconds and minutes were measured beside other work on the machine.\n")
    for question, sections in QUESTIONS.items():
        made = ""
        for title, name, section, *command in sections:
            if found := record(name, results):
                command = found.get("command") or found.get("settings", {}).get("command") or command[0]
                parts = [part if isinstance(part, str) else table(part) for part in section(found, results)]
                made += f"\n### {title}\n\n`{command}`\n\n" + "\n\n".join(filter(None, parts)) + "\n"
            elif made and command:
                made += f"\n### {title}\n\n`{command[0]}`\n\nNot yet run.\n"
        text += f"\n## {question}\n{made}" if made else ""
    return text


# --- the README -------------------------------------------------------------------------------------------------------


def readme_table(results: Path) -> str:
    """The one table of the README: a line a claim."""
    rows = {}
    stored = {path.stem[:2]: json.loads(path.read_text())["values"] for path in (results / "notebooks").glob("*.json")}
    if sft := stored.get("01"):
        rows["SFT: answers in the asked format"] = f"{rate(sft['base_format'])} → {rate(sft['format'])}"
    if dpo := stored.get("03"):
        kept, before, learned = (rate(dpo["sampled"][name]) for name in ("SFT on the chosen", "SFT", "DPO"))
        rows["sampled exact match: SFT → DPO (SFT on the chosen answers; DPO − that)"] = (
            f"{before} → {learned} ({kept}; {dpo['over_sft']['SFT on the chosen']})")
    if rewards := stored.get("05"):
        rows["held-out pairs told apart: reward model with a scalar head / implicit reward of the DPO policy"] = (
            f"{rate(rewards['scalar_accuracy'])} / {rate(rewards['accuracy'])}")
    if found := record("baselines", results):
        rows["base model in its own plain form, greedy"] = f"{right(found['base'], 'greedy'):.1%}"
        for kind in ("greedy", "sampled"):
            sft, kept, learned = (over_seeds([right(of[name], kind) for of in found["seeds"].values()])
                                  for name in ("sft", "rejection", "grpo"))
            name = f"best SFT → GRPO, mean of {len(found['seeds'])} seeds: {kind} exact match"
            rows[name] = f"{sft.value:.1%} → {learned}"
            rows[f"the same by rejection sampling, as many rollouts: {kind}"] = f"{sft.value:.1%} → {kept}"
    if turns := stored.get("07"):
        rows["success with the calculator, greedy: SFT → multi-turn GRPO (rejection sampling; sampled, rejection sampling "
             "− GRPO)"] = (
            f"{rate(turns['before'])} → {rate(turns['after'])} ({rate(turns['rejection'])}; {turns['sampled_less_grpo']})")
    if tools := stored.get("14"):
        sft, learned, kept = (rate(tools[f"{name}: right answers, sampled"])
                              for name in ("warm-up", "GRPO", "rejection sampling"))
        rows["which of three tools to ask, right answers, sampled: best SFT → GRPO (rejection sampling)"] = (
            f"{sft} → {learned} ({kept})")
    if game := stored.get("08"):
        before, after, kept, as_many = (rate(game[f"guesses_{of}"]) for of in ("before", "after", "rejection", "as_many"))
        rows["guessing game, guesses a game: imitation → GRPO (rejection sampling; GRPO after as many games); optimum"] = (
            f"{before} → {after} ({kept}; {as_many}); {game['optimum']:.2f}" + failed_seeds("08_guess", results))
    if long := record("longer_answers", results):
        runs = [of["400"] for of in long["seeds"].values() if "400" in of]
        sft, learned, *kept = (f"{rate_over_seeds([run[name]['right'] for run in runs]).value:.1%}"
                               for name in ("sft", "grpo", "rejection 4", "rejection 16"))
        rows[f"notebook 09's task, parity, a tenth of the demonstrations long, greedy, mean of {len(runs)} seeds: SFT → GRPO "
             "(rejection sampling in 4 / 16 rounds)"] = f"{sft} → {learned} ({' / '.join(kept)})"
    rows |= real_model(results)
    for title, name, key in (("decode engine: times as fast as `generate()`", "decode", "ratio"),
                             ("a training step: times as fast as TRL", "trl", "speed")):
        if found := record(name, results):
            kinds = [[row[key] for row in found["rows"] if (row["model"] == "tiny") == tiny] for tiny in (True, False)]
            rows[f"{title}, embedded model; SmolLM2"] = "; ".join(span(kind, unit="×") for kind in kinds if kind)
    if found := record("pool", results):
        rows["environment pool: steps a second, of OpenEnv's"] = span([r["median"] for r in found["ratios"].values()], unit="×")
    return table([{"measured": name, "value": value} for name, value in rows.items()])


def failed_seeds(notebook: str, results: Path) -> str:
    """Of the seeds beside the stored one, those with which a claim of the notebook's gate does not hold."""
    of = (record("seeds", results) or {"notebooks": {}})["notebooks"].get(notebook, {})
    failed = [seed for seed, run in of.items() if not run["passed"]]
    return f", not with seed {' and '.join(failed)}" if failed else ""


def real_model(results: Path) -> dict[str, str]:
    """What SmolLM2 did before and after GRPO, a value a seed, where rejection sampling stands beside it."""

    def seeds_of(found: dict, kind: str, what: str) -> str:
        return " / ".join(rate(run["after"][what]) for _, _, run in runs_of(found, kind))

    rows = {}
    if found := record("smollm2_aws_seeds", results):
        rows["SmolLM2-135M, simulated AWS accounts, held-out tasks, greedy: SFT on one solution of each template → GRPO "
             "(rejection sampling; SFT on many generated solutions instead)"] = (
            f"{seeds_of(found, 'sft', 'both')} → {seeds_of(found, 'grpo', 'both')} "
            f"({seeds_of(found, 'rejection', 'both')}; {seeds_of(found, 'many', 'both')})")
    if found := record("smollm2_reasoning", results):
        ways = {way: " / ".join(rate(str(flag_rate(marked(run["greedy"]["right"], found["new numbers"]))))
                                for _, _, run in runs_of(found, way)) for way in REASONED}
        rows["SmolLM2-135M, word problems solved in steps, held-out ones with new numbers, greedy: SFT on worked solutions → "
             "GRPO (rejection sampling; longer SFT)"] = (
            f"{ways['sft']} → {ways['grpo']} ({ways['rejection']}; {ways['longer']})")
    if found := record("smollm2_english", results):
        after, kept = ([rate(str(flag_rate(run["greedy"]["all rules"]))) for _, _, run in runs_of(found, way)]
                       for way in ("grpo", "rejection"))
        rows["SmolLM2-135M, all rules of a held-out chat prompt kept, greedy: as it is → GRPO (rejection sampling)"] = (
            f"{rate(str(flag_rate(found['base']['greedy']['all rules'])))} → {' / '.join(after)} ({' / '.join(kept)})")
    return rows


def ladder(series: Path, results: Path) -> str:
    """A line a notebook: its title, what its own first cell says that one learns, and its minutes in the recorded series."""
    rows, took = [], (record("series", results) or {"notebooks": {}})["notebooks"]
    for path in sorted(series.glob("[0-9][0-9]_*.ipynb")):
        text = "".join(json.loads(path.read_text())["cells"][0]["source"])
        title = re.search(r"^# (.*)$", text, re.M)
        learn, before = (re.search(rf"^\| {row} \| (.*) \|$", text, re.M) for row in ("you will learn", "read first"))
        if not title or not learn or not before:
            raise ValueError(f"{path.name}: its first cell needs a line `# NN · title` and rows `| you will learn | ... |` and "
                             "`| read first | ... |`")
        rows.append({"notebook": f"[{title[1]}](notebooks/{path.name})", "you will learn": learn[1],
                     "read first": re.sub(r"\[(\d+)\]\([^)]*\)", r"\1", before[1]),
                     "minutes": took.get(path.stem, "not recorded")})
    return table(rows)


def minutes(results: Path) -> str:
    """How long the series took as one command."""
    whole = record("series", results)
    return (f"The recorded run of {len(whole['notebooks'])} notebooks took {whole['minutes']:.0f} minutes on "
            f"{whole['processors']} processor cores, {whole['jobs']} at a time, after the installation; `make test` executes "
            "them again, most of them shortened.")


def rollout(results: Path) -> str:
    """The first held-out question on which the last two policies of the record differ, with what each wrote."""
    found = record("rollouts", results)
    verdicts = [[w["correct"] for w in q["written"].values()] for q in found["questions"]]
    chosen = next((q for q, v in zip(found["questions"], verdicts) if v[-2] != v[-1]), found["questions"][0])
    width = max(map(len, chosen["written"]))
    lines = [f"{name:<{width}}  {'✓' if w['correct'] else '✗'}  {one_line(w['text'])}" for name, w in chosen["written"].items()]
    return "\n".join(["```text", chosen["question"], *lines, "```"])


def one_line(text: str, most: int = 60) -> str:
    text = text.replace("\n", "↵").replace("`", "'")
    return text if len(text) <= most else text[:most] + "…"


def front(readme: str, results: Path, series: Path) -> str:
    """The README with all that is made for it, each part between its mark and the next end."""
    parts = {BEGIN: readme_table(results), LADDER: ladder(series, results), MINUTES: minutes(results),
             ROLLOUT: rollout(results)}
    for begin, made in parts.items():
        before, rest = readme.split(begin)
        readme = f"{before}{begin}\n{made}\n{END}{rest.split(END, 1)[1]}"
    return readme


def board_rows(entries: list[dict]) -> list[dict]:
    """The rows of the board, the fewest tokens first."""
    means = sorted(((board.summary(e), e) for e in entries), key=lambda pair: pair[0]["tokens"])
    return [{"entry": e["title"], "sampled tokens": f"{m['tokens']:,.0f}", "seconds": f"{m['seconds']:.0f}",
             "held-out, greedy": f"{m['accuracy']:.1%}",
             "by seed": ", ".join(f"{of['accuracy']:.1%}" for _, of in sorted(e["seeds"].items())),
             "recipes tried": e["tries"], "processor, threads": f"{e['machine']['processor']}, {e['machine']['threads']}"}
            for m, e in means]


def board_page(page: str, results: Path) -> str:
    """docs/board.md with the table of the entries."""
    entries = [board.read(path) for path in sorted((results / "board").glob("*.json"))]
    before, rest = page.split(BOARD)
    shown = table(board_rows(entries)) if entries else "no entry yet"
    return f"{before}{BOARD}\n{shown}\n{END}{rest.split(END, 1)[1]}"


def main() -> None:
    results, readme = HERE / "results", ROOT / "README.md"
    print(atomic_write(HERE / "RESULTS.md", results_page(results)))
    print(atomic_write(readme, front(readme.read_text(), results, ROOT / "notebooks")))
    page = ROOT / "docs" / "board.md"
    print(atomic_write(page, board_page(page.read_text(), results)))


if __name__ == "__main__":
    main()
