"""Where rows keep their keys and values: pages and slots against each other, and what becomes of pages."""

import pytest
import torch
from decode_helpers import ENGINES, flat, ragged_prompts, tiny_policy

from grpolab.decode import scheduler
from grpolab.decode.cache import PAGE, Pages, Prefilled, Slots, store_for
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.decode.verify import choose_engine

KINDS = {"pages": Pages, "slots": Slots}


@pytest.fixture(autouse=True, scope="module")
def on_any_processor():
    """Pages work without AVX too; only their speed asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        yield


@pytest.fixture(scope="module")
def engine():
    return choose_engine(tiny_policy())


@pytest.fixture
def stores(monkeypatch):
    """The stores that samplers made, the newest last."""
    made = []
    monkeypatch.setattr(scheduler, "store_for", lambda *about: made.append(store_for(*about)) or made[-1])
    return made


def prefilled(engine, lengths, seed=0):
    """Prompts of these lengths in one cache of random keys and values."""
    torch.manual_seed(seed)
    cache = engine.allocate(len(lengths), 4 * PAGE)
    for t in cache.tensors:
        t.normal_()
    return cache, [Prefilled(cache, i, length) for i, length in enumerate(lengths)]


def holds(store, row, prompt):
    """Whether a row's keys and values are the prompt's, to the bit."""
    taken = store.take(row, prompt.length)
    return all(torch.equal(t.narrow(time, 0, prompt.length)[..., 0, :, :, :],
                           of.narrow(time, 0, prompt.length)[..., prompt.row, :, :, :])
               for t, of, time in zip(taken.tensors, prompt.cache.tensors, taken.times))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_hold_their_prompts_also_after_moves(engine, kind):
    store = KINDS[kind](engine, 8)
    _, prompts = prefilled(engine, [5, PAGE, 2 * PAGE + 7])
    order = [2, 0, 1, 2, 2, 1]
    store.enter(0, [prompts[i] for i in order[:4]], 4 * PAGE)
    store.enter(4, [prompts[i] for i in order[4:]], 4 * PAGE)
    assert all(holds(store, row, prompts[i]) for row, i in enumerate(order))
    store.release(1, broken=False)
    store.move([1], [5], 3 * PAGE)
    assert holds(store, 1, prompts[1])
    store.move([0, 1, 2], [1, 2, 0], 3 * PAGE)  # at once, not one after the other
    assert [holds(store, row, prompts[i]) for row, i in ((0, 1), (1, 1), (2, 2))] == [True] * 3


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
