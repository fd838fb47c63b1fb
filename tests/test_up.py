"""`grpolab up`: several processes that start in order and end together."""

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from env_harness import free_port

from grpolab.__main__ import main
from grpolab.arithmetic import Task, generate
from grpolab.cli import up as command
from grpolab.cli.up import Service, supervise
from grpolab.runs.run import repository
from tests.test_atropos import HOME

PAGE = (repository() / "docs" / "serving.md").read_text()
RECIPE = re.search(r"```toml\n(.*?)\[up\]", PAGE, flags=re.DOTALL)[1].replace("runs/cli_sft/tiny/policy", "tiny")
ANSWERS = ("import http.server, sys; http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), "
           "http.server.SimpleHTTPRequestHandler).serve_forever()")


ANSWERS_FOR_A_WHILE = f"""
import os, threading
print(os.getpid(), flush=True)
def die():
    print("no memory left", flush=True)
    os._exit(3)
threading.Timer(1.5, die).start()
{ANSWERS}
"""


def say_atropos_is_installed(monkeypatch):
    find = command.importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name, *more: name == "atroposlib" or find(name, *more))


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A function that writes the recipe and a file of rows into the working folder."""
    monkeypatch.chdir(tmp_path)
    say_atropos_is_installed(monkeypatch)
    monkeypatch.setattr(command.shutil, "which", lambda name: name)
    (tmp_path / "train.jsonl").write_text('{"question": "What is 2 + 3?", "answer": "2 plus 3 is 5. #### 5"}\n')

    ports = f"[up]\napi-port = {free_port()}\nserver-port = {free_port()}\n"

    def write(more="", up=ports):
        named = {line.partition(" =")[0] for line in more.splitlines()}
        (tmp_path / "run.toml").write_text("".join(
            line for line in RECIPE.splitlines(True) if line.partition(" =")[0] not in named) + more + up)
        return "run.toml"

    return write


@pytest.mark.parametrize("way", ["shared", "lora_only", "lora_restart", "none"])
def test_dry_run_prints_what_it_would_start(recipe, capsys, way):
    more = f'weight-bridge = "{way}"\n' + "lora-rank = 4\n" * way.startswith("lora")
    assert main(["up", recipe(more), "--dry-run", "--steps", "3", "--server-port", "9999"]) == 0
    lines = capsys.readouterr().out.splitlines()
    started = [line.split()[0] for line in lines[: lines.index("")]]
    server = ["server"] * (way in ("shared", "lora_only"))  # else the trainer starts it
    assert started == ["api", *server, "environment", "trainer"] and not Path("logs").exists()
    assert "steps = 3" in lines and f'weight_bridge = "{way}"' in lines and 'server_url = "http://127.0.0.1:9999"' in lines
    environment = next(line for line in lines if line.startswith("environment"))
    assert "--openai.server_type=vllm" in environment and "--env.group_size=8" in environment
    assert "--env.data_path=train.jsonl" in environment and not any(line.startswith("data") for line in lines)
    trainer = Path("again.toml")  # as a run leaves it
    trainer.write_text("\n".join(lines[lines.index("") + 1 :]))
    assert main(["train", str(trainer), "--print-config"]) == 0 and capsys.readouterr().out == trainer.read_text() + "\n"
    assert main(["up", str(trainer), "--data", "train.jsonl", "--dry-run", "--resume"]) == 0
    assert "trainer.toml --resume\n" in capsys.readouterr().out
    assert main(["up", recipe(more), "--dry-run", "--dtype", "bfloat16"]) == 0
    assert ("--dtype bfloat16" in capsys.readouterr().out) == bool(server)  # whose weights are of the trainer's type


def test_what_cannot_work_is_refused_before_anything_starts(recipe, capsys, monkeypatch):
    monkeypatch.setattr(command, "run", None)
    Path("full").mkdir()
    Path("full/server.log").write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["up", recipe(), "--server-port", str(port)]) == 2
        assert f"--server-port {port} is not free" in capsys.readouterr().err
    for flags, says in ((["--env", "calculator"], "leave --env"), (["--lora-rank", "4", "--weight-bridge", "shared", "--steps",
                        "x"], "invalid"), (["--stepss", "3"], "--stepss"), (["--print-config"], "say --dry-run"),
                        (["--environment", "python my_env.py"], "--data train.jsonl: 'python my_env.py' is not told it"),
                        (["--refills", "3"], "--refills 3 is of"), (["--weight-bridge", "none", "--lora-rank", "4"],
                        "sends whole models"),
                        (["--api-port", "99999"], "from 1 to 65535"), (["--server-port", "0"], "from 1 to 65535"),
                        (["--api-port", "7", "--server-port", "7"], "two ports"),
                        (["--bridge-path", "run.toml"], "run.toml holds something else"),
                        (["--logs", "full"], "full/server.log is not of an earlier")):
        with suppress(SystemExit):  # of the parser
            assert main(["up", recipe(), *flags]) == 2
        assert says in "".join(capsys.readouterr())
    assert main(["up", recipe("dry-run = true\n")]) == 2 and "say --dry-run to grpolab up" in capsys.readouterr().err
    Path(recipe()).rename("full/trainer.toml")
    assert main(["up", "full/trainer.toml", "--logs", "full"]) == 2
    assert "where the trainer's recipe would be written" in capsys.readouterr().err
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    assert main(["up", recipe()]) == 2 and "there is no such program" in capsys.readouterr().err
    Path("train.jsonl").write_text('{"question": "What?", "answer": "5"}\n')
    assert main(["up", recipe()]) == 1 and "does not end in '#### number'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["up", recipe(up="[up]\napi-prt = 3\n"), "--dry-run"])
    assert "api-prt" in "".join(capsys.readouterr())
    assert main(["train", recipe()]) == 2 and "a table for grpolab up" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def signals():
    """What `supervise` leaves set is of a process that ends after it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def python(name, script, *arguments, answers=None):
    return Service(name, [sys.executable, "-S", "-c", script, *arguments], answers)


