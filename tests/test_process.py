"""Environments in processes of their own, and `async` ones in threads: what they do stays theirs."""

import ast
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time

import odd_envs
import psutil
import pytest
from env_harness import ROOT, SOON, EchoEnv, alive, eventually, server_process, wait_for

from grpolab.env import child_processes
from grpolab.env.client import Deadlines, EnvSession
from grpolab.env.process import Isolation
from grpolab.env.protocol import FactoryError, ServerError, SessionLost
from grpolab.env.server import serve
from grpolab.env.session import ServeOptions

BOTH = pytest.mark.parametrize("isolate", ["thread", "process"])


def ended(server):
    return lambda: server.status()["sessions"] == 0


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def test_each_session_has_a_process_of_its_own_that_ends_with_it():
    before = children()
    async with serve(EchoEnv, isolate="process", max_sessions=2) as server:
        async with EnvSession(server.url) as a, EnvSession(server.url) as b:
            seen = [(await s.reset(seed=7, episode_id="e", task={"id": "ä"})).observation for s in (a, b)]
            assert [s["seed"] for s in seen] == [7, 7] and seen[0]["task"] == {"id": "ä"}
            big = await a.step({"text": "é", "big": 3_000_000})
            assert big.observation["echo"] == "é" and len(big.observation["big"]) == 3_000_000 and big.reward == 1.0
            with pytest.raises(ServerError, match="boom: x"):
                await b.step({"raise": "boom: x"})
            with pytest.raises(ServerError) as caught:
                await b.step({"zzz": 1})
            assert caught.value.code == "VALIDATION_ERROR"
            assert (await b.state())["step_count"] == 2 and (await a.state())["episode_id"] == "e"
            pids = [s["pid"] for s in server.status()["session_list"]]
            assert len(set(pids)) == 2 and os.getpid() not in pids and all(alive(p) for p in pids)
        assert ended(server)() and not any(alive(p) for p in pids)
    assert children() <= before and EchoEnv.live == 0


async def test_a_process_that_dies_costs_its_own_session_only():
    async with serve(EchoEnv, isolate="process", max_sessions=2) as server, EnvSession(server.url) as good:
        async with EnvSession(server.url) as bad:
            with pytest.raises(SessionLost, match="process of EchoEnv ended with status 137"):
                await bad.step({"die": True})
        await good.reset()
        assert (await good.step({"text": "fine"})).observation["echo"] == "fine"
        await eventually(lambda: server.status()["sessions"] == 1, SOON)
        pid = server.status()["session_list"][0]["pid"]
        for process in psutil.Process(pid).children():
            process.kill()
        await eventually(lambda: not alive(pid), SOON)
        with pytest.raises(SessionLost, match="ended with status 137"):  # between two requests
            await good.step({"text": "x"})
        await eventually(ended(server), SOON)


@BOTH
async def test_exit_of_an_async_environment_is_an_error_of_that_step(isolate):
    async with serve(odd_envs.AsyncOdd, isolate=isolate) as server, EnvSession(server.url) as session:
        await session.reset()
        with pytest.raises(ServerError, match="SystemExit: 3"):
            await session.step({"exit": 3})
        with pytest.raises(ServerError, match="CancelledError"):
            await session.step({"cancelled": True})
        assert (await session.step({})).observation["ticks"] >= 0
        await session.close()
        assert ended(server)()
        async with EnvSession(server.url) as again:
            await again.reset()


@BOTH
async def test_an_async_environment_has_a_loop_to_itself(isolate):
    """Its tasks run between steps, what blocks it blocks no other session, and plain methods may stand beside."""
    async with serve(odd_envs.AsyncOdd, isolate=isolate) as server:
        async with EnvSession(server.url) as one, EnvSession(server.url) as two:
            await one.reset()
            await two.reset()
            await asyncio.sleep(0.3)
            assert (await one.state())["ticks"] >= 2
            blocked = asyncio.create_task(one.step({"block": 1.5}))
            await asyncio.sleep(0.05)
            for _ in range(5):
                await two.step({})
            assert not blocked.done()
            await blocked


@BOTH
async def test_a_hung_async_step_is_cancelled_and_its_environment_closes(isolate, tmp_path):
    options = {"arguments": {"path": str(tmp_path / "closed")}, "step_timeout": 0.2}
    async with serve(odd_envs.Marks, isolate=isolate, **options) as server, EnvSession(server.url) as session:
        with pytest.raises(SessionLost, match="STEP_TIMEOUT"):
            await session.step({})
    assert (tmp_path / "closed").exists() and server.status()["abandoned"] == 0


