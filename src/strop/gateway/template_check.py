"""Is a model's chat template exact? Recorded conversations are replayed through a session, turn by turn.

    report = examine(renderer, conversation)
    report.exact        every prompt was the previous prompt, what was said, and new tokens
    report.differences  how prompts differ from what the template itself writes, each by a name that allows it
    report.wrong        how they differ otherwise: the gateway is not exact

What the assistant says in a conversation is taken for sampled: as the tokens of the template's own text for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from strop.gateway.contexts import Contexts, History, Prompt
from strop.gateway.continuation import HIDDEN, Seam, explain_rewrite
from strop.gateway.conversation import Conversation
from strop.gateway.dialects.base import Json
from strop.gateway.jinja import BadTemplate
from strop.gateway.simulated_model import Ending, SimulatedAnswer, SimulatedModel
from strop.gateway.template import Renderer
from strop.gateway.transcripts import SAMPLES, Transcript
from strop.types import Turn


class TurnReport(Struct, frozen=True, kw_only=True):
    """One prompt. `sampled` are the spans [start, end) of it that the model said before, the last being the previous
    answer; `response_ids` are what it says now. `text_equal` and `ids_equal` compare the prompt with the template's own
    rendering. `differences` are names of what may differ (see `seams`); `wrong` is what may not, in words. `rewritten`:
    the template has written other text for what came before."""

    message: int
    prompt_ids: list[int]
    sampled: list[tuple[int, int]]
    response_ids: list[int]
    exact: bool
    branch: str | None
    text_equal: bool
    ids_equal: bool
    rewritten: bool
    differences: list[str]
    wrong: str | None


class TemplateReport(Struct, kw_only=True):
    """What became of one conversation. `error` is why the template cannot render it."""

    id: str
    history: History
    turns: list[TurnReport] = []
    error: str | None = None
    unread: int = 0
    """Answers with calls, as the template writes them, in which the family's parser finds none."""

    @property
    def extensions(self) -> int:
        return sum(turn.exact for turn in self.turns[1:])

    @property
    def branches(self) -> Counter[str]:
        return Counter(turn.branch for turn in self.turns if turn.branch)

    @property
    def differences(self) -> Counter[str]:
        return Counter(name for turn in self.turns for name in turn.differences)

    @property
    def wrong(self) -> list[str]:
        """What stands in a prompt that should not, or does not that should."""
        return [f"turn {n} (message {turn.message}): {turn.wrong}" for n, turn in enumerate(self.turns) if turn.wrong]

    @property
    def exact(self) -> bool | None:
        """Whether every prompt was the previous one, what was said, and what belongs there; None if there is none."""
        if not self.turns and self.error is None:
            return None
        return self.error is None and all(turn.exact and not turn.wrong for turn in self.turns)

    @property
    def stable(self) -> bool:
        """Whether the template never rewrote what it had written before."""
        return not any(turn.rewritten for turn in self.turns)

    @property
    def equal(self) -> bool | None:
        """Whether every prompt is the template's own rendering; None if there is no prompt, or all that differs may."""
        if self.wrong:
            return False
        return True if self.turns and all(turn.text_equal for turn in self.turns) else None


class Finding(Struct, frozen=True, kw_only=True):
    """One conversation with answers that end as the template writes it; with answers that end in every other way; and
    shown as the template writes history."""

    sampled: TemplateReport
    otherwise: TemplateReport
    template: TemplateReport

    @property
    def wrong(self) -> list[str]:
        return [*self.sampled.wrong, *self.otherwise.wrong, *self.template.wrong]

    @property
    def exact(self) -> bool | None:
        return False if self.wrong else self.sampled.exact

    @property
    def differences(self) -> Counter[str]:
        return self.sampled.differences | self.otherwise.differences

    @property
    def equal(self) -> bool | None:
        return False if self.wrong else self.sampled.equal


def look_at(renderer: Renderer, conversation: Transcript) -> Finding:
    """Replay a conversation in every way."""
    return Finding(
        sampled=examine(renderer, conversation),
        otherwise=examine(renderer, conversation, endings=("length", "written", *renderer.stop_ids)),
        template=examine(renderer, conversation, history="template"),
    )


