"""Data sets of the Hugging Face Hub by name, and folders written by `datasets.save_to_disk`.

`datasets` does the work: it downloads, caches, and knows about HF_HOME, HF_HUB_OFFLINE and logins.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from strop.errors import TaskError
from strop.imports import one_line
from strop.tasks import arrow
from strop.tasks.rows import Sources


def from_hub(name: str, near: Path | None = None, /, **kwargs: Any) -> Sources:
    """Every split of a data set, or those that `kwargs` ask for: they are load_dataset's own. `near` is what a user
    may have meant instead."""
    tried = f"tasks {name!r}: there is no such file or folder{f' (but {near} is there)' if near else ''}"
    datasets = arrow.import_library("datasets", f"{tried}; a Hugging Face data set needs datasets to be read")
    try:
        found = datasets.load_dataset(name, **kwargs)
    except Exception as error:
        fix = _fix(name, error, offline=bool(datasets.config.HF_HUB_OFFLINE))
        raise TaskError(f"{tried}, and no Hugging Face data set could be loaded ({one_line(error)}); {fix}") from error
    return _splits(found, name)


def is_saved(folder: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote it."""
    names = {path.name for path in folder.iterdir()}
    return "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= names


def from_disk(folder: Path) -> Sources:
    datasets = arrow.import_library(
        "datasets", f"{folder} was written by Hugging Face's datasets and needs it to be read"
    )
    try:
        found = datasets.load_from_disk(folder)
    except Exception as error:
        raise TaskError(f"datasets cannot read {folder} ({one_line(error)}). Fix: save it again") from error
    return _splits(found, str(folder))


def _splits(found: Any, where: str) -> Sources:
    """A dict of data sets by split, or one of them: `split="train[:100]"` is of split train."""
    if isinstance(found, list):
        raise TaskError(f"{where}: `split` is a list. Fix: name one split, or none of them to have all")
    named = cast("dict[Any, Any]", found if isinstance(found, dict) else {found.split or "train": found})
    splits = {str(key).partition("[")[0]: data for key, data in named.items()}
    return {
        split: arrow.read_rows(_batches(data, where), split, f"{where}, split {split}")
        for split, data in splits.items()
    }


def _batches(data: Any, where: str) -> Iterator[Any]:
    try:
        yield from data.with_format("arrow").iter(arrow.BATCH)
    except Exception as error:  # a streamed one is downloaded only now
        raise TaskError(f"{where} failed while it was read ({one_line(error)}). Fix: try again") from error


def _fix(name: str, error: Exception, *, offline: bool) -> str:
    elsewhere = f"fetch it with `hf download {name} --repo-type dataset --local-dir FOLDER` and give FOLDER"
    if isinstance(error, ConnectionError) and offline:
        return f"HF_HUB_OFFLINE is set and it was not downloaded before: unset that, or elsewhere {elsewhere}"
    if isinstance(error, ConnectionError):
        return f"check the path or the network, or elsewhere {elsewhere}"
    if isinstance(error, FileNotFoundError):  # datasets' own errors for what is not there or not allowed are of this
        return "check the path or the name; for a private or gated data set run `hf auth login`"
    return "check tasks_args, which are load_dataset's (name, revision, split ...)"
