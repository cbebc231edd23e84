"""One lap of an engine: so many tokens from so many prompts, timed. Every side of the comparison runs this very file,
each in its own process and, where it has one, its own virtualenv, so it needs the standard library only.

    stdin: {"part": "steady", "requests": 32, ...} ──▶ lap ──▶ stdout: {"seconds": ..., "sampled": ..., ...}

    steady     all requests at once: `requests` prompts of `prompt` tokens, `sampled` tokens for each
    chat       `requests` conversations of `turns` turns. A turn adds `message` tokens to the history and samples; the
               next begins when its answer is there
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Prompts = dict[int, list[int]]


class Side(ABC):
    """An engine as one side has it."""

    vocabulary: int

    @abstractmethod
    def answer(self, prompts: Prompts, sampled: int) -> Iterable[tuple[int, list[int]]]:
        """`sampled` tokens for each prompt, drawn at temperature 1 with nothing cut. Given out as they end; a side that
        lets conversations go on by themselves may be sent more prompts through `more` meanwhile."""

    def more(self, prompts: Prompts, sampled: int) -> bool:
        """Take more prompts while `answer` is at work. False: not until it is done."""
        return False

    def versions(self) -> dict[str, str]:
        return {}


def lap(side: Side, order: dict[str, Any]) -> dict[str, float]:
    draw = random.Random(order["seed"])

    def ids(count: int) -> list[int]:
        return [draw.randrange(side.vocabulary) for _ in range(count)]

    turns = order.get("turns", 1)
    histories = {i: ids(order["prompt"]) for i in range(order["requests"])}
    messages = {i: [ids(order["message"]) for _ in range(turns - 1)] for i in histories}
    prompt_tokens = sampled_tokens = 0
    cpu, begin = cpu_seconds(), time.perf_counter()
    waiting = dict(histories)
    while waiting:
        asked, waiting = waiting, {}
        prompt_tokens += sum(len(prompt) for prompt in asked.values())
        for i, answer in side.answer(asked, order["sampled"]):
            assert len(answer) == order["sampled"], f"{len(answer)} tokens were sampled"
            sampled_tokens += len(answer)
            if messages[i]:
                histories[i] = histories[i] + answer + messages[i].pop(0)
                if side.more({i: histories[i]}, order["sampled"]):
                    prompt_tokens += len(histories[i])
                else:
                    waiting[i] = histories[i]
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": cpu_seconds() - cpu,
        "prompt_tokens": prompt_tokens,
        "sampled_tokens": sampled_tokens,
    }


def cpu_seconds() -> float:
    """Of this process and all below it."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)], ticks[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine, found = {os.getpid()}, 1
    while found:
        below = {pid for pid, parent in parents.items() if parent in mine} - mine
        mine, found = mine | below, len(below)
    return sum(ticks.get(pid, 0) for pid in mine) / os.sysconf("SC_CLK_TCK")


def serve(make: type[Side], *args: Any) -> None:
    """Laps as they are ordered, until the orders end."""
    out = os.dup(1)
    os.dup2(2, 1)  # what the side prints is not a result
    side = make(*args)
    with os.fdopen(out, "w") as results:
        for line in sys.stdin:
            order = json.loads(line)
            result = {"versions": side.versions()} if order.get("part") == "versions" else lap(side, order)
            print(json.dumps(result), file=results, flush=True)