@BOTH
async def test_an_async_environment_that_is_deaf_to_cancellation_holds_no_slot(isolate):
    start = time.monotonic()
    options = {"close_timeout": 0.3, "step_timeout": 0.3, "max_sessions": 4}
    async with serve(odd_envs.DeafInClose, isolate=isolate, **options) as server:
        async with EnvSession(server.url) as session:
            await session.reset()
        await eventually(ended(server), SOON)
        async with EnvSession(server.url) as session:
            await session.reset()
            with pytest.raises(SessionLost, match="STEP_TIMEOUT"):
                await session.step({"deaf": 3600})
        await eventually(ended(server), SOON)
        left = EnvSession(server.url, deadlines=Deadlines(close=0.1))
        await left.connect()
        await left.reset()
        assert server.status()["abandoned"] == (2 if isolate == "thread" else 0)
    assert time.monotonic() - start < 2 * SOON  # the server stopped in spite of the last
    await left.close()


async def test_memory_is_limited():
    async with serve(odd_envs.Inspects, isolate=Isolation(memory_mib=256)) as server, EnvSession(server.url) as session:
        with pytest.raises(ServerError, match="MemoryError"):
            await session.step({"do": "len(bytearray(10**9))"})
        assert (await session.step({"do": "len(bytearray(10**6))"})).observation["said"] == "1000000"


async def test_a_process_inherits_neither_secrets_nor_descriptors(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("HF_TOKEN", "hush")
    held, holds = os.pipe()
    os.set_inheritable(holds, True)
    with open(held), open(holds, "w"):
        isolate = Isolation(env={"MINE": "1"}, cwd=tmp_path)
        async with serve(odd_envs.Inspects, isolate=isolate) as server, EnvSession(server.url) as session:
            async def say(text):
                return (await session.step({"do": text})).observation["said"]

            assert await say("[v for v in os.environ.values() if 'hush' in v]") == "[]"
            assert await say("os.environ['MINE'], os.getcwd()") == str(("1", str(tmp_path)))
            assert await say("'PATH' in os.environ") == "True"
            opened = "[f for f in map(int, os.listdir('/proc/self/fd')) if f > 2 and os.path.exists(f'/proc/self/fd/{f}')]"
            assert len(ast.literal_eval(await say(opened))) == 1  # its socket, which it does not pass on
            assert await say(f"[os.get_inheritable(f) for f in {opened}]") == "[False]"


TALKS = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "60"])
print(os.getpid(), child.pid, "AWS_SECRET_ACCESS_KEY" in os.environ, os.environ.get("MINE"), flush=True)
for i in range(50_000): print("x" * 20)
os.kill(child.pid, 9)
time.sleep(60)
"""


def test_a_server_of_an_environments_own_says_its_address_and_ends_with_all_that_it_started(monkeypatch):
    """It inherits no secret, and however much it prints it is not blocked."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    guard, address = child_processes.start_server([sys.executable, "-c", TALKS], {"MINE": "1"})
    pid, child, secret, mine = address.split()
    assert (secret, mine) == ("False", "1")
    wait_for(lambda: not alive(int(child)), SOON, "all is printed")
    child_processes.stop(guard)
    assert not alive(int(pid))
    guard, child = child_processes.start_server(["sh", "-c", "sleep 60 & echo $!; wait"])
    assert alive(int(child))
    child_processes.stop(guard)
    wait_for(lambda: not alive(int(child)), SOON)


@pytest.mark.parametrize("command", ["exit 3", "sleep 60", "echo; sleep 60", "printf loading; sleep 60"])
def test_a_server_that_gives_no_address_is_an_error(command):
    before = children()
    with pytest.raises(RuntimeError, match="sh printed no address"):
        child_processes.start_server(["sh", "-c", command], seconds=10 if command.startswith(("exit", "echo")) else 0.3)
    assert children() <= before


def test_a_command_keeps_its_exit_status_where_there_is_no_proc():
    """As on macOS."""
    script = ("import os, sys; from grpolab.env import child_processes; sys.platform, os.listdir = 'darwin', None;"
              "sys.exit(child_processes.main(['sh', '-c', 'exit 3']))")
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, cwd=ROOT) as guard:
        assert guard.wait(SOON) == 3


