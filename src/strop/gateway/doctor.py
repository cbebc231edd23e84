"""Is a model's chat template exact? Recorded conversations are replayed through a session, turn by turn.

    report = examine(renderer, conversation)
    report.exact        every prompt was the previous prompt, what was said, and new tokens
    report.equal        where the template is prefix-stable: every prompt is what the template itself writes

What the assistant says in a conversation is taken for sampled: as the tokens of the template's own text for it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from strop.errors import ConfigError
from strop.gateway.asked import Asked
from strop.gateway.dialects.base import Json, Refused
from strop.gateway.dialects.plain import read_messages
from strop.gateway.render import Messages, Renderer, Tools
from strop.gateway.session import Contexts, History
from strop.gateway.templates import BadTemplate
from strop.types import Turn

Ending = Literal["stop", "length"]
NAMES = ("messages", "traj", "history")
"""What the list of messages is called in a transcript."""


class Conversation(Struct, frozen=True, kw_only=True):
    """`messages` are plain (see `Request`); `id` says where it stands in its file."""

    id: str
    messages: list[Json]
    tools: list[Json] | None = None


_CALL = {"type": "function", "function": {"name": "lookup", "arguments": {"city": "Zürich", "days": [1, 2]}}}
SAMPLES = [
    Conversation(
        id="three turns",
        messages=[
            {"role": "system", "content": "You are helpful."},
            {"role": "user", "content": "How are you?"},
            {"role": "assistant", "content": "Fine, thank you."},
            {"role": "user", "content": "And tomorrow?\n"},
            {"role": "assistant", "content": "Who knows."},
            {"role": "user", "content": "True."},
            {"role": "assistant", "content": "Indeed."},
        ],
    ),
    Conversation(
        id="tool calls",
        messages=[
            {"role": "user", "content": "The weather?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001"} | _CALL]},
            {"role": "tool", "name": "lookup", "tool_call_id": "call00001", "content": '{"sky": "blue"}'},
            {"role": "assistant", "content": "Once more.", "tool_calls": [{"id": "call00002"} | _CALL]},
            {"role": "tool", "name": "lookup", "tool_call_id": "call00002", "content": "blue"},
            {"role": "assistant", "content": "The sky is blue."},
        ],
        tools=[{"type": "function", "function": {"name": "lookup", "description": "The weather.", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
        }}}],
    ),
]  # fmt: skip
"""What is replayed when nothing else is given."""


class TurnReport(Struct, frozen=True, kw_only=True):
    """One prompt. `sampled` are the spans [start, end) of it that the model said before, the last being the previous
    answer; `response_ids` are what it says now. `text_equal` and `ids_equal` compare the prompt with the template's own
    rendering, and are None where the template has rewritten what came before."""

    message: int
    prompt_ids: list[int]
    sampled: list[tuple[int, int]]
    response_ids: list[int]
    exact: bool
    branch: str | None
    text_equal: bool | None
    ids_equal: bool | None


class Report(Struct, kw_only=True):
    """What became of one conversation. `error` is why the template cannot render it."""

    id: str
    history: History
    turns: list[TurnReport] = []
    error: str | None = None

    @property
    def extensions(self) -> int:
        return sum(turn.exact for turn in self.turns[1:])

    @property
    def branches(self) -> Counter[str]:
        return Counter(turn.branch for turn in self.turns if turn.branch)

    @property
    def exact(self) -> bool:
        return self.error is None and all(turn.exact for turn in self.turns)

    @property
    def stable(self) -> bool:
        """Whether the template never rewrote what it had written before."""
        return all(turn.text_equal is not None for turn in self.turns)

    @property
    def equal(self) -> bool | None:
        """Whether every prompt is the template's own rendering; None if the template is not prefix-stable here."""
        return all(turn.text_equal for turn in self.turns) if self.stable else None