def gone(services, seconds=10):
    """Whether no process of theirs is left: each wrote its id first."""
    pids = [int(s.log.read_text().split()[0]) for s in services if s.log.is_file() and s.log.read_text().split()]
    until = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(pids) and not any(Path(f"/proc/{pid}").exists() for pid in pids)


PID = "import os, time; print(os.getpid(), flush=True); "


def api(port):
    return python("api", PID + ANSWERS, str(port), answers=f"http://127.0.0.1:{port}/")


def test_they_end_together_when_the_trainer_is_done(tmp_path, capfd):
    services = [api(free_port()), python("environment", PID), python("trainer", PID + "time.sleep(.5); print('step 1/1')")]
    supervise(services, tmp_path, 20)
    out = capfd.readouterr().out
    assert gone(services) and "step 1/1" in out and f"log: {tmp_path}/api.log" in out


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_one_that_dies_ends_all_and_is_named(tmp_path, dies):
    services = [api(free_port()), python("environment", PID + "time.sleep(60)"), python("trainer", PID + "time.sleep(60)")]
    last = PID + "time.sleep(.3); print('no memory left'); os._exit(3)"
    if dies:
        services[dies] = python(services[dies].name, last)
    else:
        port = free_port()
        services[0] = python("api", ANSWERS_FOR_A_WHILE, str(port), answers=f"http://127.0.0.1:{port}/")
    with pytest.raises(ChildProcessError, match=f"(?s)the {services[dies].name} ended with status 3.*no memory left"):
        supervise(services, tmp_path, 20)
    assert gone(services)


def test_an_api_that_never_answers_is_named(tmp_path):
    port = free_port()
    services = [python("api", PID + "time.sleep(60)", answers=f"http://127.0.0.1:{port}/"), python("trainer", PID)]
    with pytest.raises(TimeoutError, match=rf"the api did not answer at http://127.0.0.1:{port}/ in 0.5 s"):
        supervise(services, tmp_path, 0.5)
    assert gone(services[:1]) and services[1].guard is None


