"""What is sent to a process that holds weights: in order, and at no cost of whoever sends it."""

import socket
import threading
import time
from collections.abc import Generator
from multiprocessing.connection import Connection

import pytest

from strop.learner.outgoing import LARGE, Outgoing
from tests.limits import stretch

AT_ONCE = 0.2
"""Seconds that nothing here may keep who sends."""


@pytest.fixture
def ends() -> Generator[tuple[Connection, Connection]]:
    ours, theirs = (Connection(sock.detach()) for sock in socket.socketpair())
    with ours, theirs:
        yield ours, theirs


def close(outgoing: Outgoing) -> None:
    began = time.monotonic()
    outgoing.close()
    outgoing.join()
    assert time.monotonic() - began < stretch(AT_ONCE)
    assert "learner-writer" not in {thread.name for thread in threading.enumerate()}


def test_nobody_waits_for_a_process_that_reads_nothing_and_all_arrives_in_order(ends) -> None:
    outgoing, began = Outgoing(ends[0]), time.monotonic()
    messages = [b"first", b"", *([b"%d" % n * 100 for n in range(2000)]), bytes(16 * LARGE), b"small", bytes(LARGE + 1)]
    for number in range(0, len(messages), 2):
        outgoing.send(*messages[number : number + 2])
    assert time.monotonic() - began < stretch(AT_ONCE)
    for message in messages:
        assert ends[1].recv_bytes() == message
    for number in range(3):  # what waited is through
        outgoing.send(b"%d" % number)
        assert ends[1].recv_bytes() == b"%d" % number
    close(outgoing)


def test_nothing_is_sent_once_it_is_closed(ends) -> None:
    outgoing = Outgoing(ends[0])
    outgoing.send(b"before")
    outgoing.send(bytes(16 * LARGE))  # in the middle of which it is closed
    outgoing.send(b"never")
    time.sleep(0.05)
    close(outgoing)
    outgoing.send(b"after")
    close(outgoing)
    assert ends[1].recv_bytes() == b"before"
    with pytest.raises(OSError, match="end of file"):
        ends[1].recv_bytes()


@pytest.mark.parametrize("size", [5, 16 * LARGE])
def test_where_the_other_end_is_gone_who_reads_hears_of_it(ends, size: int) -> None:
    outgoing = Outgoing(ends[0])
    ends[1].close()
    for _ in range(3):
        outgoing.send(bytes(size))
    with pytest.raises((EOFError, OSError)):
        ends[0].recv_bytes()
    close(outgoing)
