"""Agents' clients on the wire: kept-alive connections, and everything that can go wrong with them."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from strop.agent.openai_clients import make_async_client, make_client

ANSWER: dict[str, Any] = {
    "id": "turn-1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
}
CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class Server:
    """Answers by what the request's `user` says, one thread per connection."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/v1"
        self.requests: list[tuple[int, str, dict[bytes, bytes]]] = []
        self.connections = 0
        self.go_on = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listening.accept()
                self.connections += 1
                threading.Thread(target=self._talk, args=(connection, self.connections), daemon=True).start()

    def _talk(self, connection: socket.socket, number: int) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
            while first := lines.readline():
                head: dict[bytes, bytes] = {}
                while (line := lines.readline().strip()) != b"":
                    name, _, value = line.partition(b": ")
                    head[name.lower()] = value
                asked = json.loads(lines.read(int(head[b"content-length"])))
                self.requests.append((number, first.decode().split()[1], head))
                if not self._answer(connection, asked):
                    return

    def _answer(self, connection: socket.socket, asked: dict[str, Any]) -> bool:
        """Whether the connection is kept."""
        body = json.dumps(ANSWER).encode()
        whole = OK + b"Content-Length: %d\r\n\r\n" % len(body) + body
        match asked["user"].partition(" ")[0]:
            case "hello" | "echo":
                said = json.loads(body)
                said["choices"][0]["message"]["content"] = asked["user"]
                body = json.dumps(said).encode()
                connection.sendall(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            case "chunked":
                connection.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n")
                for at in range(0, len(body), 10):
                    piece = body[at : at + 10]
                    connection.sendall(b"%x\r\n" % len(piece) + piece + b"\r\n")
                connection.sendall(b"0\r\n\r\n")
            case "continue":
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" + whole)
            case "no-length":
                connection.sendall(OK + b"Connection: close\r\n\r\n" + body)
                return False
            case "last":
                connection.sendall(whole.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"))
                return False
            case "cut":
                connection.sendall(whole[:-5])
                return False
            case "hang-up":
                return False
            case "nonsense":
                connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")
                return False
            case "refuse":
                said = b'{"error": {"message": "not with me"}}'
                connection.sendall(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(said) + said)
            case "slow":
                self.go_on.wait(60)
                connection.sendall(whole)
            case "stream":
                connection.sendall(OK.replace(b"application/json", b"text/event-stream") + b"\r\n")
                for word in ("one", "two"):
                    choice = {"index": 0, "delta": {"content": word}}
                    connection.sendall(b"data: " + json.dumps(CHUNK | {"choices": [choice]}).encode() + b"\n\n")
                    self.go_on.wait(60)
                connection.sendall(b"data: [DONE]\n\n")
                return False
        return True


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.go_on.set()
    server.listening.close()


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, server: Server) -> Iterator[Any]:
    """Ask the server, with either client; all in one event loop."""
    given: dict[str, Any] = {"model": "m", "messages": []}
    if request.param == "sync":
        client = make_client(server.url, "key")

        def ask(user: str, **options: Any) -> Any:
            options.setdefault("max_retries", 0)
            answer = client.with_options(**options).chat.completions.create(**given, user=user)
            return answer.choices[0].message.content

        yield ask
        client.close()
        return
    with asyncio.Runner() as runner:

        async def make() -> openai.AsyncOpenAI:
            return make_async_client(server.url, "key")

        shared = runner.run(make())

        async def ask_async(user: str, **options: Any) -> Any:
            options.setdefault("max_retries", 0)
            client = shared.with_options(**options)
            return (await client.chat.completions.create(**given, user=user)).choices[0].message.content

        yield lambda user, **options: runner.run(ask_async(user, **options))
        runner.run(shared.close())


def test_one_connection_for_all_requests(ask: Any, server: Server):
    assert [ask(f"hello {n}") for n in range(3)] == ["hello 0", "hello 1", "hello 2"]
    assert ask("chunked") == ask("continue") == "hi"
    assert server.connections == 1
    _, path, head = server.requests[-1]
    assert path == "/v1/chat/completions"
    assert head[b"authorization"] == b"Bearer key"
    assert head[b"host"].startswith(b"127.0.0.1:")


@pytest.mark.parametrize("last", ["last", "no-length"])
def test_a_connection_that_the_server_ends_is_replaced(ask: Any, server: Server, last: str):
    assert [ask("hello"), ask(last), ask("hello")] == ["hello", "hi", "hello"]
    assert server.connections == 2


def test_a_connection_that_died_while_it_was_idle_is_not_used(ask: Any, server: Server):
    assert ask("hello") == "hello"
    assert ask("last") == "hi"
    time.sleep(0.05)  # the end of the connection may come a moment after the answer
    assert ask("hello") == "hello"


@pytest.mark.parametrize("how", ["cut", "hang-up", "nonsense"])
def test_what_is_not_an_answer_is_an_error_of_the_connection(ask: Any, server: Server, how: str):
    with pytest.raises(openai.APIConnectionError):
        ask(how)
    assert ask("hello") == "hello"


def test_the_package_tries_again_as_it_does_without_us(ask: Any, server: Server):
    with pytest.raises(openai.APIConnectionError):
        ask("hang-up", max_retries=1)
    assert len(server.requests) == 2


def test_refusals_are_the_packages_own(ask: Any, server: Server):
    with pytest.raises(openai.BadRequestError, match="not with me"):
        ask("refuse")
    assert ask("hello") == "hello"
    assert server.connections == 1


def test_an_answer_that_does_not_come_in_time(ask: Any, server: Server):
    with pytest.raises(openai.APITimeoutError):
        ask("slow", timeout=0.2)
    server.go_on.set()
    assert ask("hello") == "hello"  # not what came too late


def test_nobody_there(ask: Any, server: Server):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(openai.APIConnectionError):
        ask("hello", base_url=f"http://127.0.0.1:{port}/v1")


def test_other_servers_are_reached_by_the_packages_own_way(ask: Any, server: Server):
    other = Server()
    assert ask("hello", base_url=other.url) == "hello"
    assert (len(server.requests), len(other.requests)) == (0, 1)
    other.listening.close()


def test_streams_come_as_they_are_sent(server: Server):
    client = make_client(server.url, "key")
    with client.chat.completions.create(model="m", messages=[], user="stream", stream=True) as stream:
        words = (chunk.choices[0].delta.content for chunk in stream)
        assert next(words) == "one"  # the server waits with the second
        server.go_on.set()
        assert list(words) == ["two"]


async def test_streams_come_as_they_are_sent_in_a_loop(server: Server):
    async with make_async_client(server.url, "key") as client:
        stream = await client.chat.completions.create(model="m", messages=[], user="stream", stream=True)
        words = aiter(stream)
        assert (await anext(words)).choices[0].delta.content == "one"
        server.go_on.set()
        assert [chunk.choices[0].delta.content async for chunk in words] == ["two"]


def test_a_stream_that_is_left_gives_nothing_to_the_next_request(server: Server):
    client = make_client(server.url, "key")
    with client.chat.completions.create(model="m", messages=[], user="stream", stream=True) as stream:
        next(iter(stream))
    server.go_on.set()
    answer = client.chat.completions.create(model="m", messages=[], user="hello")
    assert answer.choices[0].message.content == "hello"
    assert server.connections == 2


def test_threads_get_their_own_answers(server: Server):
    def ask(number: int) -> Any:
        client = make_client(server.url, f"key-{number}")
        answer = client.chat.completions.create(model="m", messages=[], user=f"echo {number}")
        return answer.choices[0].message.content

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(200))) == [f"echo {n}" for n in range(200)]
    assert server.connections <= 8


