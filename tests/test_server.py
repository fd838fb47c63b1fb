import asyncio
import contextlib
import json
import signal
import time

import psutil
import pytest
from env_harness import SOON, AsyncEchoEnv, EchoEnv, eventually, get, server_process
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from grpolab.env import protocol
from grpolab.env.calculator import CalculatorEnv
from grpolab.env.client import Deadlines, EnvSession, socket_url
from grpolab.env.faults import Faulty
from grpolab.env.protocol import (
    CapacityError,
    ConnectError,
    DeadlineExceeded,
    InvalidAction,
    ServerError,
    SessionLost,
)
from grpolab.env.server import serve, serve_forever
from grpolab.env.session import ServeOptions
from grpolab.signals import at_signals


def port_of(server):
    return int(server.url.rpartition(":")[2])


def handshake(path, *headers):
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade",
             "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@pytest.fixture(autouse=True)
def fresh_counts():
    EchoEnv.live = EchoEnv.most = AsyncEchoEnv.cancelled = 0
    EchoEnv.close_seconds = 0.0
    yield
    EchoEnv.close_seconds = 0.0


@pytest.mark.parametrize("env", [EchoEnv, AsyncEchoEnv])
async def test_an_episode(env):
    async with serve(env) as server, EnvSession(server.url) as session:
        first = await session.reset(seed=7, episode_id="ep1", task={"id": 3}, unknown=1)
        assert first.observation["seed"] == 7 and first.observation["task"] == {"id": 3} and first.reward is None
        second = await session.step({"text": "hello"})
        assert (second.observation["echo"], second.observation["turn"], second.reward) == ("hello", 1, 1.0)
        state = await session.state()
        assert state["episode_id"] == "ep1" and state["step_count"] == 1
    assert server.status()["sessions"] == 0 and EchoEnv.live == 0


@pytest.mark.parametrize("env", [EchoEnv, AsyncEchoEnv])
async def test_sessions_are_isolated_and_each_environment_is_closed_once(env):
    async with serve(env, max_sessions=8) as server:
        async with contextlib.AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(EnvSession(server.url)) for _ in range(8)]
            await asyncio.gather(*(s.reset(seed=i) for i, s in enumerate(sessions)))
            for i, s in enumerate(sessions):
                for _ in range(i):
                    await s.step({"text": str(i)})
            last = await asyncio.gather(*(s.step({"text": f"#{i}"}) for i, s in enumerate(sessions)))
            assert [r.observation["turn"] for r in last] == [i + 1 for i in range(8)]
            assert [r.observation["echo"] for r in last] == [f"#{i}" for i in range(8)]
            assert len({r.observation["env"] for r in last}) == 8 == EchoEnv.live
            assert server.status()["sessions"] == 8
        assert EchoEnv.live == 0 and server.status()["sessions"] == 0 and server.status()["closed"] == 8


async def test_over_capacity_the_handshake_gets_a_real_503():
    async with serve(EchoEnv, max_sessions=1) as server, EnvSession(server.url):
        with pytest.raises(InvalidStatus) as raw:
            await connect(server.url + "/ws", proxy=None)
        reply = raw.value.response
        assert reply.status_code == 503 and reply.headers["Retry-After"] == "1"
        body = json.loads(reply.body)
        assert (body["active_sessions"], body["max_sessions"]) == (1, 1)
        with pytest.raises(CapacityError) as caught:
            await EnvSession(server.url).connect()
        assert (caught.value.active, caught.value.max_sessions) == (1, 1)
        assert server.status()["refused"] == 2 and EchoEnv.most == 1


async def test_a_burst_of_handshakes_never_exceeds_the_cap():
    async with serve(EchoEnv, max_sessions=3) as server:
        sessions = [EnvSession(server.url) for _ in range(20)]
        outcome = await asyncio.gather(*(s.connect() for s in sessions), return_exceptions=True)
        assert sum(o is None for o in outcome) == 3 and sum(isinstance(o, CapacityError) for o in outcome) == 17
        await asyncio.gather(*(s.close() for s in sessions))
        assert EchoEnv.most == 3 and server.status()["sessions"] == 0


async def test_a_slot_is_held_until_the_environment_of_a_dropped_connection_has_closed():
    EchoEnv.close_seconds = 3.0
    async with serve(EchoEnv, max_sessions=1) as server:
        raw = await connect(server.url + "/ws", proxy=None)
        raw.transport.abort()
        await asyncio.sleep(0.1)
        assert server.status()["sessions"] == 1 == EchoEnv.live
        with pytest.raises(CapacityError):  # after LEAVING, for which it may hope
            await EnvSession(server.url).connect()
        assert EchoEnv.live == 1
        await eventually(lambda: server.status()["sessions"] == 0, SOON)
        assert EchoEnv.live == 0 and EchoEnv.most == 1


