"""The store that `strop serve` or a training run serves, as `strop enqueue` and `strop runner` reach it."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable

from strop.cli import keys
from strop.errors import ConfigError, StropError
from strop.store import open_store
from strop.store.base import Store

PORT = 8640
START_SECONDS = 60.0
"""Seconds that a server which does not answer yet is waited for by what is to run for long."""


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default=os.environ.get("STROP_URL"), help="where `strop serve`, or the run, is (default: $STROP_URL)"
    )
    keys.add(command)


async def open_served(
    arguments: argparse.Namespace,
    patience: float = 0.0,
    *,
    outage: float = 60.0,
    on_outage: Callable[[Exception | None], None] | None = None,
) -> Store:
    if not arguments.url:
        raise ConfigError(
            f"where is the store? Fix: --url http://HOST:{PORT}, as `strop train` or `strop serve` says (or $STROP_URL)"
        )
    if re.fullmatch(r"[\w.-]+:\d+", arguments.url):
        raise ConfigError(f"--url {arguments.url} has no http:// before it. Fix: write http://{arguments.url}")
    if not arguments.url.startswith(("http://", "https://")):
        raise ConfigError("--url is the address of a run or of `strop serve`, http://.... Fix: start one there first")
    waiting = say_what_is_awaited(arguments.url, arguments.json)
    return await open_store(
        arguments.url,
        key=keys.read_key(arguments),
        patience=patience,
        on_wait=waiting,
        outage=outage,
        on_outage=on_outage,
    )


def say_what_is_awaited(what: str, json: bool) -> Callable[[StropError], None]:
    """Says once what is waited for."""

    def say(why: StropError) -> None:
        if not json:
            print(f"waiting for {what}", file=sys.stderr)

    return say