def choose_samples(renderer: Renderer) -> list[Transcript]:
    """What is replayed when nothing else is given: with tools, where the template demands them."""
    tools = SAMPLES[-1].tools
    return [replace(one, tools=tools) for one in SAMPLES] if _demands_tools(renderer) else SAMPLES


def needs(renderer: Renderer, found: Sequence[Finding] = ()) -> list[str]:
    """What a template wants that it may not be given, or writes that is not read, and what to do about it."""
    sentences = [
        f"the chat template reads {name}, and tokenizer_config.json names none, so nothing stands there. Fix: set "
        f"{name} in that file if the model was trained with one"
        for name in ("bos_token", "eos_token")
        if name in renderer.reads
    ]
    if unread := sum(one.sampled.unread for one in found):
        sentences.append(
            f"calls are read as {renderer.format.name}, and none was found in {unread} answers with calls as the chat "
            "template writes them: they would come back as text. Fix: set policy.tools to system, or policy.template "
            "to a template of a known family"
        )
    if _demands_tools(renderer):
        sentences.append(
            "the chat template refuses a conversation without tools. Fix: send `tools` with every request, or "
            "set policy.template to a template that does not demand them"
        )
    return sentences


def _demands_tools(renderer: Renderer) -> bool:
    chat = [{"role": "user", "content": "Hello"}]
    try:
        renderer.text(chat, None, generate=True)
    except BadTemplate:
        pass
    else:
        return False
    try:
        renderer.text(chat, SAMPLES[-1].tools, generate=True)
    except BadTemplate:
        return False
    return True


def examine(
    renderer: Renderer,
    conversation: Transcript,
    *,
    history: History = "sampled",
    endings: Sequence[Ending] = ("stop",),
) -> TemplateReport:
    """Replay a conversation. `endings` says, turn after turn and over again, how answers end."""
    report = TemplateReport(id=conversation.id, history=history)
    replay = _Replay(renderer, conversation, history, report, cut_off="length" in endings)
    try:
        for at in range(1, len(conversation.messages)):
            if conversation.messages[at]["role"] == "assistant":
                replay.turn(at, endings[len(report.turns) % len(endings)])
    except BadTemplate as error:
        report.error = str(error)
    return report


class _Was(Struct, frozen=True, kw_only=True):
    """A turn that was replayed: its answer is messages[at], and `written` is the template's text for its prompt."""

    at: int
    ids: list[int]
    written: str
    said: SimulatedAnswer
    spans: list[tuple[int, int]]
    differences: list[str]


