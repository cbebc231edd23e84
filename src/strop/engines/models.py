"""Model names: what a user writes, and the folder it stands for."""

from __future__ import annotations

from pathlib import Path

from strop.errors import ModelError

SHIPPED = {"strop/nano": Path(__file__).parent.parent / "models" / "nano"}


def resolve(name: str) -> Path:
    """The folder (Hugging Face format) of a model that ships with strop or lies on this disk."""
    if name in SHIPPED:
        return SHIPPED[name]
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if folder.is_dir():
        raise ModelError(f"{folder} holds no config.json: give a folder in Hugging Face format")
    raise ModelError(
        f"there is no model {name!r}: it is neither a folder here nor one that ships with strop "
        f"({', '.join(SHIPPED)}); download it first and give its folder"
    )
