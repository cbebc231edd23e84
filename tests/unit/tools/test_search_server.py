"""The search server, asked over HTTP as Search-R1's agents ask, and the tools that agents call."""

import asyncio
import json
import socketserver
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.cli.tool_functions import load
from strop.net.client import Client
from strop.tools.search import Search
from strop.tools.search.app import serve_index
from strop.tools.search.batches import Batches
from strop.tools.search.index import Index, ScoredPassage
from tests.unit.tools.test_search_index import TOWNS, made


class Asked:
    """A server of a small index."""

    def __init__(self, url: str, index: Index) -> None:
        self.url, self.index, self._client = url, index, Client(url)

    async def __call__(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self._client.request(method, path, sent, timeout=20)
        return answer.status, json.loads(answer.body or b"null")

    async def close(self) -> None:
        await self._client.close()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    long = {"id": "long", "title": "Long", "text": "needle " * 1_500_000}
    return made(tmp_path_factory.mktemp("search"), [*TOWNS, long])


@pytest.fixture
async def asked(index: Index) -> AsyncIterator[Asked]:
    async with serve_index(index) as server:
        asked = Asked(server.url, index)
        yield asked
        await asked.close()


async def test_answers_have_search_r1_s_shape(asked: Asked) -> None:
    status, said = await asked("/retrieve", {"queries": ["Einstein", "Rhine"], "topk": 2, "return_scores": True})
    assert status == 200
    ((first,), (second,)) = said["result"]
    assert first["document"]["contents"] == '"Ulm"\nAlbert Einstein was born in Ulm.'
    assert second["document"]["id"] == "3"
    assert first["score"] > 0
    _, plain = await asked("/retrieve", {"queries": ["Rhine"], "topk": None})
    assert plain["result"] == [[second["document"]]]
    assert (await asked("/retrieve", {"queries": []}))[1] == {"result": []}
    assert len((await asked("/retrieve", {"queries": ["the lies in on was are"], "topk": 4}))[1]["result"][0]) <= 4
    status, health = await asked("/health", b"", "GET")
    assert (status, health) == (200, {"status": "ok", "passages": 6, "by": "words"})


async def test_pages_are_found_by_title_id_and_url(asked: Asked) -> None:
    ulm = {"title": "Ulm", "text": f"{TOWNS[0]['text']}\n{TOWNS[1]['text']}", "ids": ["1", "2"]}
    for body in (
        {"titles": ["ulm", "Bern"]},
        {"ids": [2, "9"]},
        {"urls": ["https://example.org/wiki/Ulm", "https://en.wikipedia.org/wiki/Bern"]},
        {"urls": ["https://en.wikipedia.org/wiki/Ulm", "no url"]},
    ):
        assert await asked("/access", body) == (200, {"result": [ulm, None]})


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("/retrieve", b"{", 400, "not JSON"),
        ("/retrieve", b'{"queries": ["\xff"]}', 400, "not JSON"),
        ("/retrieve", {}, 400, "missing required field `queries`"),
        ("/retrieve", {"queries": "Ulm"}, 400, "Expected `array`, got `str`"),
        ("/retrieve", {"queries": ["Ulm"], "topk": 0}, 400, "topk is how many"),
        ("/retrieve", {"queries": ["Ulm"], "topk": 1001}, 400, "from 1 to 1000"),
        ("/retrieve", {"queries": ["Ulm"] * 1001}, 400, "1001 queries in one request"),
        ("/retrieve", {"queries": ["x" * (5 << 20)]}, 413, "larger than 4 MiB"),
        ("/retrieve", b"[" * 100_000, 400, "Expected `object`"),
        ("/access", {}, 400, "say which pages"),
        ("/access", {"ids": ["1"], "titles": ["Ulm"]}, 400, "one of them"),
        ("/access", {"titles": [1]}, 400, "Expected `str`"),
        ("/search", {}, 404, "ask /retrieve"),
    ],
)
async def test_a_bad_request_is_told_why(asked: Asked, path: str, body: Any, status: int, why: str) -> None:
    got, said = await asked(path, body)
    assert got == status
    assert why in said["error"]["message"]
    assert (await asked("/retrieve", b"", "GET"))[0] == 405


async def test_many_at_once_get_what_each_would_get_alone(asked: Asked) -> None:
    queries = [f"{a} {b}" for a in ("Ulm", "Rhine", "tower", "nothing") for b in ("Danube", "band", "Basel", "")]

    async def one(number: int) -> None:
        some = [queries[(number + n) % len(queries)] for n in range(number % 5 + 1)]
        topk = number % 3 + 1
        status, said = await asked("/retrieve", {"queries": some, "topk": topk, "return_scores": True})
        assert status == 200
        alone = asked.index.search(some, topk)
        assert [[(d["document"]["id"], d["score"]) for d in found] for found in said["result"]] == [
            [(found.passage.id, pytest.approx(found.score)) for found in per_query] for per_query in alone
        ]

    await asyncio.gather(*(one(number) for number in range(200)))


