"""Messages to tokens and back, with a model's own chat template and tokenizer.

    renderer = Renderer.from_folder("models/nano")
    renderer.prompt([{"role": "user", "content": "hi"}], None)    ids of "<|im_start|>user\\nhi<|im_end|>\\n<|im_st..."

Left out: images and other non-text parts; templates that are chosen by name from a list.
"""

from __future__ import annotations

import gzip
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from copy import copy
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec
from tokenizers import Tokenizer

from strop.errors import ConfigError, ModelError
from strop.gateway.detokenize import overlap
from strop.gateway.dialects.base import Json
from strop.gateway.jinja import EFFORT, THINKING, BadTemplate, Template
from strop.gateway.template_style import TOOL, USER, answer, marker, shaped, traits_of
from strop.gateway.tool_calls import find
from strop.gateway.tool_calls.base import Format
from strop.gateway.tool_prompt import ToolsWay, tooling

Messages = Sequence[Json]
Tools = Sequence[Json] | None

_HERE = "strop" + secrets.token_hex(8)
"""Marks a place in somebody's conversation, where no text may happen to be the same."""
_KEPT = 16_384
"""Characters of prompts whose tokens are kept."""
_VARIANTS = 64
"""Settings of a template's variables that are remembered."""
_WINDOW = 64
"""How many tokens before new text are looked at to see how that is split into tokens in its place."""


