"""Processes on other machines connect, and strangers do not."""

import socket
import time
from multiprocessing import AuthenticationError

import pytest

from strop.cluster.listener import NUMBER, ChildListener, connect
from strop.errors import LearnerDied, PlaceError


@pytest.fixture
def listener():
    listener = ChildListener("127.0.0.1", 0)
    yield listener
    listener.close()


def test_who_has_the_key_is_connected(listener) -> None:
    (one, first), (two, second) = listener.expect(), listener.expect()
    with connect(listener.address, two, second) as theirs, connect(listener.address, one, first):
        connection = listener.take(two, 5)
        connection.send({"to": "two"})
        assert b"two" in theirs.recv(1000)
        connection.close()
        listener.take(one, 5).close()


def test_a_wrong_key_is_hung_up_on_and_the_right_one_still_works(listener) -> None:
    number, key = listener.expect()
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        connect(listener.address, number, b"x" * 32)
    connect(listener.address, number, key).close()
    listener.take(number, 5).close()


def test_a_key_opens_one_connection(listener) -> None:
    number, key = listener.expect()
    connect(listener.address, number, key).close()
    listener.take(number, 5).close()
    with pytest.raises((OSError, EOFError)):
        connect(listener.address, number, key)


def test_strangers_do_not_keep_others_waiting(listener) -> None:
    number, key = listener.expect()
    silent = [socket.create_connection(listener.address) for _ in range(5)]
    silent[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    silent[1].sendall(b"\0\0\0\x08" + NUMBER.pack(number))
    began = time.monotonic()
    connect(listener.address, number, key).close()
    listener.take(number, 5).close()
    assert time.monotonic() - began < 5
    for sock in silent:
        sock.close()


def test_who_does_not_come_is_not_waited_for(listener) -> None:
    number, _ = listener.expect()
    with pytest.raises(LearnerDied, match=r"did not connect within 0\.1 s"):
        listener.take(number, 0.1)


def test_a_port_that_is_taken_is_one_sentence(listener) -> None:
    with pytest.raises(PlaceError, match=r"cannot listen on .* Fix: set cluster\.port to another"):
        ChildListener(*listener.address)
