"""The page on which a person plays the AWS environment: in a real browser, and for those who should not reach it."""

import asyncio
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from grpolab.env.aws.backend import accounts
from grpolab.env.aws.environment import AwsEnv, read_task
from grpolab.env.aws.web import page
from grpolab.env.server import serve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BUCKET = "intermediate-bucket-versioned"
MAKE, VERSION = read_task(BUCKET).solution


class Browser:
    """Headless Chromium, over its DevTools socket."""

    def __init__(self, socket):
        self.socket, self.number = socket, 0

    async def ask(self, method, **parameters):
        self.number += 1
        await self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while (reply := json.loads(await self.socket.recv())).get("id") != self.number:
            pass
        return reply.get("result", {})  # none where its page has just gone

    async def run(self, script):
        return (await self.ask("Runtime.evaluate", expression=script)).get("result", {}).get("value")

    async def until(self, script, seconds=60):
        async with asyncio.timeout(seconds):
            while not await self.run(script):
                await asyncio.sleep(0.05)

    async def submit(self, form, field, text):
        await self.run(f"at('{field}').value = {json.dumps(text)}; at('{form}').requestSubmit()")


async def browse(address, play):
    """Open the page and let `play(browser)` act on it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # its children write there to the last
        process = subprocess.Popen([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
                                    "--window-size=1100,800", f"--user-data-dir={profile}", "about:blank"],
                                   stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            line = await asyncio.to_thread(lambda: next(line for line in process.stderr if "DevTools listening" in line))
            port = re.search(r"127\.0\.0\.1:(\d+)", line)[1]
            listed = f"http://127.0.0.1:{port}/json"
            async with asyncio.timeout(30):
                while not (tabs := [t for t in json.loads(await asyncio.to_thread(fetch, listed)) if t["type"] == "page"]):
                    await asyncio.sleep(0.05)
            async with connect(tabs[0]["webSocketDebuggerUrl"], max_size=None) as socket:
                browser = Browser(socket)
                await browser.ask("Page.navigate", url=address)
                await play(browser)
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)


def fetch(url, **headers):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(urllib.request.Request(url, headers=headers), timeout=10).read().decode()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_person_solves_a_task_in_a_browser():
    async def play(browser):
        await browser.until("document.readyState === 'complete' && at('note').textContent.includes('start a task')")
        await browser.submit("choose", "name", BUCKET)
        await browser.until("at('task').textContent.includes('versioning')")
        await browser.submit("ask", "command", "aws sqs create-queue --queue-name '<img src=x onerror=document.title=1>'")
        await browser.until("document.querySelectorAll('.turn pre').length === 1")
        assert "<img" in await browser.run("document.querySelector('.turn pre').textContent")  # its text, and no element
        await browser.submit("ask", "command", "ls")
        await browser.until("document.querySelectorAll('.turn.failed').length === 1")
        assert await browser.run("document.images.length") == 0
        assert await browser.run("document.title") == "grpolab: an AWS account"
        await browser.submit("ask", "command", MAKE)
        await browser.until("document.querySelectorAll('.turn').length === 3")
        await browser.until(f"at('account').textContent.includes({json.dumps(MAKE.rpartition('/')[2])})")
        await browser.submit("ask", "command", VERSION)
        await browser.until("at('note').textContent.includes('the task is done')")
        assert "reward 1" in await browser.run("at('note').textContent")

    async def main():
        async with serve(AwsEnv, max_sessions=1, backends=accounts(1)) as server, page(server) as address:
            await browse(address, play)

    asyncio.run(main())


def test_it_holds_a_session_and_says_when_there_is_none():
    async def main():
        async with serve(AwsEnv, max_sessions=1, backends=accounts(1)) as server, page(server) as address:
            where = address.replace("http", "ws") + "/socket"
            async with connect(where, origin=address) as first:
                await first.send(json.dumps({"type": "reset", "data": {"task": "no such task"}}))
                assert "no such task" in json.loads(await first.recv())["data"]["message"]
                assert server.status()["sessions"] == 1
                async with connect(where, origin=address) as second:
                    assert "capacity" in json.loads(await second.recv())["data"]["message"]
            async with asyncio.timeout(10):
                while server.status()["sessions"]:
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_other_sites_do_not_reach_it():
    async def main():
        async with serve(AwsEnv, max_sessions=1, backends=accounts(1)) as server, page(server) as address:
            html = await asyncio.to_thread(fetch, address)
            outside = re.sub(r"new WebSocket\(`ws://\$\{location.host\}/socket`\)", "", html)
            assert "<title>" in html and not re.search(r"https?:|src=|href=|@import|fetch\(|innerHTML", outside)
            with pytest.raises(urllib.error.HTTPError, match="403"):
                await asyncio.to_thread(fetch, address, Host="evil.example")
            with pytest.raises(urllib.error.HTTPError, match="404"):
                await asyncio.to_thread(fetch, address + "/status")
            where = address.replace("http", "ws") + "/socket"
            for origin in (None, "http://evil.example", "null"):
                with pytest.raises(InvalidStatus, match="403"):
                    await connect(where, origin=origin)
            assert server.status()["opened"] == 0

    asyncio.run(main())
