"""Steps a second of the aws environment and memory of its sessions, beside one `aws` process for each step.

    .venv/bin/python benchmarks/aws.py

The server is a process of its own, its accounts are processes below it; clients step it over its socket, and a step is a
command with the grading of the account after it. The peer is the command alone, `aws ... --endpoint-url`, against one such
account, several at once where there are several sessions. Both take turns; a ratio compares neighbours, so that whatever
else the machine does falls on both. Memory is the proportional share (PSS) of the server and all processes below it, after
the steps and before the sessions close; `thread` and `process` say where a session's environment lives.
"""

import argparse
import asyncio
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import records  # noqa: E402

from grpolab.env.aws.backend import Simulator  # noqa: E402
from grpolab.env.client import EnvSession  # noqa: E402

SESSIONS = (1, 8)
TASK = "advanced-dead-letter"  # none of the lines below solves it
LINES = (
    "aws s3 mb s3://bucket-{n}", "aws s3api list-buckets", "aws sqs create-queue --queue-name queue-{n}", "aws sqs list-queues",
    "aws dynamodb create-table --table-name table-{n} --attribute-definitions AttributeName=id,AttributeType=S "
    "--key-schema AttributeName=id,KeyType=HASH --billing-mode PAY_PER_REQUEST",
    "aws dynamodb put-item --table-name table-{n} --item '{{\"id\": {{\"S\": \"1\"}}}}'",
    "aws dynamodb scan --table-name table-{n}",
    "aws iam create-user --user-name user-{n}", "aws ssm put-parameter --name name-{n} --value x --type String", "aws s3 ls",
)
CLI = [sys.executable, "-c", "import sys; from awscli.clidriver import main; sys.exit(main())"]


def lines(count: int) -> list[str]:
    """`count` commands, each of which succeeds."""
    return [LINES[i % len(LINES)].format(n=i // len(LINES)) for i in range(count)]


async def measure_steps(url: str, sessions: int, steps: int, server: int) -> dict:
    """Steps a second of so many sessions at once, after the first ten of each, which load what they need; and the memory
    that the process `server` and all below it have then."""
    clients = [EnvSession(url) for _ in range(sessions)]
    await asyncio.gather(*(c.connect() for c in clients))
    latencies = []

    async def play(client, todo, kept):
        for line in todo:
            start = time.perf_counter()
            result = await client.step({"command": line})
            kept.append(time.perf_counter() - start)
            if not result.observation["ok"]:
                raise SystemExit(f"{line}: {result.observation['text']}")

    todo = lines(steps + len(LINES))
    await asyncio.gather(*(c.reset(seed=0, task=TASK) for c in clients))
    await asyncio.gather(*(play(c, todo[:len(LINES)], []) for c in clients))
    start = time.perf_counter()
    await asyncio.gather(*(play(c, todo[len(LINES):], latencies) for c in clients))
    wall = time.perf_counter() - start
    used = memory_mib(server)
    await asyncio.gather(*(c.close() for c in clients))
    return {"steps_per_s": len(latencies) / wall, "median_s": statistics.median(latencies), "used_mib": used}


def measure_processes(endpoint: str, at_once: int, steps: int, names: int) -> dict:
    """The same for one `aws` process a step, `at_once` of them; `names` keeps what they make apart between rounds."""
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "AWS_DEFAULT_REGION": "us-east-1",
           "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    took = []

    def play(worker):
        for line in [LINES[i % len(LINES)].format(n=f"{names}-{worker}-{i // len(LINES)}") for i in range(steps)]:
            start = time.perf_counter()
            command = [*CLI, *shlex.split(line)[1:], "--endpoint-url", endpoint]
            subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
            took.append(time.perf_counter() - start)

    workers = [threading.Thread(target=play, args=(n,)) for n in range(at_once)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"steps_per_s": len(took) / (time.perf_counter() - start), "median_s": statistics.median(took)}


def start_server(sessions: int, isolate: str) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen([sys.executable, "-m", "grpolab", "serve", "aws", "--port", "0", "--max-sessions", str(sessions),
                                "--max-turns", "1000000", "--isolate", isolate], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"})
    for line in process.stdout:
        if "ws://" in line:
            return process, "ws://" + line.split("ws://")[1].split()[0]
    raise SystemExit("the server did not start")


def memory_mib(pid: int) -> float:
    """The proportional share of a process and all below it (Linux)."""
    me = psutil.Process(pid)
    return sum(p.memory_full_info().pss for p in (me, *me.children(recursive=True))) / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of each session")
    parser.add_argument("--processes", type=int, default=10, help="steps of each worker that starts one `aws` a step")
    parser.add_argument("--out", type=records.record_path, default=ROOT / "benchmarks" / "results" / "aws.json")
    args = parser.parse_args()
    rows = {(who, n): [] for n in SESSIONS for who in ("thread", "process", "aws")}
    described = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    with Simulator() as account:
        endpoint = account.address
        for turn in range(args.rounds):
            for n in SESSIONS:
                for who in ("thread", "process"):
                    process, url = start_server(n, who)
                    try:
                        rows[who, n].append(asyncio.run(measure_steps(url, n, args.steps, process.pid)))
                    finally:
                        process.kill()
                        process.wait()
                rows["aws", n].append(measure_processes(endpoint, n, args.processes, turn * 10 + n))
    table = [{"who": who, "sessions": n, "steps_per_s": statistics.median(r["steps_per_s"] for r in found),
              "median_ms": 1e3 * statistics.median(r["median_s"] for r in found),
              "mib_per_session": statistics.median(r["used_mib"] for r in found) / n if "used_mib" in found[0] else None}
             for (who, n), found in rows.items()]
    ratios = {n: [a["steps_per_s"] / b["steps_per_s"] for a, b in zip(rows["process", n], rows["aws", n])] for n in SESSIONS}
    for row in table:
        print(f"{row['who']:8} {row['sessions']} sessions: {row['steps_per_s']:8.1f} steps/s, median {row['median_ms']:7.1f} ms"
              + (f", {row['mib_per_session']:5.0f} MiB a session" if row["mib_per_session"] else ""))
    for n, found in ratios.items():
        print(f"{n} sessions: {statistics.median(found):.0f} times one `aws` process a step "
              f"({min(found):.0f} to {max(found):.0f})")
    records.write(args.out, {"command": "python benchmarks/aws.py", "machine": described, "rounds": args.rounds,
                             "steps": args.steps, "table": table, "ratios": ratios})


if __name__ == "__main__":
    main()