STUBBORN = """
import os, signal, sys, time
print(os.getpid(), flush=True)
def keep(*_):
    print("kept a checkpoint", flush=True)
    if sys.argv[1] != "twice":
        os._exit(130)
signal.signal(signal.SIGINT, keep)
print("ready", flush=True)
time.sleep(60)
while True: time.sleep(60)
"""


@pytest.mark.parametrize("how", ["once", "twice", "closed terminal"])
def test_ctrl_c_lets_the_trainer_finish_and_a_second_one_does_not(tmp_path, how):
    services = [api(free_port()), python("environment", PID + "time.sleep(60)"), python("trainer", STUBBORN, how)]

    def interrupt():
        trainer = tmp_path / "trainer.log"
        for text in ("ready", "kept a checkpoint")[: 1 + (how == "twice")]:
            while not trainer.is_file() or text not in trainer.read_text():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGHUP if how == "closed terminal" else signal.SIGINT)

    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        supervise(services, tmp_path, 20)
    assert gone(services) and "kept a checkpoint" in services[-1].log.read_text()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL  # as it was before


def test_two_do_not_share_a_folder_and_what_a_killed_one_left_in_memory_goes(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "MEMORY", tmp_path)
    monkeypatch.setattr(command, "supervise", lambda *_: None)
    (tmp_path / f"grpolab-{2**22 + 1}.safetensors.lock").touch()  # there is no process of that number
    (tmp_path / "grpolab-1.safetensors").touch()
    path = recipe()
    assert main(["up", path]) == 0
    assert [p.name for p in tmp_path.glob("*grpolab*")] == ["grpolab-1.safetensors"]
    holding = ("import pathlib, time, grpolab.files as f\n"
               "with f.locked(pathlib.Path('logs/.process')): print(1, flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        written = Path("logs/trainer.toml").stat().st_mtime_ns
        assert main(["up", path, "--steps", "7"]) == 2
        assert f"--logs logs is in use by process {other.pid}" in capsys.readouterr().err
        assert Path("logs/trainer.toml").stat().st_mtime_ns == written
        other.kill()


@pytest.mark.full
@pytest.mark.parametrize("way", ["shared", "none"])
def test_the_embedded_model_learns_from_a_real_environment(recipe, tmp_path, monkeypatch, capfd, way):
    """Four real processes: atroposlib's API, a served policy, an environment on its BaseEnv, the trainer."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    if not (Path(HOME) / "lib").is_dir() or not list(Path(HOME).glob("lib/python*/site-packages/aiohttp")):
        pytest.skip("atroposlib's environments are not installed: make atropos")
    (installed,) = Path(HOME).glob("lib/python*/site-packages")
    monkeypatch.setenv("PYTHONPATH", f"{repository()}:{installed}")
    say_atropos_is_installed(monkeypatch)
    rows = [{"question": p.question, "answer": f"#### {p.answer}"} for p in generate(40, 0, seed=1, task=Task("+", 9))[0]]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["sft", "tiny", "--ops", "+", "--max-operand", "9", "--steps", "60", "--lr", "3e-3"]) == 0
    more = ["--steps", "4", "--prompts-per-step", "4", "--max-new-tokens", "24", "--lr", "3e-4", "--timeout", "300"]
    path = recipe(f'model = "runs/cli_sft/tiny/policy"\nweight-bridge = "{way}"\n')
    assert main(["up", path, "--api", f"{HOME}/bin/run-api", *more]) == 0
    assert "done in" in capfd.readouterr().out
    (metrics,) = tmp_path.glob("runs/cli_grpo/*/metrics.csv")
    table = list(csv.DictReader(metrics.open()))
    assert len(table) == 4 and all(float(row["mixed"]) == 1 for row in table)  # BaseEnv drops the others
    assert float(table[0]["diff_max"]) < 1e-3 and table[0]["staleness"] == "0"  # the first batch is on-policy
    assert max(float(row["sync_s"]) for row in table[1:]) > 0 and max(float(row["staleness"]) for row in table) <= 4
    environment = (tmp_path / "logs" / "environment.log").read_text()
    assert "Error" not in environment or way == "none"  # which is away while it starts again
    assert not list(Path("/dev/shm").glob(f"grpolab-{os.getpid()}*"))
