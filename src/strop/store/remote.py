"""A store that is served elsewhere: every verb is a request to it.

    store = await HttpStore.open("http://127.0.0.1:8640", key)

A server that cannot be reached, is being started again or has trouble with its disk is asked again for as long as
`patience` says: verbs may be said twice. One that has never answered is given up after a few seconds, since the address
is likely wrong. What the server refuses is raised here as it was raised there.

Left out: keys of attempts. `attempts()` tells them as "", since only a lease tells an attempt's key (`attempt` has the
one it was asked with); what checks keys (a gateway) stands beside the store itself.
"""

from __future__ import annotations

import asyncio
import builtins
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from strop.errors import ConfigError, IllegalTransition, StoreError, Unavailable, UnknownId
from strop.net.asgi import ErrorBody
from strop.net.client import Client, Response, TooLarge
from strop.store import rows, rpc, wire
from strop.store.base import ID, Ref, Store
from strop.store.batching import VerbBatches, VerbRequest
from strop.store.turn_deltas import grow
from strop.types import Attempt, Cause, Event, Lease, Mode, Policy, Reward, Rollout, Status, Step, TokenCounts, Turn

T = TypeVar("T")
POLL = 30.0
"""Seconds one request waits for something to happen; lines that stay silent for longer are cut by many proxies."""
TIMEOUT = 30.0
"""Seconds an answer may take on top of that."""
FIRST = 5.0
"""Seconds a server that has never answered is tried for, and any is given to take a connection."""
BRIEF = 1.0
"""Seconds that a server may be away without anybody being told."""
MAX_ANSWER = 1 << 30
"""Bytes: the turns of one long rollout are some hundred megabytes."""

_encode = msgspec.json.Encoder().encode
_DECODERS = {verb.name: msgspec.json.Decoder(verb.gives) for verb in rpc.VERBS}
_ERROR = msgspec.json.Decoder(ErrorBody)


