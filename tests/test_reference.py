"""The reference's log-probs: resident and cached train alike in every bit, and a stale cache cannot be read."""


import pytest
import torch
from test_train import collect, flat, fresh, preferences, untimed
from transformers import AutoModelForCausalLM, MistralConfig

from grpolab.chat import Example
from grpolab.models.load import Policy
from grpolab.runs.checkpoints import data_hash
from grpolab.train.dpo import DPOConfig, dpo
from grpolab.train.loop import Optimisation
from grpolab.train.preferences import Pair
from grpolab.train.reference import ReferenceLogps, cache_logps, pair_logps, reference_values


def test_pair_logps_equal_one_plain_forward_a_sequence(tiny):
    pairs = preferences(tiny)
    plain = []
    for p in pairs:
        for side in p.sides:
            ids = torch.tensor([side.prompt + side.tokens])
            logps = tiny.model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
            plain.append(logps[len(side.prompt) - 1 :].sum().item())
    for width in (0, 512):
        with torch.no_grad():
            assert pair_logps(tiny, pairs, width).flatten().tolist() == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("change", [
    {"token_budget": 200}, *(pytest.param(more, marks=pytest.mark.full) for more in (
        {}, {"share_prompts": False, "kind": "ipo"}, {"autocast": "bfloat16"}))])
def test_resident_and_cached_reference_train_alike_in_every_bit(tiny, tmp_path, change):
    pairs, config = preferences(tiny), DPOConfig(steps=6, batch_size=4, lr=3e-4, **change)
    one, two, three = fresh(tiny), fresh(tiny), fresh(tiny)
    resident = collect(dpo(one, tiny, pairs, config))
    cached = collect(dpo(two, cache_logps(tiny, pairs, tmp_path, config=config), pairs, config))
    read = collect(dpo(three, cache_logps(tiny, pairs, tmp_path, config=config), pairs, config))
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(flat(one), flat(two)) and torch.equal(flat(one), flat(three)) and not torch.equal(flat(one), flat(tiny))
    assert untimed(resident) == untimed(cached) == untimed(read)


def test_a_damaged_cache_is_named(tiny, tmp_path):
    cache_logps(tiny, preferences(tiny), tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=f"{path.name} is damaged.*delete it"):
        cache_logps(tiny, preferences(tiny), tmp_path)


def test_a_cache_of_another_precision_and_the_policys_own_model_are_refused(tiny):
    pairs = preferences(tiny)
    with pytest.raises(ValueError, match="computed with autocast=None, and the training has 'bfloat16'"):
        collect(dpo(fresh(tiny), cache_logps(tiny, pairs), pairs, DPOConfig(steps=1, autocast="bfloat16")))
    same = Policy(tiny.model, tiny.tokenizer, "same", tiny.eos_ids)
    with pytest.raises(ValueError, match="would move along"):
        collect(dpo(tiny, same, pairs, DPOConfig(steps=1)))


def test_a_stale_cache_cannot_be_used(tiny, tmp_path):
    pairs = preferences(tiny)
    first = cache_logps(tiny, pairs, tmp_path)
    (path,) = tmp_path.iterdir()
    before = path.stat().st_mtime_ns
    assert torch.equal(cache_logps(tiny, pairs, tmp_path).values, first.values) and path.stat().st_mtime_ns == before
    changed = fresh(tiny)
    with torch.no_grad():
        next(changed.model.parameters())[0, 0] += 1e-3
    other = fresh(tiny)
    other.model.config.rms_norm_eps *= 2
    for reference, some, config in [
        (changed, pairs, None), (other, pairs, None), (tiny, pairs[:-1], None), (tiny, pairs[::-1], None),
        (tiny, pairs, Optimisation(autocast="bfloat16")),
    ]:
        n = len(list(tmp_path.iterdir()))
        values = cache_logps(reference, some, tmp_path, config=config)
        assert len(list(tmp_path.iterdir())) == n + 1
        assert torch.equal(values.values, cache_logps(reference, some, config=config).values)


def test_nothing_to_score_is_refused(tiny):
    with pytest.raises(ValueError, match="no pairs to score"):
        cache_logps(tiny, [])
    pairs = preferences(tiny)
    for n, data in ((len(pairs), "x"), (len(pairs) - 1, data_hash(pairs))):
        with pytest.raises(ValueError, match="of other pairs"):
            reference_values(ReferenceLogps(torch.zeros(n, 2), data), pairs, Optimisation())


def test_the_cache_of_a_model_with_windows_is_its_own_forward(tiny):
    """Resident or cached, in shared rows: the plain log-probs of single sequences."""
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, sliding_window=6)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6.0 if p.dim() > 1 else 1.0)
    policy = Policy(model, tiny.tokenizer, "mistral", (2,))
    pairs = [Pair((5, 6, 7, 8 + i), Example((9, 10) * 6, (1,) * 12), Example((11, 12, 13) * 5, (1,) * 15)) for i in range(3)]
    own = []
    for side in (s for p in pairs for s in p.sides):
        logps = model(torch.tensor([side.prompt + side.tokens])).logits[0].log_softmax(-1)
        own.append(logps[len(side.prompt) - 1 : -1].gather(1, torch.tensor(side.tokens)[:, None]).sum().item())
    cached = cache_logps(policy, pairs)
    resident = reference_values(policy, pairs, DPOConfig())(range(3))
    assert cached.values.flatten().tolist() == pytest.approx(own, abs=1e-3) and torch.equal(cached.values, resident)
