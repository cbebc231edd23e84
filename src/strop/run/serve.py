"""`strop serve`: a store that other processes and machines share, with everything that keeps it well, and a model.

    folder/ ──lock──▶ store ──▶ server (/v1/, /r/) ──▶ HttpStore anywhere
                        │          └── with a model: the gateway's addresses as well ──▶ agents anywhere
                        └── reclaim_regularly: attempts of runners that are gone end in time

Told to stop (SIGTERM, SIGINT) it drains: no new connections, requests that wait for something to happen end at once,
those at work are finished, the store is closed.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from strop.config import Config, describe_models
from strop.errors import ConfigError, PlaceError, RunEnded, StropError, Unavailable
from strop.files import private, private_folder
from strop.net.addresses import AddressApp
from strop.net.secrets import new_key
from strop.net.server import HttpServer, SettingNames, serve
from strop.run.folder import wait_until_gone
from strop.store import open_store
from strop.store.base import Store
from strop.store.reclaim import reclaim_regularly
from strop.store.server.app import StoreApp
from strop.store.server.keys import run_key

if TYPE_CHECKING:  # needed only where a model is served
    from strop.gateway.app import Gateway
    from strop.learner.process import PolicyClient
    from strop.run.prepare import PreparedPolicy

LEASE_CHECK = 1.0
"""Seconds between two looks for leases that have run out."""
GRACE = 10.0
"""Seconds that runners get to be heard of again after the store was away."""
LOG = logging.getLogger("strop.run.serve")


class StoreServer:
    """A store being served at `url`, to whoever has `key`. Closing it leaves the store open."""

    def __init__(
        self, server: HttpServer, app: StoreApp, addressed: AddressApp, key: str, tasks: list[asyncio.Task[None]]
    ) -> None:
        self.url, self.key, self.addressed = server.url, key, addressed
        self._server, self._app, self._tasks = server, app, tasks

    def hold(self) -> None:
        """Have clients of the store wait until `let_in`."""
        self._app.refuses = Unavailable("the run is being started. Fix: ask again")

    def let_in(self) -> None:
        self._app.refuses = None

    def end(self, *, done: bool) -> None:
        """Give nothing out any more, though agents' calls are still answered. Clients of a run that is `done` are told
        so; those of one that may be resumed wait for it."""
        self._app.end(RunEnded("the run has ended") if done else Unavailable("the run was stopped. Fix: resume it"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._app.close()
        await self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def serve_store(
    store: Store,
    *,
    key: str,
    gateway: Gateway | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    hosts: Sequence[str] = (),
    settings: SettingNames = ("--host", "--port"),
    lease_check: float | None = LEASE_CHECK,
    grace: float = GRACE,
    log: Path | None = None,
) -> StoreServer:
    """Serve an open store, and beside it a gateway if there is one, from the running event loop. Without `lease_check`
    somebody else looks after the store and the gateway's sessions. Raises `PlaceError` if the address cannot be had."""
    app = StoreApp(store, key, model=gateway is not None)
    addressed = AddressApp(app if gateway is None else _beside(gateway, app, store))
    workers = gateway.workers if gateway is not None else None
    if workers is not None:
        workers.set_server_key(key)
    switch = workers.switch if workers is not None else None
    server = await serve(addressed, host=host, port=port, hosts=hosts, log=log, settings=settings, switch=switch)
    tasks: list[asyncio.Task[None]] = []
    if lease_check is not None:
        tasks.append(asyncio.create_task(_reclaim(store, lease_check, grace), name="strop-reclaim"))
        if gateway is not None:
            tasks.append(asyncio.create_task(_forget(store, gateway), name="strop-forget"))
    return StoreServer(server, app, addressed, key, tasks)


def _beside(gateway: Gateway, app: StoreApp, store: Store) -> ASGIApp:
    """Model calls go to the gateway, those with the server's own key as rollouts of their own; everything else goes to
    the store."""
    from strop.gateway.server_key import ServerKeyCalls

    server_key = ServerKeyCalls(gateway, store, app.key)

    async def beside(scope: Scope, receive: Receive, send: Send) -> None:
        await (server_key if gateway.serves(scope["path"]) else app)(scope, receive, send)

    return beside


async def _reclaim(store: Store, every: float, grace: float) -> None:
    """A store that is away for a while is looked after again when it is back."""
    while True:
        try:
            await reclaim_regularly(store, every, grace)
        except StropError as error:
            LOG.warning("leases that have run out could not be looked for: %s", error)


