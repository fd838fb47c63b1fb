"""Static checks of every notebook (they are executed by nbval), and the runner on small notebooks."""

import ast
import json
import re
from pathlib import Path

import badges
import nbformat
import pytest
from jupyter_hook import before_saving

from grpolab.__main__ import main
from grpolab.cli.run import literal
from grpolab.lab import notebooks
from grpolab.runs.run import repository

SERIES = sorted((repository() / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=SERIES, ids=[p.stem for p in SERIES])
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def tagged(notebook, tag):
    return [c for c in notebook.cells if tag in c.metadata.get("tags", [])]


def code(notebook):
    return [c for c in notebook.cells if c.cell_type == "code"]


def test_it_is_valid_light_and_stored_executed_in_order_without_errors(path, notebook):
    nbformat.validate(notebook)
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem) and path.stat().st_size < 500_000
    assert notebook.metadata.kernelspec == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert "papermill" not in notebook.metadata
    cells = [c for c in code(notebook) if c.source.strip()]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    outputs = [o for c in cells for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error" or (o.output_type == "stream" and o.name == "stderr")]
    assert [o for o in outputs if "image/png" in o.get("data", {})]


def test_the_stored_gate_passed(notebook):
    (gate,) = tagged(notebook, "gate")
    assert "passed" in json.dumps(gate.outputs) and "FAILED" not in json.dumps(gate.outputs)
    assert gate.metadata["jupyter"] == {"source_hidden": True} and gate.metadata["cellView"] == "form"  # folded
    exercises = tagged(notebook, "check") + tagged(notebook, "exercise")
    later = [c for c in code(notebook)[code(notebook).index(gate) + 1 :] if c not in exercises]
    assert all("policy.save" in c.source or "run." in c.source for c in later) and len(later) <= 1  # at most what saves


def test_one_parameters_cell_of_literals(notebook):
    (cell,) = tagged(notebook, "parameters")
    for statement in ast.parse(cell.source).body:
        assert isinstance(statement, ast.AnnAssign)
        ast.literal_eval(statement.value)
    assert all("#@param" in line for line in cell.source.splitlines())


def test_badge_and_setup_cell_follow_the_address_in_pyproject(path):
    assert len(badges.wanted(json.loads(path.read_text()), path.name)) == 2 and not badges.differing(path), "run: make badges"


def test_title_and_badge_name_the_file(path, notebook):
    first = notebook.cells[0].source
    assert f"/blob/main/notebooks/{path.name})" in first
    number, words = path.stem.split("_", 1)
    (title,) = re.findall(r"^# (.*)$", first, flags=re.M)
    assert title.lower().replace(" ", "_").replace("-", "_") == f"{number}_·_{words}"


def test_cells_are_short(notebook):
    lengths = sorted(len(c.source.splitlines()) for c in code(notebook))
    assert lengths[-1] <= 40
    assert lengths[len(lengths) // 2] <= 15


def test_nothing_belongs_to_one_machine(notebook):
    text = json.dumps(notebook)
    assert not re.search(r"(?<![\w.:/<])/(home|root|Users|tmp|work|mnt|content)/", text)
    source = "\n".join(c.source for c in code(notebook))
    assert "asyncio.run" not in source and "nest_asyncio" not in source


def test_links_lead_somewhere(path, notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for link in re.findall(r"\]\((?!http)([^)#]+)\)", cell.source):
                assert (path.parent / link).exists(), link


def test_opening_it_changes_nothing_for_git(path):
    """A front end adds the name and version of its kernel and saves; what is then on disk is what was there."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.kernelspec.display_name = "Python 3 (ipykernel)"
    notebook.metadata.language_info = {"name": "python", "version": "3.99", "codemirror_mode": {"name": "ipython"}}
    model = {"type": "notebook", "content": notebook}
    before_saving(model=model, path=f"notebooks/{path.name}", contents_manager=None)
    assert nbformat.writes(model["content"]) + "\n" == path.read_text()


def test_make_lab_starts_its_server_with_the_hook():
    hook = f"{before_saving.__module__}.{before_saving.__name__}"
    assert f"--FileContentsManager.pre_save_hook={hook}" in (repository() / "Makefile").read_text()


# --- quick ------------------------------------------------------------------------------------------------------------

QUICK = ("03_dpo", "04_grpo", "05_reward_model", "07_multi_turn_grpo", "08_guess", "09_longer_answers",
         "13_rejection_sampling", "14_tools", "15_distillation", "16_async_grpo", "17_critic")


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", QUICK)
def test_quick_leaves_out_a_part_of_the_run_and_says_so(name, quick, tmp_path, monkeypatch):
    """The cells up to the one that expands the parameters."""
    (path,) = [path for path in SERIES if path.stem == name]
    notebook, namespace = nbformat.read(path, as_version=4), {}
    monkeypatch.chdir(tmp_path)
    (gate,) = tagged(notebook, "gate")
    assert "shortened=left_out" in gate.source
    for cell in code(notebook)[1:]:
        exec(cell.source, namespace)  # noqa: S102  (the repository's own notebook)
        if cell in tagged(notebook, "parameters"):
            namespace["quick"] = quick
        if "left_out" in namespace:
            break
    done = [(int(a.replace(",", "")), int(b.replace(",", "")))
            for a, b in re.findall(r"([0-9,]+) of ([0-9,]+)", namespace["left_out"])]
    assert bool(done) == quick and all(a <= b / 3 for a, b in done)


# --- the runner -------------------------------------------------------------------------------------------------------


def small(source: str) -> dict:
    parameters = nbformat.v4.new_code_cell('model: str = "tiny"\nn: int = 1', metadata={"tags": ["parameters"]})
    notebook = nbformat.v4.new_notebook(cells=[parameters, nbformat.v4.new_code_cell(source)])
    notebook.metadata.kernelspec = {"display_name": "x", "language": "python", "name": "python3"}
    return notebook


GATE = """from grpolab import gate
from grpolab.runs.run import Run
with gate("x", Run("{name}", model).folder) as g:
    g.equal("n", n, 1)"""


@pytest.fixture
def series(tmp_path, monkeypatch):
    folder = tmp_path / "a folder with spaces" / "notebooks"
    folder.mkdir(parents=True)
    (folder.parent / "pyproject.toml").touch()
    nbformat.write(small(GATE.format(name="01_fine")), folder / "01_fine.ipynb")
    nbformat.write(small(GATE.format(name="02_other")), folder / "02_other.ipynb")
    monkeypatch.chdir(folder.parent)
    return folder


def test_the_series_runs_and_reports_and_changes_no_file_that_git_keeps(series, capsys):
    before = {path: path.read_bytes() for path in series.parent.rglob("*") if path.is_file()}
    assert notebooks.run_series([], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1::2]] == [["01_fine", "gate", "passed"], ["02_other", "gate", "passed"]]
    runs = series.parent / "runs"
    assert (runs / "01_fine" / "tiny" / "01_fine.ipynb").exists()
    assert before == {path: path.read_bytes() for path in series.parent.rglob("*")
                      if path.is_file() and not path.is_relative_to(runs)}


@pytest.mark.full
def test_a_failing_gate_and_a_notebook_that_breaks_fail_the_command(series, capsys):
    """The executed copy is the log; the results of an earlier run do not pass one that breaks before its gate."""
    assert notebooks.run_series(["1"], {}) == 0
    nbformat.write(small("1 / 0"), series / "01_fine.ipynb")
    assert main(["run", "1", "2", "-p", "n", "2"]) == 1
    out = capsys.readouterr().out
    assert "ZeroDivisionError" in out and "gate FAILED" in out
    assert "GateError" in (series.parent / "runs" / "02_other" / "tiny" / "02_other.ipynb").read_text()


def test_store_puts_the_executed_notebook_in_place(series):
    source = "import sys; print('seen', file=sys.stderr)\n" + GATE.format(name="01_fine")
    nbformat.write(small(source), series / "01_fine.ipynb")
    assert notebooks.run_series(["01"], {}, store=True) == 0
    stored = nbformat.read(series / "01_fine.ipynb", as_version=4)
    assert [c.execution_count for c in stored.cells] == [1, 2]
    assert "papermill" not in json.dumps(stored) and not stored.cells[1].outputs[0].get("name") == "stderr"
    record = json.loads((series.parent / "benchmarks" / "results" / "notebooks" / "01_fine.json").read_text())
    assert record["passed"] and record["checks"][0]["name"] == "n" and "threads" in record
    assert not (series.parent / "benchmarks" / "results" / "series.json").exists()  # that of the whole series alone
    assert notebooks.run_series([], {}, store=True) == 0
    whole = json.loads((series.parent / "benchmarks" / "results" / "series.json").read_text())
    assert list(whole["notebooks"]) == ["01_fine", "02_other"] and all(m >= 0 for m in whole["notebooks"].values())


def test_store_replaces_no_edit_and_removes_no_checkpoint_of_another_run(series, capsys):
    source = f"open({str(series / '01_fine.ipynb')!r}, 'a').write(' ')\n" + GATE.format(name="01_fine")
    nbformat.write(small(source), series / "01_fine.ipynb")
    run = series.parent / "runs" / "01_fine" / "tiny"
    for place in ("seed-1", "child"):
        (run / place / "checkpoint-00000001").mkdir(parents=True)
    before = (series / "01_fine.ipynb").read_text()
    assert notebooks.run_series(["01"], {}, store=True) == 1
    assert "the notebook was edited while it ran" in capsys.readouterr().out
    assert (series / "01_fine.ipynb").read_text() == before + " "
    assert [path.parent.name for path in run.rglob("checkpoint-*")] == ["seed-1"]


@pytest.mark.full
def test_a_shortened_run_passes_and_is_not_stored(series, capsys):
    source = GATE.format(name="01_fine").replace(".folder)", ".folder, shortened='2 of 9 steps')")
    nbformat.write(small(source), series / "01_fine.ipynb")
    before = (series / "01_fine.ipynb").read_text()
    assert notebooks.run_series(["01"], {}, store=True) == 0
    out = capsys.readouterr().out
    assert "shortened" in out.split() and "identities passed; claims not judged: 2 of 9 steps" in out
    assert (series / "01_fine.ipynb").read_text() == before


@pytest.mark.full
@pytest.mark.slow
def test_notebooks_run_beside_each_other(series, capfd, monkeypatch):
    """Two at a time; one that breaks fails the command."""
    monkeypatch.setenv("PYTHONPATH", str(Path(notebooks.__file__).parents[2]))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    nbformat.write(small("raise ValueError('broken')"), series / "03_broken.ipynb")
    assert main(["run", "--jobs", "2"]) == 1
    out = capfd.readouterr().out
    assert "03_broken            failed" in out and "ValueError: broken" in out and "3 notebooks, 1 failed" in out
    assert main(["run", "--jobs", "0"]) == 1 and "--jobs is a number" in capfd.readouterr().err
    assert main(["run", "--jobs", "2", "-p", "stpes", "3"]) == 1 and "no parameter stpes" in capfd.readouterr().err


def test_what_needs_the_first_policy_waits_for_it_and_the_longest_goes_next(series):
    record = series.parent / "benchmarks" / "results" / "series.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"notebooks": {"03_needs": 2.0, "04_long": 9.0, "05_free": 3.0}}))
    for stem, source in (("03_needs", 'Run("01_sft", model)'), ("04_long", "1"), ("05_free", "1")):
        nbformat.write(small(source), series / f"{stem}.ipynb")
    def in_turn(*asked, jobs):
        return tuple([path.stem[:2] for path in part] for part in notebooks.in_turn(notebooks.find(asked), jobs))
    assert in_turn(jobs=2) == (["01", "02"], ["04", "05", "03"])
    assert in_turn(jobs=1) == (["01"], ["02", "03", "04", "05"])
    assert in_turn("01", "03", jobs=2) == (["01"], ["03"])
    assert in_turn("05", "04", jobs=2) == ([], ["04", "05"])


def test_a_notebook_is_named_by_number_or_by_name(series, capsys):
    wanted = ["01_fine.ipynb", "02_other.ipynb"]
    for names in (["1", "2"], ["01_fine", "02_other"], ["notebooks/01_fine.ipynb", "02_other.ipynb"]):
        assert [p.name for p in notebooks.find(names)] == wanted
    assert main(["run", "01_other"]) == 1 and "no notebook 01_other; there are 01, 02" in capsys.readouterr().err
    assert main(["run", "-p", "stpes", "3"]) == 1 and "no parameter stpes" in capsys.readouterr().err


def test_notebooks_are_found_in_a_clone_below_or_in_the_editable_copy(series, tmp_path, monkeypatch, capsys):
    """Colab clones the repository into the working directory, and installs it elsewhere."""
    monkeypatch.chdir(tmp_path)
    assert [p.name for p in notebooks.find(["01"])] == ["01_sft.ipynb"]
    monkeypatch.setattr(notebooks, "__file__", str(tmp_path / "site-packages" / "grpolab" / "lab" / "notebooks.py"))
    assert main(["run"]) == 1 and "inside a copy of the grpolab repository" in capsys.readouterr().err
    series.parent.rename(tmp_path / "grpolab")
    assert [p.name for p in notebooks.find(["01"])] == ["01_fine.ipynb"]


LITERALS = [("3", 3), ("1e-4", 1e-4), ("True", True), ("smollm2-135m", "smollm2-135m"), ("a/b", "a/b")]


@pytest.mark.parametrize(("text", "value"), LITERALS)
def test_parameters_are_read_as_literals(text, value):
    assert literal(text) == value


def test_the_conda_environment_agrees_with_the_lock():
    yaml = pytest.importorskip("yaml")
    locked = dict(line.split("==") for line in (repository() / "requirements.lock").read_text().splitlines() if "==" in line)
    names = {k.lower().replace("_", "-"): v for k, v in locked.items()}
    content = yaml.safe_load((repository() / "environment.yml").read_text())
    (pip,) = [d["pip"] for d in content["dependencies"] if isinstance(d, dict)]
    pinned = dict(p.split("==") for p in pip if "==" in p)
    assert {k: names[k.lower().replace("_", "-")] for k in pinned} == pinned
    import tomllib

    project = tomllib.loads((repository() / "pyproject.toml").read_text())["project"]
    apart = {"interop", "lab", "gym", "sinks", "mcp", "verifiers", "constrained"}
    extras = [extra for name, extra in project["optional-dependencies"].items() if name not in apart]
    wanted = sum(extras, project["dependencies"])
    direct = {re.split(r"[><=\[; ]", d)[0].lower().replace("_", "-") for d in wanted}
    assert direct == {k.lower().replace("_", "-") for k in pinned}
