"""What pip installs: every room of the package and the embedded model, usable from any folder."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import badges
import nbformat
import pytest
from nbclient import NotebookClient
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from grpolab.runs.run import repository

ROOT = repository()
NOISE = shutil.ignore_patterns("__pycache__", "*.partial")
LOAD = """
import grpolab.files, grpolab
from grpolab import GrpoPool, MultiTurnEnvPool, Sampler, SamplingParams, gate, load_policy, losses
assert {target!r} in grpolab.__file__ and {target!r} in str(grpolab.files.DATA), (grpolab.__file__, grpolab.files.DATA)
from grpolab.evaluate import fixed_prompts
policy = load_policy("tiny", device="cpu")
print(policy.origin)
with Sampler(policy) as sampler:
    prompt = policy.tokenizer.encode("1 + 1 =", add_special_tokens=False)
    print(policy.decode(sampler.sample_sync([prompt], params=SamplingParams(greedy=True, max_new_tokens=2))[0][0].tokens))
print(len(fixed_prompts()), "prompts")
"""


BACKEND = "from setuptools import build_meta; build_meta.build_sdist({out!r})"


def build(source, out):
    """A wheel of a folder or an sdist."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "-w", out, source]
    subprocess.run(command, check=True, timeout=300)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy, so that no build/ of an earlier state is taken along."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("grpolab", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=NOISE)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build(source, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_every_module_and_the_embedded_model(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(p.relative_to(ROOT)) for kind in ("*.py", "*.html") for p in (ROOT / "grpolab").rglob(kind)}
    data = {f"grpolab/data/tiny/{p.name}" for p in (ROOT / "data" / "tiny").iterdir()} | {"grpolab/data/fixed_prompts.jsonl"}
    data |= {f"grpolab/data/{folder}/{p.name}" for folder in ("aws", "english") for p in (ROOT / "data" / folder).iterdir()}
    assert len(data) == 19 and modules | data | {"grpolab/py.typed"} <= names


@pytest.mark.full
def test_the_source_distribution_makes_the_same_wheel(source, wheel, tmp_path):
    pytest.importorskip("setuptools")
    copy = shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    subprocess.run([sys.executable, "-c", BACKEND.format(out=str(tmp_path))], cwd=copy, check=True, timeout=300,
                   capture_output=True)
    (made,) = tmp_path.glob("*.tar.gz")
    assert any(name.endswith("data/tiny/model.safetensors") for name in tarfile.open(made).getnames())
    (tmp_path / "out").mkdir()
    again = build(made, tmp_path / "out")
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_uv_takes_the_torch_that_pip_locks():
    (constraint,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    assert constraint in (ROOT / "requirements.lock").read_text().split()


def test_an_installed_copy_works_from_another_folder(wheel, tmp_path):
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target",
                    target, wheel], check=True, timeout=300)
    done = subprocess.run([sys.executable, "-c", LOAD.format(target=str(target))], cwd=elsewhere, capture_output=True,
                          text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(target)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("tiny (") and "prompts" in done.stdout
    assert list(elsewhere.iterdir()) == []


# --- Colab ------------------------------------------------------------------------------------------------------------

# What Colab's GPU image brought in June 2026 (googlecolab/backend-info, pip-freeze.gpu.txt), of what this package asks for.
COLAB = {"torch": "2.11.0", "transformers": "5.9.0", "safetensors": "0.7.0", "numpy": "2.0.2", "websockets": "15.0.1",
         "ipykernel": "6.17.1", "ipywidgets": "7.7.1", "matplotlib": "3.10.0", "pandas": "2.2.2",
         "tqdm": "4.67.3"}
KERNEL = ("ipykernel", "ipywidgets")


def test_what_colab_brings_is_admitted():
    """So pip replaces none of it; papermill, tyro, pydantic and nest-asyncio2 are small, and pyyaml comes with transformers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    assert set(wanted) - set(COLAB) == {"papermill", "tyro", "pydantic", "nest-asyncio2", "pyyaml"}
    refused = {name: str(wanted[name]) for name, version in COLAB.items() if not wanted[name].contains(version)}
    assert not refused and Version("3.12") in SpecifierSet(project["requires-python"])


@pytest.fixture(scope="module")
def colab(tmp_path_factory):
    """An environment with the packages of this one but without grpolab; to pip, kernel and widgets are as old as Colab's."""
    home = tmp_path_factory.mktemp("colab")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=120)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site, ours = home / "lib" / version / "site-packages", Path(sysconfig.get_paths()["purelib"])
    for entry in ours.iterdir():
        name = entry.name.lower()
        if "grpolab" not in name and name != "google" and not name.startswith(KERNEL):
            (site / entry.name).symlink_to(entry)
    for name in KERNEL:
        (site / name).symlink_to(ours / name)
        info = site / f"{name}-{COLAB[name]}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {COLAB[name]}\n")
        (info / "INSTALLER").write_text("pip\n")
        (info / "RECORD").write_text("")
    if (ours / "ipykernel_launcher.py").exists():
        (site / "ipykernel_launcher.py").symlink_to(ours / "ipykernel_launcher.py")
    (site / "google" / "colab").mkdir(parents=True)  # a folder of its own: one of this environment would be written into
    (site / "google" / "colab" / "__init__.py").touch()
    pip = home / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{home}/bin/python" -m pip "$@"\n')
    pip.chmod(0o755)
    return home


