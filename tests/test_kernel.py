"""The dashboard in a kernel of its own: what a cell shows while it runs, and when it is interrupted."""

import threading
import time

import pytest
from jupyter_client.manager import start_new_kernel

PREPARE = """
import asyncio
from grpolab import load_policy
from grpolab.arithmetic import Task, generate
from grpolab.lab.dashboard import Dashboard
from grpolab.runs.run import Run
from grpolab.train import SFTConfig, demonstrations, sft

policy = load_policy("tiny")
known, asked = generate(20, 2, seed=1, task=Task(ops="+-", max_operand=99))
config = SFTConfig(steps=10_000, batch_size=1, save_every=7)
run = Run("x", root=ROOT)
"""
TRAIN = """
live = Dashboard(config.steps, ["loss"], "SFT", run=run)
async for row in sft(policy, demonstrations(policy, known), config, run=run):
    live.update(row)
"""


class Kernel:
    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3", extra_arguments=["--log-level=ERROR"])

    def run(self, code, interrupt_after=None, seconds=None):
        """Execute a cell; (status, what it printed, errors, the latest state of its displays). It is interrupted after so
        many updates of a display, or after so many seconds."""
        asked = self.client.execute(code)
        if seconds is not None:
            threading.Timer(seconds, self.manager.interrupt_kernel).start()
        texts, errors, shown, updates = "", [], {}, 0
        end = time.monotonic() + 120
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=120)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "stream":
                texts += content["text"]
            elif kind == "error":
                errors.append("\n".join(content["traceback"]))
            elif kind in ("display_data", "update_display_data", "execute_result"):
                shown[content.get("transient", {}).get("display_id", len(shown))] = content["data"]
                updates += kind == "update_display_data"
                if interrupt_after is not None and updates >= interrupt_after:
                    interrupt_after = None
                    self.manager.interrupt_kernel()
            elif kind == "status" and content["execution_state"] == "idle":
                break
        while (reply := self.client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != asked:
            pass
        return reply["content"]["status"], texts, errors, list(shown.values())

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    yield kernel
    kernel.close()


@pytest.fixture
def prepared(kernel, tmp_path):
    status, _, errors, _ = kernel.run(f"ROOT = {str(tmp_path)!r}\n" + PREPARE)
    assert status == "ok", errors
    return kernel


@pytest.mark.parametrize("body", ["", "    await asyncio.sleep(0.3)\n"], ids=["in the loop", "in the body"])
def test_an_interrupt_is_one_line_and_a_rerun_goes_on_from_there(prepared, body):
    status, printed, errors, shown = prepared.run(TRAIN + body, interrupt_after=2)
    assert status == "error" and errors == []  # run-all stops here, and no traceback
    (line,) = [s for s in printed.splitlines() if "stopped" in s]
    assert " of 10000; a rerun of this cell goes on from " in line
    assert "interrupted" in shown[-1]["text/html"] and "interrupted" in shown[-1]["text/plain"]
    prepared.run("steps = []\n" + TRAIN + "    steps.append(row['step'])\n" + body, interrupt_after=2)
    _, printed, _, _ = prepared.run("print(steps[0], [r['step'] for r in live.rows] == list(range(live.done)))")
    assert printed.split() == [line.split("goes on from ")[1], "True"]  # and the dashboard shows the whole run


@pytest.mark.parametrize("waiting", ["await asyncio.sleep(60)", "time.sleep(60)"])
def test_an_interrupt_is_one_line_in_any_cell(kernel, waiting):
    """Also where the display of an earlier cell has more to show. Other errors are shown as ever."""
    cell = f"""import asyncio, time
from IPython.display import display
def work():
    {'...' if 'await' in waiting else waiting}
shown = display("a", display_id=True)
shown.update("b")
{waiting if 'await' in waiting else 'work()'}"""
    assert kernel.run("from grpolab import plots\nplots.use_style()")[2] == []
    kernel.run("from grpolab.lab.dashboard import Dashboard\nlive = Dashboard(2, [])\nlive.update({'step': 0})")
    began = time.monotonic()
    status, printed, errors, _ = kernel.run(cell, interrupt_after=1)
    assert (status, errors) == ("error", []) and time.monotonic() - began < 20  # not when it would have ended anyway
    lines = [(n, line) for n, line in enumerate(cell.splitlines(), start=1)][-2:]  # the former if it is slow to leave it
    assert printed in {f"stopped at line {n} ({line}); a rerun starts this cell over\n" for n, line in lines}
    assert "ZeroDivisionError" in kernel.run("1 / 0")[2][0]


def test_asking_leaves_weights_and_generators_as_they_are(prepared):
    _, said, errors, _ = prepared.run("""
import random, torch
from grpolab.runs.checkpoints import weights_hash

live = Dashboard(3, [])
states = []
for _ in range(2):
    states.append((weights_hash(policy), policy.version, random.getstate(), torch.get_rng_state().tolist()))
    await live.ask(policy, asked)
print(len(live.asked), states[0] == states[1])
""")
    assert (said.splitlines()[-1], errors) == ("2 True", [])
