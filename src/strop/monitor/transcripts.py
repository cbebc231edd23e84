"""Rollouts to read: what was said turn by turn, and transcripts.md, the best and worst of a run's last steps.

All but `leave` are functions of records; `strop rollouts RUN ID` shows a rollout with the same parts.
Left out of the page: events, and what was said in attempts before the last (`strop rollouts` has them).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from strop.algorithms.rewards import total_reward
from strop.config import Config, weigh_rewards
from strop.files import write_whole
from strop.monitor.console import format_figure
from strop.printable import escape_text
from strop.store.base import Store
from strop.trajectory import sum_tokens
from strop.types import TRAINED, Rollout, Step, Turn

RECENT, FEW, LONG = 3, 3, 2000
"""Steps looked at, rollouts shown of each kind, and characters after which a text is shortened."""

Message = dict[str, Any]


async def leave(folder: Path, store: Store, steps: Sequence[Step], config: Config) -> None:
    """Write transcripts.md from what the store has of the last steps."""
    recent, weights = steps[-RECENT:], weigh_rewards(config)
    rollouts = [await store.get(id) for step in recent for id in step.rollouts]
    best, worst = choose_extremes(rollouts, weights)
    turns = {rollout.id: await store.turns(rollout.id) for rollout in [*best, *worst]}
    parts = [_title(recent)]
    for title, chosen in {"Best": best, "Worst": worst}.items():
        parts += [f"## {title}"] if chosen else []
        for rollout in chosen:
            given = total_reward(rollout, weights)
            parts.append(render_rollout(rollout, turns[rollout.id], given))
    whole = escape_text("\n\n".join(parts) + "\n")  # it is read with `cat` too
    write_whole(folder / "transcripts.md", whole.encode(errors="replace"))


def _title(steps: Sequence[Step]) -> str:
    if not steps:
        return "# Transcripts\n\nNo step was made, so there is nothing to show."
    first, last = steps[0].number, steps[-1].number
    span = f"step {last}" if first == last else f"steps {first} to {last}"
    return f"# Transcripts: the best and worst rollouts of {span}"


def choose_extremes(
    rollouts: Sequence[Rollout], weights: Mapping[str, float], few: int = FEW
) -> tuple[list[Rollout], list[Rollout]]:
    """The best and the worst by their total reward, the latest first among equals, none in both. One that has no reward
    is worse than any other."""

    def worth(rollout: Rollout) -> float:
        given = total_reward(rollout, weights)
        return -math.inf if given is None else given

    newest = list(reversed(rollouts))
    best = _few(sorted(newest, key=worth, reverse=True), few)
    there = {rollout.id for rollout in best}
    return best, _few((rollout for rollout in sorted(newest, key=worth) if rollout.id not in there), few)


def _few(rollouts: Iterable[Rollout], few: int) -> list[Rollout]:
    """The first ones, one of a group: its others are much like it."""
    chosen: dict[str, Rollout] = {}
    for rollout in rollouts:
        chosen.setdefault(rollout.group, rollout)
    return list(chosen.values())[:few]


def render_rollout(rollout: Rollout, turns: Sequence[Turn], given: float | None) -> str:
    """One rollout as Markdown: the task, the tools, every message, call and result, the rewards, why it ended."""
    named = ", ".join(f"{reward.name} {format_figure(reward.value)}" for reward in rollout.rewards) or "none"
    ended = f"{rollout.status} ({rollout.cause})" if rollout.cause else rollout.status
    parts = [
        f"### {rollout.id}: total {'-' if given is None else format_figure(given)}",
        f"Task {rollout.task.id} · rewards: {named} · {ended} · {_tokens(rollout, turns)}",
        f"**task**\n\n{fence(msgspec.json.format(msgspec.json.encode(rollout.task.data)).decode())}",
    ]
    offered = find_new_tools(turns)
    for new, turn in find_new_messages(turns):
        if tools := offered.get(turn.id):
            parts.append(f"**tools**\n\n{fence(chr(10).join(map(format_tool, tools)))}")
        for message in [*new, turn.answer]:
            parts += [f"**{format_role(message)}**" + f" ({turn.agent}, {turn.finish})" * (message is turn.answer)]
            parts += [fence(text) for text in list_message_texts(message) or [""]]
    if rollout.detail:
        parts.append(f"**why it ended**\n\n{fence(rollout.detail)}")
    return "\n\n".join(parts)


def _tokens(rollout: Rollout, turns: Sequence[Turn]) -> str:
    if rollout.tokens:
        return format_tokens(rollout.tokens.values())
    return f"{sum(len(turn.response_ids) for turn in turns)} tokens sampled"  # no step learnt from them


def format_tokens(turns: Iterable[Mapping[str, int]]) -> str:
    """What became of the sampled tokens of turns that a step has taken.

    >>> format_tokens([{"trained": 75}, {"excluded:title": 9}]), format_tokens([{"trained": 75}])
    ('84 tokens sampled, 75 trained, 9 excluded:title', '75 tokens sampled, 75 trained')
    """
    total = sum_tokens(turns)
    trained = total.pop(TRAINED, 0)
    parts = [f"{trained} {TRAINED}", *(f"{count} {reason}" for reason, count in sorted(total.items()))]
    return f"{trained + total.total()} tokens sampled, {', '.join(parts)}"


def find_new_messages(turns: Sequence[Turn]) -> Iterator[tuple[list[Message], Turn]]:
    """Every turn with the messages that were new in it. An agent that goes on where its last turn ended repeats what
    was said; one that begins anew or changed its history is shown from the start of it."""
    before: dict[str, Turn] = {}
    for turn in turns:
        last = before.get(turn.agent)
        goes_on = last is not None and turn.messages[: len(last.messages)] == last.messages
        new = turn.messages[len(last.messages) :] if goes_on and last is not None else turn.messages
        yield new[goes_on and bool(new) and format_role(new[0]) == "assistant" :], turn  # its own answer comes first
        before[turn.agent] = turn


def find_new_tools(turns: Sequence[Turn]) -> dict[str, list[Message]]:
    """The tools of each turn that has others than the turn of this agent before it. One that goes on from its parent
    has its parent's."""
    every: dict[str | None, list[Message]] = {}
    before: dict[str, list[Message]] = {}
    shown: dict[str, list[Message]] = {}
    for turn in turns:
        goes_on = turn.parent in every and turn.branch is None
        every[turn.id] = tools = every[turn.parent] if goes_on else turn.requested.get("tools") or []
        if tools != before.get(turn.agent, []):
            shown[turn.id] = before[turn.agent] = tools
    return shown


