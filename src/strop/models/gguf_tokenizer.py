"""The tokenizer in a GGUF file, put together again: its vocabulary and merges are there, how text is split before them
only by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from strop.errors import ModelError

UNUSED, CONTROL, USER_DEFINED = 5, 3, 4
"""GGUF's kinds of tokens, as far as they differ here."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "qwen2": [pre_tokenizers.Split(Regex(rf"{_WORDS}|\p{{N}}{_REST}"), "isolated")],
    "llama-bpe": [pre_tokenizers.Split(Regex(rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}"), "isolated")],
}
"""What comes before byte-level BPE, by the name GGUF has for it."""
OWN_WORDS = ("gpt-2", "smollm")
"""Those that split words as GPT-2 does, after what SPLITS says."""


def build_tokenizer(about: dict[str, Any], file: Path) -> Tokenizer:
    """`about` is what the file says under `tokenizer.ggml.`."""
    model, split = about.get("model"), about.get("pre")
    if model != "gpt2" or split not in SPLITS:
        known = ", ".join(SPLITS)
        raise ModelError(
            f"the tokenizer of {file} is {model}/{split}, and only byte-level BPE split as {known} is known here. "
            "Fix: give the model's folder or its Hugging Face name"
        )
    try:
        tokens: list[str] = about["tokens"]
        kinds: list[int] = about.get("token_type") or [1] * len(tokens)
        pairs = [tuple(merge.split(" ", 1)) for merge in about["merges"]]
    except KeyError as error:
        raise ModelError(
            f"{file} has no tokenizer.ggml.{error.args[0]}: it is broken. Fix: download it again"
        ) from None
    vocabulary = {token: id for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in OWN_WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*SPLITS[split], bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(vocabulary, kinds, CONTROL))  # pyright: ignore[reportUnknownMemberType]
    tokenizer.add_tokens(_added(vocabulary, kinds, USER_DEFINED))  # pyright: ignore[reportUnknownMemberType]
    return tokenizer


def _added(vocabulary: dict[str, int], kinds: list[int], kind: int) -> list[AddedToken]:
    found = [token for token, id in vocabulary.items() if kinds[id] == kind]
    return [AddedToken(token, normalized=False, special=kind == CONTROL) for token in found]
