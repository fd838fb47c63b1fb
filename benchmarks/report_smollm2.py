"""The sections of RESULTS.md on what SmolLM2-135M-Instruct learns; report.py puts them into the page."""

from __future__ import annotations

from pathlib import Path

from tables import points, rate, record, table

RECIPES = ("larger", "few", "first")  # of smollm2_arithmetic.py, the last one that was tried first
GOALS = {"arithmetic": 10, "gym": 15, "aws": 10}  # percentage points, on the held-out ones
OWN_LOGPS = ", ratios to the trainer's own log-probs"
KINDS = {"full": "all weights", "lora": "LoRA", "grpo": "GRPO", "short": "GRPO, short", "long": "GRPO, long",
         "wide": "GRPO, wide", "twice": "GRPO, two turns"}


def shown(text: str, most: int = 110) -> str:
    """A completion or a prompt in one cell of a table, as code, so that nothing in it is read as markup."""
    text = text.replace("\n", "↵").replace("`", "'")
    return f"`{text if len(text) <= most else text[:most] + '…'}`"


def grpo_of(settings: dict) -> str:
    """What a step of these settings is."""
    return (f"{settings['prompts_per_step']} prompts × {settings['group_size']} rollouts of at most "
            f"{settings['max_new_tokens']} tokens")


def runs_of(found: dict, *kinds: str) -> list[tuple[str, str, dict]]:
    """(kind, seed, run) of each run that the record holds."""
    names = [name.split(" ") for name in found if name.split(" ")[0] in kinds and " " in name]
    return [(kind, seed, found[f"{kind} {seed}"]) for kind, seed in sorted(names, key=lambda n: (kinds.index(n[0]), n[1]))]


def gained(run: dict, goal: int) -> str:
    """The gain of a run, with a cross where it stays below the goal."""
    return points(run["gain"]) + " ✗" * (float(rate(run["gain"]).rstrip("%")) < goal)


def cost(run: dict) -> list[str]:
    """Seconds a step, minutes in all, and peak memory."""
    return [f"{run['step_s']:.1f}", f"{run['seconds'] / 60:.1f}", f"{run['peak_gb']:.2f} GB"]


def style(results: Path) -> str | None:
    found = record("smollm2_style", results)
    if not found or "base" not in found:
        return None
    settings, base, rules = found["settings"], found["base"], list(found["base"]["rules"])
    runs = runs_of(found, "full", "lora")
    rows = [["before", "", "", base["all rules"], "", *base["rules"].values(), "", "", ""]]
    rows += [[KINDS[kind], seed, f"{run['trained'] / 1e6:.1f} M", run["after"]["all rules"], points(run["gain"]),
              *(run["after"]["rules"][rule] for rule in rules), *cost(run)] for kind, seed, run in runs]
    steps = "; ".join(f"{KINDS[name]}: {v['steps']} steps, lr {v['lr']:g}" + OWN_LOGPS * ("sampler_cap" in v)
                      for name, v in settings["variants"].items())
    text = (f"`{settings['command']}`: one sentence of at most so many words, in lower-case letters, without two common words, "
            f"about a topic that it must name. Held-out prompts, on other topics: {settings['held_out']}, answered greedily. "
            f"{settings['model']} in {settings['dtype']}, {grpo_of(settings['grpo'])} ({steps}), threads: "
            f"{runs[0][2]['threads'] if runs else ''}; seconds beside other work on the machine.\n\n")
    text += table(["trained", "seed", "weights", "all rules kept", "gain", *rules, "seconds a step", "minutes", "peak memory"],
                  rows)
    text += "\n\nMean reward, first to last fifth of the steps:\n\n" + rewards(runs)
    if runs:
        columns = {f"{KINDS[kind]}, seed {seed}": run["after"]["texts"] for kind, seed, run in runs if seed == runs[0][1]}
        lines = [[shown(prompt, 200), shown(base["texts"][i]), *(shown(texts[i]) for texts in columns.values())]
                 for i, prompt in enumerate(base["prompts"])]
        text += "\n\nThe first held-out prompts, and what is written before and after:\n\n"
        text += table(["prompt", "before", *columns], lines)
    return text


