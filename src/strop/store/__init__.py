"""The only state that packages share. `base` is the interface; `open_store` opens one by its name: a folder, a file, a
PostgreSQL database, or the address of one that is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from strop.errors import PlaceError, Unavailable
from strop.store.base import Store


async def open_store(
    where: str | Path,
    *,
    key: str | None = None,
    synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
    create: bool = True,
    patience: float = 0.0,
    on_wait: Callable[[Unavailable], None] | None = None,
    outage: float = 60.0,
    on_outage: Callable[[Exception | None], None] | None = None,
) -> Store:
    """Open the store at `where`: a folder (its store.sqlite), a .sqlite file, postgresql://..., or the http:// address
    of `strop serve`, which `key` opens. With `create=False` a file that is not there is refused, not made. A server
    that does not answer is asked again for `patience` seconds; `on_wait` is told, once, that it is waited for. One that
    has answered and goes away later is waited for up to `outage` seconds; `on_outage` is told why, and None when it is
    back.

        store = await open_store("http://127.0.0.1:8640", key="...")
        await store.enqueue([...])
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            if str(where).startswith(("http://", "https://")):
                from strop.store.remote import HttpStore

                return await HttpStore.open(str(where), key or "", patience=outage, on_outage=on_outage)
            return await _open(str(where), synchronous, create)
        except Unavailable as why:
            if time.monotonic() >= deadline:
                raise
            if on_wait:
                on_wait(why)
                on_wait = None
            await asyncio.sleep(0.2)


async def _open(name: str, synchronous: Literal["NORMAL", "FULL"], create: bool) -> Store:
    if name.startswith(("postgresql://", "postgres://")):
        from strop.store.postgres import PostgresStore

        return await PostgresStore.open(name)
    from strop.store.sqlite import SqliteStore

    path = Path(name) if name.endswith(".sqlite") else Path(name) / "store.sqlite"
    if not create and not path.is_file():
        raise PlaceError(f"{name} holds no store (no {path.name} there). Fix: check the path")
    return await SqliteStore.open(path, synchronous)
