"""What an interpreter and all that it starts print, as it comes out of their pipe."""

from __future__ import annotations

import asyncio
import os

from strop.tools.sandbox.runner import shorten

MOST_PRINTED = 32 << 20
"""Bytes of output after which a call is ended."""


class Printed:
    """What came out of the pipe since it was last taken: its beginning, its end, and how much there was."""

    def __init__(self, file: int, kept: int) -> None:
        self.total = 0
        self._file, self._kept = file, kept
        self._head, self._tail = bytearray(), bytearray()
        self._listening = False
        os.set_blocking(file, False)
        self.listen()

    def listen(self) -> None:
        if not self._listening:
            asyncio.get_running_loop().add_reader(self._file, self._read)
            self._listening = True

    def take(self) -> str:
        """What has been printed by now. Nobody listens until the next call."""
        for _ in range(4):  # more than a pipe holds
            if not self._listening or not self._read():
                break
        self._stop_listening()
        kept = bytes(self._head + self._tail)
        text = kept.decode(errors="replace").replace("\0", "�")  # which a database may refuse
        text = shorten(text, self._kept, self.total - len(kept))
        self.total = 0
        self._head, self._tail = bytearray(), bytearray()
        return text

    def close(self) -> None:
        if self._file >= 0:
            while self._listening and self._read():
                pass
            self._stop_listening()
            os.close(self._file)
            self._file = -1

    def _stop_listening(self) -> None:
        if self._listening:
            asyncio.get_running_loop().remove_reader(self._file)
            self._listening = False

    def _read(self) -> bool:
        """Whether there was something."""
        try:
            data = os.read(self._file, 1 << 16)
        except BlockingIOError:
            return False
        if not data or self.total > MOST_PRINTED:  # its end, or enough: who writes more has to wait
            self._stop_listening()
            return False
        self.total += len(data)
        space = max(4 * self._kept - len(self._head), 0)
        self._head += data[:space]
        self._tail = (self._tail + data[space:])[-4 * self._kept :]
        return True
