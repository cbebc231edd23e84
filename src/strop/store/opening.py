"""A store by its name: a folder, a file, a PostgreSQL database, or the address of one that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from strop.errors import PlaceError
from strop.store.base import Store


async def open_store(
    where: str | Path,
    *,
    key: str | None = None,
    synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
    create: bool = True,
) -> Store:
    """Open the store at `where`: a folder (its store.sqlite), a .sqlite file, postgresql://..., or the http:// address
    of `strop serve`, which `key` opens. With `create=False` a file that is not there is refused, not made.

        store = await open_store("http://127.0.0.1:8640", key="...")
        await store.enqueue([...])
    """
    name = str(where)
    if name.startswith(("http://", "https://")):
        from strop.store.http.client import HttpStore

        return await HttpStore.open(name, key or "")
    if name.startswith(("postgresql://", "postgres://")):
        from strop.store.postgres import PostgresStore

        return await PostgresStore.open(name)
    from strop.store.sqlite import SqliteStore

    path = Path(name) if name.endswith(".sqlite") else Path(name) / "store.sqlite"
    if not create and not path.is_file():
        raise PlaceError(f"{name} holds no store (no {path.name} there): check the path")
    return await SqliteStore.open(path, synchronous)
