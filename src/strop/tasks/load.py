"""Tasks from everything people have: see `load`.

    spec ──▶ sources: rows by split ──▶ tasks, checked one by one ──▶ ids that differ over all splits

Left out: URLs (download the file first) and tasks that come in while a run goes on.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from strop.errors import StropError, TaskError
from strop.files import find_near
from strop.imports import one_line, resolve
from strop.tasks import files, folders, hub
from strop.tasks.rows import Row, Rows, Sources, find_lone_surrogate
from strop.types import Task

Spec = str | Path | Iterable[Any]
Kind = Literal["file", "folder", "function", "hub"]
Placed = dict[str, tuple[str, Task]]
"""Tasks by id, each with the place it was found at."""

_FIELDS = frozenset(Task.__struct_fields__)
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_POSSIBLE = (
    "a .jsonl, .csv or .parquet file, a folder with files named by split (train.jsonl), a Hugging Face data set "
    "(openai/gsm8k), FILE.py:function or package.module:function"
)


def load(spec: Spec | Mapping[str, Spec], /, **kwargs: Any) -> list[Task]:
    """Tasks, with ids that differ. `spec` is one of

    - a path to a .jsonl, .csv or .parquet file;
    - a folder with files named by split, or one that `datasets.save_to_disk` wrote;
    - the name of a Hugging Face data set; `kwargs` go to `datasets.load_dataset`;
    - `FILE.py:function` or `package.module:function`, called with `kwargs`;
    - an iterable of tasks or dicts;
    - a table of these by split: every task of a source gets that split, whatever its own says. Of a folder or data set
      with several splits it is the one of that name. An id that two splits have gets the split in front.

    An object with no keys but id, split, data and agent is a task as it stands; any other object is the data of one,
    and its id, split and agent count if they are there.

    >>> load([{"question": "2 + 2?", "split": "test"}])
    [Task(id='task-1', split='test', data={'question': '2 + 2?', 'split': 'test'}, agent=None)]
    >>> [(task.id, task.split) for task in load({"train": [{"n": 1}, {"n": 2}], "test": [{"n": 3, "id": "three"}]})]
    [('task-1', 'train'), ('task-2', 'train'), ('three', 'test')]
    """
    found = {split: _tasks(rows, split) for split, rows in _sources(spec, kwargs).items()}
    tasks = [task for _, task in _together(found).values()]
    if not tasks:
        raise _none(spec)
    return tasks


# --- from a spec to rows ----------------------------------------------------------------------------------------------


def _sources(spec: Spec | Mapping[str, Spec], kwargs: dict[str, Any]) -> Sources:
    if isinstance(spec, Mapping):
        return _table(cast("Mapping[Any, Spec]", spec), kwargs)
    kind = _kind(str(spec)) if isinstance(spec, (str, Path)) else None
    if kwargs and kind not in ("function", "hub"):
        raise TaskError(f"{_name(spec)} takes no arguments. Fix: remove {', '.join(map(repr, kwargs))}")
    if kind is None:
        return {None: _items(cast("Iterable[Any]", spec), "tasks")}
    path = _path(str(spec))
    match kind:
        case "file":
            return {None: files.read(path)}
        case "folder":
            return folders.read(path)
        case "function":
            return _call(str(spec), kwargs)
        case "hub":
            return hub.from_hub(str(spec), find_near(path), **kwargs)


def _table(table: Mapping[Any, Spec], kwargs: dict[str, Any]) -> Sources:
    """One source per split. `kwargs` go to those that take any."""
    takes = {split: isinstance(spec, str) and _kind(spec) in ("function", "hub") for split, spec in table.items()}
    if kwargs and not any(takes.values()):
        raise TaskError(f"none of these tasks takes arguments. Fix: remove {', '.join(map(repr, kwargs))}")
    sources: Sources = {}
    for split, spec in table.items():
        if not isinstance(split, str) or not split:
            raise TaskError(
                f"{split!r} is not the name of a split. Fix: write a table of tasks as split = where they come from"
            )
        if isinstance(spec, Mapping):
            raise TaskError(f"the tasks of the split {split!r} are a table. Fix: write where they come from")
        sources[split] = _some(_one(_sources(spec, kwargs if takes[split] else {}), split, spec), spec)
    return sources


def _one(found: Sources, split: str, spec: Spec) -> Rows:
    """The rows that a table means. Never a mix of a source's splits: a run would train on what it is tested on."""
    if len(found) == 1:
        return next(iter(found.values()))
    if split not in found:
        raise TaskError(
            f"{_name(spec)} has the splits {', '.join(map(str, found))} and none called {split!r}. Fix: "
            "name the split as it does, or give one of its files"
        )
    return found[split]


def _some(rows: Rows, spec: Spec) -> Rows:
    first = next(rows, None)
    if first is None:
        raise _none(spec)
    yield first
    yield from rows


def _none(spec: object) -> TaskError:
    return TaskError(f"{_name(spec)}: no tasks there. Fix: give at least one")


