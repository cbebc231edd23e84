"""Scoring over HTTP: given answers become prompts whose logprobs a server is asked for, one request for each path.

answers   [1 5 2 | 7 8]   [1 5 2 7 8 4 | 9]   [1 5 2 | 6]        | is where the response begins
asked                     [1 5 2 7 8 4   9]   [1 5 2   6]        the first is read off the second
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from strop.engines.base import GivenAnswer
from strop.errors import EngineError


async def score_paths(
    score: Callable[[list[int]], Awaitable[list[float]]], answers: Sequence[GivenAnswer], *, at_once: int
) -> list[list[float]]:
    """The logprobs of the answers' response tokens. `score` gives those of every id of a path but the first; so many of
    its calls are under way `at_once`. The first error ends them all."""
    paths = [answer.ids for answer in answers]
    longest, gate, found = find_longest_paths(paths), asyncio.Semaphore(at_once), dict[int, list[float]]()

    async def ask(k: int) -> None:
        async with gate:
            found[k] = await score(paths[k])

    try:
        async with asyncio.TaskGroup() as group:
            for k in sorted(set(longest)):
                group.create_task(ask(k))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    told = [
        found[k][len(answer.prompt_ids) - 1 : len(path) - 1]
        for k, path, answer in zip(longest, paths, answers, strict=True)
    ]
    if not all(math.isfinite(logprob) for logprobs in told for logprob in logprobs):
        raise EngineError("a given token has no finite logprob: are the weights finite numbers?")
    return told


def find_longest_paths(paths: Sequence[list[int]]) -> list[int]:
    """For each path the place of one that begins with it and is not the beginning of another.

    >>> find_longest_paths([[1, 5], [1, 6], [1, 5, 7], [1]])
    [2, 1, 2, 2]
    """
    order = sorted(range(len(paths)), key=paths.__getitem__)  # a path comes right before those that begin with it
    longest = list(range(len(paths)))
    for k, following in zip(order[-2::-1], order[:0:-1], strict=True):
        if paths[following][: len(paths[k])] == paths[k]:
            longest[k] = longest[following]
    return longest
