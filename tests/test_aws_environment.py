"""The AWS environment: rewards, options and secrets of an episode, eight accounts at once, and what is killed under it."""

import asyncio
import json
import os
import signal
import sys

import psutil
import pytest
from env_harness import SOON, alive, server_process, wait_for

from grpolab.__main__ import main
from grpolab.env.aws import backend, environment
from grpolab.env.aws.backend import Simulator
from grpolab.env.aws.commands import Output
from grpolab.env.aws.environment import AwsEnv, SetupError, read_command, read_task, shorten
from grpolab.env.aws.grader import grade
from grpolab.env.aws.tasks import TIERS, Task, load_tasks
from grpolab.env.client import EnvSession
from grpolab.env.pool import GrpoPool
from grpolab.env.protocol import InvalidAction, ServerError
from grpolab.env.server import serve

BUCKET = "intermediate-bucket-versioned"  # create it, then turn on its versioning
NAME = read_task(BUCKET).solution[0].rpartition("/")[2]
MAKE, VERSION = read_task(BUCKET).solution
LOOK = "aws s3 ls"


@pytest.fixture
def account(_account):
    return _account.endpoint


def played(env, *lines, seed=1, task=BUCKET):
    """The results of an episode: of its reset, then of each line."""
    return [env.reset(seed=seed, task=task), *(env.step({"command": line}) for line in lines)]


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted by /proc")
def test_an_account_gathers_no_open_files():
    """At seventeen an episode, a simulator that kept those of its connections stopped answering after some 1200."""
    with Simulator() as simulator:
        env = AwsEnv(simulator.address, max_turns=2)
        (process,) = psutil.Process(simulator.guard.pid).children(recursive=True)
        played(env, MAKE, VERSION)
        before = process.num_fds()
        for _ in range(10):
            played(env, MAKE, VERSION)
        assert process.num_fds() <= before + 5
        env.close()


def test_the_reward_is_paid_once_and_stalling_earns_nothing(account):
    env = AwsEnv(account, max_turns=5)
    first, made, looked, done = played(env, MAKE, LOOK, VERSION)
    assert first.observation == {"text": read_task(BUCKET).description, "ok": True} and first.reward is None
    assert (made.reward, made.done, made.metadata["progress"]) == (None, False, 0.5)
    assert (looked.reward, looked.done) == (None, False) and NAME in looked.observation["text"]
    assert (done.reward, done.done, done.metadata["achieved"]) == (1.0, True, True)
    with pytest.raises(RuntimeError, match="the episode is over"):
        env.step({"command": LOOK})
    stalled = played(env, MAKE, *[LOOK] * 4)
    assert [r.reward for r in stalled[1:]] == [None, None, None, None, 0.0] and stalled[-1].done
    assert not stalled[-1].metadata["achieved"] and stalled[-1].metadata["progress"] == 0.5


def test_shaping_is_a_potential_difference(account):
    """Every way through an episode sums to its terminal reward."""
    env = AwsEnv(account, max_turns=4, shaping=0.5)
    assert [r.reward for r in played(env, MAKE, LOOK, VERSION)[1:]] == [0.25, 0.0, 0.75]
    assert [r.reward for r in played(env, MAKE, *[LOOK] * 3)[1:]] == [0.25, 0.0, 0.0, -0.25]


def test_drift_spoils_by_the_seed(account):
    env, seen = AwsEnv(account), []
    for seed in (1, 1, 2, 3, 4):
        env.reset(seed=seed, task="drift-bucket")
        seen.append(grade(read_task("drift-bucket"), env.account.client).holds)
        assert 0 < env.state()["progress"] < 1
    assert seen[0] == seen[1] and len(set(seen)) > 1


def test_the_same_seed_gives_the_same_episode(account):
    env = AwsEnv(account)
    make = {"command": "aws sqs create-queue --queue-name a"}
    one, two = ([env.reset(seed=9), env.step(make), env.state()] for _ in range(2))
    assert one == two
    assert len({json.dumps(env.reset(seed=n).metadata) for n in range(4)}) > 1
    tiers = {env.reset(seed=n).metadata["task"]["tier"] for env in (AwsEnv(account, tier="warmup"),) for n in range(5)}
    assert tiers == {"warmup"}


