"""What pip installs: every room of the package and the embedded model, usable from any folder."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from grpolab.lab.run import repository

ROOT = repository()
NOISE = shutil.ignore_patterns("__pycache__", "*.partial", "arithmetic")
LOAD = """
import grpolab.files, grpolab
from grpolab import GrpoPool, MultiTurnEnvPool, Sampler, SamplingParams, gate, load_policy, losses
assert {target!r} in grpolab.__file__ and {target!r} in str(grpolab.files.DATA), (grpolab.__file__, grpolab.files.DATA)
from grpolab.evaluate import fixed_prompts
policy = load_policy("tiny", device="cpu")
with Sampler(policy) as sampler:
    prompt = policy.tokenizer.encode("1 + 1 =", add_special_tokens=False)
    print(policy.decode(sampler.sample_sync([prompt], params=SamplingParams(greedy=True, max_new_tokens=2))[0][0].tokens))
print(len(fixed_prompts()), "prompts")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that no build/ of an earlier state is taken along."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("grpolab", "data"):
        shutil.copytree(ROOT / name, source / name, ignore=NOISE)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "-w", out, source]
    subprocess.run(command, check=True, timeout=300)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_the_embedded_model(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "grpolab").rglob("*.py")}
    data = {f"grpolab/data/tiny/{p.name}" for p in (ROOT / "data" / "tiny").iterdir()} | {"grpolab/data/fixed_prompts.jsonl"}
    assert len(data) == 8 and modules | data <= names


def test_an_installed_copy_works_from_another_folder(wheel, tmp_path):
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target",
                    target, wheel], check=True, timeout=300)  # fmt: skip
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", LOAD.format(target=str(target))], cwd=elsewhere, capture_output=True,
                              text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(target)})  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0].startswith("tiny (") and "prompts" in done.stdout
    assert list(elsewhere.iterdir()) == []
