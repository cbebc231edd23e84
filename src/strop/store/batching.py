"""Sends what several callers of one client ask for at the same time as one request.

    finish ─┐
    finish ─┼──▶ POST /v1/batch [..., ..., ...] ──▶ each caller gets its own answer
    lease  ─┘

A request costs as much as a small verb. Nobody waits for others: a lone caller's verb goes at once; where another is
under way, or several went together the last time, it goes with what else comes up in this turn of the event loop. A
batch is answered when all of it is durable; where no answer comes, each caller asks again for itself.

Left out: verbs that read or wait, and large bodies, for which others should not have to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from strop.errors import StoreError
from strop.net.client import Client, Response
from strop.store import rpc, wire

LARGE = 64 << 10
"""Bytes of a body that goes alone."""
MAX_BATCH = 128
"""Verbs of one request: with `LARGE` it bounds what a server has to take at once."""


class _Answer(Struct):
    status: int
    body: msgspec.Raw


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[_Answer]).decode


class VerbRequest(Struct):
    """A verb as a request of its own, and what its address names."""

    verb: rpc.Verb[Any]
    path: str
    at: Mapping[str, str | int]
    body: bytes

    async def send(self, client: Client, timeout: float) -> Response:
        return await client.request(self.verb.method, self.path, self.body, timeout=timeout, again=True)


_Waiting = tuple[VerbRequest, "asyncio.Future[Response]"]


class VerbBatches:
    """The verbs of one client, from one event loop. Raises what `Client.request` raises."""

    def __init__(self, client: Client, timeout: float) -> None:
        self._client, self._timeout = client, timeout
        self._under_way = 0  # requests that are not answered
        self._shared = False  # whether several verbs went together the last time
        self._waiting: list[_Waiting] = []  # for the end of this turn of the loop
        self._sending: set[asyncio.Task[None]] = set()
        self._understood = True  # until a server says that it knows no batches

    async def send(self, asked: VerbRequest) -> Response:
        lone = not self._under_way and not self._shared
        if lone or not self._understood or len(asked.body) > LARGE:
            return await self._send_alone(asked)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Response] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send_waiting)
        self._waiting.append((asked, future))
        return await future

    def _send_waiting(self) -> None:
        waiting, self._waiting = [one for one in self._waiting if not one[1].done()], []
        self._shared = len(waiting) > 1
        for first in range(0, len(waiting), MAX_BATCH):
            task = asyncio.create_task(self._send_batch(waiting[first : first + MAX_BATCH]))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send_batch(self, batch: list[_Waiting]) -> None:
        answers: Sequence[Response | BaseException]
        try:
            answers = await self._ask([asked for asked, _ in batch])
        except BaseException as error:  # also that this task was cancelled: nobody may be left waiting
            answers = [error] * len(batch)
        for (_, future), given in zip(batch, answers, strict=True):
            if future.done():  # its caller has gone away
                continue
            if isinstance(given, Response):
                future.set_result(given)
            else:
                future.set_exception(given)

    async def _ask(self, batch: list[VerbRequest]) -> Sequence[Response | BaseException]:
        if len(batch) == 1:
            return [await self._send_alone(batch[0])]
        body = _encode([_call(asked) for asked in batch])
        answer = await self._send_alone(VerbRequest(rpc.BATCH, rpc.BATCH.path, {}, body))
        if answer.status in (404, 405):  # an older server
            self._understood = False
            return await asyncio.gather(*map(self._send_alone, batch), return_exceptions=True)
        if answer.status != 200:
            return [answer] * len(batch)
        try:
            answers = _decode(answer.body)
        except msgspec.MsgspecError as error:
            raise self._unreadable(str(error)) from None
        if len(answers) != len(batch):
            raise self._unreadable(f"{len(answers)} answers to {len(batch)} verbs")
        return [Response(one.status, {}, bytes(one.body)) for one in answers]

    async def _send_alone(self, asked: VerbRequest) -> Response:
        self._under_way += 1
        try:
            return await asked.send(self._client, self._timeout)
        finally:
            self._under_way -= 1

    def _unreadable(self, why: str) -> StoreError:
        return StoreError(
            f"{self._client.url} answers a batch with what cannot be read here ({why}). Fix: use the same version of "
            "strop on both sides"
        )


def _call(asked: VerbRequest) -> wire.VerbCall:
    at = {name: str(value) for name, value in asked.at.items()}
    return wire.VerbCall(verb=asked.verb.name, at=at, body=msgspec.Raw(asked.body))
