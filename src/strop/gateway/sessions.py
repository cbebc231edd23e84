"""The sessions that are open: found by an attempt's address and key, or by the key alone.

    /r/g1.0/1/agents/main/v1    the rollout and the attempt are in the address, the key must be that attempt's
    /v1                         one base URL for all rollouts: the key says which attempt it is

A session that is open is found without asking the store. One that is needed again after it was dropped, or that another
gateway began, is rebuilt from the store.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable

from starlette.types import Scope

from strop.errors import Fenced, UnknownId
from strop.gateway.api_errors import to_api_error
from strop.gateway.auth import is_opened_by, read_keys, unauthorized
from strop.gateway.session import Session
from strop.store.base import AttemptStore, Ref
from strop.types import Attempt

LOOKS = 8
"""Sessions that are looked at for an idle one, each time one more is opened than there should be."""


class Sessions:
    """Sessions live while their attempt does. The least recently used idle ones go once there are `most`. What one
    costs does not grow with how many are open."""

    def __init__(self, store: AttemptStore, most: int) -> None:
        self.most = most
        self.other_key = ""
        """What else opens a model here, for a client with a wrong key: the end of a sentence."""
        self._store = store
        self._open: OrderedDict[Ref, Session] = OrderedDict()
        self._by_key: dict[bytes, Ref] = {}
        self._of_rollout: dict[str, set[Ref]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, ref: Ref) -> bool:
        return ref in self._open

    def __getitem__(self, ref: Ref) -> Session:
        return self._open[ref]

    async def at(self, rollout: str, attempt: str, scope: Scope) -> Session:
        """The session of the attempt in the address, if one of the request's keys is that attempt's."""
        if not (attempt.isascii() and attempt.isdigit() and len(attempt) < 10):
            raise unauthorized()
        ref, keys = (rollout, int(attempt)), read_keys(scope)
        session = self._open.get(ref)
        if session is None:
            try:
                attempts = await self._store.attempts(rollout)
            except UnknownId:
                raise unauthorized() from None
            found = next((attempt for attempt in attempts if attempt.number == ref[1]), None)
            if found is None or not is_opened_by(found, keys):
                raise unauthorized()
            return await self._add(found)
        if not is_opened_by(session.attempt, keys):
            raise unauthorized()
        self._open.move_to_end(ref)
        return session

    async def by_key(self, scope: Scope) -> Session:
        """The session of the attempt that one of the request's keys opens. A header made for it says so before an API
        key does, which clients demand even where it means nothing."""
        keys = read_keys(scope, trace_first=True)
        for key in keys:
            if (ref := self._by_key.get(key)) is not None:
                self._open.move_to_end(ref)
                return self._open[ref]
            try:
                attempt = await self._store.attempt(key.decode("latin-1"))
            except UnknownId:
                continue
            if is_opened_by(attempt, [key]):
                return await self._add(attempt)
        came = "no attempt has this key" if keys else "a key is needed"
        raise unauthorized(
            f"{came}. Fix: send the key that came with the task, as API key or as header trace_id{self.other_key}"
        )

    async def _add(self, attempt: Attempt) -> Session:
        rollout, number = ref = (attempt.rollout, attempt.number)
        if attempt.ended is not None:
            raise to_api_error(Fenced(f"attempt {number} of rollout {rollout} is over. Fix: end the agent"))
        found, turns = await asyncio.gather(self._store.get(rollout), self._store.turns(rollout, attempt=number))
        session = Session(found, attempt)
        session.restore(turns)
        if ref in self._open:  # another request opened it while this one waited for the store
            return self._open[ref]
        self._drop([(rollout, number - 1)])
        self._make_place()
        self._open[ref] = session
        self._by_key[attempt.key.encode()] = ref
        self._of_rollout.setdefault(rollout, set()).add(ref)
        return session

    def _make_place(self) -> None:
        """Drop idle sessions while there are too many. One that is at work counts as used now: it is not looked at
        again before all others were."""
        for _ in range(LOOKS):
            if len(self._open) < self.most:
                return
            ref, session = next(iter(self._open.items()))
            if session.in_flight:
                self._open.move_to_end(ref)
            else:
                self._drop([ref])

    def drop(self, session: Session) -> None:
        """Its attempt is over. Others of the same rollout may be at work."""
        self._drop([(session.rollout.id, session.attempt.number)])

    def forget(self, rollout: str) -> None:
        """Drop every session of a rollout."""
        self._drop(list(self._of_rollout.get(rollout, ())))

    def _drop(self, refs: Iterable[Ref]) -> None:
        for ref in refs:
            if (session := self._open.pop(ref, None)) is not None:
                del self._by_key[session.attempt.key.encode()]
                (of_rollout := self._of_rollout[ref[0]]).discard(ref)
                if not of_rollout:
                    del self._of_rollout[ref[0]]

    async def wait_until_idle(self, ref: Ref, limit: float) -> bool:
        """Wait up to `limit` seconds until an attempt's calls in flight have ended. Whether they have."""
        deadline = time.monotonic() + limit
        while (session := self._open.get(ref)) and session.in_flight:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True
