"""What the base model, the SFT policy and the GRPO policy write to the same held-out questions, greedily.

    python -m grpolab run 01 04 && python benchmarks/rollouts.py     # then: make results

The README shows the first question on which SFT and GRPO differ.
"""

import asyncio
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import records  # noqa: E402

from grpolab import Sampler, SamplingParams, load_policy  # noqa: E402
from grpolab.arithmetic import Task, generate  # noqa: E402
from grpolab.chat import prompt_ids  # noqa: E402
from grpolab.checker import check_answer  # noqa: E402

RUNS = HERE.parent / "runs"
POLICIES = {"base": "tiny", "SFT": RUNS / "01_sft" / "tiny" / "policy", "GRPO": RUNS / "04_grpo" / "tiny" / "policy"}
COMMAND = "python benchmarks/rollouts.py"
RESULTS = HERE / "results" / "rollouts.json"


async def written(policy, problems) -> list[dict]:
    async with Sampler(policy) as sampler:
        prompts = [prompt_ids(policy.tokenizer, problem.question) for problem in problems]
        groups = await sampler.sample(prompts, group_size=1, params=SamplingParams(greedy=True, max_new_tokens=32))
    texts = [policy.decode(group[0].tokens) for group in groups]
    return [{"text": text, "correct": check_answer(text, problem.answer)}
            for text, problem in zip(texts, problems)]


def main(runs: dict = POLICIES) -> None:
    problems = generate(6400, 1000, seed=1, task=Task(ops="+-", max_operand=99))[1][:20]  # held out by the notebooks
    answers = {name: asyncio.run(written(load_policy(str(where), device="cpu"), problems)) for name, where in runs.items()}
    questions = [{"question": problem.question, "written": {name: given[i] for name, given in answers.items()}}
                 for i, problem in enumerate(problems)]
    print(records.write(RESULTS, {"command": COMMAND, "questions": questions}))


if __name__ == "__main__":
    main()
