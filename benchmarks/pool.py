"""Steps a second and latency of our client and server beside OpenEnv's own, and a group's wall clock beside its waiting.

    make openenv && .venv/bin/python benchmarks/pool.py

Each server and each client is a process of its own. Behind both stands the same echo environment with the same action and
the same observation; its methods are plain, and either server runs them in a thread that the session has to itself. Each
side has the settings that it comes with: both ping, theirs also compresses every message and ours none. Ours and theirs
take turns, in either order, at each number of sessions, and a ratio compares two neighbours, so that whatever else the
machine does falls on both.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import records  # noqa: E402

from grpolab.env.client import EnvSession  # noqa: E402
from grpolab.env.pool import GrpoPool  # noqa: E402
from grpolab.env.protocol import StepResult  # noqa: E402

SESSIONS = {1: 2000, 8: 500, 64: 80}  # steps of each session


class Echo:
    """Says what it heard, `sleep` seconds later, in the fields of the echo environment of tests/openenv_peer.py."""

    turn = 0

    def seen(self, text, reward=None):
        return StepResult({"echo": text, "turn": self.turn, "env": hex(id(self)), "seed": None}, reward,
                          metadata={"kept": True})

    def reset(self):
        self.turn = 0
        return self.seen("")

    def step(self, action):
        self.turn += 1
        if action.get("sleep"):  # a sleep of 0 s is none: it can cost 70 us
            time.sleep(action["sleep"])
        return self.seen(action["text"], float(len(action["text"])))

    def state(self):
        return {}

    def close(self):
        pass


def serve_echo():
    from grpolab.env.server import serve_forever

    asyncio.run(serve_forever(Echo, max_sessions=64))


async def measure_ours(url, sessions, steps):
    clients = [EnvSession(url) for _ in range(sessions)]
    await asyncio.gather(*(c.connect() for c in clients))
    await asyncio.gather(*(c.reset() for c in clients))
    latencies = []

    async def play(client):
        for _ in range(steps):
            start = time.perf_counter()
            await client.step({"text": "x"})
            latencies.append(time.perf_counter() - start)

    await asyncio.gather(*(c.step({"text": "x"}) for c in clients))
    start = time.perf_counter()
    await asyncio.gather(*(play(c) for c in clients))
    wall = time.perf_counter() - start
    await asyncio.gather(*(c.close() for c in clients))
    return {"steps_per_s": len(latencies) / wall, "median_s": statistics.median(latencies)}


async def measure_group(url, size=8, turns=6, seconds=0.05):
    """A group's wall clock over the time that its slowest session's environment needs, and the same one by one."""
    async with GrpoPool(url, size=size) as pool:
        async def rollout(seat):
            for _ in range(turns):
                await seat.step({"text": "x", "sleep": seconds})

        walls = []
        for _ in range(7):
            await pool.reset_group()
            start = time.perf_counter()
            await pool.run_group(rollout)
            walls.append(time.perf_counter() - start)
    return {"sessions": size, "turns": turns, "env_s": turns * seconds, "wall_s": statistics.median(walls),
            "overhead": statistics.median(walls) / (turns * seconds) - 1, "speedup": size * turns * seconds / min(walls)}


def start(*command):
    """A server process and its address."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    for line in process.stdout:
        if "ws://" in line:
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process, "ws://" + line.split("ws://")[1].split()[0]
    raise SystemExit(f"{command} did not start")


def ask(*command):
    """The JSON that a client process prints."""
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def ratios_of(rows, sessions, ours, theirs):
    """Our steps a second over theirs, round by round: median, least and most."""
    pairs = [a["steps_per_s"] / b["steps_per_s"] for a, b in zip(rows[ours, sessions], rows[theirs, sessions])]
    return {"median": statistics.median(pairs), "least": min(pairs), "most": max(pairs)}


def machine():
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] \
        if cpuinfo.exists() else []
    return {"cpu": models[0] if models else platform.processor(), "cores": os.cpu_count(),
            "python": platform.python_version(), "websockets": importlib.metadata.version("websockets"),
            "system": platform.system(), "load": os.getloadavg()[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--openenv", default="openenv-0.10.0", help="or openenv-core-0.3.0")
    parser.add_argument("--out", type=records.record_path, default=ROOT / "benchmarks" / "results" / "pool.json")
    args = parser.parse_args()
    python = ROOT / ".venv" / args.openenv / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{args.openenv} is not there to be compared with: make openenv")
    me, peer = str(Path(__file__).resolve()), str(ROOT / "tests" / "openenv_peer.py")
    ours, theirs = "grpolab", args.openenv
    clients = {ours: [sys.executable, me, "--as-client"], theirs: [str(python), peer, "bench"]}
    described = machine()
    servers = {ours: start(sys.executable, me, "--as-server"), theirs: start(str(python), peer, "server", "64")}
    rows = {(who, n): [] for who in servers for n in SESSIONS}
    try:
        for turn in range(args.rounds):
            for n, steps in SESSIONS.items():
                for who in (ours, theirs) if turn % 2 else (theirs, ours):
                    rows[who, n] += ask(*clients[who], servers[who][1], f"{n}:{steps}")
        group = asyncio.run(measure_group(servers[ours][1]))
    finally:
        for process, _ in servers.values():
            process.kill()
    described["load_after"] = os.getloadavg()[0]
    table = [{"who": who, "sessions": n, "steps_per_s": statistics.median(r["steps_per_s"] for r in found),
              "latency_ms": 1e3 * statistics.median(r["median_s"] for r in found)} for (who, n), found in rows.items()]
    ratios = {n: ratios_of(rows, n, ours, theirs) for n in SESSIONS}
    print(f"{'':20}{'sessions':>9}{'steps/s':>10}{'median ms':>11}")
    for row in table:
        print(f"{row['who']:20}{row['sessions']:9}{row['steps_per_s']:10.0f}{row['latency_ms']:11.3f}")
    for n, r in ratios.items():
        print(f"{n:3} sessions: {r['median']:.2f} times theirs ({r['least']:.2f} to {r['most']:.2f} in {args.rounds} rounds)")
    print(f"group of {group['sessions']} x {group['turns']} turns of 50 ms: {1e3 * group['wall_s']:.0f} ms against "
          f"{1e3 * group['env_s']:.0f} ms, {100 * group['overhead']:.1f} % more; {group['speedup']:.1f}x one by one")
    result = {"machine": described, "rounds": args.rounds, "table": table, "ratios": ratios, "group": group}
    records.write(args.out, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-server"]:
        serve_echo()
    elif sys.argv[1:2] == ["--as-client"]:
        sizes = [tuple(map(int, size.split(":"))) for size in sys.argv[3:]]
        print(json.dumps([asyncio.run(measure_ours(sys.argv[2], *size)) for size in sizes]))
    else:
        main()