def _kind(spec: str) -> Kind:
    path = _path(spec)
    try:
        there = "folder" if path.is_dir() else "file" if path.exists() else None
    except OSError as error:
        raise files.unreadable(path, error) from None
    if there == "folder" and spec:  # no text at all would be the current folder
        return "folder"
    if "://" not in spec:
        if path.suffix.lower() in files.KINDS:
            return "file"
        if ":" in spec:
            return "function"
        meant_as_file = difflib.get_close_matches(path.suffix, files.KINDS, 1, 0.7)  # .josnl
        if there is None and not meant_as_file and _HUB_NAME.fullmatch(spec):
            return "hub"
    near = find_near(path) if there is None else None
    raise TaskError(f"{spec!r} is not a source of tasks. Fix: {f'write {near}' if near else f'give {_POSSIBLE}'}")


def _path(spec: str) -> Path:
    return Path(os.path.expanduser(spec))  # Path's own raises where there is no such user


def _call(spec: str, kwargs: dict[str, Any]) -> Sources:
    function = resolve(spec, "tasks")
    if not callable(function):
        raise TaskError(f"{spec} is {type(function).__name__}, not a function. Fix: name a function that returns tasks")
    try:
        result = function(**kwargs)
    except StropError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{spec} failed: {one_line(error)}") from error
    if isinstance(result, Mapping):
        return _table(cast("Mapping[Any, Spec]", result), {})
    if isinstance(result, Iterable) and not isinstance(result, (str, bytes)):
        return {None: _items(cast("Iterable[Any]", result), spec)}
    raise TaskError(
        f"{spec} returned {type(cast(object, result)).__name__}. Fix: return a list of tasks or dicts, or a dict of "
        "them by split"
    )


def _items(items: Iterable[Any], where: str) -> Rows:
    for number, item in enumerate(_careful(items, where), 1):
        yield Row(f"{where}, item {number}", f"task-{number}", item)


def _careful(items: Iterable[Any], where: str) -> Iterator[Any]:
    """A generator's own errors, as a sentence."""
    try:
        yield from items
    except StropError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{where} failed while its tasks were read: {one_line(error)}") from error


def _name(spec: object) -> str:
    return str(spec) if isinstance(spec, (str, Path)) else "tasks"


# --- from rows to tasks -----------------------------------------------------------------------------------------------


def _tasks(rows: Rows, split: str | None) -> Placed:
    return _unique((row.place, _checked(_task(row, split), row.place)) for row in rows)


def _task(row: Row, split: str | None) -> Task:
    if isinstance(row.item, Task):
        return row.item if split is None else msgspec.structs.replace(row.item, split=split)
    item: object = row.item
    if not isinstance(item, Mapping):
        raise TaskError(f"{row.place}: a task is an object, not {type(item).__name__}. Fix: write it as {{...}}")
    fields = dict(cast("Mapping[str, Any]", item))
    whole = "data" in fields and fields.keys() <= _FIELDS
    found: dict[str, Any] = {"id": row.id, "split": "train", "agent": None}
    # An empty text is an empty cell of a table: as if it were not there.
    found |= {name: fields[name] for name in found if fields.get(name, "") != ""}
    if isinstance(found["id"], int):  # common in data sets
        found["id"] = str(found["id"])
    if split is not None:
        found["split"] = split
    for name, value in found.items():
        if not isinstance(value, str) and not (name == "agent" and value is None):
            raise TaskError(f"{row.place}: {name!r} is {value!r}. Fix: write it as text")
    return Task(**found, data=fields["data"] if whole else fields)


def _checked(task: Task, place: str) -> Task:
    """A task that comes out of JSON as it went in."""
    try:
        text = msgspec.json.encode((task.id, task.split, task.agent or "", task.data))
        # msgspec writes NaN as null: only where there is a null can there be one.
        wrong = _not_finite(msgspec.to_builtins(task.data, str_keys=True), "") if b"null" in text else None
    except UnicodeEncodeError:
        raise TaskError(f"{place}: {find_lone_surrogate(msgspec.structs.asdict(task))}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"{place}: its data cannot be written as JSON ({error}). Fix: use plain types") from None
    if wrong:
        raise TaskError(f"{place}: {wrong}, which JSON cannot hold. Fix: write null or leave it out")
    return task


def _not_finite(value: Any, path: str) -> str | None:
    """Where a number is NaN or infinite, if any is."""
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{path or 'data'!r} is {value}"
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inside = cast("dict[str, Any]", value).items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(cast("list[Any]", value))
    return next((found for key, v in inside if (found := _not_finite(v, f"{path}.{key}" if path else str(key)))), None)


def _together(found: Mapping[str | None, Placed]) -> Placed:
    """The tasks of all splits. Ids that two of them have get the split in front."""
    if len(found) == 1:
        return next(iter(found.values()))
    count = Counter(id for tasks in found.values() for id in tasks)
    return _unique(
        (place, msgspec.structs.replace(task, id=f"{split}-{id}") if count[id] > 1 else task)
        for split, tasks in found.items()
        for id, (place, task) in tasks.items()
    )


def _unique(found: Iterable[tuple[str, Task]]) -> Placed:
    tasks: Placed = {}
    for place, task in found:
        if task.id in tasks:
            first = tasks[task.id][0]
            raise TaskError(f"{place}: id {task.id!r} was used before, at {first}. Fix: give each task its own")
        tasks[task.id] = place, task
    return tasks
