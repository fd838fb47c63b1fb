"""The notebook series: executing it in batch through papermill, and the form in which git keeps it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from grpolab.files import atomic_write, fewer_colours
from grpolab.runs.run import repository


def _home(folder: str) -> Path:
    """This folder of the repository."""
    here = repository()
    places = [here, here / "grpolab", Path(__file__).parents[2]]  # the second is Colab's clone, the third an editable copy
    return next((place / folder for place in places if (place / folder).is_dir()), here / folder)


def recorded(name: str) -> dict:
    """What a script of benchmarks/ has measured: the content of benchmarks/results/<name>.json."""
    return json.loads((_home("benchmarks/results") / f"{name}.json").read_text())


def find(numbers: list[str]) -> list[Path]:
    """The notebooks with these numbers or names, "01" or "01_sft" (all for none), in the order given; raises ValueError for
    one that does not exist."""
    folder = _home("notebooks")
    series = {path.name[:2]: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    if not series:
        raise ValueError(f"there are no notebooks in {folder}: run this inside a copy of the grpolab repository")
    known = series | {path.stem: path for path in series.values()}
    names = {number: Path(number).name.removesuffix(".ipynb").zfill(2) for number in numbers}
    if unknown := [number for number, name in names.items() if name not in known]:
        raise ValueError(f"no notebook {', '.join(unknown)}; there are {', '.join(series)}")
    return [known[name] for name in names.values()] or list(series.values())


def run_series(numbers: list[str], parameters: dict, *, jobs: int = 1, store: bool = False) -> int:
    """Execute notebooks, print one line each, return the exit status: 0 when every one ran and its gate passed, or passed as
    far as a shortened run is judged (such a run is never stored).

    The executed copy lies in runs/<notebook>/<model>/ (of another seed than 0 in its seed-<seed>/), also when it failed: it
    is then the log. The notebook itself stays as it is. With `store` the copy takes its place, if it passed, its figures
    that of figures/<notebook>_<name>.png, its gate values that of benchmarks/results/notebooks/<notebook>.json; the minutes of
    a whole series that passed go to benchmarks/results/series.json.

    Of several `jobs`, each has its share of the processors and a process of its own, in the order of `in_turn`. An interrupt
    ends all of them, and the same command goes on from their checkpoints.
    Raises ValueError, before anything runs, for a notebook or parameter that does not exist."""
    if jobs < 1:
        raise ValueError(f"--jobs is a number of notebooks at once, at least 1; got {jobs}")
    paths = find(numbers)
    known = {path.stem: defaults(path) for path in paths}
    if strangers := set(parameters) - {name for names in known.values() for name in names}:
        names = "; ".join(f"{stem}: {', '.join(names)}" for stem, names in known.items())
        raise ValueError(f"no parameter {', '.join(sorted(strangers))}. Parameters are {names}")
    run, began = partial(run_notebook, parameters=parameters, store=store), time.monotonic()
    if jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    first, rest = in_turn(paths, jobs)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        each = pool.map if pool else map
        done = [*each(run, first), *each(run, rest)]
    took, failed = (time.monotonic() - began) / 60, [passed for passed, _ in done].count(False)
    print(f"{len(done)} notebooks, {failed} failed, {took:.1f} min", flush=True)
    if store and not numbers and not failed:
        each_took = {path.stem: round(minutes, 1) for path, (_, minutes) in zip([*first, *rest], done)}
        write_record(series_record(paths[0]), {"minutes": round(took, 1), "jobs": jobs, "processors": os.cpu_count(),
                                               "notebooks": dict(sorted(each_took.items()))})
    return 1 if failed else 0


def series_record(notebook: Path) -> Path:
    """Where the minutes of the last stored series are kept."""
    return notebook.parents[1] / "benchmarks" / "results" / "series.json"


def in_turn(paths: list[Path], jobs: int) -> tuple[list[Path], list[Path]]:
    """Which notebooks go first, and which follow when these have ended: 01, since others start from its policy, and beside it
    such as do not, one for each further job; then, where there are several jobs, the longest of the last record first."""
    first = [path for path in paths if path.stem.startswith("01")]
    if first:
        first += [path for path in paths if r'Run(\"01_sft\"' not in path.read_text() and path not in first][: jobs - 1]
    rest = [path for path in paths if path not in first]

    record = series_record(paths[0])
    minutes = json.loads(record.read_text())["notebooks"] if record.exists() else {}
    return first, sorted(rest, key=lambda path: -minutes.get(path.stem, 0)) if jobs > 1 else rest


def defaults(path: Path) -> dict[str, str]:
    """Name -> default of each parameter of a notebook, as a text."""
    import papermill

    return {name: about["default"].strip("'\"") for name, about in papermill.inspect_notebook(str(path)).items()}


def run_notebook(path: Path, parameters: dict, *, store: bool) -> tuple[bool, float]:
    """Execute one notebook with those of the parameters that it has; whether it passed, and the minutes that it took."""
    print(f"{path.stem:20} begins\n", end="", flush=True)  # one write, since two may begin at once
    known, home = defaults(path), path.parent.parent
    own = {name: value for name, value in parameters.items() if name in known}
    values = {"model": "tiny", "seed": "0"} | known | own
    folder = home / "runs" / path.stem / str(values["model"]).replace("/", "--")
    own_folder = folder if str(values["seed"]) == "0" else folder / f"seed-{values['seed']}"
    output = own_folder / path.name
    own_folder.mkdir(parents=True, exist_ok=True)
    if store:  # what is stored is one whole run, never the end of an interrupted one
        for checkpoint in own_folder.rglob("checkpoint-*"):
            if not any(part.startswith("seed-") for part in checkpoint.relative_to(own_folder).parts):  # another run's
                shutil.rmtree(checkpoint)
    began, source = time.time(), path.read_bytes()
    error = _execute(path, output, own)
    minutes = (time.time() - began) / 60
    # Some notebooks have no folder for each seed. One that runs beside this one with another model is none of ours.
    places = (own_folder / "results.json", folder / "results.json")
    written = next((f for f in places if f.is_file() and f.stat().st_mtime >= began), None)
    results = json.loads(written.read_text()) if written else {}
    verdict, note = "gate passed", f"\n    {error}" if error else ""
    if not results or results["passed"] and error:
        verdict = "failed" if error else "no gate"
    elif not results["passed"]:
        verdict = "gate FAILED"
    elif results.get("shortened"):
        verdict, note = "shortened", f"\n    identities passed; claims not judged: {results['shortened']}"
    if store and verdict == "gate passed" and path.read_bytes() != source:
        verdict, note = "not stored", "\n    the notebook was edited while it ran"
    print(f"{path.stem:20} {verdict:12} {minutes:5.1f} min   {output.relative_to(home)}{note}\n", end="", flush=True)
    if store and verdict == "gate passed":
        executed = clean(json.loads(output.read_text()))
        atomic_write(path, json.dumps(executed, indent=1, sort_keys=True, ensure_ascii=False) + "\n")  # as Jupyter writes it
        for figure in (written.parent / "figures").glob("*.png"):
            atomic_write(home / "figures" / f"{path.stem}_{figure.name}", figure.read_bytes())
        threads = os.environ.get("OMP_NUM_THREADS")
        write_record(home / "benchmarks" / "results" / "notebooks" / f"{path.stem}.json", {
            "threads": threads and int(threads), "parameters": own} | results)
    return verdict in ("gate passed", "shortened"), minutes


def write_record(path: Path, content: dict) -> None:
    """What `make results` reads."""
    atomic_write(path, json.dumps(content, indent=1) + "\n")


def _execute(path: Path, output: Path, parameters: dict) -> str | None:
    """Run one notebook; the error that ended it as one line, or None."""
    import papermill

    try:
        papermill.execute_notebook(
            str(path), str(output), parameters, kernel_name="python3", cwd=str(path.parent), progress_bar=False,
            extra_arguments=["--log-level=ERROR"],  # ipykernel warns of unencrypted TCP, which does not leave the machine
        )
    except papermill.PapermillExecutionError as error:
        return f"{error.ename}: {error.evalue}".splitlines()[0]
    return None


def clean(notebook: dict) -> dict:
    """An executed notebook without what differs between machines and runs of the same code: papermill's times and paths,
    the kernel's display name and Python version, what went to stderr. Pictures in few colours."""
    tidy(notebook)["metadata"].pop("papermill", None)
    for cell in notebook["cells"]:
        for key in ("papermill", "execution", "ExecuteTime"):
            cell["metadata"].pop(key, None)
        if cell["metadata"].get("tags") == []:
            del cell["metadata"]["tags"]
        if cell["cell_type"] == "code":
            cell["outputs"] = [o for o in cell["outputs"] if not (o["output_type"] == "stream" and o["name"] == "stderr")]
            for output in cell["outputs"]:
                data = output.get("data", {})
                if "image/png" in data:
                    image = fewer_colours(base64.b64decode("".join(data["image/png"])))
                    data["image/png"] = base64.b64encode(image).decode() + "\n"
    return notebook


def tidy(notebook: dict) -> dict:
    """The notebook with the plain kernel's name and no version of Python; changed in place."""
    notebook["metadata"]["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook["metadata"]["language_info"] = {"name": "python"}
    return notebook
