"""A real PostgreSQL server for tests: a cluster in a temporary folder, on a free port of the loopback.

    server = Server()           # initdb, start
    server.url("run1")          # postgresql://strop@127.0.0.1:PORT/postgres?schema=run1
    server.kill9(); server.start()
    server.close()

`postgres_server` is a fixture that conftest files import; all of them share one server, which ends with the session.
PostgreSQL refuses to run as root, so root lends it the user `postgres` (or `nobody`).
"""

from __future__ import annotations

import atexit
import functools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import pytest

USER = "strop"
MISSING = "PostgreSQL is not installed (Debian: apt-get install postgresql)"


def program(name: str) -> str:
    """Where one of PostgreSQL's programs is; Debian keeps them out of PATH. Skips the test if it is nowhere."""
    kept = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4].split(".")[0]))
    found = shutil.which(name) or (str(kept[-1]) if kept else None)
    return found or pytest.skip(MISSING)


class Server:
    """One cluster. `settings` are those of postgresql.conf."""

    def __init__(self, **settings: str) -> None:
        self._pg_ctl, initdb = program("pg_ctl"), program("initdb")
        self._owner = _owner()
        self.folder = Path(tempfile.mkdtemp(prefix="strop-postgres-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.data = self.folder / "data"
        self.data.mkdir(mode=0o700)
        if self._owner:
            for path in (self.folder, self.data):
                os.chown(path, self._owner["user"], self._owner["group"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._run(initdb, "-D", str(self.data), "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        given = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "on",
            "shared_buffers": "16MB",
            "max_connections": "100",
        } | settings
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in given.items())
        self.start()

    def url(self, schema: str | None = None, *, database: str = "postgres") -> str:
        plain = f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"
        return plain if schema is None else f"{plain}?schema={schema}"

    def start(self) -> None:
        deadline = time.monotonic() + 60
        while True:  # the children of a killed server hold its shared memory for a moment
            try:
                log = str(self.folder / "log")
                self._run(self._pg_ctl, "-D", str(self.data), "-l", log, "-w", "-t", "60", "start")
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def stop(self, mode: Literal["immediate", "fast"] = "fast") -> None:
        self._run(self._pg_ctl, "-D", str(self.data), "-w", "-t", "60", "-m", mode, "stop")

    def kill9(self) -> None:
        """As if the machine had pulled it away: nothing is flushed, nobody is told. `start` recovers."""
        os.kill(int((self.data / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)

    def close(self) -> None:
        if (self.data / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self.folder)

    def _run(self, *command: str) -> None:
        # Into a file: the server inherits the outputs of the program that starts it, and would keep a pipe open.
        with (self.folder / "commands").open("a+") as said:
            done = subprocess.run(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said, **self._owner
            )
        if done.returncode:
            raise AssertionError(f"{command[0]} failed: {(self.folder / 'commands').read_text()[-2000:]}")


def _owner() -> dict[str, Any]:
    """Whom root lends the server to, as arguments of `subprocess.run`."""
    if os.getuid() != 0:
        return {}
    known = {user.pw_name: user for user in pwd.getpwall()}
    user = known.get("postgres") or known["nobody"]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@functools.cache
def shared() -> Server:
    server = Server()
    atexit.register(server.close)
    return server


@pytest.fixture(scope="session")
def postgres_server() -> Server:
    """One for the whole session, however many conftest files import it. Take a schema of your own."""
    return shared()
