"""The model card of a trained policy, written from its run, and the upload to the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import HfApi, ModelCardData, get_session  # transformers brings it
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id
from matplotlib import pyplot as plt

from grpolab.files import atomic_write, png, source_commit
from grpolab.lab import plots
from grpolab.models.lora import HUB_IDS
from grpolab.runs.checkpoints import computed_on
from grpolab.runs.run import Run

CURVES = ("reward", "accuracy", "loss")  # the first of these that a run has is drawn
SAMPLES = 3
SILENCE = 60.0  # seconds without a byte from the hub after which it does not answer; its client would wait for ever


def write_model_card(run: Run, policy, folder: Path, recipe: str) -> None:
    """README.md and curve.png beside a policy saved in `folder`: how it was trained (`recipe`), what was measured, and some of
    the rollouts of its last step."""
    facts, rows = policy.provenance or {}, run.table()
    column = next(name for name in CURVES if name in rows)
    axes = plots.curve(rows, column, title=f"{column.capitalize()} in training", ylabel=column)
    atomic_write(folder / "curve.png", png(axes.figure))
    plt.close(axes.figure)
    base = facts.get("base", "")
    library = "peft" if (folder / "adapter_config.json").exists() else "transformers"
    hub_id = HUB_IDS.get(base, base if base.count("/") == 1 else None)
    data = ModelCardData(base_model=hub_id, library_name=library, tags=["grpolab", facts["method"]])
    measured = run.measured()
    computed = {**computed_on(policy), "commit": source_commit()}
    computed = {name: value for name, value in computed.items() if value not in ("", None)}
    atomic_write(folder / "README.md", "\n\n".join(filter(None, (
        f"---\n{data.to_yaml()}\n---",
        f"# {base or 'A model'} after {facts['method'].upper()}",
        f"{base or 'A model'} after {facts['steps']} steps of {facts['method'].upper()}, trained with grpolab. The training "
        "wrote this card; nobody has read it yet.",
        "## Training\n\nThese options, saved as `run.toml`, repeat it by `grpolab train run.toml`:",
        f"```toml\n{recipe.strip()}\n```",
        f"![{column} of each step](curve.png)",
        "The last step:\n\n" + _table(rows.iloc[-1].dropna().map(_number).to_dict()),
        "## Measured on held-out rows\n\n" + _table(measured.iloc[-1].map(_number).to_dict()) if len(measured) else "",
        _samples(run),
        "## Computed on\n\n" + _table(computed)))) + "\n")


def _table(values: dict) -> str:
    return "\n".join(("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())))


def _number(value) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


def _samples(run: Run) -> str:
    """The first rollouts of the last recorded step, as they are."""
    recorded = run.rollouts(columns=["step", "prompt", "completion", "reward"])
    if not len(recorded):
        return ""
    last = recorded[recorded["step"] == recorded["step"].max()].drop_duplicates("prompt").head(SAMPLES)
    # Indented as JSON: whatever a model wrote is text and no markup.
    lines = [json.dumps({"prompt": r.prompt, "completion": r.completion, "reward": r.reward}, ensure_ascii=False)
             for r in last.itertuples()]
    return "## Rollouts of the last step\n\n" + "\n".join("    " + line for line in lines)


def hub() -> HfApi:
    get_session().timeout = SILENCE
    return HfApi()


def check_hub(repo: str) -> None:
    """ValueError where the hub would not take an upload to `repo`: before anything is trained."""
    try:
        if repo.count("/") != 1:
            raise HFValidationError("it has no owner")
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--push-to-hub {repo!r}: name it as owner/model ({error})") from error
    try:
        hub().whoami()
    except LocalTokenNotFoundError as error:
        raise ValueError("--push-to-hub needs a token of the hub: `hf auth login`, or HF_TOKEN in the environment") from error
    except Exception as error:  # the hub's client raises those of several libraries
        raise ValueError(f"--push-to-hub: the hub does not answer, or refuses the token: {error}") from error


def push(folder: Path, repo: str) -> str:
    """Upload a folder into a repository, private where it is new; returns its address. ValueError that says how to try
    again."""
    api = hub()
    try:
        address = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Trained with grpolab")
    except Exception as error:
        raise ValueError(f"the policy is saved, but was not uploaded ({error}): hf upload {repo} {folder}") from error
    return str(address)