def format_tool(tool: Message) -> str:
    """
    >>> format_tool({"function": {"name": "add", "description": "Sums.", "parameters": {"properties": {"a": {}}}}})
    'add(a): Sums.'
    """
    about = tool.get("function") or tool
    parameters: Message = about.get("parameters") or about.get("input_schema") or {}
    described = str(about.get("description") or "").strip()
    name = about.get("name") or about.get("type")
    return f"{name}({', '.join(parameters.get('properties') or ())})" + (f": {described}" if described else "")


def format_role(message: Message) -> str:
    return str(message.get("role", "assistant"))


def list_message_texts(message: Message) -> list[str]:
    """What a message says: its text, then a line per tool call.

    >>> list_message_texts({"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]})
    ['add({"a":1})']
    """
    content = message.get("content") or ""
    texts = [_text(content)] if content else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        texts.append(f"{function['name']}({arguments if isinstance(arguments, str) else _json(arguments)})")
    return texts


def _text(content: Any) -> str:
    """Text, or a list of parts of which some are text."""
    if not isinstance(content, list):
        return str(content)
    parts = cast("list[Any]", content)
    if parts and all(isinstance(part, int) for part in parts):  # a prompt that was given as ids
        return f"{len(parts)} token ids: {' '.join(map(str, parts))}"
    tables = [cast("dict[str, Any]", part) if isinstance(part, dict) else {} for part in parts]
    return "\n".join(str(t["text"]) if "text" in t else _json(part) for t, part in zip(tables, parts, strict=True))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def fence(text: str) -> str:
    """A block that nothing in the text can end.

    >>> print(fence("a ``` b"))
    ````
    a ``` b
    ````
    """
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}\n{shorten(text)}\n{ticks}"


def shorten(text: str, limit: int = LONG) -> str:
    """
    >>> shorten("abcdefghij", 4)
    'ab\\n[... 6 characters ...]\\nij'
    """
    half = limit // 2
    return (
        text if len(text) <= limit else f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
    )
