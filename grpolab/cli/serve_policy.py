"""`grpolab serve-policy`: a policy's endpoint as a process of its own."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from grpolab.cli.address import Address


@dataclass(frozen=True)
class ServePolicy:
    """Serve a model behind an OpenAI-compatible endpoint until SIGTERM or SIGINT."""

    model: Positional[str]  # tiny, smollm2-135m, a Hugging Face id, or a folder
    name: str | None = None  # what requests call the model (default: its own name)
    address: OmitArgPrefixes[Address] = Address()
    slots: int | None = None  # completions decoded together (default: what the memory holds)
    seed: int = 0  # of the requests that bring none
    weights: Path | None = None  # file through which a trainer sends its updates (RemoteSampler.publish)
    adapters: Path | None = None  # folder from which clients may load LoRA adapters (AdapterSwap)
    policy_version: int = 0  # version of the weights at the start
    max_sessions: int = 4096  # sessions open at a time

    def run(self) -> int:
        token = self.address.token()
        from grpolab.decode.sampler import Sampler  # torch is not needed for --help, nor to refuse an address
        from grpolab.models.load import load_policy

        policy = load_policy(self.model)
        print(policy.origin)
        policy.version = self.policy_version
        asyncio.run(self.serve(Sampler(policy, slots=self.slots, seed=self.seed), token))
        return 0

    async def serve(self, sampler, token: str | None) -> None:
        from grpolab.serve.service import serve_policy

        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with sampler, serve_policy(
            sampler, name=self.name, host=self.address.host, port=self.address.port, token=token, seed=self.seed,
            max_sessions=self.max_sessions, weights=self.weights, adapters=self.adapters,
        ) as service:
            print(f"serving {service.name} at {service.url}/v1", flush=True)
            await stop.wait()
