"""lm-eval, unchanged, at the served policy: the page's command measures what `evaluate` does."""

import asyncio
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from loop_helpers import rows_of

from grpolab.arithmetic import Task, generate, write_jsonl
from grpolab.evaluate import evaluate
from grpolab.models.load import load_policy
from grpolab.serve.service import serve_policy
from grpolab.train import SFTConfig, demonstrations, sft

PACKAGES, pytestmark = "lmeval", [pytest.mark.full, pytest.mark.usefixtures("packages")]  # they weigh 300 MB
ROOT = Path(__file__).parents[1]


def test_the_command_of_the_page_finds_the_greedy_rate(tmp_path, packages):
    line = re.search(r"^PYTHONPATH=.* -m (lm_eval .*)$", (ROOT / "docs/running.md").read_text(), re.MULTILINE)[1]
    problems, held_out = generate(60, 20, seed=3, task=Task("+", max_operand=9))
    write_jsonl(tmp_path / "data/arithmetic/eval.jsonl", held_out)
    policy = taught(problems)

    async def measured() -> float:
        async with serve_policy(policy, seed=0) as service:
            command = line.replace("http://127.0.0.1:8000", service.url).replace("data/lm-eval", str(ROOT / "data/lm-eval"))
            done = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *shlex.split(command), cwd=tmp_path, stderr=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")})
            _, said = await asyncio.wait_for(done.communicate(), 600)
            assert done.returncode == 0, said.decode()[-2000:]
        return (await evaluate(policy, held_out)).exact.value

    expected = asyncio.run(measured())
    (results,) = (tmp_path / "runs/lm-eval").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["grpolab_arithmetic"]["exact_match,boxed"] == pytest.approx(expected)
    assert 0.1 < expected < 1  # a grader that says all or nothing is seen


def taught(problems):
    policy = replace(load_policy("tiny"), name="policy")
    rows_of(sft(policy, demonstrations(policy, problems), SFTConfig(steps=60, batch_size=16, lr=1e-3)))
    return policy
