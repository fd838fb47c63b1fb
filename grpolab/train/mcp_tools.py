"""The tools of an MCP server (Model Context Protocol) for `Tools`, with a session of its own for each episode:

    tools = Tools(McpServer(["python", "server.py"]), reward)       # a process on stdio, one an episode
    tools = Tools(McpServer("http://127.0.0.1:8000/mcp"), reward)   # streamable HTTP
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from grpolab.env.protocol import first_fault
from grpolab.train.tools import ToolFailed, ToolsLost


class McpServer:
    """server  the address of a server that speaks streamable HTTP, or the command that starts one on stdio, as a list
    env     variables of the command's process, beside the few that the protocol's package lets through
    connect seconds that it may take until it answers, and then until it has listed its tools; ToolsLost after them
    """

    def __init__(self, server: str | Sequence[str], *, env: Mapping[str, str] | None = None, connect: float = 30.0):
        try:
            from mcp import StdioServerParameters
        except ImportError as error:
            raise ImportError("the tools of an MCP server need the package mcp: pip install 'grpolab[mcp]'") from error
        is_address = isinstance(server, str) and urlsplit(server).scheme in ("http", "https")
        is_command = not isinstance(server, str) and server and all(isinstance(word, str | os.PathLike) for word in server)
        if not (is_address or is_command):
            raise ValueError(f"{server!r:.80}: give an address, http://host:port/path, or a command as a list of words, as in "
                             "['python', 'server.py']")
        self.connect, self.__name__ = connect, server if isinstance(server, str) else " ".join(map(str, server))
        self._at = server if isinstance(server, str) else StdioServerParameters(
            command=str(server[0]), args=[str(word) for word in server[1:]], env=dict(env or {}) or None)

    def tools(self) -> list[dict]:
        """What the server lists, in OpenAI's shape; ToolsLost where it cannot be asked."""
        async def ask() -> list[dict]:
            async with self._client() as client:
                try:
                    async with asyncio.timeout(self.connect):
                        page = await client.list_tools()
                        tools = list(page.tools)
                        while page.next_cursor:
                            page = await client.list_tools(cursor=page.next_cursor)
                            tools += page.tools
                except TimeoutError as error:
                    raise ToolsLost(f"the MCP server {self.__name__} did not list its tools in {self.connect:g} s") from error
                return [{"type": "function", "function": {
                    "name": tool.name, "description": " ".join((tool.description or "").split()),
                    "parameters": tool.input_schema}} for tool in tools]

        with ThreadPoolExecutor(1) as apart:  # also where a loop runs already, as in a notebook
            return apart.submit(asyncio.run, ask()).result()

    @asynccontextmanager
    async def session(self, names: Sequence[str]) -> AsyncIterator[dict[str, Callable[..., Awaitable[str]]]]:
        """The tools of these names as functions, within a session of their own."""
        async with self._client() as client:
            yield {name: _function(client, name) for name in names}

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        from mcp import Client

        client = Client(self._at)
        try:
            async with asyncio.timeout(self.connect):
                await client.__aenter__()
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise
            raise ToolsLost(f"the MCP server {self.__name__} could not be reached: {first_fault(error)!r}. Is it "
                            "running?") from error
        try:
            yield client
        finally:
            await client.__aexit__(None, None, None)


def _function(client: Any, name: str) -> Callable[..., Awaitable[str]]:
    async def call(**arguments: Any) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise ToolsLost(f"the MCP server ended during {name}: {error}") from error
            raise ToolFailed(str(error)) from error
        text = "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)
        if result.is_error:
            raise ToolFailed(text)
        return text

    return call
