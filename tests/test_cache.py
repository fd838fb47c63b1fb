"""Where rows keep their keys and values: pages and slots against each other, and what becomes of pages."""

import pytest
import torch
from decode_helpers import ENGINES, flat, ragged_prompts, tiny_policy

from grpolab.decode import scheduler
from grpolab.decode.cache import Pages, Slots, store_for
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams


@pytest.fixture(autouse=True, scope="module")
def on_any_processor():
    """Pages work without AVX too; only their speed asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        yield


@pytest.fixture
def stores(monkeypatch):
    """The stores that samplers made, the newest last."""
    made = []
    monkeypatch.setattr(scheduler, "store_for", lambda *about: made.append(store_for(*about)) or made[-1])
    return made


def test_the_page_of_zeros_is_never_written(stores):
    policy = tiny_policy()
    with Sampler(policy, slots=5) as sampler:
        sampler.sample_sync(ragged_prompts(7, 3, 70), group_size=3, params=SamplingParams(max_new_tokens=60, seed=0))
        (store,) = stores
        assert isinstance(store, Pages) and len(store.users) > 15
        assert not store.keys[:, 0].any() and not store.values[:, 0].any()
        assert not store.users.any(), "a page was not given back"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ENGINES[:-1])
def test_pages_and_slots_give_the_same_rollouts(engine, dtype, stores, monkeypatch):
    policy = tiny_policy(eos=(3, 14, 15), dtype=dtype)
    prompts, params = ragged_prompts(9, 3, 80), SamplingParams(max_new_tokens=70, seed=3)
    with Sampler(policy, slots=6, engine=engine) as paged:
        ours = flat(paged.sample_sync(prompts, group_size=4, params=params))
        assert isinstance(stores[-1], Pages)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with Sampler(tiny_policy(eos=(3, 14, 15), dtype=dtype), slots=6, engine="llama") as slotted:
        theirs = flat(slotted.sample_sync(prompts, group_size=4, params=params))
        assert isinstance(stores[-1], Slots)
    same = [(r, s) for r, s in zip(ours, theirs) if r.tokens == s.tokens]  # else a draw fell between the two roundings
    least, bound = (0.9, 1e-4) if dtype == torch.float32 else (0.25, 0.5)
    assert len(same) > least * len(ours)
    assert max(abs(a - b) for r, s in same for a, b in zip(r.logps, s.logps)) < bound


def test_exact_mode_keeps_the_kernels_of_the_trainer():
    with Sampler(tiny_policy(dtype=torch.bfloat16), slots=4, exact=True) as sampler:
        assert isinstance(store_for(sampler.engine, 4), Slots)


def test_a_sampler_of_one_row_gives_the_same_tokens():
    policy, params = tiny_policy(eos=(3,), attention_bias=True), SamplingParams(greedy=True, max_new_tokens=60)
    with Sampler(policy, slots=1) as one, Sampler(policy, slots=4) as four:
        found, expected = (flat(s.sample_sync(ragged_prompts(4), params=params)) for s in (one, four))
    assert [r.tokens for r in found] == [r.tokens for r in expected]
