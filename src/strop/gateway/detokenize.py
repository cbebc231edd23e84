"""Sampled ids to what an agent sees: text, cut at stop strings, with reasoning and tool calls taken out.

    ids ──Detokenizer──▶ text ──StopStrings──▶ text ──the family's parser (formats/)──▶ text, reasoning, calls

Each stage is fed as tokens arrive and gives out only what no later token can change. Answers that are not streamed walk
the same way, so streaming cannot change an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Detokenizer:
    """Ids to text, never half a character: bytes of an unfinished one wait for the token that completes it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # a window: those given out last, which some decoders need to go on, and the rest
        self._given = 0

    def feed(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        return self._take(final=False)

    def close(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        if self._given == len(self._ids):
            return ""
        before = self._decode(self._ids[: self._given]) if self._given else ""
        text = self._decode(self._ids)[len(before) :]
        if not text or (text.endswith("\ufffd") and not final):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return text


class TokenTexts(dict[int, tuple[str, list[int] | None]]):
    """Tokens by their ids: each as text, and its bytes; None where it is not whole characters."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, id: int) -> tuple[str, list[int] | None]:
        text = self._decode([id])
        self[id] = found = text, None if "\ufffd" in text else list(text.encode())
        return found


class StopStrings:
    """Gives text out up to the first stop string; what may be the beginning of one waits."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held: str = ""
        self.hit: str | None = None

    def feed(self, new: str) -> str:
        if self.hit or not self._stops:
            return "" if self.hit else new
        text = self._held + new
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            (at, self.hit), self._held = min(found), ""
            return text[:at]
        keep = len(text) - max(overlap(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    def close(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
