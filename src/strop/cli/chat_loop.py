"""A chat at work: what is typed goes to the model or the agent, what comes of it to the view.

this thread: input(), Ctrl-C        ──ask──▶   the other thread: an event loop with store, gateway and engine
the view prints as things happen    ◀─show──
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from strop.cli.chat_view import ChatJson, ChatLines, ChatTerminal
from strop.cli.output import get_program
from strop.cli.rollouts import open_run
from strop.cli.tool_functions import load
from strop.config import Config, describe_models
from strop.errors import StropError
from strop.run.chat import AgentChat, Chat, ChatAnswer, ChatSession, open_chat
from strop.types import Task

T = TypeVar("T")
HELP = """\
/reset          begin another conversation
/system TEXT    begin another, with this system message (without a text: with none)
/quit           leave; so does Ctrl-D
Ctrl-C stops an answer, and twice leaves. A message that is to begin with / has a space before it."""


def talk(config: Config, folder: Path, view: ChatLines, arguments: argparse.Namespace, *, run: Path | None) -> None:
    """Load what is talked to, and talk. `run` is whose agent `--agent` means."""
    tools = load(arguments.tools)
    if not isinstance(view, ChatJson):
        print(f"loading {describe_models(config)}", file=sys.stderr)
    stack = AsyncExitStack()
    with Background() as background:
        try:
            session = background.run(stack.enter_async_context(open_chat(config, folder, agent=arguments.agent)))
            if arguments.agent and run is not None:
                speaker = AgentChat(session, background.run(_example(run)))
            else:
                speaker = Chat(
                    session, system=arguments.system, tools=tools.schemas, run=tools.text, rounds=arguments.rounds
                )
            converse(speaker, session, background, view)
        finally:
            background.run(stack.aclose())
    if view.asked:
        view.note(f"what was said is kept: {get_program()} rollouts {folder}")


def converse(speaker: Chat | AgentChat, session: ChatSession, background: Background, view: ChatLines) -> None:
    """Answer line by line, until the last."""
    view.note(_introduction(speaker, session))
    for line in _read_typed(view) if isinstance(view, ChatTerminal) else _read_lines():
        if line.startswith("/"):
            if not _run_command(line, speaker, background, view):
                break
        elif line.strip():
            _ask(line.strip(), speaker, session, background, view)
    background.run(speaker.reset())


def _introduction(speaker: Chat | AgentChat, session: ChatSession) -> str:
    model = describe_models(session.config)
    if isinstance(speaker, AgentChat):
        where = f"its task's {speaker.field!r}" if speaker.field else "its task"
        return f"{session.config.agent} on {model}: what you type is {where}; /help lists commands, Ctrl-D leaves\n"
    about = f"context {session.engine.context} tokens, temperature {session.config.policy.eval.temperature:g}"
    tools = ", ".join(tool["function"]["name"] for tool in speaker.tools)
    more = "--tools or --agent" if session.config.agent else "--tools"
    has = f"with {tools}" if tools else f"no tools: {more}"
    return f"{model}: {about}, {has}; /help lists commands, Ctrl-D leaves\n"


def _run_command(line: str, speaker: Chat | AgentChat, background: Background, view: ChatLines) -> bool:
    """Do what a line with a / says. Whether the chat goes on."""
    command, _, text = line.rstrip().partition(" ")
    match command:
        case "/quit" | "/exit":
            return False
        case "/help":
            view.note(HELP + "\n")
        case "/reset" | "/system" if isinstance(speaker, AgentChat):
            view.error(StropError(f"{command} is not for agents: each task begins anew, with the agent's own prompts"))
        case "/reset":
            background.run(speaker.reset())
            view.note("a new conversation begins\n")
        case "/system":
            background.run(speaker.reset(text.strip()))
            view.note(f"a new conversation begins, {'with this' if text.strip() else 'without a'} system message\n")
        case _:
            view.error(StropError(f"there is no {command}: /help lists commands"))
    return True


def _ask(text: str, speaker: Chat | AgentChat, session: ChatSession, background: Background, view: ChatLines) -> None:
    """Ask, and show what comes of it. Ctrl-C ends the answer."""
    view.asked = True
    try:
        came = background.run(session.alive(speaker.ask(text, view.show)))
    except KeyboardInterrupt:
        if not isinstance(view, ChatTerminal):
            raise
        view.show_interrupt()
    except StropError as error:
        view.error(error)
        background.run(session.alive(asyncio.sleep(0)))  # if something died, that ends the chat
    else:
        view.show_answer(came, session.engine.context) if isinstance(came, ChatAnswer) else view.show_end(*came)


def _read_lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\n")


def _read_typed(view: ChatTerminal) -> Iterator[str]:
    """What is typed at the prompt, until Ctrl-D, or Ctrl-C twice in a row."""
    prompt = "> "
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport] - input() edits lines with it

        if view.out.color_system and not view.out.no_color:
            prompt = "\001\033[1;36m\002> \001\033[0m\002"
    while True:
        try:
            line = input(prompt)
        except EOFError:
            view.out.print()
            return
        except KeyboardInterrupt:
            view.out.print()
            if view.stopped:
                return
            view.stopped = True
            view.note("Ctrl-C again leaves")
            continue
        view.stopped = False
        yield line


async def _example(run: Path) -> Task | None:
    """One of the run's tasks."""
    store = await open_run(str(run))
    try:
        found = await store.list(limit=1)
        return found[0].task if found else None
    finally:
        await store.close()


class Background:
    """An event loop in a thread of its own: the terminal's thread is free for typing and for Ctrl-C.

    `run` does something there and waits for it; interrupted, it waits until that was cancelled, and raises."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="strop-chat", daemon=True)

    def __enter__(self) -> Background:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        ended = threading.Event()

        async def doing() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(doing(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            ended.wait(30)
            raise