class Renderer:
    """A chat template with its tokenizer.

    `end_of_turn` is the token that ends an answer, as the template writes it; `stop_ids` are all tokens that do (that
    one, the one that ends calls, the tokenizer's eos and those of generation_config.json). An end that is no token of
    this tokenizer is a stop string, in `stop_texts`.
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
        self._kept = lru_cache(maxsize=128)(self.encode)
        self._specials, self._stops = specials or {}, stops
        self._template = Template(template, self._specials, variables)
        if variables and (why := self.unread(variables)):
            raise ConfigError(f"policy.chat_template_kwargs: {why}")
        added = tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.format: Format = find(template)
        traits = traits_of(self._template, self._added.values(), self.format.marks)
        self.tooling = tooling(self._template, traits, self.format, tools)
        if self.tooling.writer:
            self._template, self.format = self._template.rewriting(self.tooling.writer), self.tooling.format
        kept = self.format.marks
        self._marker = marker(self._added.values())
        self._hidden = frozenset(i for i, token in added.items() if token.special and token.content not in kept)
        self._tokens: dict[int, tuple[str, list[int] | None]] = {}
        vocabulary = tokenizer.get_vocab()
        self.num_ids = max(vocabulary.values()) + 1
        self._others: dict[bytes, Renderer] = {}
        self._learn()

    def _learn(self) -> None:
        """What follows from how the template writes with its variables as they are."""
        tokenizer, kept = self.tokenizer, self.format.marks
        self._traits = traits_of(self._template, self._added.values(), kept)
        self.generation_prompt = self._traits.generation_prompt
        self._openings = {self.generation_prompt} if self.generation_prompt.strip() else set[str]()
        said, called = self._traits.said, self._traits.called
        self._ends = list(dict.fromkeys([*said.ends, *called.ends]))
        stops_at = [*self._ends, *said.next, *called.next]
        stops_at = [mark for mark in dict.fromkeys(stops_at) if mark not in kept]  # those go on behind it
        self._end = re.compile(r"\s*(" + "|".join(map(re.escape, self._ends)) + ")") if self._ends else None
        self._closes: dict[Any, bool] = {}  # kinds of conversations that were checked -> whether calls are shown
        self._short = self._may_be_shortened()
        self._tried: set[tuple[Any, ...]] = set()  # kinds of short conversations for which that was seen to be so
        eos = tokenizer.token_to_id(self._specials.get("eos_token", ""))
        tokens = [id for text in stops_at if (id := tokenizer.token_to_id(text)) is not None]
        found = [*tokens, *([] if eos is None else [eos]), *self._stops]
        if not found:
            raise ModelError(
                "neither the chat template nor tokenizer_config.json says which token ends an assistant's turn: "
                "set eos_token there"
            )
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(found))
        self.stop_texts: tuple[str, ...] = tuple(text for text in stops_at if tokenizer.token_to_id(text) is None)
        self.end_of_turn: int = self.stop_ids[0]

    @classmethod
    def from_folder(cls, folder: str | Path, *, variables: Json | None = None, tools: ToolsWay = "auto") -> Renderer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json from a folder in
        Hugging Face format; only the first and a template are required. `variables` are the template's, `tools` says
        who writes tools."""
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        beside = folder / "chat_template.jinja"
        try:
            template = beside.read_text("utf-8") if beside.exists() else config.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {beside}: {error}") from None
        if not isinstance(template, str):
            raise ModelError(f"{folder} has no chat template: put one there as chat_template.jinja")
        return cls.from_parts(folder, template, variables=variables, tools=tools)

    @classmethod
    def from_parts(
        cls, folder: Path, template: str, *, variables: Json | None = None, tools: ToolsWay = "auto"
    ) -> Renderer:
        """The tokenizer of a folder with a template from elsewhere. tokenizer.json may be compressed, as .json.gz."""
        config = _read_json(folder / "tokenizer_config.json")
        stops: int | list[int] = _read_json(folder / "generation_config.json").get("eos_token_id") or []
        return cls(
            _read_tokenizer(folder),
            template,
            specials={name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))},
            stops=[stops] if isinstance(stops, int) else stops,
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

    def unread(self, names: Iterable[str]) -> str:
        """Why variables cannot be given: the template would not notice. Empty if it reads them all."""
        unknown = sorted(set(names) - self.reads)
        if not unknown:
            return ""
        switches = sorted(self.reads & {*THINKING, *EFFORT})
        known = f"of those that switch thinking it reads {', '.join(switches)}" if switches else "it cannot be switched"
        return f"the model's chat template does not read {', '.join(unknown)}: leave it out ({known})"

    def given(self, variables: Json) -> Renderer:
        """The same with these variables besides its own: another way to write, with traits of its own."""
        wanted = self.variables | variables
        if wanted == self.variables:
            return self
        key = msgspec.json.encode(wanted, order="sorted")
        if (other := self._others.get(key)) is None:
            if len(self._others) >= _VARIANTS:
                self._others.clear()
            other = copy(self)
            other._template = self._template.given(wanted)
            try:
                other._learn()
            except ModelError as error:
                raise BadTemplate(str(error)) from None
            self._others[key] = other
        return other

    # -- messages to text ------------------------------------------------------------------------------------------

    def text(self, messages: Messages, tools: Tools, *, generate: bool) -> str:
        """The template's text for a conversation; `generate` ends it where the assistant's answer begins."""
        return self._render([shaped(message, self._traits.shape) for message in messages], tools, generate)

    def _render(self, messages: Messages, tools: Tools, generate: bool) -> str:
        return self._template.render(messages, tools, generate=generate)

    def prompt(self, messages: Messages, tools: Tools) -> list[int]:
        """The tokens of a whole conversation, up to where the answer begins."""
        text = self.text(messages, tools, generate=True)
        if not text.strip():
            raise BadTemplate("the model's chat template writes nothing for these messages")
        # The members of a group begin alike; what is long is not worth keeping.
        return list(self._kept(text)) if len(text) <= _KEPT else self.encode(text)

    def opening(self, messages: Messages, tools: Tools, ids: Sequence[int] = (), lead: str = "") -> str:
        """What the template writes behind the last message, where the answer begins: who speaks, and a thought that is
        open or closed already. It may depend on anything in the conversation. `ids` are the prompt with `lead` at its
        end: one that ends as others before it need not be rendered for this."""
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
        if not whole[at:].strip():  # who speaks next stands behind the last message always
            marks = [mark for pair in self.format.thoughts for mark in pair if whole.rstrip().endswith(mark)]
            return whole[whole.rfind(marks[0]) :] if marks else whole[at:]
        if len(self._openings) < _VARIANTS:
            self._openings.add(whole[at:])
        return whole[at:]

    def after(self, messages: Messages, tools: Tools, served: int) -> str | None:
        """What the template writes behind the assistant's message `messages[served - 1]`, from the end of that turn to
        where the next answer begins. None if the template does not show where that message ends.

        Few templates depend there on what lies between the last user's message and the assistant's (those that number
        rounds or calls do): a long conversation is rendered without it. Whether that may be done is tried out when the
        template is loaded, on every kind of short conversation, and whenever one has grown to twice its length.
        """
        parts = self._parts(messages, tools, served)
        return parts and parts[1]

    def _parts(self, messages: Messages, tools: Tools, served: int) -> tuple[str, str] | None:
        """What is written behind the last word of an answer: its closing, and what `after` says."""
        short = _shortened(messages, served) if self._short else None
        if short is None:
            return self._after(messages, served, tools)
        parts = self._after(*short, tools)
        kind = _kind(messages, tools) if len(messages) <= 8 else None
        if kind in self._tried or (kind is None and len(messages).bit_length() == (served - 1).bit_length()):
            return parts
        whole = self._after(messages, served, tools)
        self._short = parts == whole
        if kind and self._short:
            self._tried.add(kind)
        return whole

    def _after(self, messages: Messages, served: int, tools: Tools) -> tuple[str, str] | None:
        return self._behind([shaped(message, self._traits.shape) for message in messages], tools, served)

    def _behind(self, shaped: list[Json], tools: Tools, served: int) -> tuple[str, str] | None:
        """The conversation is rendered with a mark at the end of the message, in its last call if calls are shown. What
        is behind the mark is checked once for every kind of conversation."""
        answer, kind = shaped[served - 1], _checked_as(shaped, tools, served)
        closes = self._closes.get(kind)
        known = closes is not None
        if closes is None:
            closes = bool(answer.get("tool_calls")) and self._shows_calls(shaped, tools, served)
        marked = _with_mark(answer) if closes else _behind_words(_without_calls(answer))
        rest = self._rest(shaped, tools, served, marked)
        closing = None if rest is None else self._closing(closes, rest, [*shaped[: served - 1], marked], tools)
        if rest is None or closing is None:
            return None
        rest = rest[len(closing) :]
        if not known:
            if not self._is_behind(shaped, tools, served, rest, closes):
                return None
            if kind is not None:
                self._closes[kind] = closes
        return closing, rest

    def _shows_calls(self, shaped: list[Json], tools: Tools, served: int) -> bool:
        without = [*shaped[: served - 1], _without_calls(shaped[served - 1]), *shaped[served:]]
        try:
            return self._render(without, tools, True) != self._render(shaped, tools, True)
        except BadTemplate:
            return True

    def _is_behind(self, shaped: list[Json], tools: Tools, served: int, rest: str, closes: bool) -> bool:
        """Whether a text is what the template writes behind all of a message: it may write other text because of a
        mark, show only some of the calls, or write them or the words behind what follows."""
        if not self._render(shaped, tools, True).endswith(rest):
            return False
        answer = shaped[served - 1]
        words = self._rest(shaped, tools, served, _behind_words(answer)) if closes and answer["content"] else None
        return words is None or words.endswith(rest)

    def _rest(self, shaped: list[Json], tools: Tools, served: int, marked: Json) -> str | None:
        """What stands behind the mark; None if it is not shown."""
        try:
            text = self._render([*shaped[: served - 1], marked, *shaped[served:]], tools, True)
        except BadTemplate:
            return None
        found = text.rpartition(_HERE)
        return found[2] if found[1] else None

    def _closing(self, calls: bool, rest: str, marked: list[Json], tools: Tools) -> str | None:
        """What still belongs to the answer behind a mark in it, before the end of the turn. It is what the template
        always writes there or, should it be something else this time, what it writes when nothing follows."""
        closing = self._traits.called if calls else self._traits.said
        if calls and (ends := [at for end in closing.ends if (at := rest.find(end)) >= 0]):
            return rest[: min(ends)].rstrip()
        if rest.startswith(closing.before) and (closing.before or not calls):
            return closing.before
        try:
            alone = self._render(marked, tools, False).rpartition(_HERE)[2].rstrip()
        except BadTemplate:
            return None
        end = next((end for end in self._ends if alone.endswith(end)), "")
        alone = alone[: len(alone) - len(end)].rstrip() if end else alone
        return alone if rest.startswith(alone) else None

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
        end, beyond = self.ended(path)
        if end:
            rest = self._behind_end(rest, end, messages[served - 1])
            rest = rest and rest[_num_common(beyond, rest) :]
        else:
            parts = self._parts(messages, tools, served)
            answer = messages[served - 1]
            said = self.decode(path[-_WINDOW:] if answer.get("tool_calls") else last)  # a prompt may open a call
            rest = parts and self._unsaid(parts[0], rest, said, answer)
        if rest is None or self._repeated(self.decode(last).removesuffix(end + beyond), rest):
            return None
        return self.encode_after(path, rest)

    def _behind_end(self, rest: str, end: str, answer: Json) -> str | None:
        """What is left to be written behind an answer that the model ended; None if the template may write an end
        there that nobody knows for one."""
        if rest.lstrip().startswith(end):  # also where the next message begins with it
            return rest.lstrip()[len(end) :]
        if written := self._end.match(rest) if self._end else None:
            return rest[written.end() :]
        return rest if (self._traits.called if answer.get("tool_calls") else self._traits.said).sure else None

    def writes_end(self, answer: Json) -> bool:
        """Whether the template writes a mark that ends such an answer. Where it does not, the next message begins."""
        return bool((self._traits.called if answer.get("tool_calls") else self._traits.said).ends)

    def _repeated(self, said: str, rest: str) -> bool:
        """Whether marks that the model said last would be written once more."""
        said = _squeezed(said)
        marks = islice(self._marker.finditer(rest.lstrip()), 3)
        begun = (_squeezed(rest.lstrip()[: mark.end()]) for mark in marks)
        return any(text and said.endswith(text) for text in begun)

    def ended(self, path: Sequence[int]) -> tuple[str, str]:
        """The end of turn that the last sampled token completed, and what that token says beyond it; empty if it
        completed none. An end that is no token of its own may lie across several."""
        if path[-1] in self.stop_ids:
            return self._added.get(path[-1]) or self.decode(path[-1:]), ""
        said, before = self.decode(path[-_WINDOW:]), len(self.decode(path[-_WINDOW:-1]))
        for text in (*self.stop_texts, *self._ends):
            end = said.rfind(text) + len(text)
            if end >= len(text) and end > before:
                return text, said[end:]
        return "", ""

    def _unsaid(self, closing: str, rest: str, said: str, answer: Json) -> str | None:
        """What is left to be written behind an answer that was not ended: what closes it and the end of the turn may be
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
            if _squeezed(said).endswith(_squeezed(last)):
                return rest
            return self._unclosed(closing, marks[0].start(), rest, said)
        return rest if said.rstrip().endswith(closing.rstrip()[-1:]) else None

    def _unclosed(self, closing: str, at: int, rest: str, said: str) -> str | None:
        """The same for an answer that was cut off within its closing, whose first mark is `at`; before it stand the
        brackets of a call and, in an argument that was put there, a quote."""
        brackets = closing[:at].rstrip()
        marks, brackets = closing[len(brackets) :], brackets.removeprefix('"')
        begun = overlap(said, marks)
        if not brackets and not self._marker.match(marks[:begun].lstrip()):  # a call without arguments closes otherwise
            return None
        before = _squeezed(said[: len(said) - begun])
        return marks[begun:] + rest if before.endswith(_squeezed(brackets)) else None

    def _splits(self, text: str, at: int) -> bool:
        """Whether a place lies within a token, of which a model cannot have said a part."""
        marks = (mark for mark in self._marker.finditer(text) if mark.start() < at < mark.end())
        return any(self.tokenizer.token_to_id(mark.group()) is not None for mark in marks)

    # -- text to tokens and back -----------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_after(self, path: Sequence[int], text: str) -> list[int]:
        """The tokens of `text` as they are in its place behind `path`, whose own tokens stay what they are."""
        recent = list(path[-_WINDOW:])
        last = next((i for i in range(len(recent) - 1, -1, -1) if recent[i] in self._added), None)
        for start in range(min(8, len(recent))) if last is None else (last,):
            window = recent[start:]
            ids = self.encode(self.decode(window) + text)
            if ids[: len(window)] == window:
                return ids[len(window) :]
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Every token as text, special ones too."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def token(self, id: int) -> tuple[str, list[int] | None]:
        """One token as text, and its bytes; None where it is not whole characters."""
        if id not in self._tokens:
            text = self.decode([id])
            self._tokens[id] = text, None if "\ufffd" in text else list(text.encode())
        return self._tokens[id]

    def spoken(self, ids: Sequence[int]) -> str:
        """What an agent is shown of sampled tokens: no special tokens, except marks with a meaning in its format."""
        return self.tokenizer.decode([i for i in ids if i not in self._hidden], skip_special_tokens=False)

    def _may_be_shortened(self) -> bool:
        """Try it on rounds of calls and of words, with a system's message and tools and without: templates look back
        by counting messages, and some count wrong."""
        call, result = answer("", "b"), {"role": "tool", "content": "c", "name": "f", "tool_call_id": "call00001"}
        chat = [USER, call, result, call, result, answer("d"), USER, answer("e"), USER, call, result, call, result]
        try:
            for head, tools in (([], None), ([{"role": "system", "content": "s"}], None), ([], [TOOL])):
                whole = [*head, *chat]
                for served in range(len(head) + 4, len(whole), 2):
                    for end in (served + 1, len(whole)):
                        short = _shortened(whole[:end], served)
                        if short and self._after(*short, tools) != self._after(whole[:end], served, tools):
                            return False
        except BadTemplate:
            return False
        return True


def _with_mark(answer: Json) -> Json:
    """An assistant's message with a mark at the end of its last call's arguments."""
    *calls, last = answer["tool_calls"]
    function = last["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        marked = json.dumps(json.loads(arguments) | {_HERE: _HERE}, ensure_ascii=False)
    else:
        marked = arguments | {_HERE: _HERE}
    return answer | {"tool_calls": [*calls, last | {"function": function | {"arguments": marked}}]}


def _behind_words(answer: Json) -> Json:
    return answer | {"content": (answer["content"] or "") + _HERE}


def _without_calls(answer: Json) -> Json:
    return {name: value for name, value in answer.items() if name != "tool_calls"}


def _kind(messages: Messages, tools: Tools) -> tuple[Any, ...]:
    """What kind of conversation this is to a template: who speaks, with words and calls or without, with tools."""
    return (bool(tools), *((m["role"], bool(m["content"]), len(m.get("tool_calls", ()))) for m in messages))


def _checked_as(messages: Messages, tools: Tools, served: int) -> tuple[Any, ...] | None:
    """Conversations that a template treats alike where an answer ends; None if that hangs on the answer's very words:
    templates ask whether there are any, strip white space and look for marks at their end."""
    answer = messages[served - 1]
    content, calls = answer["content"] or "", answer.get("tool_calls")
    if len(messages) > 8 or (not calls and (not content or content[-1].isspace() or content[-1] in ">]")):
        return None
    thinks = "</" in content or bool(answer.get("reasoning_content"))
    return served, thinks, bool(calls and calls[-1]["function"]["arguments"]), *_kind(messages, tools)


def _shortened(messages: Messages, served: int) -> tuple[list[Json], int] | None:
    """A conversation without what lies between its system message, the last user's before an answer, and the answer;
    and how many messages that then ends. None if nothing can be left out."""
    user = next((i for i in range(served - 2, -1, -1) if messages[i]["role"] == "user"), None)
    system = [messages[0]] if messages[0]["role"] == "system" else []
    if user is None or user == len(system) == served - 2:
        return None
    return [*system, messages[user], *messages[served - 1 :]], len(system) + 2


def _squeezed(text: str) -> str:
    """Without white space."""
    return "".join(text.split())


def _num_common(a: str, b: str) -> int:
    """How many leading characters two texts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        if not path.exists() and (packed := folder / "tokenizer.json.gz").exists():
            return Tokenizer.from_str(gzip.decompress(packed.read_bytes()).decode())
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ModelError(f"cannot read {path}: {error}; the model needs one") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None


def _token_text(token: Any) -> str | None:
    """tokenizer_config.json writes special tokens as text or as {"content": text, ...}."""
    return cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
