"""Serves an ASGI app inside the running event loop, on a socket that is bound before anything else starts.

What a stranger can make it keep is bounded by `strop.net.bounds`.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from strop.errors import PlaceError
from strop.files import private
from strop.net.bounds import Bounded
from strop.net.handover import Routed, Switch
from strop.net.hosts import Hosts, list_names

IDLE = 5.0
"""Seconds after which a connection is closed that asks for nothing more. They are counted once a second."""
GARBAGE = 20_000
"""New objects after which Python looks for garbage; its own default is 700."""
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that stand for all addresses of the machine, and the one by which it reaches itself then."""
SettingNames = tuple[str, str]
"""What an address's host and port are called where people set them."""


class HttpServer:
    """`url` is where it answers. Signals are left to the owner of the process."""

    def __init__(self, url: str, server: _Quiet, task: asyncio.Task[None]) -> None:
        self.url = url
        self._server = server
        self._task = task
        self._taking: set[asyncio.Task[Any]] = set()

    def take(self, connection: socket.socket, first: bytes) -> None:
        """Serve a connection that another process has accepted, and of which it has read `first`."""
        state, config = self._server.server_state, self._server.config
        make = partial(config.http_protocol_class, config=config, server_state=state, app_state={}, first=first)
        connection.setblocking(False)
        task = asyncio.ensure_future(asyncio.get_running_loop().connect_accepted_socket(make, connection))
        self._taking.add(task)
        task.add_done_callback(self._taken)

    def _taken(self, task: asyncio.Task[Any]) -> None:
        self._taking.discard(task)
        if not task.cancelled():
            task.exception()  # its client has gone already

    async def close(self) -> None:
        """Stop taking requests, give those in flight a few seconds, then end them."""
        self._server.stop()
        await self._task
        # uvicorn cancels what is left but does not wait for it; its last act is to record what it sampled.
        if left := self._server.server_state.tasks:
            await asyncio.wait(left, timeout=5)


async def serve(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    hosts: Sequence[str] = (),
    log: Path | None = None,
    settings: SettingNames = ("gateway.host", "gateway.port"),
    switch: Switch | None = None,
) -> HttpServer:
    """Start serving and return once requests are answered. Raises `PlaceError` if the address cannot be had.

    Clients may call it by its address, by the machine's name, and by those in `hosts`. With a `switch`, connections
    whose requests are for another process go there.

    What the server has to say about broken clients and requests goes to the file `log`, if there is anything, not to
    the terminal.
    """
    sock = bind(host, port, settings)
    server, task = await _start(app, host, hosts, log, settings, switch, [sock])
    shown = ANY.get(host, host)
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{sock.getsockname()[1]}"
    http = HttpServer(url, server, task)
    if switch is not None:
        switch.take = http.take
    return http


def name_from_elsewhere(url: str, host: str, address: str = "") -> str:
    """The address of a server that listens on `host`, as other machines reach it: by this one's `address`, or else its
    name, where it listens on all of its addresses."""
    if host not in ANY:
        return url
    shown = f"[{address}]" if ":" in address else address or socket.gethostname()
    return f"http://{shown}:{url.rpartition(':')[2]}"


async def serve_handed(
    app: ASGIApp, switch: Switch, *, host: str, hosts: Sequence[str] = (), log: Path | None = None
) -> HttpServer:
    """Serve connections that another process, which listens on `host`, hands over."""
    http = HttpServer("", *await _start(app, host, hosts, log, ("gateway.host", "gateway.port"), switch, []))
    switch.take = http.take
    return http


async def serve_bound(
    app: ASGIApp, sock: socket.socket, *, host: str, hosts: Sequence[str] = (), log: Path | None = None
) -> HttpServer:
    """Serve on a socket that listens already, at `host`."""
    url = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    return HttpServer(url, *await _start(app, host, hosts, log, ("gateway.host", "gateway.port"), None, [sock]))


async def _start(
    app: ASGIApp,
    host: str,
    hosts: Sequence[str],
    log: Path | None,
    settings: SettingNames,
    switch: Switch | None,
    sockets: list[socket.socket],
) -> tuple[_Quiet, asyncio.Task[None]]:
    if log is not None:
        _log_to(log)
    config = uvicorn.Config(
        Hosts(app, [*hosts, *await list_names(host)], f"{settings[0]}s"),
        http=Bounded if switch is None else cast("type[Bounded]", partial(Routed, switch=switch)),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE,  # pyright: ignore[reportArgumentType]
        timeout_graceful_shutdown=5,
    )
    server = _Quiet(config)
    task = asyncio.create_task(server.serve(sockets=sockets), name="strop-server")
    ready = asyncio.create_task(server.ready.wait())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        ready.cancel()
        await task
    # What was imported and loaded stays: it need not be looked at again and again while requests come. What a request
    # leaves behind is hardly ever garbage that only the collector finds: it looks more rarely.
    gc.freeze()
    gc.set_threshold(GARBAGE, 10, 50)
    return server, task


def bind(host: str, port: int, settings: SettingNames) -> socket.socket:
    host_setting, port_setting = settings
    if not 0 <= port <= 65535:
        raise PlaceError(f"there is no port {port}: {port_setting} is from 1 to 65535, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sends small answers at once only on sockets that say that they are TCP.
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a name"
        raise PlaceError(
            f"cannot listen on {host!r}: {reason}. Fix: set {host_setting} to an address of this machine"
        ) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; {port_setting}=0 picks a free one"
        elif error.errno == errno.EACCES:
            message = f"port {port} may not be used by this user; {port_setting}=0 picks a free one"
        else:
            message = f"cannot listen on {host}: {error.strerror}; set {host_setting} to an address of this machine"
        raise PlaceError(message) from None
    return sock


def _log_to(path: Path) -> None:
    """One file for what the server says and for what requests ran into."""
    handler = _Log(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("uvicorn", "strop"):
        logger = logging.getLogger(name)
        for before in logger.handlers:
            before.close()
        logger.handlers, logger.propagate = [handler], False


class _Log(logging.FileHandler):
    """Its owner's only: requests name rollouts and what is in them."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=private)


class _Quiet(uvicorn.Server):
    """Says when it is ready, stops as soon as it is told to, and leaves signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # the time of day in its answers, once a second
            for connection in cast("list[Bounded]", list(self.server_state.connections)):
                connection.check_time()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