@pytest.fixture
def content(colab, tmp_path, monkeypatch):
    """A folder as Colab's /content: the repository's address leads to this one, packages come from the environment alone,
    and the kernel `colab` is the environment's."""
    kernel = tmp_path / "jupyter" / "kernels" / "colab"
    kernel.mkdir(parents=True)
    argv = [str(colab / "bin" / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Colab", "language": "python"}))
    # What is committed or staged or neither, but not ignored: the clone is of the tree as it stands.
    source = tmp_path / "source"
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.splitlines():
        if name.startswith(("grpolab/", "data/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, source / name)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@localhost"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], cwd=source, check=True, timeout=60)
    settings = {"JUPYTER_PATH": tmp_path / "jupyter", "PATH": f"{colab / 'bin'}{os.pathsep}{os.environ['PATH']}",
                "GIT_CONFIG_COUNT": 1, "GIT_CONFIG_KEY_0": f"url.file://{source}.insteadOf", "GIT_CONFIG_VALUE_0":
                badges.repository(), "PIP_NO_INDEX": 1, "PIP_NO_BUILD_ISOLATION": 0, "PIP_DISABLE_PIP_VERSION_CHECK": 1,
                "PIP_FIND_LINKS": ""}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "content"
    folder.mkdir()
    return folder


USE = """
from importlib.metadata import version
import grpolab
from grpolab import load_policy
from grpolab.evaluate import fixed_prompts
from grpolab.runs.run import Run
print(load_policy("tiny", device="cpu").name, len(fixed_prompts()) > 9, Run("01_sft", "tiny").folder)
print(version("ipykernel"), version("ipywidgets"), "site-packages" in grpolab.__file__)
"""


@pytest.mark.full
def test_the_setup_cell_installs_on_colab_twice(content):
    """Run, and run again, in one kernel from another folder: the second finds the clone. Torch, kernel and widgets stay."""
    cells = ["import google.colab", badges.setup("smollm2"), USE, badges.setup("smollm2"), USE]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, kernel_name="colab", resources={"metadata": {"path": str(content)}}).execute()
    said = ["".join(o.get("text", "") for o in cell.outputs if o["output_type"] == "stream") for cell in notebook.cells]
    for text in (said[2], said[4]):
        assert f"tiny True {content / 'runs' / '01_sft' / 'tiny'}" in text, said
        assert text.splitlines()[-1] == f"{COLAB['ipykernel']} {COLAB['ipywidgets']} True", said
    assert "rror" not in said[3] and "fatal" not in said[3], said[3]
    assert {p.name for p in content.iterdir()} == {"grpolab", "runs"}