class HttpStore(Store):
    """Open it with `await HttpStore.open(url, key)`."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        patience: float = 60.0,
        on_outage: Callable[[Exception | None], None] | None = None,
    ) -> None:
        """`on_outage` is told, once each, why a server that had answered is waited for, and None when it is back."""
        if not key:
            raise ConfigError(
                "no key is given. Fix: give the run's key (--key-file or STROP_KEY), which `strop train` and `strop "
                "serve` keep in their folder's file `key`"
            )
        self.url, self._key = url.rstrip("/"), wire.check_key(key)
        self._client = self._connections()
        self._batches = VerbBatches(self._client, TIMEOUT)
        self._beats = self._connections()  # of their own: one that has gone silent is not followed by another
        self._patience = patience
        self._on_outage = on_outage
        self._is_away = False
        self._answered = False

    def _connections(self) -> Client:
        return Client(self.url, key=self._key, connect_timeout=FIRST, max_answer=MAX_ANSWER)

    @classmethod
    async def open(
        cls,
        url: str,
        key: str,
        *,
        patience: float = 60.0,
        on_outage: Callable[[Exception | None], None] | None = None,
    ) -> HttpStore:
        """Raises `StoreError` if nobody answers there within seconds, or the key does not open it."""
        store = cls(url, key, patience=patience, on_outage=on_outage)
        try:
            await store.policies()
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        await self._client.close()
        await self._beats.close()

    # -- rollouts ------------------------------------------------------------------------------------------------

    async def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        for given in rollouts:
            if given.status != "queued":
                raise IllegalTransition(f"rollout {given.id!r} is {given.status}, not queued. Fix: enqueue a new one")
        if not rollouts:
            return 0
        new = [wire.NewRollout.of(given) for given in rollouts]
        return (await self._call(rpc.ENQUEUE, new)).queued

    async def lease(
        self,
        runner: str,
        *,
        seconds: float,
        count: int = 1,
        wait: float = 0.0,
        token: str | None = None,
        rollout: str | None = None,
    ) -> builtins.list[Lease]:
        # Whatever becomes of the line, the same token leads to the same leases.
        token = token or secrets.token_hex(16)
        deadline = time.monotonic() + wait
        while True:
            poll = min(max(deadline - time.monotonic(), 0.0), POLL) if wait else 0.0
            body = wire.LeaseBody(
                runner=rows.text(runner) or "",
                seconds=seconds,
                count=min(count, wire.MAX_COUNT),
                wait=poll,
                token=token,
                rollout=rollout,
            )
            leases = await self._call(rpc.LEASE, body, timeout=poll + TIMEOUT if poll else None)
            if leases or time.monotonic() >= deadline:
                return leases

    async def begin(self, rollout: Rollout, runner: str, *, seconds: float) -> Lease:
        if rollout.status != "queued":
            raise IllegalTransition(f"rollout {rollout.id!r} is {rollout.status}, not queued. Fix: begin a new one")
        body = wire.BeginBody(rollout=wire.NewRollout.of(rollout), runner=rows.text(runner) or "", seconds=seconds)
        return await self._call(rpc.BEGIN, body)

    async def heartbeat(self, attempts: Sequence[Ref], *, seconds: float) -> builtins.list[Ref]:
        if not attempts:
            return []
        body = {"attempts": attempts, "seconds": seconds}
        # A line may go silent without a word: there must be time to say it again before the lease runs out.
        timeout = min(max(seconds / 3, 1.0), TIMEOUT)
        return (await self._call(rpc.HEARTBEAT, body, timeout=timeout, client=self._beats)).over

    async def finish(
        self,
        rollout: str,
        attempt: int,
        *,
        rewards: Sequence[Reward] = (),
        cause: Cause | None = None,
        detail: str | None = None,
    ) -> Rollout:
        # JSON has no NaN: it would arrive as something else.
        body = {
            "rewards": [rows.check_reward(reward) for reward in rewards],
            "cause": cause,
            "detail": rows.text(detail),
        }
        return await self._call(rpc.FINISH, body, id=rollout, n=attempt)

    async def cancel(
        self, rollouts: Sequence[str], *, detail: str, cause: Literal["cancelled", "late"] = "cancelled"
    ) -> None:
        if rollouts:
            body = {"rollouts": rollouts, "detail": rows.text(detail), "cause": cause}
            await self._call(rpc.CANCEL, body)

    async def reclaim(self, *, everything: bool = False) -> builtins.list[str]:
        return (await self._call(rpc.RECLAIM, {"everything": everything})).rollouts

    # -- what happened in them -----------------------------------------------------------------------------------

    async def add_turns(self, turns: Sequence[Turn]) -> None:
        if turns:
            await self._call(rpc.ADD_TURNS, turns)

    async def add_events(self, events: Sequence[Event]) -> None:
        for event in events:
            rows.check_event(event)
        if events:
            await self._call(rpc.ADD_EVENTS, events)

    async def add_rewards(self, rewards: Mapping[str, Sequence[Reward]]) -> None:
        checked = {id: [rows.check_reward(reward) for reward in given] for id, given in rewards.items()}
        if checked:
            await self._call(rpc.ADD_REWARDS, {"rewards": checked})

    # -- reading -------------------------------------------------------------------------------------------------

    async def get(self, rollout: str) -> Rollout:
        return await self._call(rpc.GET, id=rollout)

    async def attempts(self, rollout: str) -> builtins.list[Attempt]:
        """Without their keys, which are "" here."""
        return [one.attempt() for one in await self._call(rpc.ATTEMPTS, id=rollout)]

    async def attempt(self, key: str) -> Attempt:
        shown = await self._call(rpc.ATTEMPT, {"key": rows.text(key)})
        return msgspec.structs.replace(shown.attempt(), key=key)

    async def turns(self, rollout: str, *, attempt: int | None = None) -> builtins.list[Turn]:
        return grow(await self._call(rpc.TURN_DELTAS, {"attempt": attempt}, id=rollout))

    async def events(self, rollout: str, *, attempt: int | None = None) -> builtins.list[Event]:
        return await self._call(rpc.EVENTS, {"attempt": attempt}, id=rollout)

    async def list(
        self,
        *,
        group: str | None = None,
        status: Status | None = None,
        mode: Mode | None = None,
        after: str | None = None,
        limit: int = 1000,
        newest: bool = False,
    ) -> builtins.list[Rollout]:
        found: builtins.list[Rollout] = []
        while len(found) < limit:
            size = min(limit - len(found), wire.MAX_COUNT)
            which = {"group": group, "status": status, "mode": mode, "after": after, "limit": size}
            page = await self._call(rpc.ROLLOUTS, which | {"newest": "true" if newest else None})
            found += page
            if len(page) < size:
                break
            after = page[-1].id
        return found

    async def wait(self, cursor: int, *, timeout: float) -> tuple[int, builtins.list[Rollout]]:
        deadline = time.monotonic() + timeout
        while True:
            poll = min(max(deadline - time.monotonic(), 0.0), POLL) if timeout else 0.0
            told = await self._call(rpc.CHANGES, {"cursor": cursor, "timeout": poll}, timeout=poll + TIMEOUT)
            if told.rollouts or time.monotonic() >= deadline:
                return told.cursor, told.rollouts

    async def stats(self) -> dict[str, int]:
        return await self._call(rpc.STATS)

    async def count_open(self) -> dict[str, int]:
        return await self._call(rpc.COUNT_OPEN)

    # -- policies and steps --------------------------------------------------------------------------------------

    async def put_policy(self, policy: Policy) -> None:
        await self._call(rpc.PUT_POLICY, policy)

    async def policies(self) -> builtins.list[Policy]:
        return await self._call(rpc.POLICIES)

    async def commit_step(self, step: Step, tokens: Mapping[str, TokenCounts] | None = None) -> None:
        await self._call(rpc.COMMIT_STEP, {"step": step, "tokens": tokens or {}})

    async def name_checkpoint(self, lineage: int, number: int, checkpoint: str) -> None:
        await self._call(rpc.NAME_CHECKPOINT, {"lineage": lineage, "number": number, "checkpoint": checkpoint})

    async def steps(self, *, superseded: bool = False) -> builtins.list[Step]:
        which = {"superseded": "true" if superseded else "false"}
        return [record.step() for record in await self._call(rpc.STEPS, which)]

    async def open_lineage(self, *, after: int) -> int:
        return (await self._call(rpc.OPEN_LINEAGE, {"after": after})).lineage

    # ------------------------------------------------------------------------------------------------------------

    async def _call(
        self,
        verb: rpc.Verb[T],
        given: Any = None,
        *,
        timeout: float | None = None,
        client: Client | None = None,
        **at: str | int,
    ) -> T:
        """Ask for a verb of the table: `given` is its body, or its query by name; `at` is what its address names. What
        reads, or has a time or connections of its own, is not sent together with other verbs."""
        path, body = _path(verb.path, at), given
        if verb.method == "GET":
            path, body = path + _query(given or {}), None
        asked = VerbRequest(verb, path, at, self._encode(body))
        if verb.method == "GET" or timeout is not None or client is not None:
            send = partial(asked.send, client or self._client, timeout or TIMEOUT)
        else:
            send = partial(self._batches.send, asked)
        answer = await self._send(send)
        try:
            return _DECODERS[verb.name].decode(answer)
        except msgspec.MsgspecError as error:
            raise StoreError(
                f"{self.url} answers what cannot be read here ({error}). Fix: use the same version of strop on "
                "both sides"
            ) from None

    def _encode(self, what: Any) -> bytes:
        try:
            return b"" if what is None else _encode(what)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise StoreError(f"this cannot be sent to the store: {error}. Fix: use plain JSON types") from None

    async def _send(self, send: Callable[[], Awaitable[Response]]) -> bytes:
        """The body of the answer, asked for again and again while nobody is there to give one."""
        pause, since = 0.05, None  # since when it fails: a request may have waited in peace for long before
        while True:
            try:
                answer = await send()
                self._answered = True
                if answer.status == 200:
                    self._tell_outage(None)
                    return answer.body
                why = self._refused(answer)
                if answer.status not in (502, 503, 504):
                    raise why
            except (ConnectionError, TimeoutError) as error:
                if isinstance(error, TooLarge):
                    raise StoreError(f"{error}. Fix: read it beside the store itself") from None
                why = error
            now = time.monotonic()
            since = now if since is None else since
            tried, patience = now - since, self._patience if self._answered else min(FIRST, self._patience)
            if tried >= patience:
                raise self._unreachable(why, tried) from None
            if self._answered and tried > BRIEF:
                self._tell_outage(why)
            await asyncio.sleep(min(pause * random.uniform(0.5, 1.5), patience - tried))
            pause = min(2 * pause, 2.0)

    def _tell_outage(self, why: Exception | None) -> None:
        if self._on_outage is not None and self._is_away != (why is not None):
            self._is_away = why is not None
            self._on_outage(why)

    def _unreachable(self, why: Exception, tried: float) -> Unavailable:
        if isinstance(why, StoreError):  # it said why
            return Unavailable(f"{why} (the store at {self.url} was asked for {tried:.0f} s)")
        reason = str(why).removeprefix(f"{self.url} ").removeprefix("cannot be reached: ")
        return Unavailable(
            f"the store at {self.url} cannot be reached (tried for {tried:.0f} s, {reason}). Fix: "
            "check the address, and whether `strop train` with runner.remote, or `strop serve`, is up there"
        )

    def _refused(self, answer: Response) -> Exception:
        try:
            problem = _ERROR.decode(answer.body).error
        except msgspec.MsgspecError:
            return StoreError(
                f"{self.url} answers with status {answer.status}, but is not a Strop store. Fix: check the address"
            )
        if problem.type in wire.ERRORS:
            return wire.ERRORS[problem.type](problem.message)
        if answer.status == 401:
            return StoreError(
                f"the key does not open the store at {self.url}. Fix: give the run's key (--key-file or STROP_KEY)"
            )
        return StoreError(problem.message)


def _path(path: str, at: Mapping[str, str | int]) -> str:
    for name, value in at.items():
        if name == "id" and not ID.fullmatch(str(value)):  # it could not be told from another address
            raise UnknownId(f"there is no rollout {value!r}. Fix: give one that `strop rollouts` lists")
        path = path.replace(f"{{{name}}}", quote(str(value)))
    return path


def _query(given: Mapping[str, Any]) -> str:
    query = urlencode({name: value for name, value in given.items() if value is not None}, errors="replace")
    return f"?{query}" if query else ""
