"""Conversations for tests: turns as a gateway would record them, each with all of the conversation before it."""

from __future__ import annotations

import random
from typing import Any

from strop.types import Sampling, Turn

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Sums. " * 200, "parameters": {}}}]


def say(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def talk(rollout: str, num_turns: int, *, attempt: int = 1, seed: int = 0, new: int = 40) -> list[Turn]:
    """One agent that goes on from its last turn, `new` prompt tokens and one message at a time."""
    draw = random.Random(f"{rollout} {attempt} {seed}")
    turns: list[Turn] = []
    for k in range(num_turns):
        last = turns[-1] if turns else None
        added = [draw.randrange(150_000) for _ in range(new)]
        answered = [draw.randrange(150_000) for _ in range(new // 2)]
        before = [*last.messages, last.answer] if last else [say("system", "Be brief. " * 20)]
        turns.append(
            Turn(
                id=f"{rollout}/{attempt}/{k}",
                rollout=rollout,
                attempt=attempt,
                prompt_ids=(last.ids if last else []) + added,
                response_ids=answered,
                logprobs=[-draw.random() for _ in answered],
                versions=[(0, "1.4")],
                sampling=Sampling(seed=k),
                requested={"model": "m", "tools": TOOLS, "user": "u"} if k == 0 else {"model": "m"},
                finish="stop",
                parent=last.id if last else None,
                shared=len(last.ids) if last else 0,
                messages=[*before, say("user", f"question {k} " * 20)],
                answer=say("assistant", f"answer {k} " * 20),
                started=float(k),
                ended=k + 0.5,
            )
        )
    return turns


def wander(rollout: str, num_turns: int, seed: int) -> list[Turn]:
    """All that gateways record: branches from anywhere, edited histories, several choices, outside models, raw prompts
    that grow, turns that share less or more than they say, parents that are not there."""
    draw = random.Random(seed)
    turns = talk(rollout, 1, seed=seed, new=8)
    while len(turns) < num_turns:
        k, base = len(turns), draw.choice(turns)
        kind = draw.choice(["on", "on", "on", "branch", "edit", "choices", "outside", "raw", "lie", "orphan"])
        path, told = base.ids, [*base.messages, base.answer]
        shared = len(path) if kind != "branch" else draw.randrange(len(path) + 1)
        prompt = path[:shared] + [draw.randrange(99) for _ in range(draw.randrange(1, 9))]
        if kind == "lie":
            prompt[draw.randrange(len(prompt))] += 1
            shared += draw.randrange(-3, 30)
        if kind in ("edit", "branch"):
            told = told[: draw.randrange(len(told) + 1)]
        if kind == "raw":
            grown = "".join(str(message.get("content")) for message in told)
            told = [say("prompt", grown + "\u00e9\U0001f642\x00" * draw.randrange(3) + str(k))]
        else:
            told = [*told, say("user", f"\u00e9 {k} " * draw.randrange(90))]
        outside = kind == "outside"
        for choice in range(count := 3 if kind == "choices" else 1):
            answered = [] if outside else [draw.randrange(99) for _ in range(draw.randrange(4))]
            turns.append(
                Turn(
                    id=f"{rollout}/1/{len(turns)}",
                    rollout=rollout,
                    attempt=1,
                    agent="other" if draw.random() < 0.1 else "main",
                    prompt_ids=[] if outside else list(prompt),
                    response_ids=answered,
                    logprobs=[-0.5] * len(answered),
                    versions=[] if outside else [(0, "1.0")],
                    requested={"a": 1, "tools": TOOLS[: draw.randrange(2)] if draw.random() < 0.5 else None, "b": 2.5},
                    finish=draw.choice(["stop", "length", "abandoned"]),
                    parent=None if outside else "nowhere/1/7" if kind == "orphan" else base.id,
                    shared=0 if outside else shared,
                    branch="edited" if kind in ("branch", "edit") else None,
                    choice=choice,
                    choices=count,
                    messages=told,
                    answer=say("assistant", f"{choice}. " * draw.randrange(120)) if draw.random() < 0.9 else {},
                    started=float(draw.randrange(k + 1)),
                    ended=k + 1.0,
                )
            )
    return turns