async def _forget(store: Store, gateway: Gateway) -> None:
    """The gateway keeps what it knows of a rollout as long as that runs."""
    cursor = 0
    while True:
        try:
            cursor, changed = await store.wait(cursor, timeout=60.0)
        except StropError as error:
            LOG.warning("which rollouts have ended could not be looked for: %s", error)
            await asyncio.sleep(LEASE_CHECK)
            continue
        for rollout in changed:
            if rollout.status != "running":
                gateway.forget(rollout.id)


@asynccontextmanager
async def open_store_server(store: Store, key: str | None = None) -> AsyncGenerator[StoreServer]:
    """For tests and notebooks: a store served on a free port of this machine as long as the block lasts."""
    server = await serve_store(store, key=key or new_key())
    try:
        yield server
    finally:
        await server.close()


async def main(
    folder: Path,
    *,
    store_url: str | None = None,
    model: Config | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    hosts: Sequence[str] = (),
    key: str | None = None,
    synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
    grace: float = GRACE,
    on_ready: Callable[[str, str], None],
    patience: float = 0.0,
    on_wait: Callable[[StropError], None] | None = None,
) -> None:
    """Serve the store of `folder`, or the PostgreSQL database at `store_url`, until told to stop; with `model`, also
    the policy it configures. The folder keeps the logs and, unless one is given, the key. `on_ready` is told the
    address and the key; a database that does not answer is waited for as `open_store` says."""

    async def open_all() -> tuple[Store, Gateway | None, list[PolicyClient]]:
        store = await open_store(store_url or folder, synchronous=synchronous, patience=patience, on_wait=on_wait)
        stack.push_async_callback(store.close)
        if model is None:
            return store, None, []
        from strop.run.prepare import prepare_policies

        return store, *await load_model(stack, model, await prepare_policies(model), store, folder)

    with watch_stop_signals() as stop, hold_folder(folder, alone=not store_url):
        secret = run_key(folder, key)
        async with AsyncExitStack() as stack:
            opening, told = asyncio.create_task(open_all()), asyncio.create_task(stop.wait())
            await asyncio.wait({opening, told}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                opening.cancel()
                await asyncio.wait({opening})
                return
            store, gateway, learners = opening.result()
            log = folder / "serve.log"
            server = await serve_store(
                store, key=secret, gateway=gateway, host=host, port=port, hosts=hosts, grace=grace, log=log
            )
            stack.push_async_callback(server.close)
            gone = asyncio.create_task(wait_until_gone(folder if store_url else folder / "store.sqlite"))
            await asyncio.sleep(0)  # it has begun to watch before anybody knows of the store
            stack.enter_context(server.addressed.announce(server.url, describe_models(model) if model else "", folder))
            on_ready(server.url, secret)
            watches = [learner.watch() for learner in learners]
            if gateway is not None and gateway.workers is not None:
                watches.append(gateway.workers.watch())
            dead = [*map(asyncio.create_task, watches)]
            done, left = await asyncio.wait({told, gone, *dead}, return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
            for task in done:
                task.result()


async def load_model(
    stack: AsyncExitStack, config: Config, prepared: Sequence[PreparedPolicy], store: Store, folder: Path
) -> tuple[Gateway, list[PolicyClient]]:
    """Have the policies' models loaded, in processes that cannot train them, and put a gateway before them; `stack`
    closes them."""
    from strop.run.runtime import load_policies, make_first_version, open_policies

    there = {policy.name: policy for policy in await store.policies()}
    for policy in map(make_first_version, prepared):
        if (before := there.get(policy.name, policy)) != policy:
            raise ConfigError(
                f"the store's policy is {before.model} at version {before.version}, and --model {policy.model} is not "
                "that. Fix: serve it with another --folder or database"
            )
    served, gateway = await open_policies(stack, config, prepared, store, folder, train=False)
    await load_policies(served, gateway, train=False)
    for one in prepared:
        await store.put_policy(make_first_version(one))
    return gateway, [policy.learner for policy in served if policy.learner is not None]


@contextmanager
def watch_stop_signals() -> Generator[asyncio.Event]:
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
def hold_folder(folder: Path, *, alone: bool) -> Generator[None]:
    """Make the folder. A SQLite store in it has one owner at a time, whether that serves it or trains with it; the
    kernel lets go of the lock when the process dies."""
    try:
        private_folder(folder)
        lock = open(folder / "lock", "wb", opener=private)  # noqa: SIM115 - closed below
    except OSError as error:
        raise PlaceError(
            f"cannot write to {folder} ({error.strerror}). Fix: make it writable, or choose another place with --folder"
        ) from None
    with lock:
        try:
            if alone:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PlaceError(
                f"another process is at work in {folder}. Fix: wait for it, or choose another --folder"
            ) from None
        yield
