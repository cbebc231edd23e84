"""A run's own agent, asked by hand."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from msgspec.structs import replace

from strop.errors import ConfigError
from strop.run.chat.session import ChatAnswer, ChatSession, Show, TurnRecorded
from strop.tasks.text import FIELDS, text_fields
from strop.types import TERMINAL, Rollout, Task, Turn

MESSAGES = "messages"
"""Where a task has a conversation that ends with what the user said, that is what is typed."""


class AgentChat:
    """The run's own agent, asked with tasks like `example`: what is typed takes the place of the text in it, the rest
    is left as it is. A rollout each; nothing is remembered from one to the next."""

    def __init__(self, session: ChatSession, example: Task | None) -> None:
        self.example = example or Task(id="example", data={FIELDS[0]: ""})
        self.field = find_text_field(self.example.data)
        self._session = session

    async def ask(self, text: str, show: Show) -> tuple[Rollout, ChatAnswer]:
        """Run it on a task made of `text`. Its turns are shown as they are recorded, as are its own words."""
        store = self._session.store
        rollout = self._session.rollout(replace(self.example, id="ask", split="chat", data=self._data(text)))
        await store.enqueue([rollout])
        shown: dict[str, Turn] = {}
        heard: set[str] = set()
        try:
            while True:
                rollout = await store.get(rollout.id)  # first, so that nothing comes after what it shows as the end
                for turn in await store.turns(rollout.id):
                    if turn.id not in shown:
                        shown[turn.id] = turn
                        show(TurnRecorded(turn, select_new_messages(turn, shown)))
                for event in await store.events(rollout.id):
                    if event.id not in heard:
                        heard.add(event.id)
                        show(event)
                if rollout.status in TERMINAL:
                    return rollout, ChatAnswer(rollout=rollout.id, turns=list(shown.values()))
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            await store.cancel([rollout.id], detail="stopped by whoever asked")
            raise
        finally:
            self._session.gateway.forget(rollout.id)

    async def reset(self, system: str | None = None) -> None:
        """There is nothing to forget."""

    def _data(self, text: str) -> Any:
        if self.field is None:
            return text
        data = cast(dict[str, Any], self.example.data)
        if self.field != MESSAGES:
            return data | {self.field: text}
        *before, _ = data[MESSAGES]
        return data | {MESSAGES: [*before, {"role": "user", "content": text}]}


def find_text_field(data: Any) -> str | None:
    """Where a task's data has the text that an agent is given; None: it is all there is. Raises `ConfigError`.

    >>> [find_text_field(data) for data in ({"question": "3 * 4?", "answer": 12}, {"id": 7, "story": "..."}, "3 * 4?")]
    ['question', 'story', None]
    >>> find_text_field({"messages": [{"role": "user", "content": "3 * 4?"}], "answer": "12"})
    'messages'
    """
    if isinstance(data, str) or data is None:
        return None
    match data:
        case {"messages": [*_, {"role": "user"}]}:
            return MESSAGES
        case _:
            found = text_fields(data)
    if not found:
        raise ConfigError(
            "--agent types a text into the run's tasks, and they have no field that is clearly it (question, prompt, "
            "...). Fix: queue whole tasks instead, with `strop serve`, `strop enqueue` and `strop runner`"
        )
    return found[0]


def select_new_messages(turn: Turn, shown: dict[str, Turn]) -> list[dict[str, Any]]:
    """Those of a turn's messages that follow the answer it goes on from."""
    parent = shown.get(turn.parent or "")
    known = len(parent.messages) + 1 if parent and turn.branch is None else 0
    return turn.messages[known:]
