"""Memory and hours before a run: what can be counted, what a short probe of the model measures, and what came of it.

    print(plan(policy, config, reference=reference, prompt_tokens=60))      # a table; nothing is trained
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace

import pandas as pd
import torch

from grpolab.chat import Example
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import Policy
from grpolab.rollouts import Rollout
from grpolab.train import losses
from grpolab.train.async_grpo import AsyncGRPOConfig
from grpolab.train.grpo import GRPOConfig, grpo_gradient
from grpolab.train.loop import Optimisation
from grpolab.train.optimisers import LOW
from grpolab.train.sft import SFTConfig, sft_gradient

PROBE_TOKENS = 512  # of the probe's forward and backward at most
PROBE_ROWS = 32  # of the probe's decode batch at most
PROBE_STEPS = 12  # tokens that each of them writes
STATE = {"adamw": 8.0, "adamw_8bit": 2.04, "adafactor": 0.08, "adamw_cpu": 8.0}  # bytes of optimiser state for each parameter


@dataclass(frozen=True)
class Plan:
    """What a run is expected to take: `memory` in bytes by kind, tokens a second by kind, hours in all, and what was assumed.
    Memory and hours are upper bounds where completions end early. `str()` is the table."""

    memory: dict[str, int]
    tokens_per_s: dict[str, float]
    hours: float
    assumed: str = ""

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.memory.values())

    def __str__(self) -> str:
        lines = [f"{name:<22}{_size(n):>12}" for name, n in (*self.memory.items(), ("in all", self.total))]
        lines += [f"{name + ' tokens/s':<22}{rate:>12,.0f}" for name, rate in self.tokens_per_s.items()]
        return "\n".join([*lines, f"{'time of the run':<22}{_time(self.hours):>12}", f"({self.assumed})"])

    def compare(self, table, peak: int | None = None):
        """A DataFrame of plan and measurement. `table`: the run's rows (`run.table()`); `peak`: bytes, by default the
        largest memory of this process so far (`peak_memory`)."""
        peak = peak_memory() if peak is None else peak
        seconds = sum(table[c].sum() for c in ("sampling_s", "update_s", "seconds") if c in table)
        rows = {"memory": (_size(self.total), _size(peak), self.total / peak),
                "time of the run": (_time(self.hours), _time(seconds / 3600), self.hours * 3600 / max(seconds, 1e-9))}
        for name, rate in self.tokens_per_s.items():
            column = next((c for c in (f"{name}_tokens_per_s", "tokens_per_s") if c in table), None)
            if column:
                measured = float(table[column].mean())
                rows[f"{name} tokens/s"] = (f"{rate:,.0f}", f"{measured:,.0f}", rate / measured)
        return pd.DataFrame.from_dict(rows, orient="index", columns=["planned", "measured", "planned / measured"])


def plan(policy: Policy, config: Optimisation, *, reference: Policy | None = None, prompt_tokens: int = 32,
         completion_tokens: int | None = None) -> Plan:
    """The Plan of a run of `config`, by counting and by a probe of a few seconds; the policy stays as it is.

    prompt_tokens, completion_tokens: of a typical row (default for completions: `config.max_new_tokens`, else 32). A
    `reference` counts where it is a model of its own. SFT, DPO and reward configurations are probed by SFT's forward and
    backward on as many rows.
    """
    completion = getattr(config, "max_new_tokens", 32) if completion_tokens is None else completion_tokens
    length = prompt_tokens + completion
    if prompt_tokens < 1 or completion < 1 or length > policy.context:
        raise ValueError(f"a row of {prompt_tokens} + {completion} tokens does not fit the context of {policy.context}: both "
                         "are at least 1; pass prompt_tokens= and completion_tokens=")
    grpo = isinstance(config, GRPOConfig)
    if not grpo and not hasattr(config, "batch_size"):
        raise ValueError(f"there is no plan of a {type(config).__name__}: give that of SFT, DPO, a reward model or GRPO")
    sides = 1 if isinstance(config, SFTConfig) else 2
    rows = config.prompts_per_step * config.group_size if grpo else config.batch_size * sides
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    count, size = sum(p.numel() for p in trained), _bytes(policy)
    memory = {
        "process": max(0, peak_memory() - size),
        "parameters": size,
        "gradients": 4 * count,
        f"optimiser ({config.optimiser})": int(STATE[config.optimiser] * count),
    }
    if config.optimiser == "adamw_cpu" or any(p.dtype in LOW for p in trained):  # optimisers.Masters
        memory["master weights"] = 4 * count
    if reference is not None and reference.model is not policy.model:
        memory["reference"] = _bytes(reference)
    if isinstance(config, AsyncGRPOConfig):
        memory["sampler's copy"] = size
    rates, hours = {}, 0.0
    if grpo:
        memory["KV cache"], memory["sampler's packed weights"], rates["sampled"] = _probe_sampler(
            policy, rows, prompt_tokens, completion)
        hours += config.steps * rows * completion / rates["sampled"] / 3600
    memory["activations"], rates["updated"] = _probe_update(policy, reference, config, rows, prompt_tokens, completion)
    updated = config.inner_epochs * completion if grpo else length  # what each loop counts as a token that it trained on
    hours += config.steps * rows * updated / rates["updated"] / 3600
    return Plan(memory, rates, hours,
                f"rows of {prompt_tokens} + {completion} tokens, {rows} a step; completions may end earlier")


def _bytes(policy: Policy) -> int:
    return sum(p.numel() * p.element_size() for p in policy.model.parameters())


def _probe_sampler(policy: Policy, rows: int, prompt: int, completion: int) -> tuple[int, int, float]:
    """(bytes of the cache of a full batch, of the sampler's packed weights, tokens a second of a short decode)."""
    with Sampler(policy) as sampler:
        together = min(rows, sampler.slots)
        cache = together * (prompt + completion) * sampler.engine.bytes_per_token()
        n, steps = min(together, PROBE_ROWS), min(PROBE_STEPS, completion)
        params = SamplingParams(max_new_tokens=steps, seed=0, ignore_eos=True)
        prompts = [_random_ids(policy, prompt, i) for i in range(max(1, n // 4))]
        size = math.ceil(n / len(prompts))
        sampler.sample_sync(prompts[:1], group_size=1, params=SamplingParams(max_new_tokens=2, seed=0))  # warms up
        began = time.perf_counter()
        sampler.sample_sync(prompts, group_size=size, params=params)
        return cache, packed_bytes(sampler.engine), len(prompts) * size * steps / (time.perf_counter() - began)


def packed_bytes(engine) -> int:
    """Of a llama engine's copies of the weights. A product that reads a parameter as it is has none."""
    products = getattr(engine, "products", list)()
    return sum(m.weight.nbytes for p in products for m in p.modules
               if p.weight is None or p.weight.data_ptr() != m.weight.data_ptr())


def _probe_update(policy: Policy, reference, config: Optimisation, rows: int, prompt: int, completion: int):
    """(bytes that a full forward pass keeps for its backward, tokens a second of forward and backward). The probe's bytes are
    scaled to a full pass; its logits are counted, since beyond KEPT_BYTES they are computed again."""
    length = prompt + completion
    n = max(1, min(rows, PROBE_TOKENS // length))
    vocab = policy.model.get_output_embeddings().weight.shape[0]
    parameters = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    saved: dict[int, int] = {}  # bytes of what the backward needs, by address

    def save(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters and not (t.dim() == 2 and t.shape[1] == vocab):
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    def once() -> int:
        """One forward and backward; the tokens that it trains on."""
        ids = [tuple(_random_ids(policy, length, i)) for i in range(n)]
        if not isinstance(config, GRPOConfig):
            mask = (0,) * prompt + (1,) * completion
            sft_gradient(policy, [Example(i, mask) for i in ids], SFTConfig(token_budget=n * length))
            return n * length
        zeros, ones = (0.0,) * completion, (1,) * completion
        rollouts = [Rollout(i[:prompt], i[prompt:], ones, zeros, zeros, "length") for i in ids]
        grpo_gradient(policy, reference, rollouts, torch.arange(n) % 2 * 2 - 1.0, replace(config, token_budget=n * length))
        return n * completion

    with policy.lock:
        gradients = [p.grad for p in policy.model.parameters()]
        try:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
                once()
            began = time.perf_counter()
            tokens = once()
            seconds = time.perf_counter() - began
        finally:
            for p, grad in zip(policy.model.parameters(), gradients):
                p.grad = grad
    full = min(rows * length, max(config.token_budget, length))
    logits = min(full * completion // length * vocab * policy.dtype.itemsize, losses.KEPT_BYTES)
    return sum(saved.values()) * full // (n * length) + logits, tokens / seconds


def _random_ids(policy: Policy, n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(policy.model.get_input_embeddings().weight), (n,), generator=generator).tolist()


def peak_memory() -> int:
    """Bytes: the most that this process has held so far (on CUDA, of the GPU)."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():  # else all of it is the processor's
        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _size(n: float) -> str:
    return f"{n / 2**30:,.2f} GiB" if n >= 2**30 else f"{n / 2**20:,.1f} MiB"


def _time(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.0f} s"
