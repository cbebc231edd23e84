"""A page in a browser can have its own name lead to 127.0.0.1: servers answer to names that are theirs only."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from strop.run import serve
from strop.run.serve import StoreServer
from strop.store.sqlite import SqliteStore
from strop.tools.search.app import serve_index as search_served
from strop.tools.search.index import Index, build


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StoreServer]:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    server = await serve.serve_store(store, key="k", hosts=("strop.example.com", "other"))
    yield server
    await server.close()
    await store.close()


async def ask(url: str, host: str, path: str = "/health") -> tuple[int, dict]:
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    writer.write(
        f"GET {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer k\r\nconnection: close\r\n\r\n".encode()
    )
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8640", "localhost", "LOCALHOST:1", "my.localhost", "10.0.0.7:8640", "[::1]:8640"),
        *("strop.example.com", "Strop.Example.com:443", "strop.example.com.", "other", socket.gethostname()),
    ],
)
async def test_addresses_and_names_of_its_own_are_answered(server: StoreServer, host: str) -> None:
    assert (await ask(server.url, host))[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example.com", "evil.example.com:8640", "127.0.0.1.evil.example.com", "localhost.evil.com", "a b", "["],
)
@pytest.mark.parametrize("path", ["/health", "/address", "/v1/rollouts", "/r/a/1"])
async def test_other_names_are_refused_everywhere(server: StoreServer, host: str, path: str) -> None:
    status, said = await ask(server.url, host, path)
    assert status == 421
    assert "is not a name of this server" in said["error"]["message"]
    assert "--hosts" in said["error"]["message"]


async def test_a_search_server_does_the_same(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "Paris\\nis a city"}\n')
    build(tmp_path / "corpus.jsonl", tmp_path / "index", progress=lambda *_: None)
    async with search_served(Index.open(tmp_path / "index")) as server:
        assert (await ask(server.url, "localhost"))[0] == 200
        assert (await ask(server.url, "evil.example.com"))[0] == 421


async def test_whoever_asks_for_the_address_is_told_no_name_of_somebody_elses(
    server: StoreServer, tmp_path: Path
) -> None:
    with server.addressed.announce(server.url, "", tmp_path):
        assert (await ask(server.url, "10.0.0.7:8640", "/address"))[1]["url"] == "http://10.0.0.7:8640"
        assert "url" not in (await ask(server.url, "evil.example.com", "/address"))[1]