async def test_a_search_that_takes_long_holds_nobody_up(tmp_path: Path) -> None:
    class Slow(Index):
        def search(self, queries: Sequence[str], topk: int) -> list[list[ScoredPassage]]:
            time.sleep(0.7)
            return super().search(queries, topk)

    index = made(tmp_path, TOWNS)
    async with serve_index(Slow(tmp_path / "index", index.about)) as server:
        asked = Asked(server.url, index)
        waiting = asyncio.create_task(asked("/retrieve", {"queries": ["Ulm"]}))
        await asyncio.sleep(0.1)
        began = time.perf_counter()
        assert (await asked("/health", b"", "GET"))[0] == 200
        assert time.perf_counter() - began < 0.4
        assert not waiting.done()
        assert (await waiting)[0] == 200
        await asked.close()


async def test_what_waits_goes_together() -> None:
    seen: list[tuple[list[str], int]] = []

    def search(queries: Sequence[str], topk: int) -> list[list[ScoredPassage]]:
        seen.append((list(queries), topk))
        time.sleep(0.1)
        if "bad" in queries:
            raise ValueError("a bad one")
        return [[ScoredPassage(query, float(topk))] for query in queries]  # type: ignore[arg-type]

    batches = Batches(search, threads=1)
    asked = [(["a"], 3), (["b", "c"], 3), (["d"], 3), (["e"] * 64, 3), (["f"], 9)]
    answers = await asyncio.gather(*(batches.ask(queries, topk) for queries, topk in asked))
    assert seen == [(["a"], 3), (["b", "c", "d"], 3), (["e"] * 64, 3), (["f"], 9)]
    for (queries, _), answer in zip(asked, answers, strict=True):
        assert [found[0].document for found in answer] == queries
    assert batches.waiting == 0
    left = asyncio.create_task(batches.ask(["gone"], 3))
    await asyncio.sleep(0.01)
    left.cancel()
    first, second = await asyncio.gather(batches.ask(["bad"], 3), batches.ask(["good"], 1), return_exceptions=True)
    assert isinstance(first, ValueError)
    assert isinstance(second, list)
    batches.close()


# -- the tools ---------------------------------------------------------------------------------------------------------


async def test_tools_speak_to_models(asked: Asked) -> None:
    tools = Search(asked.url, topk=2, longest=60)

    def talk() -> None:
        found = tools.search("lies on").splitlines()
        assert [line.split(")")[0] for line in found] == ["Doc 1 (Title: Basel", "Doc 2 (Title: Ulm"]
        assert found[1] == f"Doc 2 (Title: Ulm) {str(TOWNS[0]['text'])[:60]} ..."
        assert tools.search("莱茵河") == f"Doc 1 {TOWNS[3]['contents']}"
        assert tools.search("xylophone") == "Nothing was found: search for other words."
        assert tools.access("basel").startswith("(Title: Basel) Basel lies on the Rhine")
        assert tools.access("2").startswith("(Title: Ulm) Ulm lies")
        assert tools.access("4") == TOWNS[3]["contents"]
        assert tools.access("Ulm \ud83d").startswith("There is no page")
        assert len(tools.access("Long")) < 100  # of 10 MB
        assert tools.access("Bern") == "There is no page 'Bern': search first, and take a title from what is found."
        assert tools.search("x" * (5 << 20)).startswith("The search server cannot be used now")

    await asyncio.to_thread(talk)


async def test_tools_are_functions_that_chat_can_offer(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "search_tools.py").write_text(
        f"from strop.tools.search import Search\nsearch = Search({asked.url!r}).search\n"
    )
    tools = load([f"{tmp_path}/search_tools.py:search"])
    (schema,) = tools.schemas
    assert schema["function"]["name"] == "search"
    assert schema["function"]["parameters"]["required"] == ["query"]
    assert "Einstein" in (await tools.run("search", '{"query": "Einstein"}')).text


@pytest.mark.parametrize(
    ("answer", "why", "times"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "cannot be read", 1),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{", "cannot be used now", 2),
        (b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", "it answered 500", 1),
        (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", "it answered 503", 2),
        (b"nonsense\r\n\r\n", "cannot be used now", 2),
        (b"", "closed", 2),
        (None, "no answer within 0.3 s", 2),
    ],
)
def test_a_server_that_fails_is_an_observation(answer: bytes | None, why: str, times: int) -> None:
    requests: list[bytes] = []
    over = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            requests.append(self.request.recv(1 << 16))
            if answer is None:
                over.wait(10)
            else:
                self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        tools = Search(f"http://127.0.0.1:{server.server_address[1]}", timeout=0.3, retries=1)
        said = [tools.search("anything"), tools.access("anything")]
        over.set()
        server.shutdown()
        thread.join()
    for sentence in said:
        assert why in sentence
        assert sentence.endswith(".")
        assert "\n" not in sentence
    assert len(requests) == 2 * times


def test_an_address_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(Exception, match="is not the address"):
        Search("127.0.0.1:8000")
