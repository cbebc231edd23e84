"""A direct line to an engine's server: other processes may ask it for tokens while the engine's owner allows it.

    RemoteEngine ──tell(line)──▶ LineHolder ──▶ other processes ask the server, and get tokens of `line.version`
                 ──tell(closed line), wait_until_idle()──▶ they begin nothing any more, and nothing of theirs is in
                 flight: then it is paused, or takes new weights, as if all requests had been its own
                 ──tell(None)──▶ they ask the engine: its server is gone, or has no line

Whatever goes wrong on the line is the engine's to explain, and what got no token is asked of the engine again: it knows
of pauses and restarts.

Left out: several policies of one server, whose adapters come and go between requests; sglang, which must be told of
answers that nobody wants any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from strop.errors import ContextOverflow, EngineError


class DirectLine(Struct, frozen=True, kw_only=True):
    """Where a server is, what it calls the model, which version that is, and what may be asked of it. One that is not
    `open` will be in a moment, perhaps with another version. `folder` has the model's tokenizer, for grammars.

    >>> line = DirectLine(url="http://127.0.0.1:8000", model="strop", version="1.4", context=512, vocabulary=100)
    >>> line.count_left([1, 2, 3])
    509
    """

    url: str
    model: str
    version: str
    context: int
    vocabulary: int
    stream_interval: int = 1
    seeds: bool = False
    open: bool = True
    folder: str = ""

    def count_left(self, prompt_ids: Sequence[int]) -> int:
        """How many tokens an answer may have. Raises what `refuse_prompt` does."""
        refuse_prompt(prompt_ids, self.context, self.vocabulary)
        return self.context - len(prompt_ids)


class LineHolder(Protocol):
    """Who asks the server beside the engine itself."""

    def tell(self, line: DirectLine | None) -> None:
        """This line from now on. While it is closed nothing new is begun; without one the engine is asked."""
        ...

    def of_replica(self, number: int) -> LineHolder:
        """Where several engines serve a policy: who holds the lines of this one, counted from 0."""
        ...

    async def wait_until_idle(self) -> None:
        """Returns once nothing is in flight on lines that were there before. Never fails."""
        ...


def refuse_prompt(prompt_ids: Sequence[int], context: int, vocabulary: int) -> None:
    """What no server should see. Raises `ContextOverflow` or `EngineError`."""
    if not prompt_ids:
        raise EngineError("the prompt is empty. Fix: send at least one token")
    if len(prompt_ids) >= context:
        raise ContextOverflow(
            f"the prompt has {len(prompt_ids)} tokens and the context holds {context}. Fix: shorten the history or "
            "raise policy.context"
        )
    # One id too large ends vLLM with all that is in flight.
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
        raise EngineError(f"a prompt id is outside the vocabulary of {vocabulary}: is it the right tokenizer?")
