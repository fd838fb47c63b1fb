import asyncio
import fcntl
import inspect
import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # exact mode is impossible with AMX (`verify.by_amx`)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as behind a shell's `&`: what the tests start would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch
from loop_helpers import DEVICE, fresh
from safetensors.torch import load_model, save_model

from grpolab.decode.verify import by_amx
from grpolab.models.load import Policy, load_policy


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Of a worker that died, how: a fatal error of Python's goes to the captured stderr of the test, which is lost with it."""
    if error:
        status = node.gateway._io.popen.wait(10)
        print(f"\n{node.gateway.id} ended with", f"status {status}" if status >= 0 else signal.Signals(-status).name)


@pytest.fixture(scope="session")
def _tiny() -> Policy:
    torch.set_num_threads(1)
    return load_policy("tiny", device=DEVICE)


@pytest.fixture
def tiny(_tiny) -> Policy:
    """The embedded model, a copy of its own for each test."""
    return fresh(_tiny)


@pytest.fixture
def has_amx(monkeypatch) -> bool:
    """Whether the processor has AMX, used or not: the only kind that was seen to round otherwise than the tests' bounds."""
    with monkeypatch.context() as patch:
        patch.delenv("ONEDNN_MAX_CPU_ISA")
        return by_amx()


@pytest.fixture(scope="session")
def taught_once(_tiny, tmp_path_factory):
    """taught_once(name, teach) -> the embedded model as teach(policy) leaves it: one worker teaches it, all load it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def load(name, teach):
        policy, path = fresh(_tiny), folder / f"{name}.safetensors"
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                taught = fresh(_tiny)
                teach(taught)
                save_model(taught.model, path)
        load_model(policy.model, path)
        return policy

    return load


@pytest.fixture(scope="module")
def packages(request):
    """What `make agents`, `make verifiers` or `make lmeval` installs (the module's PACKAGES says which) can be imported."""
    name = request.module.PACKAGES
    folder = Path(__file__).parents[1] / ".venv" / name
    if not (folder / "installed").exists():
        missing = f"the packages of tests/{name}.txt are not installed: make {name}"
        pytest.fail(missing) if os.environ.get(f"REQUIRE_{name.upper()}") else pytest.skip(missing)
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name, module in list(sys.modules.items()):  # another test wants another version of some
        if str(folder) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture(scope="session")
def _account():
    """A simulated AWS account with its command line; `account` wipes it for each test."""
    from grpolab.env.aws.backend import Simulator
    from grpolab.env.aws.commands import Account

    with Simulator() as simulator:
        account = Account(simulator.address)
        yield account
        account.close()


@pytest.fixture
def account(_account):
    from grpolab.env.aws.backend import wipe

    wipe(_account.endpoint)
    _account.close("s3")  # which remembers where buckets were
    return _account


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """An `async def` test runs on a loop of its own, for a minute at most, and leaves no task behind."""
    async def main():
        await asyncio.wait_for(pyfuncitem.obj(**arguments), 60)
        for _ in range(200):
            if len(asyncio.all_tasks()) == 1:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"tasks are left: {asyncio.all_tasks() - {asyncio.current_task()}}")

    if inspect.iscoroutinefunction(pyfuncitem.obj):
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        asyncio.run(main())
        return True
