"""`strop serve`: a store that other processes and machines share, with everything that keeps it well.

    folder/ ──lock──▶ store ──▶ server (/v1/, /r/) ──▶ HttpStore anywhere
                        └── reclaiming: attempts of runners that are gone end in time

Told to stop (SIGTERM, SIGINT) it drains: no new connections, requests that wait for something to happen end at once,
those at work are finished, the store is closed.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import secrets
import signal
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

from strop.errors import PlaceError, StropError
from strop.folder import until_gone
from strop.server import Server, serve
from strop.store.base import Store
from strop.store.http.keys import run_key
from strop.store.http.routes import StoreApp
from strop.store.opening import open_store
from strop.store.reclaim import reclaiming

LEASE_CHECK = 1.0
"""Seconds between two looks for leases that have run out."""
GRACE = 10.0
"""Seconds that runners get to be heard of again after the store was away."""
LOG = logging.getLogger("strop.serve")


class StoreServer:
    """A store being served at `url`, to whoever has `key`. Closing it leaves the store open."""

    def __init__(self, server: Server, app: StoreApp, key: str, reclaim: asyncio.Task[None]) -> None:
        self.url, self.key = server.url, key
        self._server, self._app, self._reclaim = server, app, reclaim

    async def close(self) -> None:
        self._reclaim.cancel()
        self._app.close()
        await self._server.close()
        await asyncio.gather(self._reclaim, return_exceptions=True)


async def serve_store(
    store: Store,
    *,
    key: str,
    host: str = "127.0.0.1",
    port: int = 0,
    lease_check: float = LEASE_CHECK,
    grace: float = GRACE,
    log: Path | None = None,
) -> StoreServer:
    """Serve an open store from the running event loop. Raises `PlaceError` if the address cannot be had."""
    app = StoreApp(store, key)
    server = await serve(app, host=host, port=port, log=log, settings=("--host", "--port"))
    reclaim = asyncio.create_task(_reclaim(store, lease_check, grace), name="strop-reclaim")
    return StoreServer(server, app, key, reclaim)


async def _reclaim(store: Store, every: float, grace: float) -> None:
    """A store that is away for a while is looked after again when it is back."""
    while True:
        try:
            await reclaiming(store, every, grace)
        except StropError as error:
            LOG.warning("leases that have run out could not be looked for: %s", error)


@asynccontextmanager
async def served(store: Store, key: str | None = None) -> AsyncGenerator[StoreServer]:
    """For tests and notebooks: a store served on a free port of this machine as long as the block lasts."""
    server = await serve_store(store, key=key or secrets.token_urlsafe(24))
    try:
        yield server
    finally:
        await server.close()


async def main(
    folder: Path,
    *,
    store_url: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
    grace: float = GRACE,
    on_ready: Callable[[str, str], None],
    patience: float = 0.0,
    on_wait: Callable[[StropError], None] | None = None,
) -> None:
    """Serve the store of `folder`, or the PostgreSQL database at `store_url`, until told to stop. The folder keeps the
    log and, unless one is given, the key. `on_ready` is told the address and the key; a database that does not answer
    is waited for as `open_store` says."""
    with _told() as stop, _held(folder, alone=not store_url):
        secret = run_key(folder, key)
        opening = asyncio.create_task(
            open_store(store_url or folder, synchronous=synchronous, patience=patience, on_wait=on_wait)
        )
        told = asyncio.create_task(stop.wait())
        await asyncio.wait({opening, told}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            return
        store = opening.result()
        try:
            server = await serve_store(store, key=secret, host=host, port=port, grace=grace, log=folder / "serve.log")
            try:
                gone = asyncio.create_task(until_gone(folder if store_url else folder / "store.sqlite"))
                await asyncio.sleep(0)  # it has begun to watch before anybody knows of the store
                on_ready(server.url, secret)
                await asyncio.wait({told, gone}, return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
                if gone.done():
                    gone.result()
                gone.cancel()
            finally:
                await server.close()
        finally:
            await store.close()


@contextmanager
def _told() -> Generator[asyncio.Event]:
    """Set once the process is told to stop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextmanager
def _held(folder: Path, *, alone: bool) -> Generator[None]:
    """Make the folder. A SQLite store in it has one owner at a time, whether that serves it or trains with it; the
    kernel lets go of the lock when the process dies."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the store holds keys
        lock = (folder / "lock").open("wb")
    except OSError as error:
        raise PlaceError(
            f"cannot write to {folder} ({error.strerror}): make it writable, or choose another place with --folder"
        ) from None
    with lock:
        try:
            if alone:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PlaceError(
                f"another process is at work in {folder}: wait for it, or choose another --folder"
            ) from None
        yield
