"""The notebook series: executing it in batch through papermill, and the form in which git keeps it.

A front end writes the name and the version of its own kernel into every notebook that it opens. The server that `make lab`
starts calls `before_saving`, so that opening a notebook of the series changes nothing for git:

    jupyter lab --FileContentsManager.pre_save_hook=grpolab.lab.notebooks.before_saving
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grpolab.files import atomic_folder, atomic_write
from grpolab.runs.figures import fewer_colours
from grpolab.runs.run import repository

SERIES = 3  # times of the whole series that its record keeps, the last ones


def find(numbers: list[str]) -> list[Path]:
    """The notebooks with these numbers or names, "01" or "01_sft" (all for none), in the order given; raises ValueError for
    one that does not exist."""
    here, home = repository(), Path(__file__).parents[2]  # called from elsewhere: the copy that is installed
    folder = (here if (here / "notebooks").is_dir() else home) / "notebooks"
    series = {path.name[:2]: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    if not series:
        raise ValueError(f"there are no notebooks in {folder}: run this inside a copy of the grpolab repository")
    known = series | {path.stem: path for path in series.values()}
    wanted = [Path(n).name.removesuffix(".ipynb").zfill(2) for n in numbers]
    unknown = [n for n, name in zip(numbers, wanted) if name not in known]
    if unknown:
        raise ValueError(f"no notebook {', '.join(unknown)}; there are {', '.join(series)}")
    return [known[name] for name in wanted] or list(series.values())


def run_beside(numbers: list[str], parameters: dict, jobs: int, *, store: bool = False) -> int:
    """`run_series` with up to `jobs` notebooks at once, each in a process of its own with its share of the processors;
    returns the same exit status. 01 goes first where it is among them, since others start from its policy; the order of the
    lines is that in which they end. An interrupt ends all of them, and the same command goes on from their checkpoints."""
    if jobs < 1:
        raise ValueError(f"--jobs is a number of notebooks at once, at least 1; got {jobs}")
    paths = find(numbers)
    names, known = [path.stem for path in paths], {path.stem: _parameters(path) for path in paths}
    check_parameters(parameters, known)
    own = {name: [x for key, value in parameters.items() if key in known[name] for x in ("-p", key, str(value))]
           for name in names}
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    environment = {"OMP_NUM_THREADS": threads} | dict(os.environ)
    first, rest = [n for n in names if n.startswith("01")], [n for n in names if not n.startswith("01")]

    def one(name: str) -> int:
        command = [sys.executable, "-m", "grpolab", "run", name, *own[name], *["--store"] * store]
        print(f"{name:20} begins", flush=True)
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        output = done.stdout if done.stdout.strip() else done.stderr[-2000:]
        print(output.rstrip(), flush=True)
        return done.returncode

    began = time.monotonic()
    codes = [one(name) for name in first]
    with ThreadPoolExecutor(jobs) as pool:
        try:
            codes += pool.map(one, rest)
        except KeyboardInterrupt:  # those that run have it too
            pool.shutdown(cancel_futures=True)
            raise
    minutes = (time.monotonic() - began) / 60
    if store and not numbers and not any(codes):
        path = paths[0].parent.parent / "benchmarks" / "results" / "series.json"
        same = {"jobs": jobs, "processors": os.cpu_count(), "notebooks": len(codes)}
        before = json.loads(path.read_text()) if path.exists() else {}
        earlier = before["minutes"] if before.items() >= same.items() else []
        atomic_write(path, json.dumps({"minutes": [*earlier, round(minutes, 1)][-SERIES:]} | same, indent=1) + "\n")
    print(f"{len(codes)} notebooks, {len(codes) - codes.count(0)} failed, {minutes:.1f} min", flush=True)
    return 1 if any(codes) else 0


def _parameters(path: Path) -> dict:
    import papermill

    return papermill.inspect_notebook(str(path))


def check_parameters(parameters: dict, known: dict[str, dict]) -> None:
    """Refuse parameters that no notebook has, and values of another type; `known`: those of each notebook by its name."""
    strangers = set(parameters) - {name for names in known.values() for name in names}
    if strangers:
        names = "; ".join(f"{stem}: {', '.join(names)}" for stem, names in known.items())
        raise ValueError(f"no parameter {', '.join(sorted(strangers))}. Parameters are {names}")
    for names in known.values():
        refuse_types(parameters, names)


def run_series(numbers: list[str], parameters: dict, *, store: bool = False) -> int:
    """Execute notebooks, print one line each, return the exit status: 0 when every one ran and its gate passed, or passed as
    far as a shortened run is judged (such a run is never stored).

    The executed copy lies in runs/<notebook>/<model>/ (of another seed than 0 in its seed-<seed>/), also when it failed: it
    is then the log, and what the last run that passed left there is in last_good/. With `store` the copy also takes the
    place of its source, if it passed, its figures that of figures/<notebook>_<name>.png, and its minutes and its gate's
    values that of benchmarks/results/notebooks/<notebook>.json. Raises ValueError, before anything runs, for a notebook or
    parameter that does not exist and for a value of another type than its parameter's.
    """
    notebooks = find(numbers)
    known = {path: _parameters(path) for path in notebooks}
    check_parameters(parameters, {path.stem: names for path, names in known.items()})
    failed = 0
    for path in notebooks:
        own = {name: value for name, value in parameters.items() if name in known[path]}
        model, seed = (str(own.get(name, known[path].get(name, {}).get("default", default))).strip("'\"")
                       for name, default in (("model", "tiny"), ("seed", "0")))
        home = path.parent.parent
        folders = run_folders(home, path.stem, model, seed)
        folder = folders[0]
        folder.mkdir(parents=True, exist_ok=True)
        good = keep_good(folders, path.name)
        for stale in folders:
            (stale / "results.json").unlink(missing_ok=True)
        if store:  # what is stored is one whole run, never the end of an interrupted one
            for checkpoint in folder.rglob("checkpoint-*"):
                shutil.rmtree(checkpoint)
        output = folder / path.name
        began = time.monotonic()
        error = _execute(path, output, own)
        folder = next((f for f in folders if (f / "results.json").exists()), folder)
        verdict = _verdict(folder, error)
        failed += verdict not in ("gate passed", "shortened")
        minutes = (time.monotonic() - began) / 60
        print(f"{path.stem:20} {verdict:12} {minutes:5.1f} min   {output.relative_to(home)}", flush=True)
        if good and verdict == "gate passed":
            shutil.rmtree(good)
        elif good:
            print(f"    the last run that passed: {good.relative_to(home)}", flush=True)
        if error:
            print(f"    {error}", flush=True)
        elif verdict == "shortened":
            kept = "; not stored" if store else ""
            print(f"    identities passed; claims not judged: {_results(folder)['shortened']}{kept}", flush=True)
        elif store and verdict == "gate passed":
            atomic_write(path, written(clean(json.loads(output.read_text()))))
            for figure in (folder / "figures").glob("*.png"):
                atomic_write(home / "figures" / f"{path.stem}_{figure.name}", figure.read_bytes())
            _record(home / "benchmarks" / "results" / "notebooks" / f"{path.stem}.json", folder, minutes, own)
    return 1 if failed else 0


def refuse_types(parameters: dict, known: dict) -> None:
    """Raise ValueError for a value that is not of its parameter's annotated type, before anything runs."""
    for name, value in parameters.items():
        wanted = known.get(name, {}).get("inferred_type_name")
        given = type(value).__name__
        if wanted in ("bool", "int", "float", "str") and given != wanted and (given, wanted) != ("int", "float"):
            example = {"bool": "True or False", "int": "3", "float": "1e-4", "str": "tiny"}[wanted]
            raise ValueError(f"parameter {name} must be {wanted}, such as {example}; got {value!r}, which is {given}")