async def test_clients_of_a_loop_share_connections_until_the_last_is_closed(server: Server):
    async def ask(client: openai.AsyncOpenAI, number: int) -> Any:
        answer = await client.chat.completions.create(model="m", messages=[], user=f"echo {number}")
        return answer.choices[0].message.content

    first, second = make_async_client(server.url, "a"), make_async_client(server.url, "b")
    assert [await ask(first, 1), await ask(second, 2)] == ["echo 1", "echo 2"]
    await first.close()
    assert await ask(second, 3) == "echo 3"
    assert server.connections == 1
    await second.close()
    assert second.is_closed()
    third = make_async_client(server.url, "c")
    assert await ask(third, 4) == "echo 4"
    assert server.connections == 2
    await third.close()
    many = [make_async_client(server.url, str(n)) for n in range(50)]
    said = await asyncio.gather(*(ask(client, n) for n, client in enumerate(many)))
    assert said == [f"echo {n}" for n in range(50)]
    await asyncio.gather(*(client.close() for client in many))


async def test_a_copy_that_is_closed_leaves_the_others_alone(server: Server):
    one, other = make_async_client(server.url, "one"), make_async_client(server.url, "other")
    async with one.with_options(timeout=5):
        pass
    assert not other.is_closed()
    answer = await other.chat.completions.create(model="m", messages=[], user="hello")
    assert answer.choices[0].message.content == "hello"
    await one.close()
    await other.close()
    assert other.is_closed()