class _Replay:
    """One conversation going through a session."""

    def __init__(
        self, renderer: Renderer, conversation: Transcript, history: History, report: TemplateReport, *, cut_off: bool
    ) -> None:
        self._renderer, self._report, self._cut_off = renderer, report, cut_off
        self._history: History = history
        self._messages, self._tools = conversation.messages, conversation.tools
        self._model = SimulatedModel(renderer, conversation.messages, conversation.tools)
        self._contexts = Contexts(b"")
        self._was: dict[str | None, _Was] = {}
        self._previous: str | None = None

    def turn(self, at: int, ending: Ending) -> None:
        renderer, before = self._renderer, self._was.get(self._previous)
        asked = Conversation.of(self._messages[:at], self._tools)
        prompt = self._contexts.prompt(renderer, asked, self._history)
        written = self._model.show(renderer.text(self._messages[:at], self._tools, generate=True))
        text = renderer.decode(prompt.ids)
        differences, wrong = self._judge(at, prompt, text, written)
        wrong = wrong or (self._cut_anywhere(at, before) if before and self._cut_off else None)
        said = self._model.say(at, prompt.ids, ending)
        parent = self._was.get(prompt.parent)
        sampled = [span for span in parent.spans if span[1] <= prompt.shared] if parent else []
        self._report.turns.append(
            TurnReport(
                message=at,
                prompt_ids=prompt.ids,
                sampled=sampled,
                response_ids=said.ids,
                exact=prompt.branch is None and prompt.parent == self._previous,
                branch=prompt.branch,
                text_equal=text == written,
                ids_equal=prompt.ids == renderer.encode(written),
                rewritten=before is not None and not self._goes_on(before, written),
                differences=differences,
                wrong=wrong,
            )
        )
        self._report.unread += self._is_unread(at, prompt, said)
        turn = _turn(len(self._report.turns), self._messages[:at], self._messages[at], prompt, said.ids)
        self._previous = turn.id
        spans = [*sampled, (len(prompt.ids), len(turn.ids))]
        self._was[turn.id] = _Was(at=at, ids=turn.ids, written=written, said=said, spans=spans, differences=differences)
        self._contexts.add(turn, asked)

    def _is_unread(self, at: int, prompt: Prompt, said: SimulatedAnswer) -> bool:
        """Whether an answer's calls, as the template writes them, come back to the agent as text."""
        renderer = self._renderer
        calls: list[Json] = self._messages[at].get("tool_calls") or []
        text = renderer.decode_answer([id for id in said.ids if id not in renderer.stop_ids])
        if not any(call["function"]["name"] in text for call in calls):
            return False
        opening = renderer.opening(self._messages[:at], self._tools, prompt.ids)
        parser = renderer.format.parser(self._tools or [], calls=True, lead=opening)
        parser.feed(text)
        parser.close()
        return not parser.calls

    def _goes_on(self, was: _Was, written: str) -> bool:
        """Whether the template writes again what it wrote before, and shows the answer to that."""
        return was.said.tail is not None and written.startswith(was.written + was.said.words)

    def _judge(self, at: int, prompt: Prompt, text: str, written: str) -> tuple[list[str], str | None]:
        """Names of allowed differences between a prompt and what the template writes, and what is wrong."""
        if prompt.branch or prompt.parent is None:
            wrong = f"the prompt, rendered whole, is {text!r}; the template writes {written!r}"
            return [], None if text == written else wrong
        was = self._was[prompt.parent]
        after = self._model.find_after(at, was.at)
        new = text[len(self._renderer.decode(was.ids)) :]
        if after is None or was.said.tail is None:
            return self._unseen(at, was.at, new, written)
        names, wrong = self._seam(was.at, was.said, new, after).judge()
        now = written[: len(written) - len(after)]
        rewritten = explain_rewrite(was.written + was.said.words, now, self._renderer)
        found: dict[str, None] = dict.fromkeys([*was.differences, *names, *([rewritten] if rewritten else [])])
        if not found and not wrong and text != written:
            wrong = f"the prompt is {text!r}; the template writes {written!r}"
        return list(found), wrong

    def _seam(self, served: int, said: SimulatedAnswer, new: str, after: str) -> Seam:
        return Seam(
            said=said.tail or "",
            end=said.end,
            new=new,
            written=after,
            then=self._model.closing(served),
            ends=self._model.ends(served),
            known=self._model.known_ends,
        )

    def _cut_anywhere(self, at: int, was: _Was) -> str | None:
        """What would be wrong if the answer before had been cut off in any place of its closing."""
        after, prompt_ids = self._model.find_after(at, was.at), was.ids[: was.spans[-1][0]]
        for said in self._model.cut_off(was.at, prompt_ids) if after is not None else ():
            path = prompt_ids + said.ids
            new = self._renderer.continuation(self._messages[:at], self._tools, was.at + 1, path, len(said.ids))
            if new is not None and after is not None:
                text = self._renderer.decode(path + new)[len(self._renderer.decode(path)) :]
                if wrong := self._seam(was.at, said, text, after).judge()[1]:
                    return wrong
        return None

    def _unseen(self, at: int, served: int, new: str, written: str) -> tuple[list[str], str | None]:
        """The template does not show the answer: what follows it must be what follows an empty one."""
        empty = self._model.unanswered(at, served)
        if written.endswith(new) and empty is not None and empty.endswith(new):
            return [HIDDEN], None
        return [], f"after an answer that the template does not show stands {new!r}; it writes {written!r}"


def _turn(number: int, messages: list[Json], answer: Json, prompt: Prompt, said: list[int]) -> Turn:
    return Turn(
        id=f"replay/1/{number}",
        rollout="replay",
        attempt=1,
        prompt_ids=prompt.ids,
        response_ids=said,
        logprobs=[0.0] * len(said),
        versions=[],
        finish="stop",
        parent=prompt.parent,
        shared=prompt.shared,
        branch=prompt.branch,
        messages=messages,
        answer=answer,
        started=0.0,
        ended=0.0,
    )
