"""Messages to tokens and back, with a model's own chat template and tokenizer.

    renderer = Renderer.from_folder("models/nano")
    renderer.prompt([{"role": "user", "content": "hi"}], None)    ids of "<|im_start|>user\\nhi<|im_end|>\\n<|im_st..."

Templates run as Hugging Face runs them (the same sandbox, filters and globals), so a prompt made here is the prompt the
model is given when it is deployed. Neither transformers nor torch is needed.

Left out: images and other non-text parts; templates that are chosen by name from a list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from strop.errors import ModelError

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None

KEPT = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>"})
"""Marks with a meaning in an answer: shown even by tokenizers that count them as special tokens."""


class BadTemplate(Exception):
    """The chat template refused these messages."""


class Renderer:
    """A chat template with its tokenizer.

    `end_of_turn` is the token the template writes after an assistant's message; `stop_ids` are all the tokens that end
    an answer (that one, the tokenizer's eos and those of generation_config.json).
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str, *, specials: dict[str, str] | None = None, stops: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self._specials = specials or {}
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template cannot be read: {error}") from None
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = frozenset(i for i, token in added.items() if token.special and token.content not in KEPT)
        self.end_of_turn = self._find_end_of_turn()
        self.end_text = self.decode([self.end_of_turn])
        eos = tokenizer.token_to_id(self._specials.get("eos_token", ""))
        found: list[int] = [self.end_of_turn, *([] if eos is None else [eos]), *stops]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(found))
        self.longest = max(map(len, tokenizer.get_vocab()))
        """The most characters one token may stand for."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> Renderer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json from a folder in
        Hugging Face format; only the first and a template are required."""
        folder = Path(folder)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ModelError(f"cannot read {folder / 'tokenizer.json'}: {error}; the model needs one") from None
        config = _read_json(folder / "tokenizer_config.json")
        beside = folder / "chat_template.jinja"
        try:
            template = beside.read_text("utf-8") if beside.exists() else config.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {beside}: {error}") from None
        if not isinstance(template, str):
            raise ModelError(f"{folder} has no chat template: put one there as chat_template.jinja")
        stops: int | list[int] = _read_json(folder / "generation_config.json").get("eos_token_id") or []
        return cls(
            tokenizer,
            template,
            specials={name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))},
            stops=[stops] if isinstance(stops, int) else stops,
        )

    # -- messages to text ------------------------------------------------------------------------------------------

    def text(self, messages: Messages, tools: Tools, *, generate: bool) -> str:
        """The template's text for a conversation; `generate` ends it where the assistant's answer begins."""
        try:
            return self._template.render(
                messages=messages, tools=tools or None, documents=None, add_generation_prompt=generate, **self._specials
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise BadTemplate(f"the model's chat template refuses these messages: {error}") from None

    def prompt(self, messages: Messages, tools: Tools) -> list[int]:
        """The tokens of a whole conversation, up to where the answer begins."""
        return self.encode(self.text(messages, tools, generate=True))

    def continuation(self, messages: Messages, tools: Tools, served: int) -> list[int] | None:
        """What follows the sampled tokens of the assistant's message `messages[served - 1]`, from the end-of-turn token
        on; None if the template wrote the first `served` messages otherwise than it did when they were the whole.

        The text starts with a special token, which no tokenizer merges with its neighbours, so that encoding it alone
        gives the same tokens as encoding it in place.
        """
        try:
            before = self.text(messages[:served], tools, generate=False)
        except BadTemplate:
            return None
        after = self.text(messages, tools, generate=True)
        end = before.rfind(self.end_text)
        stable = end >= 0 and not before[end + len(self.end_text) :].strip() and after.startswith(before.rstrip())
        if not stable:
            return None
        ids = self.encode(after[end:])
        return ids if ids[0] == self.end_of_turn else None

    # -- text to tokens and back -----------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Every token as text, special ones too."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def spoken(self, ids: Sequence[int]) -> str:
        """What an agent is shown of sampled tokens: no special tokens, except marks with a meaning (`KEPT`)."""
        return self.tokenizer.decode([i for i in ids if i not in self._hidden], skip_special_tokens=False)

    def _find_end_of_turn(self) -> int:
        """Ask the template: the first special token it writes after an assistant's words, else the eos token."""
        mark = "strop-end-of-turn-probe"
        try:
            chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
            after = self.text(chat, None, generate=False).partition(mark)[2]
        except BadTemplate:
            after = ""
        found = [i for i in self.encode(after) if i in self._hidden]
        eos = self.tokenizer.token_to_id(self._specials.get("eos_token", ""))
        if found:
            return found[0]
        if eos is None:
            raise ModelError(
                "neither the chat template nor tokenizer_config.json says which token ends an assistant's turn: "
                "set eos_token there"
            )
        return eos


_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training on text; here its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


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
