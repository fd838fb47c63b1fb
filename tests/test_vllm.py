"""vLLM's real server (`make vllm`) as the sampler of a policy that is trained here; other tests imitate its wire."""

import asyncio
import os

import pytest
import torch
from test_remote import PROMPTS, moved
from test_weight_sync import agree, free_port, turn

pytest.importorskip("peft")

from grpolab.decode.audit import audit  # noqa: E402
from grpolab.decode.sampling import SamplingParams  # noqa: E402
from grpolab.models import lora  # noqa: E402
from grpolab.models.load import load_policy  # noqa: E402
from grpolab.models.lora import LoRA  # noqa: E402
from grpolab.runs.run import repository  # noqa: E402
from grpolab.serve import remote  # noqa: E402
from grpolab.serve.http_client import RemoteError  # noqa: E402
from grpolab.serve.remote import RemoteSampler  # noqa: E402
from grpolab.serve.weight_sync import AdapterSwap, Restart  # noqa: E402

PROGRAM = repository() / ".venv" / "vllm" / "bin" / "python"
COMMAND = (str(PROGRAM), "-m", "vllm.entrypoints.openai.api_server", "--model", "{weights}", "--served-model-name", "{name}",
           "--host", "{host}", "--port", "{port}", "--dtype", "float32", "--enforce-eager", "--enable-lora",
           "--max-lora-rank", "8")

pytestmark = pytest.mark.skipif(not PROGRAM.exists() and not os.environ.get("REQUIRE_VLLM"),
                                reason="vLLM is not installed; install it with: make vllm")


def test_vllm_samples_for_a_policy_that_is_trained_here(tiny, tmp_path, monkeypatch):
    """Whole weights by a restart, then adapters while it runs: its log-probs are the trainer's to 1e-4 nats. An adapter that
    does not fit, which it takes in without a word, is an error of ours."""
    for name, value in {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}.items():
        monkeypatch.setenv(name, value)
    moved(tiny, 1)

    async def main():
        url = f"http://127.0.0.1:{free_port()}"
        async with RemoteSampler(url, tiny, bridge=Restart(tmp_path / "weights", COMMAND, seconds=600)) as whole:
            assert await whole.publish() == 1
            await agree(whole, tiny, 1)
            with pytest.raises(RemoteError, match="of which distribution"):
                await whole.sample(PROMPTS, params=SamplingParams(top_k=5, max_new_tokens=4))
            tiny.save(tmp_path / "base")
            policy = load_policy(str(tmp_path / "base"), adapter=LoRA(rank=4, target=("q_proj", "v_proj")))
            policy.version = 1
            bridge = AdapterSwap(tmp_path / "adapters")
            async with RemoteSampler(url, policy, bridge=bridge, max_staleness=0) as swapped:
                for by in (0.3, 0.5):
                    turn(policy, by)
                    assert await swapped.publish() == policy.version
                    await agree(swapped, policy, policy.version)
                names = [card["id"] for card in (await swapped.caller.ask("GET", "/v1/models"))["data"]]
                assert names == ["tiny", "policy-v3"]
                strange = load_policy("tiny", adapter=LoRA(rank=4, target=("q_proj", "v_proj")))
                turn(strange, 0.7)
                strange.version = 4
                for layer in lora.layers(strange.model):  # as of a model of another width
                    layer.lora_A["default"].weight.data = torch.randn(4, 64)
                monkeypatch.setattr(remote, "audit", lambda *_: audit(policy, *_[1:]))  # the trainer's own forward
                with pytest.raises(RemoteError, match="does not compute what"):
                    await RemoteSampler(url, strange, bridge=bridge).publish()
                await swapped.publish()
                await agree(swapped, policy, 3)

    asyncio.run(main())
