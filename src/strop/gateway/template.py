"""Messages to tokens and back, with a model's own chat template and tokenizer.

    renderer = Renderer.from_folder("models/nano")
    renderer.prompt([{"role": "user", "content": "hi"}], None)    ids of "<|im_start|>user\\nhi<|im_end|>\\n<|im_st..."

Left out: images and other non-text parts; templates that are chosen by name from a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import islice
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from strop.errors import ConfigError, ModelError
from strop.gateway.after_answer import AfterAnswer, Messages, Tools
from strop.gateway.answer_grammar import AnswerForm, write_answer
from strop.gateway.detokenize import TokenTexts, overlap
from strop.gateway.dialects.base import Json
from strop.gateway.jinja import EFFORT, THINKING, BadTemplate, Template
from strop.gateway.kept_tokens import KeptTokens
from strop.gateway.model_files import read_specials, read_stops, read_template, read_tokenizer
from strop.gateway.template_style import find_style, marker, shape_message
from strop.gateway.tool_calls import find
from strop.gateway.tool_calls.reader import Grammar
from strop.gateway.tool_prompt import ToolsWay, choose_tooling
from strop.models.lark import MarkTokens

_VARIANTS = 64
"""Settings of a template's variables that are remembered."""
_GRAMMARS = 256
"""Grammars of answers that are."""
_CLOSE, _CUT = 16, 8
"""How many of the last tokens are looked at first, and how many characters may read otherwise where they were cut off,
if all of them are whole."""
_WINDOW = 64
"""How many tokens before new text are looked at to see how that is split into tokens in its place."""


