"""Where processes on other machines connect to: a TCP port of this command, at which each proves that it was started by
it.

    number, key = listener.expect()                     driver: sent to the node through Ray
    sock = connect((host, port), number, key)           node: the process has this end
    connection = listener.take(number, timeout=60)      driver

Both sides prove that they know the key without saying it (HMAC, as multiprocessing does it). It opens one connection
and is thrown away. Who cannot is hung up on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import struct
import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from strop.errors import LearnerDied, PlaceError

HANDSHAKE = 10.0
"""Seconds in which whoever connects must have proven who it is."""
AT_ONCE = 64
"""Strangers that are listened to at the same time; more wait."""
QUIET, PROBES, BETWEEN = 15, 5, 5
"""TCP keepalive: a machine that is silent for so long is asked so many times, so many seconds apart, then given up."""
LOST = 60_000
"""Milliseconds after which what was sent to a machine, and is not acknowledged, means that it is gone."""
NUMBER = struct.Struct("<Q")


class ChildListener:
    """Listens from the start until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        try:
            self._socket = socket.create_server((host, port), backlog=AT_ONCE)
        except OSError as error:
            raise PlaceError(
                f"cannot listen on {host}:{port} for learner ranks ({error.strerror}). Fix: set cluster.port to another"
            ) from None
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        self._numbers = itertools.count(1)
        self._keys: dict[int, bytes] = {}
        self._arriving: dict[int, Future[Connection]] = {}
        self._lock, self._places = threading.Lock(), threading.BoundedSemaphore(AT_ONCE)
        threading.Thread(target=self._listen, name="strop-listener", daemon=True).start()

    def expect(self) -> tuple[int, bytes]:
        """The number and the key by which one process may connect."""
        number, key = next(self._numbers), secrets.token_bytes(32)
        with self._lock:
            self._keys[number], self._arriving[number] = key, Future()
        return number, key

    def take(self, number: int, timeout: float) -> Connection:
        """The connection of an expected process, once it is there."""
        try:
            return self._arriving[number].result(timeout)
        except (FutureTimeout, CancelledError):
            raise LearnerDied(f"a process on another node did not connect within {timeout:g} s") from None
        finally:
            with self._lock:
                self._keys.pop(number, None)
                self._arriving.pop(number, None)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for future in self._arriving.values():
                future.cancel()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            self._places.acquire()
            threading.Thread(target=self._admit, args=(sock,), daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            set_patience(sock, HANDSHAKE)
            connection = Connection(sock.detach())
            try:
                (number,) = NUMBER.unpack(connection.recv_bytes(NUMBER.size))
                with self._lock:
                    key = self._keys[number]
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
                keep_alive(connection.fileno())
                with self._lock:
                    del self._keys[number]  # it is good for one connection
                    self._arriving[number].set_result(connection)
            except (OSError, EOFError, KeyError, struct.error, AuthenticationError):
                connection.close()
        finally:
            self._places.release()


def connect(address: tuple[str, int], number: int, key: bytes) -> socket.socket:
    """This end of a connection that was expected."""
    sock = socket.create_connection(address, timeout=HANDSHAKE)
    sock.settimeout(None)
    set_patience(sock, HANDSHAKE)
    connection = Connection(os.dup(sock.fileno()))
    try:
        connection.send_bytes(NUMBER.pack(number))
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException:
        sock.close()
        raise
    finally:
        connection.close()
    keep_alive(sock.fileno())
    return sock


def set_patience(sock: socket.socket, seconds: float) -> None:
    """How long one read or write may take; 0: for ever. Unlike Python's own limit it leaves the socket blocking."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def keep_alive(fd: int) -> None:
    """From now on reads and writes may take for ever, unless the machine at the other end is gone."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        set_patience(sock, 0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", QUIET),
            ("TCP_KEEPINTVL", BETWEEN),
            ("TCP_KEEPCNT", PROBES),
            ("TCP_USER_TIMEOUT", LOST),
        ):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