def rewards(runs: list[tuple[str, str, dict]]) -> str:
    """The mean reward of each fifth of the steps of each run."""
    rows = []
    for kind, seed, run in runs:
        r, n = run["rewards"], len(run["rewards"])
        fifths = [r[n * i // 5 : n * (i + 1) // 5] for i in range(5)]
        rows.append([KINDS[kind], seed, *(f"{sum(part) / len(part):.2f}" if part else "" for part in fifths)])
    return table(["run", "seed", "1", "2", "3", "4", "5"], rows)


def gym(results: Path) -> str | None:
    found = record("smollm2_gym", results)
    if not found or "base" not in found:
        return None
    settings, base, runs = found["settings"], found["base"], runs_of(found, "grpo")
    looks = [[name + (" (chosen)" if name == found["chosen"] else ""), f"{v['greedy']:.0%}", f"{v['sampled']:.0%}",
              f"{v['one of four']:.0%}"] for name, v in found["looks"].items()]
    rows = [["before", "", base["solved"], "", "", "", ""]]
    rows += [["GRPO", seed, run["after"]["solved"], gained(run, GOALS["gym"]), *cost(run)] for _, seed, run in runs]
    grpo = settings["grpo"]
    text = (f"`{settings['command']}`: {found['chosen']} of reasoning-gym, with its own scorer. {settings['model']} in "
            f"{settings['dtype']}; {grpo_of(grpo)}, {grpo['steps']} steps, lr {grpo['lr']:g}; {settings['held_out']} held-out "
            "tasks, answered greedily; solved is the full score, and always giving the commonest answer would come to "
            f"{base['commonest']:.0%}. Each task comes after {settings['shots']} solved ones. Chosen before training, from "
            f"what the model as it is does with {settings['looked_at']} tasks of each:\n\n")
    text += table(["candidate", "greedy", "sampled", "one of four samples"], looks) + "\n\n"
    goal = f"gain (goal: {GOALS['gym']})"
    text += table(["policy", "seed", "solved", goal, "seconds a step", "minutes", "peak memory"], rows)
    text += "\n\nMean reward, first to last fifth of the steps:\n\n" + rewards(runs)
    if runs:
        after = runs[0][2]["after"]["texts"]
        lines = [[shown(prompt, 260), shown(str(base["answers"][i])), shown(base["texts"][i]), shown(after[i])]
                 for i, prompt in enumerate(base["prompts"])]
        text += "\n\n" + table(["task", "answer", "before", f"after, seed {runs[0][1]}"], lines)
    return text


def arithmetic(results: Path) -> str | None:
    """All recipes that were tried, the last one first."""
    found = [(name, record(f"smollm2_arithmetic_{name}", results)) for name in RECIPES]
    found = [(name, r) for name, r in found if r and runs_of(r, "grpo")]
    if not found:
        return None
    settings, base = found[0][1]["settings"], found[0][1]["base"]
    rows = [["as it is, in chat", "", base["chat"], "", "", "", "", ""],
            [f"as it is, plain lines after {settings['examples']} solved ones", "", base["plain"], "", "", "", "", ""],
            ["as it is, asked like the trained ones", "", base["asked"]["greedy"], "", *answered(base["asked"]), ""]]
    told = lambda key: key.removeprefix("sft ").replace(" ", ", ")  # noqa: E731
    for name, r in found:
        shown_to, grpo = r["settings"]["demonstrations"], r["settings"]["grpo"]
        rows += [[f"`{name}`: SFT, {shown_to} demonstrations, lr {told(key)}, after {run['steps']} steps", "",
                  run["after"]["greedy"], "", *answered(run["after"]), f"{run['seconds'] / 60:.1f}"]
                 for key, run in r.items() if key.startswith("sft ")]
        rows += [[f"`{name}`: GRPO, {grpo['steps']} steps of {grpo['prompts_per_step'] * grpo['group_size']} rollouts, lr "
                  f"{grpo['lr']:g}", seed, run["after"]["greedy"], gained(run, GOALS["arithmetic"]), *answered(run["after"]),
                  f"{run['seconds'] / 60:.1f}"] for _, seed, run in runs_of(r, "grpo")]
    text = (f"`{settings['command']}`: sums and differences up to {settings['operands']}, asked as `28 + 47`, answered by the "
            f"number alone; {settings['held_out']} held-out questions. {settings['model']} in {settings['dtype']}; of the "
            f"looks on the way of SFT the best on {settings['choosing']} choosing questions is where GRPO begins, with a "
            f"checker, on {settings['practice']:,} other questions. A second number beside a rate is that of the steps "
            "of a longer SFT, which tells whether the others were cut short; GRPO does not begin there. A cross marks "
            f"a gain below the goal of {GOALS['arithmetic']} points.\n\n")
    text += table(["policy", "seed", "greedy exact match", "gain over the best SFT", "sampled at T = 1", "one of four",
                   "one of eight", "minutes"], rows)
    for name, r in found:
        tuned = {told(key): run["curve"] for key, run in r.items() if key.startswith("sft ")}
        looks = sorted({int(steps) for curve in tuned.values() for steps in curve})
        lines = [[f"lr {key}", *(f"{of[n]:.1%}" if n in of else "" for n in map(str, looks))]
                 for key, of in tuned.items()]
        text += (f"\n\n`{name}`: greedy exact match on the choosing questions after so many steps of SFT, and the mean reward "
                 "of GRPO, first to last fifth of the steps:\n\n" + table(["SFT", *looks], lines) + "\n\n"
                 + rewards(runs_of(r, "grpo")))
    return text


def administration(results: Path) -> str | None:
    found = record("smollm2_aws", results)
    if not found or "best" not in found:
        return None
    settings, best = found["settings"], found["sft"]
    runs, tiers = runs_of(found, *settings["grpo"]), settings["tiers"]
    once, twice = ([run for run in runs if ("second set" in run[2]) is two] for two in (False, True))
    asked = {"alone": "as it is", "after solved ones": f"as it is, after {settings['shots']} solved tasks"}
    rows = [[how, "", *solved(found["base"][name], tiers), "", "", "", ""] for name, how in asked.items() if "base" in found]
    rows.append([f"best SFT ({best['steps']} steps)", "", *solved(found["best"], tiers), "", found["best"]["sampled"], "",
                 f"{best['seconds'] / 60:.1f}"])
    rows += [administered(kind, seed, run, run["after"], run, tiers) for kind, seed, run in once]
    two = found.get("best twice")
    if two:
        rows.append(["best SFT, two turns", "", *solved(two, tiers), "", two["sampled"], "", ""])
        rows += [administered(kind, seed, run, run["after"], run, tiers) for kind, seed, run in twice]
    recipes = "; ".join(f"{kind}: {of.get('rounds', 1) * of['steps']} steps of {of['prompts_per_step']} prompts × "
                        f"{of['group_size']} rollouts, {of.get('minibatches', 1)} update(s) each, lr {of['lr']:g}"
                        for kind, of in settings["grpo"].items())
    text = (f"`{settings['command']}`: tasks of the tiers {' and '.join(tiers)} in simulated AWS accounts, one command an "
            f"episode where a line says no more. {settings['model']} in {settings['dtype']}; SFT on "
            f"{settings['demonstrations']} reference solution of each template, of whose looks the best on other training "
            f"tasks is where GRPO begins, the templates chosen by a curriculum ({recipes}). Of each tier "
            f"{settings['held_out']} held-out instances, whose words occur nowhere in training, answered greedily, and "
            f"{settings['samples']} times at temperature 1. Minutes beside other work on the machine.\n\n")
    columns = ["policy", "seed", "both tiers", *tiers, f"gain over the best SFT (goal: {GOALS['aws']})", "sampled",
               "gain, sampled", "minutes"]
    text += table(columns, rows)
    if two:
        text += ("\n\nIn two turns the policy reads what its first command came to and may write a second one. The same on "
                 "more held-out instances, of which the sets share a few: the second set was measured halfway and after this "
                 "recipe and for no other, and the third was sampled after the hyperparameters were frozen.")
        for name in ("second set", "third set"):
            rows = [["best SFT, two turns", "", *solved(two[name], tiers), "", two[name]["sampled"], "", ""]]
            rows += [administered(kind, seed, run[name], run["after"][name], run, tiers) for kind, seed, run in twice]
            text += f"\n\nThe {name}:\n\n" + table(columns, rows)
    curve = best["curve"]
    text += "\n\nTasks to choose by that were solved after so many steps of SFT:\n\n"
    text += table(["steps", *curve], [["solved", *(f"{v:.1%}" for v in curve.values())]])
    return text + "\n\nMean reward of GRPO, first to last fifth of the steps:\n\n" + rewards(runs)


def administered(kind: str, seed: str, gain: dict, after: dict, run: dict, tiers: list[str]) -> list[str]:
    """A run's line of the table: `gain` and `after` of one set of held-out tasks."""
    more = points(gain["gain_sampled"]) if "gain_sampled" in gain else ""
    return [KINDS[kind], seed, *solved(after, tiers), gained(gain, GOALS["aws"]), after.get("sampled", ""), more,
            f"{run['seconds'] / 60:.1f}"]


def solved(measured: dict, tiers: list[str]) -> list[str]:
    return [measured["both"], *(measured[tier] for tier in tiers)]


def answered(measured: dict) -> list[str]:
    return [measured["sampled"], measured["pass_at"]["4"], measured["pass_at"]["8"]]


def real_model(results: Path) -> list[list[str]]:
    """The README's lines: what the real model did before and after GRPO, a value a seed."""
    rows = []
    found = record(f"smollm2_arithmetic_{RECIPES[0]}", results)
    if found and (runs := runs_of(found, "grpo")):
        starts = [run for key, run in found.items() if key.startswith("sft ") and key.count(" ") == 1]  # a longer SFT is none
        best = max(starts, key=lambda run: run["best"])
        rows.append(["SmolLM2-135M, sums and differences: best SFT → GRPO, greedy",
                     f"{rate(best['after']['greedy'])} → {seeds_of(runs, 'greedy')}"])
    found = record("smollm2_gym", results)
    if found and (runs := runs_of(found, "grpo")):
        rows.append([f"SmolLM2-135M, {found['chosen']} of reasoning-gym: as it is → GRPO",
                     f"{rate(found['base']['solved'])} → {seeds_of(runs, 'solved')}"])
    found = record("smollm2_aws", results)
    if found and (runs := runs_of(found, "short")):
        rows.append(["SmolLM2-135M, simulated AWS accounts, held-out tasks: best SFT → GRPO",
                     f"{rate(found['best']['both'])} → {seeds_of(runs, 'both')}"])
    if found and (runs := runs_of(found, "twice")):
        last = [(kind, seed, {"after": run["after"]["third set"]}) for kind, seed, run in runs]
        rows.append(["the same in episodes of two turns, on tasks sampled after the hyperparameters were frozen",
                     f"{rate(found['best twice']['third set']['both'])} → {seeds_of(last, 'both')}"])
    found = record("smollm2_style", results)
    if found and (runs := runs_of(found, "full")):
        rows.append(["SmolLM2-135M, one sentence by four rules: as it is → GRPO",
                     f"{rate(found['base']['all rules'])} → {seeds_of(runs, 'all rules')}"])
    return rows


def seeds_of(runs: list[tuple[str, str, dict]], what: str) -> str:
    """The rate of each seed."""
    return " / ".join(rate(run["after"][what]) for _, _, run in runs)