@pytest.mark.parametrize("env", [EchoEnv, AsyncEchoEnv])
async def test_an_environment_that_raises_keeps_its_session(env):
    async with serve(env) as server, EnvSession(server.url) as session:
        await session.reset()
        with pytest.raises(ServerError, match="RuntimeError: boom: x") as caught:  # the text of a KeyError is but a key
            await session.step({"raise": "boom: x"})
        assert caught.value.code == "EXECUTION_ERROR"
        with pytest.raises(InvalidAction, match="zzz"):
            await session.step({"zzz": 1})
        with pytest.raises(ServerError, match="nan|Out of range"):
            await session.step({"nan": True})
        with pytest.raises(ServerError, match="StepResult"):
            await session.step({"wrong": True})
        assert (await session.step({"text": "still here"})).observation["echo"] == "still here"


async def test_a_hung_plain_environment_costs_its_own_session_only():
    async with serve(EchoEnv, max_sessions=2, step_timeout=1, close_timeout=0.2) as server:
        async with EnvSession(server.url) as good:
            for abandoned in (1, 2):
                async with EnvSession(server.url) as bad:
                    with pytest.raises(SessionLost, match="STEP_TIMEOUT"):
                        await bad.step({"hang": True})
                assert (await good.step({"text": "fine"})).observation["echo"] == "fine"
                await eventually(lambda: server.status()["sessions"] == 1, SOON, "the hung session's slot is free")
                assert server.status()["abandoned"] == abandoned
            with pytest.raises(CapacityError, match="2 environments hang.*isolate='process'"):
                await EnvSession(server.url).connect()


async def test_a_thread_that_was_left_behind_closes_its_environment_when_it_returns():
    async with serve(EchoEnv, max_sessions=2, step_timeout=0.1, close_timeout=0.1) as server:
        session = EnvSession(server.url)
        await session.connect()
        await session.reset()
        with pytest.raises(SessionLost):
            await session.step({"sleep": 3})
        await session.close()
        await eventually(lambda: server.status()["abandoned"] == 1, SOON)
        assert EchoEnv.live == 1
        await eventually(lambda: server.status()["abandoned"] == 0 and EchoEnv.live == 0, SOON)


async def test_a_client_that_leaves_stops_its_async_step_at_once():
    deadlines = Deadlines(step=0.1)
    async with serve(AsyncEchoEnv, step_timeout=60) as server, EnvSession(server.url, deadlines=deadlines) as session:
        with pytest.raises(DeadlineExceeded) as caught:
            await session.step({"hang": True})
        assert caught.value.phase == "step" and isinstance(caught.value, TimeoutError)
        await eventually(lambda: server.status()["sessions"] == 0, SOON)
        assert AsyncEchoEnv.cancelled == 1 and EchoEnv.live == 0


async def test_one_request_at_a_time():
    async with serve(EchoEnv) as server, EnvSession(server.url) as session:
        step = asyncio.create_task(session.step({"text": "a", "sleep": 0.5}))
        await asyncio.sleep(0.02)
        with pytest.raises(RuntimeError, match="in flight"):
            await session.step({"text": "b"})
        assert (await step).observation["echo"] == "a"


async def test_the_wire_as_it_was_recorded():
    """Frames of other clients, pipelining included, get the replies that OpenEnv's server gives."""
    async with serve(EchoEnv) as server, connect(server.url + "/ws", proxy=None) as raw:
        async def ask(text):
            await raw.send(text)
            return json.loads(await raw.recv())

        assert (await ask('{"type":"state"}'))["data"]["step_count"] == 0
        assert (await ask("{"))["data"]["code"] == "INVALID_JSON"
        assert await ask('{"type":"ping"}') == {
            "type": "error", "data": {"message": "Unknown message type: ping", "code": "UNKNOWN_TYPE"}}
        assert (await ask('{"type":"step","data":{},"request_id":1}'))["data"]["errors"][0]["loc"] == ["request_id"]
        assert (await ask('{"type":"mcp","data":{"id":5}}'))["data"]["error"]["code"] == -32603
        for i in range(3):
            await raw.send(f'{{"type":"step","data":{{"text":"{i}"}}}}')
        assert [json.loads(await raw.recv())["data"]["observation"]["echo"] for _ in range(3)] == ["0", "1", "2"]
        await raw.send('{"type":"close"}')
        with pytest.raises(ConnectionClosed):
            await raw.recv()
        assert raw.close_code == 1000 and server.status()["sessions"] == 0


