"""The files of a model that say how it reads and writes: its tokenizer, its special tokens, its chat template.

A folder in Hugging Face format has tokenizer.json and, if need be, tokenizer_config.json, chat_template.jinja and
generation_config.json. Left out: templates that are chosen by name from a list.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from strop.errors import ModelError
from strop.net.secrets import hide

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_tokenizer(folder: Path) -> Tokenizer:
    # One text is tokenised at a time: threads would cost more than they do, and would be lost where a process forks.
    if "TOKENIZERS_PARALLELISM" not in os.environ:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        hide("TOKENIZERS_PARALLELISM")  # agents tokenise as they like
    path = folder / "tokenizer.json"
    try:
        if not path.exists() and (packed := folder / "tokenizer.json.gz").exists():
            return Tokenizer.from_str(gzip.decompress(packed.read_bytes()).decode())
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ModelError(f"cannot read {path}: {error}. Fix: put the model's tokenizer there") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}. Fix: correct it, or download it again") from None


def _token_text(token: Any) -> str | None:
    """tokenizer_config.json writes special tokens as text or as {"content": text, ...}."""
    return cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token


def read_template(folder: Path) -> str:
    """A folder's chat template, in a file of its own or in tokenizer_config.json."""
    beside = folder / "chat_template.jinja"
    try:
        found = beside.read_text("utf-8") if beside.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {beside}: {error}. Fix: make it readable UTF-8 text") from None
    template = _read_json(folder / "tokenizer_config.json").get("chat_template") if found is None else found
    if not isinstance(template, str):
        raise ModelError(f"{folder} has no chat template. Fix: put one there as chat_template.jinja")
    return template


def read_specials(folder: Path) -> dict[str, str]:
    """The special tokens by name, bos_token and the like."""
    config = _read_json(folder / "tokenizer_config.json")
    return {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}


def read_stops(folder: Path) -> list[int]:
    """The tokens that end an answer, as generation_config.json says."""
    stops: int | list[int] = _read_json(folder / "generation_config.json").get("eos_token_id") or []
    return [stops] if isinstance(stops, int) else stops
