"""Keys: the run's key opens everything, an attempt's key opens that attempt and nothing else.

A key comes as `Authorization: Bearer <key>` and is compared in constant time.
"""

from __future__ import annotations

import hmac
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from strop.errors import ConfigError, PlaceError, UnknownId
from strop.net.asgi import Header, Refusal
from strop.net.secrets import new_key
from strop.store.base import AttemptStore
from strop.store.wire import check_key
from strop.types import Attempt

CACHED = 8192
"""How many attempts' keys are kept in memory; those used last stay."""


def run_key(folder: Path, given: str | None = None) -> str:
    """The run's key: the one given, or the one kept in the folder's file `key`, made there if it is not."""
    if given is not None:
        return check_key(given)
    path = folder / "key"
    try:
        return _read_key(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise PlaceError(f"cannot read {path} ({error.strerror}). Fix: make it readable, or give a key") from None
    made = new_key()
    part = path.with_name(f"key.{os.getpid()}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(made + "\n")
        try:
            os.link(part, path)  # unlike a rename, it leaves a key alone that another server has just made
        except FileExistsError:
            return _read_key(path)
        finally:
            part.unlink()
    except OSError as error:
        raise PlaceError(
            f"cannot write {path} ({error.strerror}). Fix: make the folder writable, or give a key"
        ) from None
    return made


def _read_key(path: Path) -> str:
    try:
        return check_key(path.read_text(errors="replace").strip())
    except ConfigError:
        raise PlaceError(f"{path} holds no key. Fix: delete the file, and a new one is made") from None


def read_bearer(headers: Sequence[Header]) -> bytes:
    """The key of a request, or nothing."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""


KEY_IN_PATH = re.compile("/k/([^/]*)")
"""How a gateway's addresses begin that have an attempt's key in them."""


def hide_key(path: str) -> str:
    """A path as it may be shown.

    >>> hide_key("/k/the-key/v1/messages"), hide_key("/v1/messages")
    ('/k/.../v1/messages', '/v1/messages')
    """
    return "/k/..." + path[found.end() :] if (found := KEY_IN_PATH.match(path)) else path


def is_same_key(given: bytes, secret: bytes) -> bool:
    """Nothing never opens anything."""
    return hmac.compare_digest(given, secret) and bool(secret)


class AttemptKeys:
    """The keys of attempts at work, so that what an attempt says costs one call of the store and not two."""

    def __init__(self, store: AttemptStore) -> None:
        self._store = store
        self._keys: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._all: set[bytes] = set()

    def add(self, attempt: Attempt) -> None:
        key = attempt.key.encode()
        self._keys[attempt.rollout, attempt.number] = key
        self._all.add(key)
        if len(self._keys) > CACHED:
            self._all.discard(self._keys.popitem(last=False)[1])

    async def open(self, rollout: str, number: int, key: bytes) -> bool:
        """Whether `key` is that attempt's."""
        known = self._keys.get((rollout, number))
        if known is None:
            try:
                attempts = await self._store.attempts(rollout)
            except UnknownId:
                return False
            attempt = next((attempt for attempt in attempts if attempt.number == number), None)
            if attempt is None or not is_same_key(key, attempt.key.encode()):
                return False
            self.add(attempt)
            return True
        self._keys.move_to_end((rollout, number))
        return is_same_key(key, known)

    def holds(self, key: bytes) -> bool:
        """Whether it is the key of an attempt that was leased or heard of here. It opens nothing by that."""
        return key in self._all


class RunKey:
    """Guards what only the run's key opens."""

    def __init__(self, key: str, attempts: AttemptKeys) -> None:
        self._key = key.encode()
        self._attempts = attempts

    def fits(self, given: bytes) -> bool:
        return is_same_key(given, self._key)

    def check(self, headers: Sequence[Header]) -> None:
        given = read_bearer(headers)
        if self.fits(given):
            return
        if given and self._attempts.holds(given):
            message = "this is an attempt's key, which opens /r/<rollout>/<attempt> only. Fix: use the run's key"
            raise Refusal(message, 403, "Forbidden", "attempt_key")
        message = "the run's key is needed. Fix: send it as `Authorization: Bearer <key>`; `strop serve` says it, and "
        message += "the file `key` in its folder has it unless it was given one"
        raise Refusal(message, 401, "Unauthorized", "invalid_api_key", [(b"www-authenticate", b"Bearer")])
