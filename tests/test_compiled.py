"""The step of the llama engine in C++ against the one in torch's operators, and what happens where it cannot be made."""

import logging
import subprocess

import pytest
import torch
from decode_helpers import COMPILER, flat, ragged_prompts, tiny_policy
from test_families import FAMILIES, make

from grpolab.decode.audit import audit
from grpolab.decode.engines import compiled
from grpolab.decode.engines.compiled import CompiledEngine
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.decode.verify import batch_dependence, choose_engine

pytestmark = pytest.mark.skipif(not COMPILER, reason="no g++ here")
# a vocabulary that fills no strip, a head of one vector and of five, groups of 1 and 3
SHAPES = [dict(), dict(vocab_size=77, hidden_size=96, num_attention_heads=6, num_key_value_heads=2, attention_bias=True,
                       mlp_bias=True),
          dict(head_dim=80, num_key_value_heads=4, tie_word_embeddings=False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_it_samples_what_torchs_operators_sample(shape, dtype):
    policy = tiny_policy(dtype=dtype, **SHAPES[shape])
    prompts = [[t % 77 for t in p] for p in ragged_prompts(9, 3, 80)]
    rollouts = {}
    for engine in ("compiled", "llama"):
        with Sampler(policy, slots=6, engine=engine) as sampler:
            assert isinstance(sampler.engine, CompiledEngine) == (engine == "compiled") and sampler.engine.name == "llama"
            groups = sampler.sample_sync(prompts, group_size=2, params=SamplingParams(greedy=True, max_new_tokens=40))
            rollouts[engine] = flat(groups)
    found, other = (audit(policy, of) for of in rollouts.values())
    if dtype == torch.float32:
        assert [r.tokens for r in rollouts["compiled"]] == [r.tokens for r in rollouts["llama"]]
        assert found.disagreements == 0 and found.max_error < 1e-4
    else:
        assert found.mean_error < 1.05 * other.mean_error and found.disagreements < 0.1 * found.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rows_do_not_depend_on_the_others_nor_on_the_threads(name, dtype, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH", 1)
    monkeypatch.setitem(FAMILIES, name, (name, FAMILIES[name][1] | dict(head_dim=16, hidden_size=64, intermediate_size=112)))
    policy = make(name)  # of qwen3, norms of queries and keys
    policy.model.to(dtype)
    engine = choose_engine(policy, "compiled")
    assert batch_dependence(engine, rows=30) == 0
    rollouts = []
    monkeypatch.setattr(compiled, "MOST_ROWS", 12)
    for nearby in (0, compiled.NEARBY):  # threads share each product, or have rows of their own
        monkeypatch.setattr(compiled, "NEARBY", nearby)
        for threads in (1, 2, 3):
            with Sampler(policy, slots=30, engine="compiled", threads=threads) as sampler:
                rollouts.append(sampler.sample_sync(ragged_prompts(15), group_size=2, params=SamplingParams(seed=0)))
    assert all(found == rollouts[0] for found in rollouts)


@pytest.mark.parametrize("obstacle", ["activation", "sizes", "float16", "exact mode"])
def test_models_that_it_does_not_compute_are_decoded_by_torchs_operators(obstacle, caplog):
    config = {"activation": dict(hidden_act="gelu"), "sizes": dict(intermediate_size=100)}.get(obstacle, {})
    dtype = {"float16": torch.float16, "exact mode": torch.bfloat16}.get(obstacle, torch.float32)
    policy = tiny_policy(dtype=dtype, **config)
    with caplog.at_level(logging.WARNING), Sampler(policy, slots=4, exact=obstacle == "exact mode") as sampler:
        assert sampler.engine.name == "llama" and not isinstance(sampler.engine, CompiledEngine)
        sampler.sample_sync([[1, 2]])
    assert not caplog.text
    if obstacle != "exact mode":
        with pytest.raises(ValueError, match="the compiled engine does not fit LlamaForCausalLM: .*engine='auto'"):
            choose_engine(policy, "compiled")


def test_a_wrong_step_is_found_before_the_first_rollout(monkeypatch, caplog):
    true = CompiledEngine._model

    def wrong(self):
        model = true(self)
        model.scaling = 0.3
        return model

    monkeypatch.setattr(CompiledEngine, "_model", wrong)
    with caplog.at_level(logging.WARNING):
        assert not isinstance(choose_engine(tiny_policy()), CompiledEngine)
    assert "in torch's operators: of the compiled engine its cached step is not its own forward" in caplog.text


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No operator yet, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.library.cache_clear()
    yield tmp_path / "grpolab"
    compiled.library.cache_clear()


@pytest.mark.parametrize("fault", ["no compiler", "a compiler that fails", "no room for it"])
def test_without_the_operator_torchs_serve(fault, fresh, monkeypatch, caplog):
    if fault == "no room for it":
        fresh.write_text("a file in the place of the folder")
    else:
        monkeypatch.setenv("GRPOLAB_CXX", "" if fault == "no compiler" else "false")
    with caplog.at_level(logging.WARNING):
        assert compiled.library() is None
    assert ("made none of its own" in caplog.text) == (fault != "no compiler")
    policy = tiny_policy()
    assert not isinstance(choose_engine(policy), CompiledEngine)
    with pytest.raises(ValueError, match="there is no C\\+\\+ compiler"):
        choose_engine(policy, "compiled")


@pytest.mark.full
@pytest.mark.parametrize("without", ["-mno-amx-bf16", "-mno-amx-bf16 -mno-avx512f", "-mno-amx-bf16 -mno-avx"])
def test_processors_without_tiles_or_with_shorter_vectors_sample_the_same(without, fresh, monkeypatch):
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, *without.split()))
    for shape in range(len(SHAPES)):
        for dtype in (torch.float32, torch.bfloat16):
            test_it_samples_what_torchs_operators_sample(shape, dtype)


@pytest.mark.full
def test_it_is_made_once(fresh, monkeypatch):
    """And leaves nothing else in the folder, also where two make it at a time."""
    assert compiled.library() is not None
    assert len(list(fresh.iterdir())) == 1
    compiled.library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled again"))
    assert compiled.library() is not None


def test_weights_that_somebody_replaces_are_read_at_the_next_request():
    """Norms and embeddings are read where they lie: a parameter whose storage goes stays readable until then."""
    policy = tiny_policy(dtype=torch.bfloat16, tie_word_embeddings=False)
    with Sampler(policy, slots=4, engine="compiled") as sampler:
        sampler.sample_sync([[1, 2, 3]])
        for p in (policy.model.model.norm.weight, policy.model.model.embed_tokens.weight):
            p.data = p.data.flip(0).clone()
        found = audit(policy, flat(sampler.sample_sync([[1, 2, 3]], params=SamplingParams(greedy=True))))
        assert sampler.stats.refreshes == 1
    assert found.worst_ulps <= 8