class Renderer:
    """A chat template with its tokenizer.

    `end_of_turn` is the token that ends an answer, as the template writes it; `stop_ids` are all tokens that do (that
    one, the one that ends calls, the tokenizer's eos and those of generation_config.json). An end that is not a token
    of this tokenizer is a stop string, in `stop_texts`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        specials: dict[str, str] | None = None,
        stops: Sequence[int] = (),
        variables: Json | None = None,
        tools: ToolsWay = "auto",
    ) -> None:
        self.tokenizer = tokenizer
        self._kept = KeptTokens(self.encode)
        self._specials, self._stops = specials or {}, stops
        self._template = Template(template, self._specials, variables)
        if variables and (why := self.explain_unread(variables)):
            raise ConfigError(f"policy.chat_template_kwargs: {why}")
        added = tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.format: Grammar = find(template)
        style = find_style(self._template, self._added.values(), self.format.marks)
        self.tooling = choose_tooling(self._template, style, self.format, tools)
        if self.tooling.writer:
            self._template, self.format = self._template.with_rewrite(self.tooling.writer), self.tooling.format
        kept = self.format.marks
        self._marker = marker(self._added.values())
        self._hidden = frozenset(i for i, token in added.items() if token.special and token.content not in kept)
        self.tokens = TokenTexts(self.decode)
        vocabulary = tokenizer.get_vocab()
        self.num_ids = max(vocabulary.values()) + 1
        self._others: dict[bytes, Renderer] = {}
        self._answers: dict[bytes, str] = {}
        self._mark_tokens: dict[tuple[int, ...], MarkTokens] = {}
        self._learn()

    def _learn(self) -> None:
        """What follows from how the template writes with its variables as they are."""
        tokenizer, kept = self.tokenizer, self.format.marks
        self._style = find_style(self._template, self._added.values(), kept)
        self.generation_prompt = self._style.generation_prompt
        self._openings = {self.generation_prompt} if self.generation_prompt.strip() else set[str]()
        said, called = self._style.said, self._style.called
        self._after_answer = AfterAnswer(self._template, self._style)
        self._ends = self._after_answer.ends
        stops_at = [*self._ends, *said.next, *called.next]
        stops_at = [mark for mark in dict.fromkeys(stops_at) if mark not in kept]  # those go on after it
        self._end = re.compile(r"\s*(" + "|".join(map(re.escape, self._ends)) + ")") if self._ends else None
        eos = tokenizer.token_to_id(self._specials.get("eos_token", ""))
        tokens = [id for text in stops_at if (id := tokenizer.token_to_id(text)) is not None]
        found = [*tokens, *([] if eos is None else [eos]), *self._stops]
        if not found:
            raise ModelError(
                "neither the chat template nor tokenizer_config.json says which token ends an assistant's turn. "
                "Fix: set eos_token there"
            )
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(found))
        self.stop_texts: tuple[str, ...] = tuple(text for text in stops_at if tokenizer.token_to_id(text) is None)
        self.end_of_turn: int = self.stop_ids[0]
        self._unsaid = self._hidden | {*self.stop_ids}

    @classmethod
    def from_folder(cls, folder: str | Path, *, variables: Json | None = None, tools: ToolsWay = "auto") -> Renderer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json from a folder in
        Hugging Face format; only the first and a template are required. `variables` are the template's, `tools` says
        who writes tools."""
        folder = Path(folder)
        return cls.from_parts(folder, read_template(folder), variables=variables, tools=tools)

    @classmethod
    def from_parts(
        cls, folder: Path, template: str, *, variables: Json | None = None, tools: ToolsWay = "auto"
    ) -> Renderer:
        """The tokenizer of a folder with a template from elsewhere. tokenizer.json may be compressed, as .json.gz."""
        return cls(
            read_tokenizer(folder),
            template,
            specials=read_specials(folder),
            stops=read_stops(folder),
            variables=variables,
            tools=tools,
        )

    # -- the template's variables ------------------------------------------------------------------------------------

    @property
    def variables(self) -> Json:
        """What the template is given besides the conversation: enable_thinking, reasoning_effort and the like."""
        return self._template.variables

    @property
    def reads(self) -> frozenset[str]:
        """The names of variables that the template reads."""
        return self._template.reads

    def explain_unread(self, names: Iterable[str]) -> str:
        """Why variables cannot be given: the template would not notice. Empty if it reads them all."""
        unknown = sorted(set(names) - self.reads)
        if not unknown:
            return ""
        switches = sorted(self.reads & {*THINKING, *EFFORT})
        known = f"of those that switch thinking it reads {', '.join(switches)}" if switches else "it cannot be switched"
        return f"the model's chat template does not read {', '.join(unknown)}. Fix: leave it out ({known})"

    def with_variables(self, variables: Json) -> Renderer:
        """The same with these variables besides its own: another way to write, with traits of its own."""
        wanted = self.variables | variables
        if wanted == self.variables:
            return self
        key = msgspec.json.encode(wanted, order="sorted")
        if (other := self._others.get(key)) is None:
            if len(self._others) >= _VARIANTS:
                self._others.clear()
            other = copy(self)
            other._template = self._template.with_variables(wanted)
            try:
                other._learn()
            except ModelError as error:
                raise BadTemplate(str(error)) from None
            self._others[key] = other
        return other

    # -- messages to text ------------------------------------------------------------------------------------------

    def text(self, messages: Messages, tools: Tools, *, generate: bool) -> str:
        """The template's text for a conversation; `generate` ends it where the assistant's answer begins."""
        shaped = [shape_message(message, self._style.shape) for message in messages]
        return self._template.render(shaped, tools, generate=generate)

    def prompt(self, messages: Messages, tools: Tools) -> list[int]:
        """The tokens of a whole conversation, up to where the answer begins."""
        text = self.text(messages, tools, generate=True)
        if not text.strip():
            raise BadTemplate(
                "the model's chat template writes nothing for these messages. Fix: send a user's message with text"
            )
        return self._kept.encode(text)

    def opening(self, messages: Messages, tools: Tools, ids: Sequence[int] = (), lead: str = "") -> str:
        """What the template writes after the last message, where the answer begins: who speaks, and a thought that is
        open or closed already. It may depend on anything in the conversation. `ids` are the prompt with `lead` at its
        end: one that ends as others before it need not be rendered for this."""
        end = self.decode(ids[-_CLOSE:]).removesuffix(lead) if ids and not lead else ""
        if "\ufffd" in end or len(end) < _CUT + max(map(len, self._openings), default=0):  # one may reach beyond it
            end = self.decode(ids[-2 * _WINDOW :]).removesuffix(lead) if ids else ""
        if known := [opening for opening in self._openings if end.endswith(opening)]:
            return max(known, key=len)
        whole = self.text(messages, tools, generate=True)
        try:
            at = _num_common(whole, self.text(messages, tools, generate=False))
        except BadTemplate:
            return self.generation_prompt
        if whole.rfind("<", 0, at) > whole.rfind(">", 0, at):  # within a mark, which begins as another one does
            at = whole.rfind("<", 0, at)
        if not whole[at:].strip():  # who speaks next stands after the last message always
            marks = [mark for pair in self.format.thoughts for mark in pair if whole.rstrip().endswith(mark)]
            return whole[whole.rfind(marks[0]) :] if marks else whole[at:]
        if len(self._openings) < _VARIANTS:
            self._openings.add(whole[at:])
        return whole[at:]

    def after(self, messages: Messages, tools: Tools, served: int) -> str | None:
        """What the template writes after the assistant's message `messages[served - 1]`, from the end of that turn to
        where the next answer begins. None if the template does not show where that message ends."""
        parts = self._after_answer.find(messages, tools, served)
        return parts and parts[1]

    def continuation(
        self, messages: Messages, tools: Tools, served: int, path: Sequence[int], num_said: int
    ) -> list[int] | None:
        """The tokens that follow `path`, whose last `num_said` are those sampled for `messages[served - 1]`; None if
        the template does not show where that message ends, or the model was cut off where nobody can tell how it would
        have gone on. The end of the turn stands once: as the model said it or, where the model was cut off, as the
        template writes it, with what was left unsaid of what closes words or calls before it."""
        rest = self.after(messages, tools, served)
        if rest is None:
            return None
        last = path[-num_said:][-_WINDOW:]
        end, beyond = self.find_end(path)
        if end:
            rest = self._skip_end(rest, end, messages[served - 1])
            rest = rest and rest[_num_common(beyond, rest) :]
        elif not self._is_cut_in_later_call(answer := messages[served - 1], path[-num_said:]):
            parts = self._after_answer.find(messages, tools, served)
            said = self.decode(path[-_WINDOW:] if answer.get("tool_calls") else last)  # a prompt may open a call
            rest = parts and self._find_unsaid(parts[0], rest, said, answer)
        if rest is None:
            return None
        may_repeat = self._may_repeat(last, end + beyond, rest)
        if may_repeat and self._would_repeat(self.decode(last).removesuffix(end + beyond), rest):
            return None
        return self.encode_after(path, rest)

    def _skip_end(self, rest: str, end: str, answer: Json) -> str | None:
        """What is left to be written after an answer that the model ended; None if the template may write an end
        there that nobody knows for one."""
        if rest.lstrip().startswith(end):  # also where the next message begins with it
            return rest.lstrip()[len(end) :]
        if written := self._end.match(rest) if self._end else None:
            return rest[written.end() :]
        return rest if (self._style.called if answer.get("tool_calls") else self._style.said).sure else None

    def writes_end(self, answer: Json) -> bool:
        """Whether the template writes a mark that ends such an answer. Where it does not, the next message begins."""
        return bool((self._style.called if answer.get("tool_calls") else self._style.said).ends)

    def _would_repeat(self, said: str, rest: str) -> bool:
        """Whether marks that the model said last would be written once more."""
        said = _squeeze(said)
        marks = islice(self._marker.finditer(rest.lstrip()), 3)
        begun = (_squeeze(rest.lstrip()[: mark.end()]) for mark in marks)
        return any(text and said.endswith(text) for text in begun)

    def _may_repeat(self, last: Sequence[int], end: str, rest: str) -> bool:
        """Whether that need be looked at: most often the last few tokens before the end show that no mark is said."""
        if len(last) <= _CLOSE or not (said := self.decode(last[-_CLOSE:])).endswith(end):
            return True
        if "\ufffd" in said:
            return True
        said = _squeeze(said.removesuffix(end))[_CUT:]
        marks = (_squeeze(mark.group()) for mark in islice(self._marker.finditer(rest.lstrip()), 3))
        return any(said.endswith(mark) or mark.endswith(said) for mark in marks)

    def find_end(self, path: Sequence[int]) -> tuple[str, str]:
        """The end of turn that the last sampled token completed, and what that token says beyond it; empty if it
        completed none. An end that is not a token of its own may lie across several."""
        if path[-1] in self.stop_ids:
            return self._added.get(path[-1]) or self.decode(path[-1:]), ""
        said, before = self.decode(path[-_WINDOW:]), len(self.decode(path[-_WINDOW:-1]))
        for text in (*self.stop_texts, *self._ends):
            end = said.rfind(text) + len(text)
            if end >= len(text) and end > before:
                return text, said[end:]
        return "", ""

    def _find_unsaid(self, closing: str, rest: str, said: str, answer: Json) -> str | None:
        """What is left to be written after an answer that was not ended: what closes it and the end of the turn may be
        among the model's last tokens already, whole or in part. None if that cannot be known."""
        if not answer.get("tool_calls") and (end := answer["content"][-40:]) and (at := said.rfind(end)) >= 0:
            beyond, whole = said[at + len(end) :], closing + rest
            if whole.startswith(beyond):
                shown = closing and not beyond and overlap(said, whole)  # perhaps what the agent saw was the closing
                return None if shown else whole[len(beyond) :]
        marks = list(self._marker.finditer(closing))
        last = closing[marks[-1].start() :] if marks else ""
        for whole in (last + rest, last + rest.lstrip()):
            for length in range(min(len(said), len(whole)) if said.strip() else 0, len(last), -1):
                if said.endswith(whole[:length]) and not self._splits(whole, length):
                    return whole[length:]
        if marks:
            if _squeeze(said).endswith(_squeeze(last)):
                return rest
            return self._find_unclosed(closing, marks[0].start(), rest, said)
        return rest if said.rstrip().endswith(closing.rstrip()[-1:]) else None

    def _is_cut_in_later_call(self, answer: Json, sampled: Sequence[int]) -> bool:
        """Whether the model was cut off within a call after others that were whole. Agents are shown it as text, which
        templates write before calls: nothing is left to be closed but the turn."""
        content = answer["content"] or ""
        begin = max((mark.start() for mark in self._marker.finditer(content)), default=len(content))
        return bool(answer.get("tool_calls") and content[begin:]) and self.decode(sampled).endswith(content[begin:])

    def _find_unclosed(self, closing: str, at: int, rest: str, said: str) -> str | None:
        """The same for an answer that was cut off within its closing, whose first mark is `at`; before it stand the
        brackets of a call and, in an argument that was put there, a quote."""
        brackets = closing[:at].rstrip()
        marks, brackets = closing[len(brackets) :], brackets.removeprefix('"')
        begun = overlap(said, marks)
        if not brackets and not self._marker.match(marks[:begun].lstrip()):  # a call without arguments closes otherwise
            return None
        before = _squeeze(said[: len(said) - begun])
        return marks[begun:] + rest if before.endswith(_squeeze(brackets)) else None

    def _splits(self, text: str, at: int) -> bool:
        """Whether a place lies within a token, of which a model cannot have said a part."""
        marks = (mark for mark in self._marker.finditer(text) if mark.start() < at < mark.end())
        return any(self.tokenizer.token_to_id(mark.group()) is not None for mark in marks)

    def write_answer(self, form: AnswerForm) -> str:
        """The grammar of an answer in this model's tokens. Raises `BadSchema` and `NoForm`."""
        key = msgspec.json.encode([form, self.stop_ids])
        if (text := self._answers.get(key)) is None:
            if len(self._answers) >= _GRAMMARS:
                self._answers.clear()
            if (tokens := self._mark_tokens.get(self.stop_ids)) is None:
                tokens = self._mark_tokens[self.stop_ids] = MarkTokens.of(self.tokenizer, self.stop_ids)
            text = self._answers[key] = write_answer(self.format, tokens, form)
        return text

    # -- text to tokens and back -----------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        (encoded,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)  # does not count characters
        return encoded.ids

    def encode_after(self, path: Sequence[int], text: str) -> list[int]:
        """The tokens of `text` as they are in its place after `path`, whose own tokens stay what they are."""
        recent = list(path[-_WINDOW:])
        last = next((i for i in range(len(recent) - 1, -1, -1) if recent[i] in self._added), None)
        for start in range(min(8, len(recent))) if last is None else (last,):
            window = recent[start:]
            ids = self._kept.encode(self.decode(window) + text)
            if ids[: len(window)] == window:
                return ids[len(window) :]
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Every token as text, special ones too."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def decode_answer(self, ids: Sequence[int]) -> str:
        """What an agent is shown of sampled tokens: no special tokens, except marks with a meaning in its format."""
        return self._decode_but(self._hidden, ids)

    def decode_said(self, ids: Sequence[int]) -> str:
        """The same without the end of the turn, even where that is not a special token."""
        return self._decode_but(self._unsaid, ids)

    def _decode_but(self, hidden: frozenset[int], ids: Sequence[int]) -> str:
        shown = ids[:-1] if ids and ids[-1] in hidden else ids  # most often that is all
        shown = shown if hidden.isdisjoint(shown) else [i for i in shown if i not in hidden]
        return self.tokenizer.decode(shown, skip_special_tokens=False)


def _squeeze(text: str) -> str:
    """Without white space."""
    return "".join(text.split())


def _num_common(a: str, b: str) -> int:
    """How many leading characters two texts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
