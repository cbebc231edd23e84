"""The HTTP client against real servers: uvicorn for what is usual, bare sockets for what servers do wrong."""

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from strop.errors import ConfigError
from strop.net import client as http
from strop.net.client import Broken, Client, Lost, Unreachable
from strop.net.connection import MAX_HELD
from strop.net.server import HttpServer, serve

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module", params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return request.param()


# -- a server that behaves -------------------------------------------------------------------------------------------


async def echo(request: Request) -> Response:
    body = await request.body()
    return JSONResponse(
        {
            "method": request.method,
            "path": request.url.path,
            "query": request.url.query,
            "headers": dict(request.headers),
            "size": len(body),
            "peer": request.client.port if request.client else 0,
        },
        status_code=int(request.query_params.get("status", "200")),
    )


async def chunks(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        for number in range(100):
            yield b"%d," % number

    return StreamingResponse(parts())


async def empty(request: Request) -> Response:
    return Response(status_code=int(request.path_params["status"]), headers={"x-twice": "a"})


async def slow(request: Request) -> Response:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return Response()


async def die(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"half of it"
        raise OSError("the server dies in the middle")

    return StreamingResponse(parts(), headers={"content-length": "1000"})


APP = Starlette(
    routes=[
        Route("/echo", echo, methods=["GET", "POST", "PUT"]),
        Route("/base/echo", echo, methods=["POST"]),
        Route("/chunks", chunks),
        Route("/empty/{status}", empty),
        Route("/slow", slow),
        Route("/die", die),
    ]
)


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    server = await serve(APP)
    yield server
    await server.close()


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[Client]:
    client = Client(server.url, key="secret")
    yield client
    await client.close()


def told(answer: http.Response) -> dict:
    return json.loads(answer.body)


async def test_method_path_headers_and_body_arrive(client: Client) -> None:
    answer = await client.request("POST", "/echo?a=1", b"x" * 300_000, headers={"Trace_Id": "t", "x-odd": "\xe9"})
    said = told(answer)
    assert (answer.status, said["method"], said["query"], said["size"]) == (200, "POST", "a=1", 300_000)
    assert said["headers"]["authorization"] == "Bearer secret"
    assert said["headers"]["trace_id"] == "t"
    assert said["headers"]["x-odd"] == "\xe9"
    assert answer.headers["content-type"] == "application/json"


async def test_the_path_of_the_url_comes_first(server: HttpServer) -> None:
    client = Client(server.url + "/base/")
    said = told(await client.request("POST", "/echo"))
    assert said["path"] == "/base/echo"
    assert said["headers"]["content-length"] == "0"
    assert "authorization" not in said["headers"]
    await client.close()


async def test_an_error_status_is_an_answer(client: Client) -> None:
    assert (await client.request("GET", "/echo?status=503")).status == 503
    assert (await client.request("GET", "/nowhere")).status == 404


async def test_connections_are_kept_whatever_the_answer_looks_like(client: Client) -> None:
    peers = []
    for path in ("/chunks", "/empty/204", "/empty/304", "/empty/200", "/echo?status=500"):
        peers.append(told(await client.request("GET", "/echo"))["peer"])
        answer = await client.request("GET", path)
        if path == "/chunks":
            assert answer.body == b"".join(b"%d," % number for number in range(100))
        if path.startswith("/empty"):
            assert (answer.body, answer.headers["x-twice"]) == (b"", "a")
    assert len(set(peers)) == 1


async def test_head_has_headers_and_no_body(client: Client) -> None:
    for _ in range(2):
        answer = await client.request("HEAD", "/echo")
        assert (answer.status, answer.body) == (200, b"")
        assert int(answer.headers["content-length"]) > 0
    assert told(await client.request("GET", "/echo"))["method"] == "GET"


async def test_many_at_once_and_few_afterwards(client: Client) -> None:
    answers = await asyncio.gather(*(client.request("POST", f"/echo?n={n}", b"x" * n) for n in range(500)))
    assert [told(answer)["query"] for answer in answers] == [f"n={n}" for n in range(500)]
    assert [told(answer)["size"] for answer in answers] == list(range(500))
    peers = {told(await client.request("GET", "/echo"))["peer"] for _ in range(20)}
    assert len(peers) == 1  # last in, first out


async def test_a_slow_answer_times_out_and_its_connection_is_not_used_again(client: Client) -> None:
    before = told(await client.request("GET", "/echo"))["peer"]
    with pytest.raises(TimeoutError, match=r"http://127\.0\.0\.1.* GET /slow within 0\.2 s"):
        await client.request("GET", "/slow", timeout=0.2)
    assert told(await client.request("GET", "/echo"))["peer"] != before


async def test_a_cancelled_request_closes_its_connection() -> None:
    came, closed = asyncio.Event(), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        came.set()
        assert await reader.read() == b""
        closed.set()

    async with bare(talk) as client:
        request = asyncio.create_task(client.request("GET", "/"))
        await asyncio.wait_for(came.wait(), 10)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.wait_for(closed.wait(), 10)


async def test_a_server_that_dies_in_the_middle_of_an_answer(client: Client) -> None:
    with pytest.raises(Broken, match="in the middle"):
        await client.request("GET", "/die")
    assert (await client.request("GET", "/echo")).status == 200


async def test_closing_ends_requests_in_flight_and_refuses_new_ones(server: HttpServer) -> None:
    client = Client(server.url)
    request = asyncio.create_task(client.request("GET", "/slow"))
    await asyncio.sleep(0.1)
    await client.close()
    with pytest.raises(ConnectionError):
        await request
    with pytest.raises(Unreachable, match="closed"):
        await client.request("GET", "/echo")


async def test_one_request_costs_little(client: Client) -> None:
    """Near 0.1 ms on a quiet machine for the client alone; here server and client share a loop and a busy one."""
    await client.request("GET", "/empty/204")
    began = time.process_time()
    for _ in range(300):
        await client.request("GET", "/empty/204")
    assert (time.process_time() - began) / 300 < 0.005


# -- servers that do not ---------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def bare(talk: Talk, tls: ssl.SSLContext | None = None, **settings) -> AsyncIterator[Client]:
    """A client of a server that says just what `talk` says."""

    talks: set[asyncio.Task[None]] = set()

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await talk(reader, writer)
        finally:
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.create_task(closing(reader, writer)))

    server = await asyncio.start_server(come, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    client = Client(f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}", **settings)
    try:
        yield client
    finally:
        await client.close()
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        server.close()
        await server.wait_closed()


def saying(*parts: bytes, stay: bool = False) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if stay:
            await reader.read()

    return talk


async def test_an_answer_may_end_with_its_connection() -> None:
    async with bare(saying(b"HTTP/1.1 200 OK\r\n\r\nfirst,", b"second")) as client:
        assert (await client.request("POST", "/")).body == b"first,second"


async def test_answers_of_http_1_0() -> None:
    async with bare(saying(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", stay=True)) as client:
        assert (await client.request("GET", "/")).body == b"hi"
        assert (await client.request("GET", "/")).body == b"hi"  # on a connection of its own


async def test_interim_answers_are_skipped_and_trailers_dropped() -> None:
    parts = (
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\nA: 1\r\na: 2\r\nTransfer-",
        b"Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"0\r\nlate: 1\r\n\r\n",
    )
    async with bare(saying(*parts, stay=True)) as client:
        answer = await client.request("GET", "/")
        assert (answer.status, answer.body) == (200, b"abc")
        assert answer.headers == {"a": "1, 2", "transfer-encoding": "chunked"}


@pytest.mark.parametrize(
    "said",
    [
        b"nonsense",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-",
    ],
)
async def test_an_answer_that_is_cut_off_or_no_http_is_broken(said: bytes) -> None:
    async with bare(saying(said)) as client:
        with pytest.raises(Broken, match=client.url):
            await client.request("GET", "/", timeout=20)


async def test_an_answer_that_is_too_large_is_broken() -> None:
    async with bare(saying(b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 1000] * 50), max_answer=20_000) as client:
        with pytest.raises(Broken, match="larger than 20000 bytes"):
            await client.request("GET", "/")


async def test_a_second_answer_to_one_request_goes_to_nobody() -> None:
    one = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n"
    async with bare(saying(one + b"1" + one + b"2", stay=True)) as client:
        assert (await client.request("GET", "/")).body == b"1"
        assert (await client.request("GET", "/")).body == b"1"


async def test_an_answer_before_the_whole_request_was_read() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await asyncio.sleep(30)

    async with bare(talk) as client:
        for _ in range(2):
            answer = await client.request("POST", "/", b"x" * 50_000_000, timeout=20)
            assert answer.status == 413


def closing_after(answers: int, seen: list[bytes]) -> Talk:
    """Answers so many requests of a connection, and closes it when the next one has come."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(answers):
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        seen.append(await reader.readuntil(b"\r\n\r\n"))

    return talk


async def test_a_kept_connection_that_fails_is_tried_once_more_where_that_is_safe() -> None:
    seen: list[bytes] = []
    async with bare(closing_after(1, seen)) as client:
        for again in (False, True):
            await client.request("GET", "/", again=again)
        assert len(seen) == 3  # the second one was sent twice
        await client.request("POST", "/", again=True)
        with pytest.raises(Lost, match="before it answered"):
            await client.request("POST", "/")
        assert len(seen) == 6
        assert sum(request.startswith(b"POST") for request in seen) == 3


async def test_a_fresh_connection_that_fails_is_not_tried_again() -> None:
    seen: list[bytes] = []
    async with bare(closing_after(0, seen)) as client:
        with pytest.raises(Lost):
            await client.request("GET", "/")
    assert len(seen) == 1


async def without_connections(client: Client) -> None:
    async with asyncio.timeout(20):
        while client._open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_connection_closed_by_the_server_meanwhile_is_noticed() -> None:
    async with bare(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")) as client:
        for _ in range(3):
            assert (await client.request("POST", "/")).status == 200  # the connection is closed although it was kept
            await without_connections(client)


async def test_a_word_nobody_asked_for_closes_a_kept_connection() -> None:
    late = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"
    async with bare(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", late, stay=True)) as client:
        for _ in range(3):
            assert (await client.request("POST", "/")).status == 200
            await without_connections(client)


async def test_an_old_connection_is_not_used_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_IDLE", 0.05)
    before = told(await client.request("GET", "/echo"))["peer"]
    await asyncio.sleep(0.2)
    assert told(await client.request("GET", "/echo"))["peer"] != before


# -- addresses, TLS, what is refused ---------------------------------------------------------------------------------


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = Client(f"http://127.0.0.1:{taken.getsockname()[1]}/x")
        with pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:\d+/x cannot be reached: .*[Rr]efused"):
            await client.request("GET", "/")
    client = Client("http://nobody.invalid")
    with pytest.raises(Unreachable, match=r"nobody\.invalid"):
        await client.request("GET", "/")
    client = Client(f"http://{'a' * 70}.invalid")
    with pytest.raises(Unreachable, match="cannot be reached"):
        await client.request("GET", "/")


async def test_a_connection_that_does_not_come_about_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(2):  # nobody accepts them, so the next one waits
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        client = Client(f"http://127.0.0.1:{full.getsockname()[1]}", connect_timeout=0.2)
        with pytest.raises(Unreachable, match=r"took no connection within 0\.2 s"):
            await client.request("GET", "/")


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_ipv6_literals() -> None:
    try:
        server = await serve(APP, host="::1")
    except Exception as error:
        pytest.skip(f"no IPv6 here: {error}")
    client = Client(server.url)
    assert told(await client.request("GET", "/echo"))["headers"]["host"] == server.url.removeprefix("http://")
    await client.close()
    await server.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for localhost, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", path, "-out", path]
    subprocess.run([*made[:-1], path.with_suffix(".only"), *names], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + path.with_suffix(".only").read_bytes())
    return path


async def test_https(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    http.ssl_context.cache_clear()
    async with bare(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", stay=True), tls) as client:
        with pytest.raises(Unreachable, match="certificate"):
            await client.request("GET", "/")
        http.ssl_context.cache_clear()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert (await client.request("GET", "/")).body == b"hi"
    http.ssl_context.cache_clear()


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("localhost:8000", "http://HOST:PORT"),
        ("ftp://x", "http://HOST:PORT"),
        ("http://", "http://HOST:PORT"),
        ("http://x:port", "[Pp]ort"),
        ("http://x:99999", "Port"),
        ("http://[::1", "IPv6"),
        ("http://x/\r\nevil: 1", "percent-encode"),
        ("http://x/ä", "percent-encode"),
        ("http://me:pass@x", "leave out the user"),
        ("http://x/?a=1", "leave out everything"),
    ],
)
def test_an_address_that_cannot_be_is_refused_with_the_way_out(url: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        Client(url)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/a b", {}),
        ("GET", "/a\r\nevil: 1", {}),
        ("GET", "relative", {}),
        ("GET", "/ä", {}),
        ("GET", "/\x00", {}),
        ("G T", "/", {}),
        ("GET / HTTP/1.1\r\nx:", "/", {}),
        ("GET", "/", {"x": "a\r\nevil: 1"}),
        ("GET", "/", {"x": "a\nevil: 1"}),
        ("GET", "/", {"x": "\x00"}),
        ("GET", "/", {"x": "€"}),
        ("GET", "/", {"x\r\nevil": "1"}),
        ("GET", "/", {"x y": "1"}),
        ("GET", "/", {"": "1"}),
        ("POST", "/", {"Content-Length": "0"}),
        ("POST", "/", {"transfer-encoding": "chunked"}),
        ("POST", "/", {"Host": "elsewhere"}),
    ],
)
async def test_nothing_can_be_smuggled_into_a_request(method: str, path: str, headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"cannot be|leave it out"):
        await Client("http://127.0.0.1:9").request(method, path, headers=headers)


def test_nothing_can_be_smuggled_into_a_key() -> None:
    with pytest.raises(ValueError, match="authorization"):
        Client("http://127.0.0.1:9", key="a\r\nevil: 1")


# -- bodies that are taken as they come ------------------------------------------------------------------------------


async def test_pieces_come_as_they_are_sent() -> None:
    go = asyncio.Event()

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-a", b"b")]})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await go.wait()
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    server = await serve(app)
    client = Client(server.url)
    for _ in range(2):  # the second time on the same connection
        async with client.stream("POST", "/", b"{}") as answer:
            assert (answer.status, answer.headers["x-a"]) == (201, "b")
            pieces = aiter(answer)
            assert await anext(pieces) == b"one"
            go.set()
            assert await anext(pieces) == b"two"
            with pytest.raises(StopAsyncIteration):
                await anext(pieces)
        assert len(client._open) == len(client._idle) == 1
    await client.close()
    await server.close()


async def test_a_stream_that_is_left_closes_its_connection(client: Client) -> None:
    async with client.stream("GET", "/chunks") as answer:
        assert await anext(aiter(answer))
    assert not client._idle
    assert (await client.request("GET", "/chunks")).body.startswith(b"0,1,2")


async def test_a_stream_that_is_cut_off_says_so(client: Client) -> None:
    async with client.stream("GET", "/die") as answer:
        pieces = aiter(answer)
        assert await anext(pieces) == b"half of it"
        with pytest.raises(Broken, match="in the middle"):
            await anext(pieces)
    with pytest.raises(Broken):  # the same for whoever wants all of it
        await client.request("GET", "/die")


async def test_a_stream_that_does_not_begin_times_out(client: Client) -> None:
    with pytest.raises(TimeoutError, match="no answer to GET /slow"):
        async with client.stream("GET", "/slow", timeout=0.1):
            pass
    assert not client._open or all(connection._transport.is_closing() for connection in client._open)


async def test_a_stream_nobody_reads_is_not_read_ahead_for_ever() -> None:
    sent = 0

    async def app(scope, receive, send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(400):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            sent += 65536
        await send({"type": "http.response.body", "body": b""})

    server = await serve(app)
    client = Client(server.url, max_answer=1 << 20)  # of answers that are kept whole
    async with client.stream("GET", "/") as answer:
        pieces = aiter(answer)
        await anext(pieces)
        await asyncio.sleep(0.3)
        (connection,) = client._open
        assert connection._held < MAX_HELD + (1 << 20)
        assert sent < 400 * 65536
        rest = [piece async for piece in pieces]
        assert sum(map(len, rest)) > 300 * 65536
    await client.close()
    await server.close()
