"""Checks the prompts of a replayed conversation against its chat template, sharing no code with the gateway.

    verdict = check(Template(source, specials), tokenizer, messages, tools, report)
    verdict.faults      what is wrong, in words; empty if every prompt is exact

`report` is one conversation of what `strop doctor --json` prints. What must hold of every turn:

1. its prompt is the previous prompt, the previous answer's ids and new ids, and nothing else;
2. behind an answer's last word stands what the template writes there, character for character: the end of the turn
   once, whether the model said it or was cut off before it, then the new messages and the beginning of the next answer.
   The place is found by rendering the conversation once more with a mark at the end of that answer;
3. where the template never rewrites what it wrote before, the whole prompt's text is the template's own rendering, and
   its ids are the tokenizer's for that text if those begin with what was served and said before;
4. ids between answers are those the tokenizer gives that text in its place.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = dict[str, Any]
WORD, NUMBER, NAMED = "qx7mark", 907060504, "qx7name"
"""What answers are marked with: in text, in place of a number, and in the name of a call."""
MARK = re.compile(r"\s*(<[^<>\s]{1,40}>)")


@dataclass
class Verdict:
    """`stable`: the template never rewrote what it wrote before. `whole` prompts had the ids of the template's text
    encoded in one piece. `hidden` answers left no trace in the template's text, which is then all there is to compare.
    `refused` is why the template renders no such conversation."""

    faults: list[str] = field(default_factory=list)
    turns: int = 0
    stable: bool = True
    whole: int = 0
    hidden: int = 0
    refused: str | None = None


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """A chat template, run as stock servers run it; and the shape in which it takes calls."""

    def __init__(self, source: str, specials: dict[str, str]) -> None:
        environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = self._tojson
        environment.globals["raise_exception"] = self._raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._specials = specials
        self._as_text, self._no_content = self._find_shape()

    @staticmethod
    def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    @staticmethod
    def _raise(message: str) -> None:
        raise jinja2.TemplateError(message)

    def _run(self, messages: Sequence[Message], tools: Any, generate: bool) -> str:
        return self._template.render(
            messages=messages, tools=tools or None, documents=None, add_generation_prompt=generate, **self._specials
        )

    def _find_shape(self) -> tuple[bool, str | None]:
        """Arguments are given as a table if the template shows them so; no content as none if it can bear that, and as
        empty text to a template that shows no calls."""
        call = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {"a": WORD}}}
        tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
        chat = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "t", "name": "f", "tool_call_id": "abcdefgh1"},
        ]
        found: dict[int, tuple[bool, str | None]] = {}
        for shape in [(False, None), (False, ""), (True, None), (True, "")]:
            for tools in (None, [tool]):
                try:
                    text = self._run([self._shaped(message, shape) for message in chat], tools, True)
                except Exception:
                    continue
                shown = WORD in text
                found.setdefault((not shown) * 4 + ("None" in text) * 2 + (not shown and shape[1] is None), shape)
        return found[min(found)] if found else (False, None)

    @staticmethod
    def _shaped(message: Message, shape: tuple[bool, str | None]) -> Message:
        if not message.get("tool_calls"):
            return message
        message = copy.deepcopy(message)
        message["content"] = message.get("content") or shape[1]
        for call in message["tool_calls"]:
            if shape[0]:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return message

    def render(self, messages: Sequence[Message], tools: Any, *, generate: bool) -> str:
        return self._run([self._shaped(m, (self._as_text, self._no_content)) for m in messages], tools, generate)

    def behind(self, messages: Sequence[Message], tools: Any, answer: int) -> str | None:
        """What the template writes behind the last word of `messages[answer]`, up to where the next answer begins;
        None if it shows nothing of that message."""
        for marked in _marks(messages[answer]):
            text = self.render([*messages[:answer], marked, *messages[answer + 1 :]], tools, generate=True)
            for mark in (WORD, str(NUMBER)):
                if mark in text:
                    return text.rpartition(mark)[2]
            if NAMED in text:  # and perhaps once more where the call's result is shown
                return text.partition(NAMED)[2].replace(NAMED, "")
        return None


def _marks(answer: Message) -> Iterator[Message]:
    """An answer with a mark at its end: in its last call, or behind its text. A call without arguments is marked in its
    name: some templates write arguments in a way that leaves nothing where there are none."""
    if answer.get("tool_calls"):
        called = copy.deepcopy(answer)
        function = called["tool_calls"][-1]["function"]
        if function["arguments"]:
            function["arguments"] = _marked(function["arguments"])
        else:
            function["name"] += NAMED
        yield called
    yield answer | {"content": (answer.get("content") or "") + WORD}


def _marked(value: Any) -> Any:
    """JSON with a mark in its last leaf."""
    if isinstance(value, dict) and value:
        *_, last = value
        return value | {last: _marked(value[last])}
    if isinstance(value, list) and value:
        return [*value[:-1], _marked(value[-1])]
    return value + WORD if isinstance(value, str) else NUMBER


def check(
    template: Template,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Any,
    report: Any,
    *,
    ends: Sequence[str],
    cut: Sequence[bool] = (False,),
    shown: bool = True,
) -> Verdict:
    """`ends` are the marks that may end a turn; `cut` says, turn after turn and over again, which answers were cut off
    before theirs. Unless all that was said was `shown`, and so is in the messages, prompts are not what the template
    writes for those as a whole."""
    verdict = Verdict()
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    try:
        written = [template.render(messages[:i], tools, generate=True) for i in answers]
        said = [template.render(messages[: i + 1], tools, generate=False).rstrip() for i in answers]
        verdict.refused = None if "".join(written).strip() else "it writes nothing"
    except Exception as error:  # a template may fail in any way
        written, said = [], []
        verdict.refused = f"{type(error).__name__}: {error}"
    if verdict.refused:
        if not report["error"]:
            verdict.faults.append(f"the template cannot render this ({verdict.refused}), and nobody said so")
        return verdict
    if report["error"]:
        verdict.faults.append(f"the template renders this, but: {report['error']}")
        return verdict
    turns = report["turn_reports"]
    if [turn["message"] for turn in turns] != answers:
        verdict.faults.append(f"{len(turns)} turns for {len(answers)} answers")
        return verdict
    verdict.turns = len(turns)
    visible = [after != before.rstrip() for before, after in zip(written, said, strict=True)]
    kept = [now.startswith(before) and seen for before, now, seen in zip(said, written[1:], visible, strict=False)]
    verdict.stable = all(kept) and all(now.startswith(before) for before, now in pairwise(written))
    # An answer that was cut off in the middle of an end has a piece of that in it, which no template writes.
    comparable = shown and (not any(cut) or all(tokenizer.token_to_id(end) is not None for end in ends))
    spans: list[list[int]] = []
    for k, turn in enumerate(turns):
        before = turns[k - 1] if k else None
        faults = _law(turn, before, spans)
        if not faults and before:
            rest = template.behind(messages[: turn["message"]], tools, before["message"])
            verdict.hidden += rest is None
            piece = Piece(tokenizer, before, turn, messages[before["message"]], rest)
            was_cut = cut[(k - 1) % len(cut)] and len(before["response_ids"]) > 1
            faults = piece.faults(ends, kept=kept[k - 1], cut=was_cut)
        if not faults and (not before or (verdict.stable and comparable)):
            faults = _rendering(tokenizer, written[k], before, turn, verdict)
        verdict.faults += [f"turn {k} (message {turn['message']}): {fault}" for fault in faults]
        spans.append([len(turn["prompt_ids"]), len(turn["prompt_ids"]) + len(turn["response_ids"])])
    return verdict


def _law(turn: Any, before: Any, spans: list[list[int]]) -> list[str]:
    """The prompt goes on from the previous one and what was said, in one branch, and says so."""
    faults: list[str] = []
    if before is not None:
        path = before["prompt_ids"] + before["response_ids"]
        if turn["prompt_ids"][: len(path)] != path:
            faults.append("the prompt does not begin with the previous prompt and answer")
    if not turn["response_ids"]:
        faults.append("nothing was said")
    if turn["branch"] is not None or not turn["exact"]:
        faults.append(f"a conversation that was only added to branched: {turn['branch']}")
    if [list(span) for span in turn["sampled"]] != spans:
        faults.append(f"sampled spans are {turn['sampled']}, should be {spans}")
    return faults


class Piece:
    """What stands between the last word of an answer and where the next one begins. `rest` is the template's text
    there."""

    def __init__(self, tokenizer: Tokenizer, before: Any, turn: Any, answer: Message, rest: str | None) -> None:
        self._tokenizer, self._answer = tokenizer, answer
        self._path = before["prompt_ids"] + before["response_ids"]
        self._new_ids = turn["prompt_ids"][len(self._path) :]
        served = len(_text(tokenizer, before["prompt_ids"]))
        whole = _text(tokenizer, turn["prompt_ids"])
        self.said = _text(tokenizer, self._path)[served:]
        self.new = whole[served + len(self.said) :]
        self.last = _text(tokenizer, self._path[-1:])
        self.rest = rest if rest is None or not tokenizer.normalizer else tokenizer.normalizer.normalize_str(rest)

    def faults(self, ends: Sequence[str], *, kept: bool, cut: bool) -> list[str]:
        faults: list[str] = []
        if self._new_ids not in _in_place(self._tokenizer, self._path, self._new_ids):
            faults.append(f"the tokens of {self.new!r} are not the tokenizer's")
        if self.rest is None:
            return faults
        both = self.said + self.new
        found = sorted((at, end) for end in ends if (at := self.rest.find(end)) >= 0)
        leading = MARK.match(self.rest)
        at, end = found[0] if found else (leading.start(1), leading[1]) if leading else (0, "")
        if both.endswith(self.rest):
            return faults + ([] if cut else self._wrong_words(both[: len(both) - len(self.rest)]))
        if cut:  # perhaps before the answer's last word, or in the middle of its end
            here = [n for n in range(len(end)) if self.said.endswith(end[:n])]
            right = self._ended(ends) is None and any(self.new.lstrip() == self.rest[at + n :] for n in here)
        else:  # the template now writes this answer, or its end, otherwise than the model said it
            right = not kept and bool(end) and self._goes_on(self.rest[at + len(end) :], ends)
        if not right:
            faults.append(f"after {self.said!r} stands {self.new!r}; the template writes {self.rest!r}")
        return faults

    def _ended(self, ends: Sequence[str]) -> str | None:
        """What the model said beyond the end of its turn, with the token that completed it; None if it did not."""
        for end in ends:
            at = self.said.rfind(end)
            if at >= 0 and (beyond := len(self.said) - at - len(end)) < len(self.last):
                return self.said[len(self.said) - beyond :]
        return None

    def _goes_on(self, rest: str, ends: Sequence[str]) -> bool:
        beyond = self._ended(ends)
        if beyond is None:
            return False
        return any(rest[:n] == beyond[:n] and self.new == rest[n:] for n in range(len(beyond) + 1))

    def _wrong_words(self, text: str) -> list[str]:
        """Templates trim contents, and some leave thoughts out."""
        words = (self._answer.get("content") or "").rpartition("</think>")[2].split()
        if self._answer.get("tool_calls") or not words:
            return []
        said = text.split()[-len(words) :]
        right = said[1:] == words[1:] and bool(said) and said[0].endswith(words[0])
        return [] if right else [f"{text!r} should end with {words!r}"]


def _rendering(tokenizer: Tokenizer, written: str, before: Any, turn: Any, verdict: Verdict) -> list[str]:
    """Where nothing is rewritten: the template's text, and the tokenizer's ids of it."""
    ids = tokenizer.encode(written, add_special_tokens=False).ids
    prompt = turn["prompt_ids"]
    if _text(tokenizer, prompt) != _text(tokenizer, ids):
        return ["the prompt's text is not what the template writes"]
    path = before["prompt_ids"] + before["response_ids"] if before else []
    if ids[: len(path)] == path:
        verdict.whole += 1
        if prompt != ids:
            return ["the prompt's ids are not those of the template's text"]
    return []


def _in_place(tokenizer: Tokenizer, path: list[int], new: list[int]) -> list[list[int]]:
    """The ids a text may have behind a path: those that follow it when both are encoded together. Where the path ends
    with a token of its own, that is the text's encoding. Where the path's last words were said in other tokens than
    the tokenizer's, there is no such encoding: what it gives the text behind a part of them, or alone."""
    text = _text(tokenizer, new)
    alone = tokenizer.encode(text, add_special_tokens=False).ids
    if path[-1] in tokenizer.get_added_tokens_decoder():
        return [alone]
    found: list[list[int]] = []
    first = max(0, len(path) - 64)
    for start in range(first, len(path)):
        ids = tokenizer.encode(_text(tokenizer, path[start:]) + text, add_special_tokens=False).ids
        if ids[: len(path) - start] == path[start:]:
            found.append(ids[len(path) - start :])
            if start < first + 8:  # not in the middle of a word
                return found
    return [*found, alone]


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)