def test_a_setup_that_fails_is_an_error(account, monkeypatch):
    broken = Task("broken", "warmup", "x", ("s3",), ("aws s3 mb s3://fine-name", "aws s3 mb s3://X"))
    monkeypatch.setattr(environment, "read_task", lambda _: broken)
    env = AwsEnv(account)
    with pytest.raises(SetupError, match="task broken: 'aws s3 mb s3://X' failed: make_bucket failed"):
        env.reset(seed=1, task="broken")
    with pytest.raises(RuntimeError, match="reset"):
        env.step({"command": LOOK})


def test_criteria_and_solutions_stay_here(account):
    env = AwsEnv(account)
    for tier in TIERS:
        for task in load_tasks(tier)[:2]:
            told = [vars(env.reset(seed=1, task=task.id)), vars(env.step({"command": "aws help"})), env.state()]
            text = json.dumps(told)
            for secret in (*task.criteria, *task.solution, *task.drifts):
                assert json.dumps(secret) not in text, (task.id, secret)
            assert "criteria" not in text and "solution" not in text


@pytest.mark.parametrize("action, command", [
    ({"command": " aws s3 ls "}, "aws s3 ls"), ({"text": "aws s3 ls"}, "aws s3 ls"),
    ({"text": "Sure:\n```\naws s3 ls\n```"}, "aws s3 ls"),
    ({"text": "$ aws s3 ls\naws s3 rb s3://x"}, "aws s3 ls"),
    ({"text": "I use `aws s3 ls`"}, "I use `aws s3 ls`"), ({"text": ""}, ""),
    ({"text": "`aws s3 ls`", "metadata": {}}, "aws s3 ls")])
def test_a_command_is_found_in_text(action, command):
    assert read_command(action) == command


def rewards(env, task, *lines):
    env.reset(task=task)
    return [env.step({"command": line}).reward for line in lines]


def test_an_episode_remembers_no_bucket_of_another(account):
    """A client of S3 remembers in which region a bucket was, and the next episode has it elsewhere."""
    env = AwsEnv(account)
    here, there = "aws s3 mb s3://plum", "aws s3 mb s3://plum --region eu-west-1"
    for _ in range(2):
        assert rewards(env, "beginner-bucket-region/plum,eu-west-1", there) == [1.0]
        assert rewards(env, "warmup-bucket/plum", here) == [1.0]
    assert rewards(env, "intermediate-bucket-versioned/plum", there, "aws s3 rb s3://plum --region eu-west-1", here,
                   "aws s3api put-bucket-versioning --bucket plum --versioning-configuration Status=Enabled")[-1] == 1.0
    assert rewards(env, "warmup-bucket-delete/plum", "aws s3 rb s3://plum") == [1.0]  # its set-up makes the bucket
    env.close()


def test_the_grader_has_clients_of_its_own(account):
    env = AwsEnv(account)
    env.reset(task="warmup-queue/plum")
    requests = []
    env.account.client("sqs").meta.events.register_first("before-send", lambda **_: requests.append(1))
    env.step({"command": "aws iam list-users"})  # after which the grader looks for the queue
    assert requests == []
    env.close()


@pytest.mark.parametrize("action", [
    {"command": "aws sqs create-queue \\\n  --queue-name plum"},
    {"text": "Sure:\naws sqs create-queue \\\n  --queue-name plum\nDone."},
    {"text": "```\n$ aws sqs \\\r\n create-queue \\\r\n --queue-name pl\\\r\num\r\n```"},
    {"command": 'aws sqs create-queue --queue-name "pl\\\num"'}])
def test_a_command_goes_on_after_a_backslash(account, action):
    env = AwsEnv(account)
    env.reset(task="warmup-queue/plum")
    result = env.step(action)
    assert result.reward == 1.0, result.observation
    env.close()


@pytest.mark.parametrize("action", [{}, {"command": 1}, {"text": None}, {"command": "x", "text": "y"}, {"line": "aws s3 ls"}])
def test_another_action_is_refused(action):
    with pytest.raises(InvalidAction, match='"command": "aws ..."'):
        read_command(action)


@pytest.mark.parametrize("task", [7, None, {"task": 1}, "nothing", "intermediate-bucket-versioned/a,b,c,d", {"id": 3}])
def test_an_unknown_task_is_refused(task):
    with pytest.raises(InvalidAction):
        read_task(task)
    assert read_task({"id": "warmup-bucket/plum"}).description == "Create an S3 bucket named plum."