def test_an_interrupt_while_the_command_starts_is_handed_on_to_it():
    """It comes when the command runs, and its guard has not yet got back from starting it."""
    guard = """
import os, signal, subprocess, sys, time
from grpolab.env import child_processes
class Slow(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
child_processes.subprocess.Popen = Slow
sys.exit(child_processes.main([sys.executable, "-c", sys.argv[2], sys.argv[1]]))
"""
    command = ("import os, signal, sys, time; signal.signal(signal.SIGINT, lambda *_: os._exit(5));"
               " open(sys.argv[1], 'x').close(); time.sleep(60)")
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
            [sys.executable, "-c", guard, f"{folder}/ready", command], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=ROOT) as started:
        assert started.wait(SOON) == 5 and not started.stderr.read()


@BOTH
async def test_an_environment_gets_its_arguments(isolate):
    async with serve(EchoEnv, isolate=isolate, arguments={"resource": {"a": 1}}) as server, EnvSession(server.url) as session:
        assert (await session.reset()).observation["resource"] == {"a": 1}
    if isolate == "process":
        async with serve(EchoEnv, isolate=isolate, arguments={"resource": {1}}) as server:
            with pytest.raises(FactoryError, match="not JSON serializable"):
                await EnvSession(server.url).connect()


async def test_what_an_environment_prints_is_no_reply():
    async with serve(odd_envs.Inspects, isolate="process") as server, EnvSession(server.url) as session:
        for _ in range(3):
            assert (await session.step({"say": '{"type":"state"}\n'})).observation["said"] == '{"type":"state"}\n'


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process can adopt what escapes")


@LINUX
@pytest.mark.parametrize("end", ["close", "hang", "kill", "server"])
async def test_what_escapes_its_group_and_its_parent_ends_with_the_session(end):
    """A daemon: a session of its own, its parent gone."""
    with server_process("odd_envs:Inspects", "--step-timeout", "2", "--close-timeout", "0.2") as (process, url):
        session = EnvSession(url, deadlines=Deadlines(close=1))
        await session.connect()
        seen = (await session.step({"escape": True})).observation
        assert alive(seen["child"]) and os.getsid(seen["child"]) == seen["child"]
        if end == "hang":
            with pytest.raises(SessionLost):
                await session.step({"do": "time.sleep(3600)"})
        elif end == "kill":
            os.kill(seen["pid"], signal.SIGKILL)
        elif end == "server":
            process.kill()
        await session.close()
        await asyncio.to_thread(wait_for, lambda: not alive(seen["child"]) and not alive(seen["pid"]), SOON)


@pytest.mark.parametrize("method", ["spawn", *(pytest.param(m, marks=pytest.mark.full) for m in ("forkserver", "fork"))])
async def test_an_environment_may_use_multiprocessing(method):
    async with serve(odd_envs.Multiprocessing, isolate="process") as server, EnvSession(server.url) as session:
        assert (await session.step({"method": method})).observation["said"] == [42]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_no_process_of_a_session_outlives_the_server(number):
    with server_process("odd_envs:Inspects", "--max-sessions", "2") as (process, url):
        session = EnvSession(url, deadlines=Deadlines(close=1))
        await session.connect()
        await session.step({"spawn": True})
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 3  # its guard, itself, and what it started
        process.send_signal(number)
        await asyncio.to_thread(process.wait, SOON)
        await session.close()
        await asyncio.to_thread(wait_for, lambda: not any(alive(p.pid) for p in family), SOON)


async def test_what_another_process_cannot_import_is_refused_when_serving_starts():
    class Local(odd_envs.Base):
        pass

    before = children()  # the simulator of other tests

    async def opens(factory, **options):
        async with serve(factory, isolate="process", **options) as server, EnvSession(server.url):
            pass

    for factory in (Local, lambda: odd_envs.Base()):
        with pytest.raises(ValueError, match="put it into a file, or use isolate='thread'"):
            await opens(factory)
    with pytest.raises(FactoryError, match="has no attribute 'Missing'"):  # found in its process
        await opens("odd_envs:Missing")
    with pytest.raises(ValueError, match="No module named 'nowhere'"):
        await opens("nowhere:Env")
    with pytest.raises(ValueError, match="environment 'chess' cannot be imported"):
        await opens("chess")
    with pytest.raises(FactoryError, match="made a object without reset"):
        await opens(odd_envs.not_an_environment)
    with pytest.raises(ValueError, match="isolate='vm'"):
        ServeOptions(isolate="vm")
    with pytest.raises(ValueError, match="memory_mib=1"):
        Isolation(memory_mib=1)
    with pytest.raises(ValueError, match="no folder"):
        Isolation(cwd="/nowhere/at/all")
    assert children() <= before


