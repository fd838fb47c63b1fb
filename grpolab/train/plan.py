"""Memory and hours before a run: what is counted, what a short probe of the model itself measures, and what came of it.

    print(plan(policy, config, reference=reference, prompt_tokens=60))      # a table; nothing is trained
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import torch

from grpolab.chat import Example
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import Policy
from grpolab.rollouts import Rollout
from grpolab.train import losses
from grpolab.train.grpo import GRPOConfig, grpo_gradient
from grpolab.train.loop import Optimisation
from grpolab.train.sft import SFTConfig, sft_gradient

PROBE_TOKENS = 512  # of the probe's forward and backward at most
PROBE_ROWS = 32  # of the probe's decode batch at most
PROBE_STEPS = 12  # tokens that each of them writes

# Bytes of optimiser state for each parameter of `itemsize` bytes; that of a bf16 parameter is its fp32 master weight's.
STATE = {
    "adamw": lambda itemsize: 2 * itemsize,  # two moments in the parameter's dtype
    "adamw_8bit": lambda itemsize: 2 + 2 * 4 / 256,  # two bytes, and a scale for each block of 256
    "adafactor": lambda itemsize: 0.02 * itemsize,  # rows and columns of each matrix, next to nothing
}


@dataclass(frozen=True)
class Plan:
    """What a run is expected to take: `memory` in bytes by kind, tokens a second by kind, hours in all.

    The memory beside parameters is an upper bound where completions may end early; so are the hours. `notes` say what was
    assumed. `str()` is the table; `compare` puts what was measured beside it.
    """

    memory: dict[str, int]
    tokens_per_s: dict[str, float]
    hours: float
    notes: tuple[str, ...] = field(default=())

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.memory.values())

    def __str__(self) -> str:
        lines = [f"{name:<22}{_size(n):>12}" for name, n in self.memory.items()] + [f"{'in all':<22}{_size(self.total):>12}"]
        lines += [f"{name + ' tokens/s':<22}{rate:>12,.0f}" for name, rate in self.tokens_per_s.items()]
        lines += [f"{'time of the run':<22}{_time(self.hours):>12}"]
        return "\n".join(lines + [f"({note})" for note in self.notes])

    def compare(self, table, peak: int | None = None):
        """A DataFrame of plan and measurement. `table`: the run's rows (`run.table()`); `peak`: bytes, by default the
        largest memory of this process so far (`peak_memory`)."""
        import pandas as pd

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
    backward on as many rows. Call it before the loop, outside a running event loop's thread or in one (it blocks it).
    """
    completion = getattr(config, "max_new_tokens", 32) if completion_tokens is None else completion_tokens
    length = prompt_tokens + completion
    if prompt_tokens < 1 or completion < 1 or length > policy.context:
        raise ValueError(f"a row of {prompt_tokens} + {completion} tokens does not fit the context of {policy.context}: both "
                         "are at least 1; say prompt_tokens= and completion_tokens=")
    grpo = isinstance(config, GRPOConfig)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    sides = 1 if isinstance(config, SFTConfig) else 2
    rows = config.prompts_per_step * config.group_size if grpo else config.batch_size * sides
    size = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    state = STATE[config.optimiser]
    memory = {
        "process": max(0, _resident() - size),
        "parameters": size,
        "gradients": sum(p.numel() * max(4, p.element_size()) for p in trained),
        f"optimiser ({config.optimiser})": int(sum(p.numel() * state(max(4, p.element_size())) for p in trained)),
    }
    if any(p.dtype == torch.bfloat16 for p in trained):  # optimisers.Masters
        memory["master weights"] = sum(p.numel() * 4 for p in trained)
    if reference is not None and reference.model is not policy.model:
        memory["reference"] = sum(p.numel() * p.element_size() for p in reference.model.parameters())
    rates, notes = {}, [f"rows of {prompt_tokens} + {completion} tokens, {rows} a step; completions may end earlier"]
    hours = 0.0
    if grpo:
        cache, packed, rates["sampled"] = _probe_sampler(policy, rows, prompt_tokens, completion)
        memory["KV cache"] = cache
        memory["sampler's packed weights"] = packed
        hours += config.steps * rows * completion / rates["sampled"] / 3600
    saved, rates["updated"] = _probe_update(policy, reference, config, rows, prompt_tokens, completion)
    memory["activations"] = saved
    passes = config.inner_epochs if grpo else 1
    updated = completion if grpo else length  # what each loop counts as a token that it trained on
    hours += config.steps * passes * rows * updated / rates["updated"] / 3600
    return Plan(memory, rates, hours, tuple(notes))


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
        return cache, sampler.engine.packed_bytes(), len(prompts) * size * steps / (time.perf_counter() - began)


def _probe_update(policy: Policy, reference, config: Optimisation, rows: int, prompt: int, completion: int):
    """(bytes that a full forward pass keeps for its backward, tokens a second of forward and backward)."""
    length = prompt + completion
    n = max(1, min(rows, PROBE_TOKENS // length))
    one_pass = replace(config, token_budget=n * length)  # a second pass would take the first one's memory and hide in it
    kept: dict[bool, dict[int, int]] = {False: {}, True: {}}  # bytes by address, of logits apart
    vocab = policy.model.get_output_embeddings().weight.shape[0]
    own = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def count(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[t.dim() == 2 and t.shape[1] == vocab][storage.data_ptr()] = storage.nbytes()
        return t

    def once():
        if isinstance(config, GRPOConfig):
            rollouts = [_rollout(policy, prompt, completion, i) for i in range(n)]
            signs = torch.tensor([1.0, -1.0] * n)[:n]
            grpo_gradient(policy, reference, rollouts, signs, one_pass)
            return n * completion
        ids = [_random_ids(policy, length, i) for i in range(n)]
        mask = (0,) * prompt + (1,) * completion
        sft_gradient(policy, [Example(tuple(i), mask) for i in ids], SFTConfig(token_budget=n * length))
        return n * length

    with policy.lock:
        began = [p.grad for p in policy.model.parameters()]
        try:
            with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
                once()
            start = time.perf_counter()
            tokens = once()
            seconds = time.perf_counter() - start
        finally:
            for p, grad in zip(policy.model.parameters(), began):
                p.grad = grad
    full = min(rows * length, max(config.token_budget, length))
    states, logits = (sum(kept[of_logits].values()) * full / (n * length) for of_logits in (False, True))
    return int(states + min(logits, losses.KEPT_BYTES)), tokens / seconds  # more logits than that would be made again


def _random_ids(policy: Policy, n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(policy.model.get_input_embeddings().weight), (n,), generator=generator).tolist()


def _rollout(policy: Policy, prompt: int, completion: int, seed: int) -> Rollout:
    ids = _random_ids(policy, prompt + completion, seed)
    zeros = (0.0,) * completion
    return Rollout(tuple(ids[:prompt]), tuple(ids[prompt:]), (1,) * completion, zeros, zeros, "length")


def peak_memory() -> int:
    """Bytes: the most that this process has held so far (on CUDA, of the GPU)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _resident() -> int:
    """Bytes that this process holds now; on CUDA those of the GPU."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096
    except OSError:  # not Linux: the largest so far bounds it
        return peak_memory()


def _size(n: float) -> str:
    return f"{n / 2**30:,.2f} GiB" if n >= 2**30 else f"{n / 2**20:,.1f} MiB"


def _time(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.0f} s"
