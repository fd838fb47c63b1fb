"""`python -m grpolab serve-policy`: a policy's endpoint as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m grpolab serve-policy`."""
    parser.add_argument("model", help="tiny, smollm2-135m, a Hugging Face id, or a folder")
    parser.add_argument("--name", help="what requests call the model (default: its own name)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs --token-file")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one and prints it")
    parser.add_argument("--token-file", type=Path, help="file that holds the token which clients must send as api_key")
    parser.add_argument("--slots", type=int, help="completions decoded together (default: what the memory holds)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests that bring none (default %(default)s)")
    parser.add_argument("--weights", type=Path, help="file through which a trainer sends its updates (RemoteSampler.publish)")
    parser.add_argument("--adapters", type=Path, help="folder from which clients may put in LoRA adapters (AdapterSwap)")
    parser.add_argument("--policy-version", type=int, default=0, help="of the weights at the start (default %(default)s)")
    parser.add_argument("--max-sessions", type=int, default=4096, help="open at a time (default %(default)s)")


def main(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0."""
    from grpolab.access import check_token
    from grpolab.decode.sampler import Sampler
    from grpolab.models.load import load_policy

    token = args.token_file and check_token(args.token_file.read_text("utf-8", "replace").strip(), str(args.token_file))
    policy = load_policy(args.model)
    policy.version = args.policy_version
    sampler = Sampler(policy, slots=args.slots, seed=args.seed)
    asyncio.run(_serve(sampler, name=args.name, host=args.host, port=args.port, token=token, seed=args.seed,
                       max_sessions=args.max_sessions, weights=args.weights, adapters=args.adapters))
    return 0


async def _serve(sampler, **options) -> None:
    from grpolab.serve.service import serve_policy

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with sampler, serve_policy(sampler, **options) as service:
        print(f"serving {service.name} at {service.url}/v1", flush=True)
        await stop.wait()
