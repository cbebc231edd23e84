"""A server answers to names that are its own. A page in a browser may have its own name lead to 127.0.0.1 (DNS
rebinding) and would then be let in where only programs of this machine should be; the browser names the page's host.

Its own are addresses, which need no DNS, `localhost`, the machine's name, what it listens on, and those configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from strop.net.asgi import Refusal, refuse

FQDN_TIME = 2.0
"""Seconds that the machine's full name may take to be found."""


class Hosts:
    """An ASGI app that hears only requests for one of `names`. `setting` is what more of them are given by."""

    def __init__(self, app: ASGIApp, names: Iterable[str], setting: str) -> None:
        self._app, self._setting = app, setting
        self._names = {"localhost", *map(_normalise, names)}
        self._known: set[bytes] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope["headers"]:
            if name == b"host" and value not in self._known and not self._is_ours(value):
                return await refuse(send, self._refusal(value))
        await self._app(scope, receive, send)

    def _is_ours(self, value: bytes) -> bool:
        name = _normalise(value.decode("latin-1"))
        fine = not name or name in self._names or name.endswith(".localhost") or _is_address(name)
        if fine and len(self._known) < 1000:
            self._known.add(value)
        return fine

    def _refusal(self, value: bytes) -> Refusal:
        shown = ascii(value.decode("latin-1"))[:200]
        how = f"use its address or the machine's name, or allow this one with {self._setting}"
        return Refusal(f"{shown} is not a name of this server: {how}", 421, "WrongHost", "wrong_host")


async def list_names(host: str) -> set[str]:
    """What a machine that listens on `host` is called. One that is reached from elsewhere also has its full name."""
    names = {host, socket.gethostname()}
    if not is_loopback(host):
        with contextlib.suppress(TimeoutError):
            names.add(await asyncio.wait_for(asyncio.to_thread(socket.getfqdn), FQDN_TIME))
    return names


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to the machine that asks, and to no other.

    >>> is_loopback("localhost"), is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.7")
    (True, True, True, False)
    """
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _normalise(host: str) -> str:
    """
    >>> _normalise("Strop.Example.com.:8640"), _normalise("[::1]:80"), _normalise("10.0.0.7")
    ('strop.example.com', '::1', '10.0.0.7')
    """
    found = re.fullmatch(r"\[([^\]]*)\](:\d*)?|([^:]*)(:\d*)?", host.strip())
    name = (found[1] or found[3] or "") if found else host
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