def keep_good(folders: list[Path], notebook: str) -> Path | None:
    """Put the gate's values, the executed notebook and the figures of the last whole run that passed aside, into last_good/
    of the first folder; that folder, or None where no run has passed."""
    good = folders[0] / "last_good"
    for folder in folders:
        results = _results(folder)
        if results.get("passed") and not results.get("shortened"):
            with atomic_folder(good) as partial:
                for left in (folder / "results.json", folders[0] / notebook):
                    if left.exists():
                        shutil.copy2(left, partial)
                if (folder / "figures").is_dir():
                    shutil.copytree(folder / "figures", partial / "figures")
            break
    return good if good.exists() else None


def run_folders(home: Path, notebook: str, model: str = "tiny", seed: str | int = 0) -> list[Path]:
    """Where a notebook may leave what it did: the folder of `Run(notebook, model, seed=seed)`, of `Run(notebook, model)`."""
    folder = home / "runs" / notebook / model.replace("/", "--")
    return [folder / f"seed-{seed}", folder] if str(seed) != "0" else [folder]


def _record(path: Path, folder: Path, minutes: float, parameters: dict) -> None:
    """What `make results` reads: the gate's results.json with the minutes and the number of threads (None: all)."""
    threads = os.environ.get("OMP_NUM_THREADS")
    content = {"minutes": round(minutes, 1), "threads": threads and int(threads), "parameters": parameters}
    atomic_write(path, json.dumps(content | json.loads((folder / "results.json").read_text()), indent=1) + "\n")