async def test_a_client_that_reads_nothing_loses_its_session():
    async with serve(EchoEnv, ping_interval=0.1, ping_timeout=0.1) as server:
        raw = await connect(server.url + "/ws", proxy=None)
        raw.transport.pause_reading()
        await raw.send('{"type":"step","data":{"big":20000000}}')
        await eventually(lambda: server.status()["session_list"][0]["steps"] == 1, SOON)
        await eventually(lambda: server.status()["sessions"] == 0 == EchoEnv.live, SOON, "its slot is free")
        raw.transport.abort()


async def test_large_messages_behind_a_slow_step_wait_with_the_client_and_not_in_the_server():
    """Four clients that sent frames of 15 MB behind a slow step took the server to 1.2 GB; now it stops reading, and the
    client can send no more than the server's few messages and what the kernel buffers for the connection."""
    frame = json.dumps({"type": "step", "data": {"text": "x" * 15_000_000}})

    with server_process("env_harness:EchoEnv", "--isolate", "thread") as (process, url):
        server, sent = psutil.Process(process.pid), []
        before = server.memory_info().rss

        async def client():
            async with connect(url + "/ws", proxy=None, ping_interval=None, close_timeout=0.1) as raw:
                await raw.send('{"type":"step","data":{"sleep":60}}')
                while len(sent) < 40:
                    await raw.send(frame)
                    sent.append(time.monotonic())

        sending = asyncio.create_task(client())
        await eventually(lambda: sent and time.monotonic() - sent[-1] > 2, 30, "the client stands still")
        assert len(sent) < 40 and server.memory_info().rss - before < 100_000_000
        sending.cancel()


@pytest.mark.parametrize("frame", ["[1,2]", b"x"])
async def test_frames_that_end_the_session(frame):
    async with serve(EchoEnv) as server, connect(server.url + "/ws", proxy=None) as raw:
        await raw.send(frame)
        assert json.loads(await raw.recv())["data"]["code"] == "SESSION_ERROR"
        with pytest.raises(ConnectionClosed):
            await raw.recv()
        assert raw.close_code == 1000


async def test_messages_over_the_limit_end_the_session_with_1009():
    async with serve(EchoEnv) as server:
        async with EnvSession(server.url) as session:
            with pytest.raises(SessionLost, match="1009|too big"):
                await session.step({"text": "x" * protocol.MAX_MESSAGE_BYTES})
        await eventually(lambda: server.status()["sessions"] == 0, SOON)


async def test_health_status_and_unknown_paths():
    async with serve(EchoEnv, max_sessions=2) as server, EnvSession(server.url) as session:
        await session.reset(episode_id="e1")
        assert await asyncio.to_thread(get, server.url + "/health") == (
            200, {"Content-Type": "application/json", "Content-Length": "21", "Connection": "close"},
            {"status": "healthy"})
        _, _, body = await asyncio.to_thread(get, server.url + "/status")
        assert body["sessions"] == 1 and body["session_list"][0]["episode_id"] == "e1"
        assert (await asyncio.to_thread(get, server.url + "/nothing"))[0] == 404


@pytest.mark.parametrize("path", ["/health", "/status", "/nothing"])
async def test_a_get_under_the_name_of_another_site_is_refused(path):
    """DNS rebinding: a page of evil.example whose name leads to 127.0.0.1 must not read what this server knows."""
    async with serve(EchoEnv) as server:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
            code, _, body = await asyncio.to_thread(get, server.url + path, {"Host": host})
            assert code == 403 and "Host" in body["error"]
        for host in ("localhost:1", "127.0.0.1", "[::1]:8000"):
            assert (await asyncio.to_thread(get, server.url + path, {"Host": host}))[0] != 403
    async with serve(EchoEnv, token="secret") as server:  # whoever has the token may come by any name
        headers = {"Host": "lab.example", "Authorization": "Bearer secret"}
        assert (await asyncio.to_thread(get, server.url + path, headers))[0] != 403


async def test_the_token_is_asked_for_everywhere_but_health():
    async with serve(EchoEnv, token="secret") as server:
        with pytest.raises(ConnectError, match="401"):
            await EnvSession(server.url).connect()
        with pytest.raises(ConnectError, match="401"):
            await EnvSession(server.url, token="wrong").connect()
        async with EnvSession(server.url, token="secret") as session:
            await session.reset()
        assert (await asyncio.to_thread(get, server.url + "/status"))[0] == 401
        assert (await asyncio.to_thread(get, server.url + "/status", {"Authorization": "Bearer secret"}))[0] == 200
        assert (await asyncio.to_thread(get, server.url + "/health"))[0] == 200


