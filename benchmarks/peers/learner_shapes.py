"""Shapes of rollouts to update from: how many tokens each call wrote and sampled, and which context it began with.

    python benchmarks/peers/learner_shapes.py TRANSCRIPTS TOKENIZER      writes learner_recorded.json

The recorded shape is that of real conversations: the first 8 airline tasks of tau-bench (github.com/sierra-research/
tau-bench, historical_trajectories/gpt-4o-airline, MIT), which GPT-4o solved or not, twice each, in ChatML with
Qwen2.5's tokenizer. TRANSCRIPTS is that file with a trajectory per line, TOKENIZER a tokenizer.json, or one gzipped.
These conversations do nothing but append. Four more shapes are made of them, of what agents do that do not:

    thinking     256 tokens of thinking before every answer, of which the template of Qwen3 and others shows none to the
                 model from before the last message of the user: each such message begins a branch
    compaction   once a context has more than 4096 tokens the model is asked (64 tokens) for a summary (256, trained as
                 all that is sampled), and goes on from the system prompt with the summary and the next message
    delegation    every third call hands its work to another agent: a system prompt of 450 tokens that all such agents
                 share, a task of 950, six calls of 100 tokens with 400 of the environment between them, which are
                 about the lengths of SWE-agent's demonstrations (github.com/SWE-agent/SWE-agent, MIT); the last answer
                 is what the main agent reads
    choices      every call asks for n = 4 answers, and the conversation goes on with the first

256, 4096, 64 and n = 4 are chosen, not recorded.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

RECORDED = Path(__file__).parent / "learner_recorded.json"
RECORDED_TASKS, TRIALS = 8, 2
THINKING, LONGEST, REQUEST, SUMMARY, CHOICES = 256, 4096, 64, 256, 4
HANDED_OVER, SYSTEM, TASK, CALLS, SAID, READ = 3, 450, 950, 6, 100, 400


class CallShape(msgspec.Struct, frozen=True):
    """One call of the model. Its prompt is the first `kept` tokens (None: all, "prompt": its prompt) of what call
    `after`, a rollout and a call of it, came to, and then `written` tokens of the environment. `choices`: of how many
    answers it is one."""

    written: int
    sampled: int
    after: tuple[int, int] | None = None
    kept: int | Literal["prompt"] | None = None
    choices: int = 1
    agent: str = "main"

    def smaller(self, scale: int) -> CallShape:
        kept = self.kept // scale if isinstance(self.kept, int) else self.kept
        written, sampled = (-(-count // scale) for count in (self.written, self.sampled))
        return msgspec.structs.replace(self, written=written, sampled=sampled, kept=kept)


class Shape(msgspec.Struct, frozen=True):
    """One rollout. Without `reward` it gets one of its own."""

    group: int
    calls: list[CallShape]
    reward: float | None = None

    def smaller(self, scale: int) -> Shape:
        return Shape(self.group, [call.smaller(scale) for call in self.calls], self.reward)


class Conversation(msgspec.Struct, frozen=True):
    """One recorded rollout, which only appends. `turns` are (tokens of the environment, sampled tokens), `asked` those
    before which the user spoke. The first `shared` tokens are those of conversation `like`, which comes before."""

    group: int
    turns: list[tuple[int, int]]
    asked: list[int]
    like: int = 0
    shared: int = 0


def grown(groups: int, rollouts: int, prompt: int, turns: int, message: int, sampled: int) -> list[Shape]:
    """Rollouts of one prompt per group that grow by a message and an answer a turn."""
    made: list[Shape] = []
    for group in range(groups):
        first = len(made)
        for _ in range(rollouts):
            me = len(made)
            begin = (
                CallShape(prompt + message, sampled) if me == first else CallShape(message, sampled, (first, 0), prompt)
            )
            made.append(Shape(group, [begin, *(CallShape(message, sampled, (me, k)) for k in range(turns - 1))]))
    return made


def two_turns(groups: int = 32, rollouts: int = 8) -> list[Shape]:
    """About what a step of benchmarks/train.py has: one example for all, a short question per group, a call, an answer.
    Members of every second group all got the same, so that their tokens are read and not trained."""
    made: list[Shape] = []
    for group in range(groups):
        for member in range(rollouts):
            me, first = len(made), group * rollouts
            after, kept = ((first, 0), 150) if member else ((0, 0), 140)
            begin = CallShape(150 - kept, 30, after, kept) if me else CallShape(150, 30)
            made.append(Shape(group, [begin, CallShape(15, 12, (me, 0))], reward=0.5 if group % 2 else None))
    return made


def load_conversations() -> list[Conversation]:
    return msgspec.json.decode(RECORDED.read_bytes(), type=list[Conversation])


def recorded() -> list[Shape]:
    return [Shape(one.group, _first(k, one) + _following(k, one)) for k, one in enumerate(load_conversations())]


def _first(number: int, one: Conversation) -> list[CallShape]:
    written, sampled = one.turns[0]
    if not number:
        return [CallShape(written, sampled)]
    shared = min(one.shared, written)
    return [CallShape(written - shared, sampled, (one.like, 0), shared)]


def _following(number: int, one: Conversation) -> list[CallShape]:
    return [CallShape(*turn, (number, k)) for k, turn in enumerate(one.turns[1:])]


def thinking() -> list[Shape]:
    made: list[Shape] = []
    for number, one in enumerate(load_conversations()):
        first = _first(number, one)[0]
        calls = [msgspec.structs.replace(first, sampled=THINKING + first.sampled)]
        root, since = 0, one.turns[0][1]  # the call after the user's last message; what came since, without thinking
        for k, (written, sampled) in enumerate(one.turns[1:], 1):
            if k in one.asked:
                calls.append(CallShape(since + written, THINKING + sampled, (number, root), "prompt"))
                root, since = k, sampled
            else:
                calls.append(CallShape(written, THINKING + sampled, (number, k - 1)))
                since += written + sampled
        made.append(Shape(one.group, calls))
    return made


def compaction() -> list[Shape]:
    system = min(one.shared for one in load_conversations()[1:])
    made: list[Shape] = []
    for number, one in enumerate(load_conversations()):
        calls, size = _first(number, one), sum(one.turns[0])
        for written, sampled in one.turns[1:]:
            last = (number, len(calls) - 1)
            if size > LONGEST:
                calls.append(CallShape(REQUEST, SUMMARY, last))
                calls.append(CallShape(SUMMARY + written, sampled, (number, 0), system))
                size = system + SUMMARY + written + sampled
            else:
                calls.append(CallShape(written, sampled, last))
                size += written + sampled
        made.append(Shape(one.group, calls))
    return made


def delegation() -> list[Shape]:
    made: list[Shape] = []
    helped: tuple[int, int] | None = None  # the first call of any of them: they all have its system prompt
    for number, one in enumerate(load_conversations()):
        calls, last = _first(number, one), (number, 0)
        for k, (written, sampled) in enumerate(one.turns[1:], 1):
            if k % HANDED_OVER == 0:
                here = (number, len(calls))
                begin = CallShape(TASK, SAID, helped, SYSTEM) if helped else CallShape(SYSTEM + TASK, SAID)
                more = [CallShape(READ, SAID, (number, here[1] + n)) for n in range(CALLS - 1)]
                calls += [msgspec.structs.replace(call, agent="helper") for call in (begin, *more)]
                helped = helped or here
                written = SAID + 8  # what the other agent said, and the template around it
            calls.append(CallShape(written, sampled, last))
            last = (number, len(calls) - 1)
        made.append(Shape(one.group, calls))
    return made


def choices() -> list[Shape]:
    made: list[Shape] = []
    for number, one in enumerate(load_conversations()):
        calls: list[CallShape] = []
        for k, call in enumerate(_first(number, one) + _following(number, one)):
            me = len(calls)
            after = call.after if k == 0 else (number, me - CHOICES)
            calls.append(msgspec.structs.replace(call, after=after, choices=CHOICES))
            calls += [CallShape(0, call.sampled, (number, me), "prompt", CHOICES)] * (CHOICES - 1)
        made.append(Shape(one.group, calls))
    return made


KINDS: dict[str, Callable[..., list[Shape]]] = {
    "grown": grown,
    "two turns": two_turns,
    "recorded": recorded,
    "thinking": thinking,
    "compaction": compaction,
    "delegation": delegation,
    "choices": choices,
}


# -- recording ---------------------------------------------------------------------------------------------------------


def record(transcripts: Path, tokenizer: Path) -> list[Conversation]:
    from tokenizers import Tokenizer

    text = gzip.decompress(tokenizer.read_bytes()) if tokenizer.suffix == ".gz" else tokenizer.read_bytes()
    encode: Any = Tokenizer.from_str(text.decode()).encode
    runs: list[Any] = [json.loads(line) for line in transcripts.read_text().splitlines()]
    runs = sorted((r for r in runs if r["task_id"] < RECORDED_TASKS), key=lambda r: (r["task_id"], r["trial"]))
    assert len(runs) == RECORDED_TASKS * TRIALS
    whole: list[list[int]] = []
    found: list[Conversation] = []
    for run in runs:
        turns: list[tuple[int, int]] = []
        asked: list[int] = []
        ids: list[int] = []
        written, by_user = "", False
        for message in run["traj"]:
            if message["role"] != "assistant":
                written += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
                by_user |= message["role"] == "user"
                continue
            before: list[int] = encode(f"{written}<|im_start|>assistant\n").ids
            sampled: list[int] = encode(_said(message) + "<|im_end|>").ids
            asked += [len(turns)] * by_user
            turns.append((len(before), len(sampled)))
            ids += before + sampled
            written, by_user = "\n", False
        shares = [_shared(ids, other) for other in whole] or [0]
        like = int(np.argmax(shares))
        found.append(Conversation(run["task_id"], turns, asked, like, shares[like]))
        whole.append(ids)
    return found


def _said(message: dict[str, Any]) -> str:
    calls: list[Any] = message.get("tool_calls") or []
    of = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls]
    return (message["content"] or "") + "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in of)


def _shared(ids: list[int], other: list[int]) -> int:
    n = min(len(ids), len(other))
    differ = np.flatnonzero(np.array(ids[:n]) != np.array(other[:n]))
    return int(differ[0]) if len(differ) else n


if __name__ == "__main__":
    lines = [msgspec.json.encode(one).decode() for one in record(Path(sys.argv[1]), Path(sys.argv[2]))]
    RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n")