def test_long_outputs_are_cut_in_their_middle():
    assert shorten(Output(True, '{\n    "A": [\n        1\n    ]\n}\n', ""), 100) == '{"A":[1]}'
    assert shorten(Output(True, "", ""), 100) == "ok" and shorten(Output(False, "", "\nno\n"), 100) == "no"
    cut = shorten(Output(True, "a" * 500 + "z" * 500, ""), 100)
    assert len(cut) <= 100 and cut.startswith("aaaa") and cut.endswith("zzzz") and " ... 925 characters ... " in cut
    assert cut.count("a") - 2 + cut.count("z") == 1000 - 925  # "characters" has two


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"tier": "hard"}, {"shaping": -1}, {"observation_characters": 0}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AwsEnv("http://127.0.0.1:1", **options)


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"ministack: pip install 'grpolab\[aws\]'"):
        AwsEnv()


def test_eight_accounts_hold_different_buckets_at_once():
    async def main():
        here = asyncio.Barrier(8)

        async def stock(session):
            await session.reset(seed=1, task=BUCKET)
            await session.step({"command": f"aws s3 mb s3://bucket-of-{session.index}"})
            await session.step({"command": MAKE})  # the same name in all eight
            await here.wait()  # every account holds its buckets now
            return sorted((await session.step({"command": LOOK})).observation["text"].split()[2::3])

        async with serve(AwsEnv, max_sessions=8) as server, GrpoPool(server.url, size=8) as pool:
            held = await pool.run_group(stock)
            assert held == [sorted([f"bucket-of-{n}", NAME]) for n in range(8)]
            again = await pool.run_group(lambda session: session.reset(seed=1, task=BUCKET))
            assert len(again) == 8

    asyncio.run(main())


def test_an_account_that_dies_is_an_error_and_replaced():
    """No reward is made up: the step fails by name, and its slot gets a new session, which has a new account."""
    async def main():
        already = set(psutil.Process().children(recursive=True))
        async with serve(AwsEnv, max_sessions=1) as server, GrpoPool(server.url, size=1) as pool:
            async def killed(session):
                await session.reset(seed=1, task=BUCKET)
                await session.step({"command": MAKE})
                for child in set(psutil.Process().children(recursive=True)) - already:
                    child.kill()
                await session.step({"command": VERSION})

            with pytest.raises(ServerError, match="AccountGone: the account at http://127.0.0.1:[0-9]+ does not answer"):
                await pool.run_group(killed)

            async def plays(session):
                await session.reset(seed=1, task=BUCKET)
                await session.step({"command": MAKE})
                return (await session.step({"command": VERSION})).reward

            assert await pool.run_group(plays) == [1.0]

    asyncio.run(main())


def below(pid: int) -> list[int]:
    """The processes that descend from one."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_nothing_outlives_a_killed_server():
    """Two servers at once, with processes of their own for the environments; SIGKILL ends one with all its accounts."""
    with server_process("aws", "--max-sessions", "2", "--isolate", "process") as (one, url), \
            server_process("aws", "--max-sessions", "1", "--max-turns", "1") as (two, other):
        async def ask(url):
            async with EnvSession(url) as session:
                await session.reset(seed=1, task=BUCKET)
                result = await session.step({"command": MAKE})
                return result.done, below(one.pid)

        assert asyncio.run(ask(other))[0] is True  # --max-turns 1
        done, children = asyncio.run(ask(url))
        assert done is False and len(children) >= 4  # the session's process and its simulator, each under a guard
        os.kill(one.pid, signal.SIGKILL)
        wait_for(lambda: not any(alive(pid) for pid in children), SOON, "the end of every process of the server")
        assert asyncio.run(ask(other))[0] is True


@pytest.mark.parametrize("options, said", [
    (("calculator", "--max-turns", "3"), "--max-turns 3 is only of `serve aws`"),
    (("aws", "--shaping", "2"), "shaping=2.0"),
    (("guess", "--tier", "expert"), "--tier expert is only of `serve aws`")])
def test_the_command_line_refuses(options, said, capsys):
    try:
        status = main(["serve", *options])
    except SystemExit as exit:
        status = exit.code
    assert status == 2 and said in capsys.readouterr().err
