"""An MCP server for tests: over stdio, or with a port as its argument over HTTP. Some of its tools behave badly."""

import os
import sys
import time

import anyio
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def total(numbers: list[int]) -> dict[str, int]:
    """Add many."""
    return {"total": sum(numbers)}


@server.tool()
def picture() -> Image:
    """Give an image."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("no such thing")


@server.tool()
async def hang() -> str:
    """Never answer."""
    await anyio.sleep(600)
    return "too late"


@server.tool()
def die() -> str:
    """End the server in the middle of a call."""
    print("a meteorite", file=sys.stderr, flush=True)
    os._exit(7)


@server.tool()
def environment() -> list[str]:
    """What the server was started with."""
    return sorted(os.environ)


if __name__ == "__main__":
    if sys.argv[1:] == ["silent"]:
        time.sleep(600)
    elif sys.argv[1:] == ["broken"]:
        sys.exit("cannot find my settings")
    elif sys.argv[1:]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
