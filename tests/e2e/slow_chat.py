"""A chat at a terminal with a model that plays its answers slowly; the test types, reads and presses Ctrl-C."""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

from strop.cli.chat_loop import Background, converse
from strop.cli.chat_view import ChatTerminal
from strop.engines.scripted import Hangs
from strop.run.chat import Chat
from tests.unit.run.chat.stand import scripted

SCRIPT = {"count": "one two three four five six seven eight", "hang": Hangs("it begins"), "": "\x1b[31mYes."}


def main() -> None:
    stack = AsyncExitStack()
    with Background() as beside:
        session = beside.run(stack.enter_async_context(scripted(Path(sys.argv[1]), SCRIPT, chunk=2, latency=0.1)))
        try:
            converse(Chat(session), session, beside, ChatTerminal())
        finally:
            beside.run(stack.aclose())


if __name__ == "__main__":
    main()