def _execute(path: Path, output: Path, parameters: dict) -> str | None:
    """Run one notebook; what went wrong as one line, or None."""
    import papermill

    try:
        papermill.execute_notebook(
            str(path), str(output), parameters, kernel_name="python3", cwd=str(path.parent), progress_bar={"desc": path.stem},
            extra_arguments=["--log-level=ERROR"],  # ipykernel warns of unencrypted TCP, which does not leave the machine
        )
    except papermill.PapermillExecutionError as error:
        return f"{error.ename}: {error.evalue}".splitlines()[0]
    return None


def _results(folder: Path) -> dict:
    """What the gate wrote; nothing where it did not come that far."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _verdict(folder: Path, error: str | None) -> str:
    results = _results(folder)
    if not results or (results["passed"] and error):
        return "failed" if error else "no gate"
    return "gate FAILED" if not results["passed"] else "shortened" if results.get("shortened") else "gate passed"


def clean(notebook: dict) -> dict:
    """An executed notebook without what differs between machines and runs of the same code: papermill's times and paths,
    the kernel's display name and Python version; and without widgets, which need a kernel: their static page stays. Pictures
    in 64 colours."""
    for key in ("papermill", "widgets"):
        tidy(notebook)["metadata"].pop(key, None)
    for cell in notebook["cells"]:
        for key in ("papermill", "execution", "ExecuteTime"):
            cell["metadata"].pop(key, None)
        if cell["metadata"].get("tags") == []:
            del cell["metadata"]["tags"]
        if cell["cell_type"] == "code":
            cell["outputs"] = [o for o in cell["outputs"] if not (o["output_type"] == "stream" and o["name"] == "stderr")]
            for output in cell["outputs"]:
                data = output.get("data", {})
                data.pop("application/vnd.jupyter.widget-view+json", None)
                if "image/png" in data:
                    image = fewer_colours(base64.b64decode("".join(data["image/png"])))
                    data["image/png"] = base64.b64encode(image).decode() + "\n"
    return notebook


def tidy(notebook: dict) -> dict:
    """The notebook with the plain kernel's name and no version of Python; changed in place."""
    notebook["metadata"]["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook["metadata"]["language_info"] = {"name": "python"}
    return notebook


def written(notebook: dict) -> str:
    """The text of a notebook as Jupyter writes it: sorted keys, one space a level, an end of line at its end."""
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def before_saving(*, model: dict, path: str = "", **_) -> None:
    """Jupyter's hook: tidy what is saved, if it is a notebook of the series with a kernel of Python's usual name."""
    name = path.split("/")[-1]
    if model.get("type") != "notebook" or not re.fullmatch(r"\d\d_\w+\.ipynb", name):
        return
    if model["content"]["metadata"].get("kernelspec", {}).get("name") == "python3":
        tidy(model["content"])