def examine(
    renderer: Renderer,
    conversation: Conversation,
    *,
    history: History = "sampled",
    endings: Sequence[Ending] = ("stop",),
) -> Report:
    """Replay a conversation. `endings` says, turn after turn and over again, how answers end: with the end of the turn,
    or cut off before it."""
    report = Report(id=conversation.id, history=history)
    messages, tools = conversation.messages, conversation.tools
    contexts = Contexts(b"")
    spans: dict[str, list[tuple[int, int]]] = {}
    stable, previous = True, None
    before: str | None = ""
    try:
        for i in range(1, len(messages)):
            if messages[i]["role"] != "assistant":
                continue
            asked = Asked.of(messages[:i], tools)
            prompt = contexts.prompt(renderer, asked, history)
            written = renderer.text(messages[:i], tools, generate=True)
            stable = stable and before is not None and written.startswith(before)
            said, before = _answer(renderer, messages[: i + 1], tools, written, prompt.ids)
            if endings[len(report.turns) % len(endings)] == "length":
                while len(said) > 1 and renderer.ended(said)[0]:
                    said = said[:-1]
            sampled = [span for span in spans.get(prompt.parent or "", []) if span[1] <= prompt.shared]
            report.turns.append(
                TurnReport(
                    message=i,
                    prompt_ids=prompt.ids,
                    sampled=sampled,
                    response_ids=said,
                    exact=prompt.branch is None and prompt.parent == (previous and previous.id),
                    branch=prompt.branch,
                    text_equal=renderer.decode(prompt.ids) == written if stable else None,
                    ids_equal=prompt.ids == renderer.encode(written) if stable else None,
                )
            )
            previous = _turn(len(report.turns), messages[:i], messages[i], prompt.ids, said, prompt.parent)
            spans[previous.id] = [*sampled, (len(prompt.ids), len(prompt.ids) + len(said))]
            contexts.add(previous, asked)
    except BadTemplate as error:
        report.error = str(error)
    return report


def _answer(
    renderer: Renderer, messages: Messages, tools: Tools, prompt: str, prompt_ids: list[int]
) -> tuple[list[int], str | None]:
    """The tokens of the last message as an answer to `prompt`, and the template's text up to its end. A template that
    shows nothing of it is taken to have been ended at once; there is no text then."""
    text, rest = renderer.said(messages, tools, prompt) or ("", "")
    if not text:
        return [renderer.end_of_turn], None
    ids = renderer.encode_after(prompt_ids, text + rest)
    whole = renderer.decode(ids)
    length = next((n for n in range(len(ids)) if len(renderer.decode(ids[:n])) >= len(text)), len(ids))
    return ids[:length], prompt + (text if whole.startswith(text) else "")


def _turn(
    number: int, messages: list[Json], answer: Json, prompt_ids: list[int], said: list[int], parent: str | None
) -> Turn:
    return Turn(
        id=f"replay/1/{number}",
        rollout="replay",
        attempt=1,
        prompt_ids=prompt_ids,
        response_ids=said,
        logprobs=[0.0] * len(said),
        versions=[],
        finish="stop",
        parent=parent,
        messages=messages,
        answer=answer,
        started=0.0,
        ended=0.0,
    )


# -- conversations -----------------------------------------------------------------------------------------------------


def read_transcripts(path: Path) -> list[Conversation]:
    """Conversations of a file: JSON lines with `messages` (or `traj`, `history`) in OpenAI's format and optional
    `tools`; or one JSON document that holds such objects."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    found: list[Conversation] = []
    for where, raw in _objects(text, path):
        record = cast(Json, raw) if isinstance(raw, dict) else {}
        messages = next((record[name] for name in NAMES if isinstance(record.get(name), list)), None)
        if messages is None:
            raise ConfigError(f"{path}, {where}: no list of messages: each line is an object with `messages`")
        try:
            plain = read_messages([msgspec.json.encode(_known(message)) for message in messages])
        except (Refused, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, {where}: {error}") from None
        found.append(Conversation(id=where, messages=plain, tools=record.get("tools")))
    return found


def _objects(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and not {*NAMES} & whole.keys():
        yield from ((str(name), value) for name, value in cast(Json, whole).items())
    elif isinstance(whole, list):
        yield from ((str(i), value) for i, value in enumerate(cast(list[Json], whole)))
    elif isinstance(whole, dict):
        yield "0", cast(Json, whole)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", msgspec.json.decode(line, type=Json)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None


def _known(message: Any) -> Json:
    """Some programs write the id of the one call a result answers as a list."""
    ids = message.get("tool_call_ids")
    return message | {"tool_call_id": ids[0]} if ids and len(ids) == 1 and message.get("role") == "tool" else message
