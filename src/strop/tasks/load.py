"""Tasks from a .jsonl file, from a Python function, or from any iterable.

Left out for now: parquet, csv and Hugging Face datasets; a tasks function of three lines reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from strop.errors import StropError, TaskError
from strop.imports import one_line, resolve
from strop.types import Task

_FIELDS = frozenset(Task.__struct_fields__)


def load(spec: str | Path | Iterable[Task | Mapping[str, Any]], **kwargs: Any) -> list[Task]:
    """Tasks, with ids that differ. `spec` is a path to a .jsonl file, `FILE.py:function` or `package.module:function`
    (called with `kwargs`), or an iterable of tasks or dicts.

    An object with no keys but id, split, data and agent is a task as it stands; any other object is the data of one,
    and its id, split and agent count if they are there.

    >>> load([{"question": "2 + 2?", "split": "test"}])
    [Task(id='task-1', split='test', data={'question': '2 + 2?', 'split': 'test'}, agent=None)]
    """
    if isinstance(spec, (str, Path)):
        text = str(spec)
        if text.endswith(".jsonl"):
            if kwargs:
                raise TaskError(f"{text} is a file and takes no arguments: remove {', '.join(map(repr, kwargs))}")
            found = _read_jsonl(Path(text))
        else:
            found = _call(text, kwargs)
        where = text
    else:
        found, where = _from_iterable(spec, "task", "tasks"), "tasks"
    return _checked(found, where)


def _read_jsonl(path: Path) -> Iterator[tuple[str, Task]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    item = msgspec.json.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise TaskError(f"{where}: not valid JSON ({error}); write one JSON object per line") from None
                yield where, _task(item, f"{path.stem}-{number}", where)
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror}; check the path") from None


def _call(spec: str, kwargs: dict[str, Any]) -> Iterator[tuple[str, Task]]:
    if ":" not in spec:
        raise TaskError(f"tasks {spec!r} is neither a .jsonl file nor FILE.py:function nor package.module:function")
    function = resolve(spec, "tasks")
    if not callable(function):
        raise TaskError(f"{spec} is {type(function).__name__}, not a function: name a function that returns tasks")
    try:
        result = function(**kwargs)
    except StropError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{spec} failed: {one_line(error)}") from error
    if isinstance(result, Iterable) and not isinstance(result, (str, bytes, Mapping)):
        return _from_iterable(cast("Iterable[Any]", result), "task", spec)
    raise TaskError(f"{spec} returned {type(cast(object, result)).__name__}: return a list of tasks or dicts")


def _from_iterable(items: Iterable[Any], stem: str, where: str) -> Iterator[tuple[str, Task]]:
    for number, item in enumerate(_careful(items, where), 1):
        place = f"{where}, item {number}"
        yield place, item if isinstance(item, Task) else _task(item, f"{stem}-{number}", place)


def _careful(items: Iterable[Any], where: str) -> Iterator[Any]:
    """A generator's own errors, as a sentence."""
    try:
        yield from items
    except StropError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{where} failed while its tasks were read: {one_line(error)}") from error


def _task(item: Any, default_id: str, where: str) -> Task:
    if not isinstance(item, Mapping):
        raise TaskError(f"{where}: a task is an object, not {type(item).__name__}; write it as {{...}}")
    fields = dict(cast("Mapping[str, Any]", item))
    whole = "data" in fields and fields.keys() <= _FIELDS
    found: dict[str, Any] = {
        "id": fields.get("id", default_id),
        "split": fields.get("split", "train"),
        "agent": fields.get("agent"),
    }
    if isinstance(found["id"], int):  # common in data sets
        found["id"] = str(found["id"])
    for name, value in found.items():
        if not isinstance(value, str) and not (name == "agent" and value is None):
            raise TaskError(f"{where}: {name!r} is {value!r}; write it as text")
    return Task(**found, data=fields["data"] if whole else fields)


def _checked(found: Iterable[tuple[str, Task]], where: str) -> list[Task]:
    seen: dict[str, str] = {}
    tasks: list[Task] = []
    for place, task in found:
        if task.id in seen:
            raise TaskError(f"{place}: id {task.id!r} was used before, at {seen[task.id]}; give each task its own")
        seen[task.id] = place
        try:
            msgspec.json.encode(task)
        except (TypeError, ValueError, RecursionError) as error:
            raise TaskError(f"{place}: its data cannot be written as JSON ({error}); use plain types") from None
        tasks.append(task)
    if not tasks:
        raise TaskError(f"{where}: no tasks there; give at least one")
    return tasks
