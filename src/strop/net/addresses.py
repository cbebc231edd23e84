"""Where a gateway is, for services that run already when it starts: they read a file, or ask an address they know.

    from strop.net import addresses as address

    client = openai.AsyncOpenAI(base_url=address.read("runs/mine").base_url, api_key="-")
    ...
    await client.chat.completions.create(..., extra_headers={"trace_id": trace_id})  # as it came with the task

The run's folder holds `address.json` while its gateway answers; GET /address tells the same, as its client sees
it. It tells no secret: the key of an attempt comes with its task. The file that LLM_SERVER_NOTIFY_FILE names, as
agent services of verl have it, holds HOST:PORT meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.types import ASGIApp, Receive, Scope, Send

from strop.errors import PlaceError
from strop.files import write_whole
from strop.net.asgi import ByMethod, Header, answer
from strop.version import __version__

FILE = "address.json"
NOTIFY = "LLM_SERVER_NOTIFY_FILE"
WAIT_SECONDS = 60.0
"""Seconds that a gateway which is not there yet is waited for."""


class GatewayAddress(Struct, frozen=True, kw_only=True):
    """`base_url` and `model` are for OpenAI's clients, Anthropic's take `url`. Where only a store is served there is no
    model, and both are empty. `strop` is the version that answers there.

    >>> GatewayAddress.of("http://10.0.0.7:8640", "strop/nano").base_url
    'http://10.0.0.7:8640/v1'
    """

    url: str
    base_url: str
    model: str
    pid: int
    started: float
    strop: str = ""

    @classmethod
    def of(cls, url: str, model: str) -> GatewayAddress:
        base_url = f"{url}/v1" if model else ""
        return cls(url=url, base_url=base_url, model=model, pid=os.getpid(), started=time.time(), strop=__version__)

    def at(self, url: str) -> GatewayAddress:
        """The same as it is reached from elsewhere."""
        return replace(self, url=url, base_url=f"{url}/v1" if self.model else "")


def read(where: str | Path, *, timeout: float = WAIT_SECONDS) -> GatewayAddress:
    """The address of the gateway of the run in a folder, or of the one at a URL, once it answers. Raises `PlaceError`
    after `timeout` seconds. A file that a killed run has left behind is not taken for an address."""
    deadline, pause = time.monotonic() + timeout, 0.05
    while True:
        try:
            return _ask(str(where).rstrip("/")) if _is_url(where) else _read(Path(where))
        except (OSError, ValueError) as error:
            why = error
        if time.monotonic() + pause > deadline:
            raise PlaceError(_nobody(where, timeout, why))
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _is_url(where: str | Path) -> bool:
    return str(where).startswith(("http://", "https://"))


def _read(folder: Path) -> GatewayAddress:
    written = msgspec.json.decode((folder / FILE).read_bytes(), type=GatewayAddress)
    there = _ask(written.url)
    if (there.pid, there.started) != (written.pid, written.started):
        raise ConnectionError(f"{written.url} is another run's by now")
    return written


def _ask(url: str) -> GatewayAddress:
    # Never through a proxy: they do not know what is here.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/address", timeout=5.0) as said:
            return msgspec.json.decode(said.read(), type=GatewayAddress).at(url)
    except urllib.error.HTTPError as error:
        error.close()  # it has the connection
        raise


def _nobody(where: str | Path, timeout: float, why: Exception) -> str:
    if _is_url(where):
        return f"no gateway answered at {where} within {timeout:g} s ({why}): check the address, or start it there"
    there = (Path(where) / FILE).exists()
    reason = f"{FILE} is there, but nobody answers ({why})" if there else f"there is no {FILE} in it"
    return (
        f"no gateway was up for {where} within {timeout:g} s ({reason}): start `strop train` or `strop serve` with "
        "that --folder, or wait longer"
    )


class AddressApp:
    """An ASGI app that tells its address, once it has one, beside what the app inside it does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._address: GatewayAddress | None = None
        self._asked = ByMethod({"GET": self._tell})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._asked if scope["path"] == "/address" else self._app)(scope, receive, send)

    async def _tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._address is None:
            return await answer(send, b'{"error": {"message": "it is being started: ask again"}}', 503)
        host = _host(scope["headers"])
        seen = self._address.at(f"{scope['scheme']}://{host}") if host else self._address
        await answer(send, msgspec.json.encode(seen))

    @contextmanager
    def announce(self, url: str, model: str, folder: Path) -> Generator[GatewayAddress]:
        """Tell it from now on, and write it down in the folder until the end of the block."""
        self._address = address = GatewayAddress.of(url, model)
        file, data = folder / FILE, msgspec.json.encode(address) + b"\n"
        with _keep_file(file, data), _notify(url if model else ""):
            try:
                yield address
            finally:
                self._address = None


@contextmanager
def _keep_file(file: Path, data: bytes, *, shared: bool = False) -> Generator[None]:
    write_whole(file, data, shared=shared)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it may be another one's by now, or gone with the folder
            if file.read_bytes() == data:
                file.unlink()


@contextmanager
def _notify(url: str) -> Generator[None]:
    """The file of LLM_SERVER_NOTIFY_FILE, where a model is served and the file is named."""
    named = os.environ.get(NOTIFY)
    if not named or not url:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_keep_file(Path(named), urlsplit(url).netloc.encode(), shared=True))
        except OSError as error:
            raise PlaceError(
                f"{NOTIFY} names {named}, which cannot be written ({error.strerror or error}). Fix: name a file in a "
                "folder that is there, or leave it out"
            ) from None
        yield


def _host(headers: list[Header]) -> str:
    """What the client calls this server."""
    return next((value.decode("latin-1") for name, value in headers if name == b"host"), "")
