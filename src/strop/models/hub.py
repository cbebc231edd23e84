"""Models by their Hugging Face name: from the hub's own cache on this disk, or from the hub.

`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and `TRANSFORMERS_OFFLINE` mean what they mean to Hugging Face's
own programs. Only weights as safetensors are fetched, with config, tokenizer and template; code never is.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strop.errors import ModelError
from strop.imports import to_install

PATIENCE = 15.0
"""Seconds that the hub gets to say whether it knows a model."""
FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
]


def is_name(name: str) -> bool:
    """
    >>> is_name("Qwen/Qwen3-0.6B"), is_name("Qwen/Qwen3-0.6B@main"), is_name("./models/mine"), is_name("gpt2")
    (True, True, False, False)
    """
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", name) is not None


def is_offline() -> bool:
    given = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return given.upper() in ("1", "ON", "YES", "TRUE")


def fetch(name: str, say: Callable[[str], None]) -> Path:
    """The folder of ORG/MODEL, or ORG/MODEL@REVISION. Raises `ModelError` with the reason."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ModelError(f"Hugging Face names need huggingface_hub: `{to_install('huggingface_hub')}`") from None
    repo, _, revision = name.partition("@")
    asked = _ask(name)
    there = _cached(hub, asked)
    if is_offline():
        if there is None:
            cache = hub.constants.HF_HUB_CACHE
            raise ModelError(
                f"it is not in Hugging Face's cache ({cache}), and HF_HUB_OFFLINE keeps us from fetching it"
            )
        return there
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    if there is None:
        say(f"fetching {name} from {hub.constants.ENDPOINT}, once")
    try:
        hub.HfApi().model_info(repo, revision=revision or None, timeout=PATIENCE)  # the next line would wait forever
        folder = Path(hub.snapshot_download(**asked))
    except Exception as error:  # the hub's own errors, and all that its HTTP client has
        if there is not None:
            say(f"{name} is taken from the cache, since the hub cannot be asked: {explain(error)}")
            return there
        raise ModelError(explain(error)) from error
    if lacks := find_missing(folder):
        raise ModelError(f"it has no {lacks}. Fix: choose a model with weights as safetensors and a tokenizer.json")
    return folder


def is_cached(name: str) -> bool:
    """Whether ORG/MODEL was fetched before, and is whole."""
    try:
        return _cached(importlib.import_module("huggingface_hub"), _ask(name)) is not None
    except ImportError:
        return False


def _ask(name: str) -> dict[str, Any]:
    """What the hub's programs are asked for."""
    repo, _, revision = name.partition("@")
    # A pattern's star goes across folders.
    return {"repo_id": repo, "revision": revision or None, "allow_patterns": FILES, "ignore_patterns": ["*/*"]}


def _cached(hub: Any, asked: dict[str, Any]) -> Path | None:
    """What is here already, if it is whole."""
    try:
        folder = Path(hub.snapshot_download(**asked, local_files_only=True))
    except (OSError, ValueError):
        return None
    return None if find_missing(folder) else folder


def find_missing(folder: Path) -> str | None:
    """The first file that a model's folder lacks."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    wanted = ["config.json", "tokenizer.json", *shards]
    return next((file for file in wanted if not (folder / file).is_file()), None)


def explain(error: BaseException) -> str:
    """Why the hub did not give it, in a few words, with the way out where there is one."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for link in chain:
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return "the disk is full: free some space, or set HF_HOME to another one"
        answer = getattr(link, "response", None)
        status: int | None = getattr(answer, "status_code", None)
        if type(link).__name__ == "GatedRepoError":
            return f"the hub answered {status}: its owners want to be asked; accept their terms there and set HF_TOKEN"
        if status in (401, 403):
            return f"the hub answered {status}: there is no such model, or it is private; for those set HF_TOKEN"
        if type(link).__name__ == "RevisionNotFoundError":
            return "the hub knows it, but not this revision"
        if status == 404:
            return "the hub answered 404: there is no such model"
        if status is not None:
            return f"the hub answered {status}: try again later"
    last = chain[-1]
    words = (getattr(last, "strerror", None) or str(last)).strip().splitlines()
    return f"the hub cannot be reached ({words[0] if words else type(last).__name__})"
