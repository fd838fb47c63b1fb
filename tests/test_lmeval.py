"""lm-eval, unchanged, at the served policy: the page's commands measure what `evaluate` and a plain forward do."""

import asyncio
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_helpers import rows_of

from grpolab.arithmetic import Task, generate, write_jsonl
from grpolab.evaluate import evaluate
from grpolab.models.load import load_policy
from grpolab.serve.service import serve_policy
from grpolab.train import SFTConfig, demonstrations, sft

PACKAGES, pytestmark = "lmeval", [pytest.mark.full, pytest.mark.usefixtures("packages")]  # they weigh 300 MB
ROOT = Path(__file__).parents[1]


def run_at(policy, command, folder, packages):
    """The results of a command of the page that asks this policy, in `folder`."""
    async def measured():
        async with serve_policy(policy, seed=0) as service:
            there = command.replace("http://127.0.0.1:8000", service.url).replace("data/lm-eval", str(ROOT / "data/lm-eval"))
            done = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *shlex.split(there), cwd=folder, stderr=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")})
            _, said = await asyncio.wait_for(done.communicate(), 600)
            assert done.returncode == 0, said.decode()[-2000:]

    asyncio.run(measured())
    (results,) = (folder / "runs/lm-eval").rglob("results_*.json")
    return json.loads(results.read_text())["results"]


@pytest.fixture(scope="module")
def policy_and_held_out():
    problems, held_out = generate(60, 20, seed=3, task=Task("+", max_operand=9))
    return taught(problems), held_out


def commands():
    page = (ROOT / "docs/running.md").read_text()
    return re.findall(r"^PYTHONPATH=.* -m (lm_eval .*)$", page, re.MULTILINE)


def test_the_command_of_the_page_finds_the_greedy_rate(tmp_path, packages, policy_and_held_out):
    policy, held_out = policy_and_held_out
    write_jsonl(tmp_path / "data/arithmetic/eval.jsonl", held_out)
    results = run_at(policy, commands()[0], tmp_path, packages)
    expected = asyncio.run(evaluate(policy, held_out)).exact.value
    assert results["grpolab_arithmetic"]["exact_match,boxed"] == pytest.approx(expected)
    assert 0.1 < expected < 1  # a grader that says all or nothing is seen


def test_the_choice_among_log_likelihoods_is_that_of_a_plain_forward(tmp_path, packages, policy_and_held_out):
    policy, held_out = policy_and_held_out
    write_jsonl(tmp_path / "data/arithmetic/eval.jsonl", held_out)
    policy.save(tmp_path / "runs/cli_sft/tiny/policy")
    results = run_at(policy, commands()[1], tmp_path, packages)

    @torch.no_grad()
    def likelihood(question, answer):
        before, whole = (policy.tokenizer.encode(text, add_special_tokens=False) for text in (question, f"{question} {answer}"))
        logps = policy.model(torch.tensor([whole])).logits[0].log_softmax(-1)
        return sum(logps[i - 1, whole[i]].item() for i in range(len(before), len(whole)))

    right = 0
    for p in held_out:
        choices = [p.answer, p.answer + 1, p.answer - 1, p.answer + 2, p.answer + 10]
        right += max(choices, key=lambda c: likelihood(p.question, c)) == p.answer
    assert results["grpolab_choice"]["acc,none"] == pytest.approx(right / len(held_out)) and 0 < right < len(held_out)


def taught(problems):
    policy = replace(load_policy("tiny"), name="policy")
    rows_of(sft(policy, demonstrations(policy, problems), SFTConfig(steps=60, batch_size=16, lr=1e-3)))
    return policy
