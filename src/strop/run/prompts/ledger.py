"""calls.jsonl of a run's folder: every call of the optimiser model, reserved before it is sent.

    {"call": 7, "attempt": 1, "key": "9f...", "tokens": 5210, "cost": 0.021, "time": ...}      reserved: at most so much
    {"call": 7, "attempt": 1, "answer": "...", "tokens": 1893, "cost": 0.007, "time": ...}     what it came to

A line counts once it is on disk. So nothing is sent that was not counted, and a call whose second line never came,
since the run was killed meanwhile, stays spent with all that was reserved for it. Calls are numbered in the order in
which the optimiser asks: a resumed run that asks again gets the answer that is here, if the `key` says that it is the
same question.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from strop.errors import StoreError
from strop.files import private, sync_folder


class CallRecord(Struct, omit_defaults=True, kw_only=True):
    """One line. With a `key` it is a reservation, without one it says what came of it: an answer, or an error."""

    call: int
    attempt: int
    key: str = ""
    answer: str | None = None
    error: str = ""
    tokens: int = 0
    cost: float = 0.0
    time: float = 0.0


@dataclass
class Spent:
    """What calls came to, of those that were lost all that was reserved."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0


class CallLedger:
    """The calls of a run, in its folder and in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.spent = Spent()
        self.lost = 0  # calls that were under way when the run was killed
        self.errors = 0
        self._keys: dict[int, str] = {}
        self._attempts: dict[int, int] = {}
        self._answers: dict[int, str] = {}
        self._open: dict[tuple[int, int], CallRecord] = {}
        written = path.read_bytes() if path.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]  # what was cut off in the middle was never sent, or never counted
        for line in whole.splitlines():
            self._take(_read(line, path))
        self.lost = len(self._open)
        self._file = open(path, "ab", opener=private)  # noqa: SIM115 - closed by `close`
        self._file.truncate(len(whole))
        sync_folder(path.parent)

    @property
    def answered(self) -> bool:
        """Whether any question was ever answered."""
        return any(self._answers.values())

    def find(self, call: int, key: str) -> str | None:
        """The answer to a call that was made before. Raises `StoreError` where another question has its number."""
        known = self._keys.get(call)
        if known is not None and known != key:
            raise StoreError(
                f"{self._path} has another question as call {call} than the optimiser asks now: the code or the "
                "package that asks has changed since. Fix: resume with the versions that the run began with, or begin "
                "a new run from its prompts with `strop train --from`"
            )
        return self._answers.get(call)

    def reserve(self, call: int, key: str, *, tokens: int, cost: float, time: float) -> int:
        """Count a call before it is sent; returns the number of its attempt. It is on disk when this returns."""
        attempt = self._attempts.get(call, 0) + 1
        self._write(CallRecord(call=call, attempt=attempt, key=key, tokens=tokens, cost=cost, time=time))
        return attempt

    def settle(self, record: CallRecord) -> None:
        """What a reserved call came to."""
        assert not record.key
        self._write(record)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> CallLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: CallRecord) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._take(record)

    def _take(self, record: CallRecord) -> None:
        place = (record.call, record.attempt)
        if record.key:
            self._keys[record.call] = record.key
            self._attempts[record.call] = max(record.attempt, self._attempts.get(record.call, 0))
            self._open[place] = record
            self.spent.calls += 1
            self.spent.tokens += record.tokens
            self.spent.cost += record.cost
        elif (reserved := self._open.pop(place, None)) is not None:
            self.spent.tokens += record.tokens - reserved.tokens
            self.spent.cost += record.cost - reserved.cost
            self.errors += bool(record.error)
            if record.answer is not None:
                self._answers[record.call] = record.answer


def _read(line: bytes, path: Path) -> CallRecord:
    try:
        return msgspec.json.decode(line, type=CallRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{path} is damaged ({error}), and without it nobody knows what was spent. Fix: put it back from a copy"
        ) from None


def list_calls(path: Path) -> list[dict[str, Any]]:
    """Every line, for those who look."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [msgspec.to_builtins(_read(line, path)) for line in lines if line.endswith(b"\n")]
