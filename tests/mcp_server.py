"""An MCP server for tests/test_mcp_tools.py: on stdio, or with a port as its argument on streamable HTTP."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("notes")
notes: dict[str, str] = {"first": os.environ.get("NOTE", "nothing")}


@server.tool()
def write(key: str, value: str, times: int = 1) -> str:
    """Keep a note."""
    notes[key] = value * times
    return f"{len(notes)} notes"


@server.tool()
def read(key: str) -> str:
    """A note."""
    return notes[key]


@server.tool()
def hang() -> str:
    """Take long."""
    time.sleep(20)
    return "late"


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run(transport="stdio")
