import subprocess
import sys

import pytest

PROGRAM = """
import asyncio
from grpolab.sync import run_sync

async def work():
    await asyncio.sleep(0.01)
    return 7

def plain():
    return run_sync(work())

async def notebook():
    return plain()

print({call})
"""


@pytest.mark.parametrize("call", ["plain()", "asyncio.run(notebook())"], ids=["no loop", "a running loop"])
def test_a_coroutine_from_synchronous_code(call):
    """In a process of its own, since nest_asyncio patches asyncio."""
    program = PROGRAM.replace("{call}", call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "7", done.stderr