@pytest.mark.parametrize("isolate, thing", [*(("thread", thing) for thing in odd_envs.Returns.THINGS),
                                            ("process", "huge"), ("process", "set")])
async def test_what_cannot_be_sent_is_an_error_that_names_the_environment(isolate, thing):
    async with serve(odd_envs.Returns, isolate=isolate) as server, EnvSession(server.url) as session:
        with pytest.raises(ServerError, match="Returns returned|observation=|metadata=|done=|reward=") as caught:
            await session.step({"thing": thing})
        assert caught.value.code == "EXECUTION_ERROR"
        with pytest.raises(ServerError, match="Returns returned from a state"):
            await session.state()
        await session.reset()


async def test_many_processes_leave_nothing_behind():
    async with serve("guess", isolate="process", max_sessions=4) as server:
        async def tenant():
            for _ in range(3):
                async with EnvSession(server.url) as session:
                    await session.reset(seed=1)

        await asyncio.gather(*(tenant() for _ in range(4)))  # once, for what is allocated once
        before = psutil.Process().num_fds(), children()
        await asyncio.gather(*(tenant() for _ in range(4)))
        assert (psutil.Process().num_fds(), children()) == before and server.status()["closed"] == 24


@pytest.mark.parametrize("arguments, said", [
    (["calculator", "--port", "99999"], "port=99999"),
    (["calculator", "--step-timeout", "-1"], "step_timeout=-1"),
    (["calculator", "--max-sessions", "0"], "max_sessions=0"),
    (["calculator", "--ping-interval", "nan"], "ping_interval=nan"),
    (["odd_envs:Missing", "--isolate", "thread"], "has no attribute 'Missing'"),
    (["nowhere:Env"], "No module named 'nowhere'"),
    (["chess"], "environment 'chess' cannot be imported"),
    (["calculator", "--isolate", "thread", "--memory-mib", "100"], "--memory-mib"),
    (["calculator", "--env", "NOT_SET_HERE"], "NOT_SET_HERE is not set"),
    (["calculator", "--host", "0.0.0.0"], "--token-file"),
    (["calculator", "--isolate", "thread", "--env", "A=1"], "need --isolate process"),
    (["calculator", "--token-file", "empty"], "empty is empty"),
    (["calculator", "--token-file", "two lines"], "holds spaces, line breaks"),
    (["calculator", "--token-file", "none"], "none"),
    (["calculator", "--token-file", "bytes"], "the bearer token of bytes holds spaces, line breaks or letters beyond ASCII"),
    (["exits:Env", "--isolate", "thread"], "environment 'exits:Env' cannot be imported: SystemExit(0)"),
    (["raises:Env", "--isolate", "thread"], "environment 'raises:Env' cannot be imported: KeyError('a key')"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_command_line_that_makes_no_sense_is_told_in_a_line(arguments, said, tmp_path, capfd, monkeypatch):
    from grpolab.__main__ import main

    (tmp_path / "empty").write_text("\n")
    (tmp_path / "two lines").write_text("hush\nhush\n")
    (tmp_path / "bytes").write_bytes(b"hush\xff\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)")
    (tmp_path / "raises.py").write_text("raise KeyError('a key')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    assert main(["serve", *arguments]) in (1, 2)
    error = capfd.readouterr().err
    assert said in error and error.count("\n") == 1 and "hush" not in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_that_is_still_importing(number, tmp_path):
    (tmp_path / "slow.py").write_text("import sys, time\nprint('importing', file=sys.stderr, flush=True)\ntime.sleep(60)")
    server = subprocess.Popen(
        [sys.executable, "-m", "grpolab", "serve", "slow:Env", "--isolate", "thread"], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})
    assert server.stderr.readline() == "importing\n"
    server.send_signal(number)
    said = server.communicate(timeout=SOON)[1]
    assert server.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)
    assert "Traceback" not in said and "checkpoint" not in said