@pytest.mark.parametrize("headers", [["Bearer secret", "Bearer secret"], ["Bearer \xff"], []])
@pytest.mark.parametrize("path", ["/status", "/ws"])
async def test_an_authorization_that_is_none_is_refused_with_401(path, headers):
    async with serve(EchoEnv, token="secret") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        writer.write(handshake(path, *(f"Authorization: {header}" for header in headers)))
        assert b" 401 " in await reader.readline()
        writer.close()


async def test_a_browser_is_refused_and_takes_no_slot():
    async with serve(EchoEnv, max_sessions=1) as server:
        with pytest.raises(InvalidStatus) as caught:
            await connect(server.url + "/ws", proxy=None, origin="https://evil.example")
        assert caught.value.response.status_code == 403
        assert server.status()["sessions"] == 0 == server.status()["opened"]


async def test_a_handshake_that_dies_while_it_waits_for_a_place_gives_it_back():
    EchoEnv.close_seconds = 0.5
    async with serve(EchoEnv, max_sessions=1) as server:
        last = await connect(server.url + "/ws", proxy=None)
        last.transport.abort()
        await last.wait_closed()
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        writer.write(handshake("/ws"))
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await eventually(lambda: server.status()["opened"] == server.status()["closed"] == 2, SOON)
        async with EnvSession(server.url) as session:
            await session.reset()


async def test_stopping_the_server_answers_what_is_in_flight_and_closes_every_environment():
    async with serve(EchoEnv) as server:
        session = EnvSession(server.url)
        await session.connect()
        step = asyncio.create_task(session.step({"text": "last", "sleep": 1}))
        await asyncio.sleep(0.05)
    assert (await step).observation["echo"] == "last"
    assert EchoEnv.live == 0 and server.status()["sessions"] == 0
    with pytest.raises(SessionLost):
        await session.step({"text": "late"})
    await session.close()
    with pytest.raises(ConnectError):
        await EnvSession(server.url).connect()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="max_sessions=0"):
        ServeOptions(max_sessions=0)
    with pytest.raises(ValueError, match="token"):
        ServeOptions(host="0.0.0.0")
    with pytest.raises(ValueError, match="connect=0"):
        Deadlines(connect=0)
    with pytest.raises(ValueError, match="step=inf"):
        Deadlines(step=float("inf"))
    with pytest.raises(ValueError, match="ftp"):
        socket_url("ftp://x")
    assert socket_url("http://h:1/") == "ws://h:1/ws" and socket_url("wss://h/env/ws?x=1") == "wss://h/env/ws?x=1"


async def test_latency_and_faults_around_any_environment():
    def factory():
        return Faulty(CalculatorEnv(max_turns=9), latency=0.05, faults={2: "raise"})

    async with serve(factory) as server, EnvSession(server.url) as session:
        start = time.monotonic()
        assert (await session.reset(seed=1, task={"a": 1, "op": "+", "b": 2})).observation["text"] == "What is 1 + 2?"
        assert time.monotonic() - start >= 0.05
        assert (await session.step({"text": "calc: 1+2"})).observation["text"] == "3"
        with pytest.raises(ServerError, match="injected fault at step 2"):
            await session.step({"text": "calc: 1"})
        assert (await session.state())["turn"] == 1  # the step that raised never reached it


async def test_a_client_that_reopens_at_once_is_never_refused():
    """It says close, does not wait for the environment, and comes again at once, as OpenEnv's does."""
    EchoEnv.close_seconds = 0.01
    async with serve(EchoEnv, max_sessions=1) as server:
        for _ in range(50):
            async with connect(server.url + "/ws", proxy=None) as raw:
                await raw.send('{"type":"reset"}')
                await raw.recv()
                await raw.send(protocol.CLOSE)
        assert EchoEnv.most == 1


async def test_a_server_that_was_stopped_gives_its_signals_back(capsys):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    serving = asyncio.ensure_future(serve_forever(EchoEnv))
    await eventually(lambda: "serving" in capsys.readouterr().out, SOON)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(serving, SOON)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


async def test_a_handler_that_python_cannot_read_is_left_alone(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)  # what it says of one that was installed in C
    with at_signals(print, signal.SIGUSR1):
        pass
