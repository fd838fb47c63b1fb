"""Logits to tokens: the draw, its filters against transformers, and its frequencies."""

import math

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpolab.decode.sampling import SamplingParams, draw_mixed, draw_tokens, fold_seed, inverse_cdf, truncate, uniforms


def chi_square_quantile(freedom, z):
    """Wilson and Hilferty 1931: the quantile of the chi-square distribution at the normal quantile z."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("wrong", [
    dict(temperature=0), dict(temperature=-1.0), dict(temperature=float("nan")), dict(temperature="hot"), dict(top_k=-1),
    dict(top_k=2.5), dict(top_p=0.0), dict(top_p=1.5), dict(min_p=-0.1), dict(max_new_tokens=0), dict(max_new_tokens=8.0),
    dict(stop_ids=("a",)), dict(seed=1.5), dict(stop_strings=("",)), dict(stop_strings=("\ud800",)), dict(stop_strings=(3,)),
    dict(greedy="no"), dict(ignore_eos="no")])
def test_bad_params_are_named_before_they_reach_the_batch(wrong):
    name = next(iter(wrong))
    with pytest.raises((TypeError, ValueError), match="hot" if wrong[name] == "hot" else name):
        SamplingParams(**wrong)


@pytest.mark.parametrize("cold", [9.9e-31, 1e-38, 1e-40, 5e-324])
def test_a_temperature_that_leaves_float32_is_refused(cold):
    with pytest.raises(ValueError, match=f"got {cold}; for the argmax use greedy=True"):
        SamplingParams(temperature=cold)


@pytest.mark.parametrize("temperature", [1e-30, 1e-12, 1e30, 1e300])
def test_the_coldest_and_the_hottest_temperature_are_exact(temperature):
    """The argmax with probability 1, or every token with the same."""
    logits = torch.randn(64, 600, generator=torch.Generator().manual_seed(0)) * 30
    u = torch.from_numpy(uniforms(np.full(64, 5, np.uint64), np.arange(64)))
    drawn = draw_tokens(logits, u, SamplingParams(temperature=temperature))
    if temperature < 1:
        assert torch.equal(drawn.tokens, logits.argmax(-1)) and not drawn.logps.any()
    else:
        assert drawn.tokens.unique().numel() > 50
        torch.testing.assert_close(drawn.logps, torch.full((64,), -math.log(600)))
    torch.testing.assert_close(drawn.raw_logps, logits.log_softmax(-1).gather(1, drawn.tokens[:, None]).squeeze(1))


@pytest.mark.parametrize("vocab", [7, 512, 513, 5000])
def test_inverse_cdf_is_the_first_index_past_u(vocab):
    generator = torch.Generator().manual_seed(vocab)
    probs = torch.rand(200, vocab, generator=generator) ** 8
    probs[:, ::3] = 0
    u = torch.rand(200, generator=generator, dtype=torch.float64)
    u[:3] = torch.tensor([0.0, 1 - 2**-53, 1.0])
    cdf = probs.double().cumsum(-1)
    rows = zip(cdf.numpy(), u.clamp(max=1 - 2**-52).tolist())
    expected = [int(np.searchsorted(row, x * row[-1], side="right")) for row, x in rows]
    found = inverse_cdf(probs, u)
    assert found.tolist() == expected
    assert bool((probs.gather(1, found[:, None]) > 0).all())


def test_uniforms_are_a_function_of_seed_and_position():
    seeds = np.array([fold_seed(0, i, g) for i in range(40) for g in range(25)], dtype=np.uint64)
    assert len(set(seeds.tolist())) == 1000
    u = uniforms(seeds, np.arange(50)[:, None])
    assert u.min() >= 0 and u.max() < 1
    np.testing.assert_array_equal(uniforms(seeds[7:8], np.array([31])), u[31, 7:8])
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    assert ((counts - u.size / 64) ** 2 / (u.size / 64)).sum() < chi_square_quantile(63, 3.7)
    assert abs(np.corrcoef(u[1:].ravel(), u[:-1].ravel())[0, 1]) < 4 / math.sqrt(u.size)
    assert abs(np.corrcoef(u[:, 1:].ravel(), u[:, :-1].ravel())[0, 1]) < 4 / math.sqrt(u.size)


@pytest.mark.parametrize("params", [SamplingParams(top_k=5), SamplingParams(top_p=0.7), SamplingParams(min_p=0.1),
                                    SamplingParams(top_k=20, top_p=0.9, min_p=0.02)])
@pytest.mark.parametrize("vocab, spread", [(50, 2.0), (1000, 3.0), (1000, 0.1)])
def test_filters_equal_those_of_transformers(params, vocab, spread):
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    expected = logits
    if params.top_k:
        expected = TopKLogitsWarper(params.top_k)(None, expected)
    if params.top_p < 1:
        expected = TopPLogitsWarper(params.top_p)(None, expected)
    if params.min_p:
        expected = MinPLogitsWarper(params.min_p)(None, expected)
    found = truncate(logits, params)
    assert torch.equal(found.isinf(), expected.isinf()) and torch.equal(found, expected)


def test_logps_are_those_of_the_distribution_sampled_from():
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)) * 2
    u = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.6, top_k=4)
    drawn = draw_tokens(logits, u, params)
    best = (logits / 0.6).topk(4)
    own = best.values.log_softmax(-1)
    position = (best.indices == drawn.tokens[:, None]).long().argmax(-1, keepdim=True)
    torch.testing.assert_close(drawn.logps, own.gather(1, position).squeeze(1))
    torch.testing.assert_close(drawn.raw_logps, logits.log_softmax(-1).gather(1, drawn.tokens[:, None]).squeeze(1))
    torch.testing.assert_close(drawn.kept_mass, (logits / 0.6).softmax(-1).gather(1, best.indices).sum(-1))
    assert draw_tokens(logits, u, SamplingParams(temperature=0.6)).kept_mass is None


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(top_k=6),
                                    SamplingParams(temperature=1.3, top_p=0.8)])
@pytest.mark.parametrize("vocab", [12, 600])
def test_frequencies_follow_the_distribution(params, vocab):
    n = 20000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)) * 2
    u = torch.from_numpy(uniforms(np.full(n, 5, np.uint64), np.arange(n)))
    tokens = draw_tokens(logits.expand(n, -1), u, params).tokens
    probs = truncate(logits / params.temperature, params).double().softmax(-1)[0]
    order = probs.argsort(descending=True)
    expected, counts = probs[order] * n, torch.bincount(tokens, minlength=vocab)[order].double()
    assert counts[expected == 0].sum() == 0
    big = int((expected >= 20).sum())
    expected = torch.cat((expected[:big], expected[big:].sum(0, True)))
    counts = torch.cat((counts[:big], counts[big:].sum(0, True)))
    kept = expected > 0
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert statistic < chi_square_quantile(int(kept.sum()) - 1, 3.7)
    shifted = probs.roll(1)[order]
    wrong = torch.cat((shifted[:big], shifted[big:].sum(0, True)))[kept].mul(n).clamp(min=1e-9)
    assert float(((counts[kept] - wrong) ** 2 / wrong).sum()) > 10 * statistic


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(greedy=True), SamplingParams(temperature=0.7),
                                    SamplingParams(top_k=40), SamplingParams(top_p=0.9)])
def test_a_row_alone_is_drawn_as_among_others(params, monkeypatch):
    """In every bit, with a vocabulary whose sums torch would share among threads."""
    monkeypatch.setattr("grpolab.decode.sampling.TOP", 20)
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    logits, u = 3 * torch.randn(64, 151936), torch.rand(64, dtype=torch.float64)
    try:
        torch.set_num_threads(2)
        whole = draw_tokens(logits, u, params)
        for i in range(len(u)):
            alone = draw_tokens(logits[i : i + 1], u[i : i + 1], params)
            assert all(torch.equal(getattr(whole, x)[i : i + 1], getattr(alone, x)) for x in ("tokens", "logps", "raw_logps"))
    finally:
        torch.set_num_threads(threads)


def test_rows_of_several_requests_are_drawn_each_by_its_own_params():
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(0))
    u = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kinds = [(SamplingParams(greedy=True), torch.tensor([0, 3]), None), (SamplingParams(top_k=2), torch.tensor([2, 4]), None),
             (SamplingParams(temperature=0.5), torch.tensor([1, 5]), None)]
    mixed = draw_mixed(logits, u, kinds)
    for params, rows, _ in kinds:
        for i in rows.tolist():
            alone = draw_tokens(logits[i: i + 1], u[i: i + 1], params)
            assert mixed.tokens[i] == alone.tokens[0] and mixed.logps[i] == alone.logps[0]
            assert mixed.raw_logps[i] == alone.raw_logps[0]
    assert mixed.kept_mass[0] == 1 and mixed.kept_mass[2] < 1
