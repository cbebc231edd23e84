"""The store's addresses as any HTTP client sees them: keys, answers, refusals, long polls."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from strop.net.client import Client, Response
from strop.run.serve import StoreServer, open_store_server
from strop.store.server import keys
from strop.store.server.keys import AttemptKeys
from strop.store.sqlite import SqliteStore
from strop.types import Attempt, Rollout, Task


class Stand:
    """A served store, the store behind it, and a plain client."""

    def __init__(self, behind: SqliteStore, server: StoreServer) -> None:
        self.behind, self.server = behind, server
        self.clients: list[Client] = []

    def client(self, key: str | None) -> Client:
        self.clients.append(Client(self.server.url, key=key))
        return self.clients[-1]

    async def ask(self, method: str, path: str, body: Any = b"", *, key: str | None = "run-key") -> tuple[int, Any]:
        """The status and the JSON of the answer."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.client(key).request(method, path, sent, timeout=60)
        assert answer.headers["content-type"] == "application/json"
        return answer.status, json.loads(answer.body)

    async def refused(self, method: str, path: str, body: Any = b"", *, key: str | None = "run-key") -> tuple[int, str]:
        """The status and the code of a refusal; each has a sentence."""
        status, answer = await self.ask(method, path, body, key=key)
        assert set(answer["error"]) == {"message", "type", "code"}
        assert len(answer["error"]["message"].split()) > 3
        return status, answer["error"]["code"]

    async def attempt(self, id: str) -> Attempt:
        await self.behind.enqueue([Rollout(id=id, group=id, member=0, task=Task(id="t"), created=1.0)])
        (lease,) = await self.behind.lease("w", seconds=600)
        return lease.attempt

    async def waiters(self, num: int) -> None:
        """Returns once so many requests wait for something to be queued."""
        async with asyncio.timeout(30):
            while len(self.behind._queued._waiting) != num:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    behind = await SqliteStore.open(tmp_path / "store.sqlite")
    async with open_store_server(behind, "run-key") as server:
        stand = Stand(behind, server)
        yield stand
        for client in stand.clients:
            await client.close()
    await behind.close()


# -- verbs -------------------------------------------------------------------------------------------------------------


async def test_a_rollouts_way_with_nothing_but_curl(stand: Stand) -> None:
    new = [{"id": "a", "task": {"id": "t"}}]
    assert await stand.ask("POST", "/v1/rollouts", new) == (200, {"queued": 1, "recorded": 1})
    assert await stand.ask("POST", "/v1/rollouts", new) == (200, {"queued": 0, "recorded": 1})
    status, (lease,) = await stand.ask("POST", "/v1/lease", {"runner": "w", "seconds": 30, "token": "x"})
    assert (status, lease["rollout"]["group"], lease["rollout"]["status"]) == (200, "a", "running")
    assert lease["rollout"]["created"] > 1e9
    assert await stand.ask("POST", "/v1/lease", {"runner": "w", "seconds": 30, "token": "x"}) == (200, [lease])
    event = {"rollout": "a", "attempt": 1, "kind": "reward", "data": {"name": "style", "value": 0.5}}
    assert await stand.ask("POST", "/v1/events", [event]) == (200, {"recorded": 1})
    over = {"over": [["a", 2]]}
    assert await stand.ask("POST", "/v1/heartbeat", {"attempts": [["a", 1], ["a", 2]], "seconds": 9}) == (200, over)
    status, done = await stand.ask("POST", "/v1/rollouts/a/attempts/1/finish", {"rewards": [{"value": 1}]})
    assert (status, done["status"], [r["value"] for r in done["rewards"]]) == (200, "succeeded", [0.5, 1.0])
    assert await stand.ask("GET", "/v1/rollouts/a") == (200, done)
    assert await stand.ask("GET", "/v1/rollouts?status=succeeded&limit=5") == (200, [done])
    assert await stand.ask("GET", "/v1/rollouts?group=null") == (200, [])
    assert (await stand.ask("GET", "/v1/stats"))[1]["events"] == 1


async def test_attempts_are_shown_without_their_keys(stand: Stand) -> None:
    attempt = await stand.attempt("a")
    answer = await stand.client("run-key").request("GET", "/v1/rollouts/a/attempts")
    (shown,) = json.loads(answer.body)
    assert (shown["number"], shown["runner"], "key" in shown) == (1, "w", False)
    assert attempt.key.encode() not in answer.body


async def test_what_wants_no_key(stand: Stand) -> None:
    assert (await stand.ask("GET", "/health", key=None))[1]["status"] == "ok"
    assert (await stand.ask("GET", "/", key=None))[1]["description"] == "/openapi.json"
    described = (await stand.ask("GET", "/openapi.json", key=None))[1]
    assert described["openapi"].startswith("3.1")
    for path, methods in described["paths"].items():
        for method, told in methods.items():
            assert told["description"], (method, path)
            assert all(parameter["description"] for parameter in told.get("parameters", ())), (method, path)
            assert path.startswith(("/v1/", "/r/")) == ("security" in told)


# -- keys --------------------------------------------------------------------------------------------------------------


async def test_the_run_key_opens_everything_and_nothing_else_does(stand: Stand) -> None:
    attempt = await stand.attempt("a")
    own, events = "/r/a/1", "/r/a/1/events"
    said = {"kind": "message", "data": {}}
    for key in (None, "", "wrong", "run-keyx", "run-ke", "\xe9"):
        for method, path, body in (("GET", "/v1/stats", b""), ("POST", "/v1/lease", b"{"), ("GET", own, b"")):
            assert await stand.refused(method, path, body, key=key) == (401, "invalid_api_key"), (key, path)
        assert await stand.refused("POST", events, said, key=key) == (401, "invalid_api_key")
    for key in ("run-key", attempt.key):
        assert (await stand.ask("GET", own, key=key))[1]["id"] == "a"
        assert await stand.ask("POST", events, said, key=key) == (200, {"recorded": 1})
    assert (await stand.ask("GET", "/v1/stats"))[0] == 200


async def test_an_attempts_key_opens_that_attempt_only(stand: Stand) -> None:
    mine, other = await stand.attempt("a"), await stand.attempt("b")
    assert await stand.ask("POST", "/r/a/1/events", {"kind": "span"}, key=mine.key) == (200, {"recorded": 1})
    for path in (
        "/r/a/1/events",
        "/r/a/2/events",
        "/r/nobody/1/events",
        "/r/a/x/events",
        "/r/a/" + "9" * 50 + "/events",
    ):
        assert (await stand.refused("POST", path, {"kind": "span"}, key=other.key))[0] == 401
    assert await stand.refused("GET", "/v1/rollouts/a", key=mine.key) == (403, "attempt_key")
    body = {"runner": "me", "seconds": 1}
    assert await stand.refused("POST", "/v1/lease", body, key=mine.key) == (403, "attempt_key")
    assert [event.kind for event in await stand.behind.events("a")] == ["span"]
    assert await stand.behind.events("b") == []


async def test_an_event_costs_one_call_of_the_store(stand: Stand) -> None:
    """Keys are kept, but not for ever: those used last stay."""
    attempt = await stand.attempt("a")
    known = AttemptKeys(stand.behind)
    assert await known.open("a", 1, attempt.key.encode())
    await stand.behind.close()  # from here on nothing can be looked up
    assert await known.open("a", 1, attempt.key.encode())
    assert not await known.open("a", 1, b"wrong")
    assert not await known.open("a", 1, b"")
    for n in range(keys.CACHED + 10):
        known.add(Attempt(rollout="b", number=n, runner="w", key="k", started=0.0, lease_until=0.0))
        assert n > 5 or await known.open("a", 1, attempt.key.encode())
    assert len(known._keys) == keys.CACHED
    assert ("a", 1) not in known._keys


async def test_a_key_that_was_never_told_opens_nothing(stand: Stand) -> None:
    known = AttemptKeys(stand.behind)
    known.add(Attempt(rollout="a", number=1, runner="w", key="", started=0.0, lease_until=0.0))
    assert not await known.open("a", 1, b"")


# -- what an attempt says ----------------------------------------------------------------------------------------------


async def test_events_of_an_attempt(stand: Stand) -> None:
    attempt = await stand.attempt("a")
    reward = {"kind": "reward", "data": {"name": "format", "value": 0.5}, "id": "e1"}

    async def say(body: Any) -> tuple[int, Any]:
        return await stand.ask("POST", "/r/a/1/events", body, key=attempt.key)

    assert await say(reward) == (200, {"recorded": 1})
    assert await say(reward) == (200, {"recorded": 1})  # the same id: it was sent again
    assert await say([{"kind": "message", "data": {"text": "hi"}}, {"kind": "span"}]) == (200, {"recorded": 2})
    assert [event.kind for event in await stand.behind.events("a")] == ["reward", "message", "span"]
    for bad, code in (
        ({"kind": "reward", "data": {"value": "much"}}, "bad_reward"),
        ({"kind": "reward", "data": {"value": None}}, "bad_reward"),
        ({"kind": "reward", "data": {"value": 1e39}}, "bad_reward"),
        ({"kind": "secret", "data": {}}, "malformed"),
        ({"kind": "message", "rollout": "b"}, "malformed"),
        (b"{", "malformed"),
        (b'{"kind": "message", "data": {"a": "\xff"}}', "malformed"),
        (b'{"kind": "message", "data": {"a": ' + b"[" * 5000, "malformed"),
    ):
        assert await stand.refused("POST", "/r/a/1/events", bad, key=attempt.key) == (400, code)
    big = b'{"kind": "message", "data": {"a": "' + b"x" * (17 << 20) + b'"}}'
    assert await stand.refused("POST", "/r/a/1/events", big, key=attempt.key) == (413, "request_too_large")
    await stand.behind.finish("a", 1)
    assert await say(reward) == (200, {"recorded": 1})  # it was recorded while there was time
    late = json.dumps(reward | {"id": "e2"}).encode()
    for _ in range(2):
        answer = await stand.client(attempt.key).request("POST", "/r/a/1/events", late)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (409, "attempt_over")
        assert answer.headers["x-should-retry"] == "false"
    assert (await stand.ask("GET", "/r/a/1", key=attempt.key))[1]["status"] == "succeeded"


# -- bad input ---------------------------------------------------------------------------------------------------------

LEASE = {"runner": "w", "seconds": 30}
STEP = {"lineage": 1, "number": 1, "rollouts": [], "metrics": {}, "time": 1.0}
DEEP = b"[" * 200 + b"]" * 200


@pytest.mark.parametrize(
    ("method", "path", "body", "words"),
    [
        ("POST", "/v1/lease", b"", "JSON"),
        ("POST", "/v1/lease", b"{", "JSON"),
        ("POST", "/v1/lease", b"runner=w&seconds=3", "JSON"),
        ("POST", "/v1/lease", b'{"runner": "\xff", "seconds": 1}', "utf-8"),
        ("POST", "/v1/lease", b'{"runner": "\\ud800", "seconds": 1}', "surrogate"),
        ("POST", "/v1/lease", [], "object"),
        ("POST", "/v1/lease", {"runner": "w"}, "seconds"),
        ("POST", "/v1/lease", LEASE | {"secnds": 3}, "secnds"),
        ("POST", "/v1/lease", LEASE | {"seconds": 0}, "$.seconds"),
        ("POST", "/v1/lease", LEASE | {"seconds": 3601}, "$.seconds"),
        ("POST", "/v1/lease", LEASE | {"seconds": "1"}, "$.seconds"),
        ("POST", "/v1/lease", b'{"runner": "w", "seconds": NaN}', "JSON"),
        ("POST", "/v1/lease", b'{"runner": "w", "seconds": 1e999}', "out of range"),
        ("POST", "/v1/lease", LEASE | {"wait": 61}, "$.wait"),
        ("POST", "/v1/lease", LEASE | {"wait": -1}, "$.wait"),
        ("POST", "/v1/lease", LEASE | {"count": 0}, "$.count"),
        ("POST", "/v1/lease", LEASE | {"count": 1001}, "$.count"),
        ("POST", "/v1/lease", LEASE | {"count": 1.5}, "$.count"),
        ("POST", "/v1/rollouts", {"id": "a"}, "array"),
        ("POST", "/v1/rollouts", [{"id": "a"}], "task"),
        ("POST", "/v1/rollouts", [{"id": "a", "task": {"id": "t"}, "member": 2**63}], "member"),
        ("POST", "/v1/rollouts", [{"id": "a", "task": {"id": "t"}, "max_attempts": 3}], "max_attempts"),
        *(
            ("POST", "/v1/rollouts", [{"id": "b", "task": {"id": "t"}, name: value}], name)  # the store's to say
            for name, value in {
                "status": "running",
                "attempts": 2**63 - 1,
                "due": 1e308,
                "ended": 1.0,
                "cause": "timeout",
                "detail": "x",
                "rewards": [{"value": 1.0}],
            }.items()
        ),
        ("POST", "/v1/rollouts", b'[{"id": "a", "task": {"id": "t", "data": ' + DEEP + b"}}]", "nested too deeply"),
        ("POST", "/v1/rollouts", b'[{"id": "a", "task": {"id": "t", "data": ' + b"[" * 10**5, "nested too deeply"),
        ("POST", "/v1/heartbeat", {"attempts": [["a"]], "seconds": 1}, "length 2"),
        ("POST", "/v1/steps", {"step": {}}, "$.step"),
        ("POST", "/v1/steps", {"step": STEP | {"lineage": -1}}, "$.step.lineage"),
        ("POST", "/v1/steps", {"step": STEP | {"number": 2**53}}, "$.step.number"),
        ("PUT", "/v1/checkpoints", {"lineage": 1, "number": -1, "checkpoint": "c"}, "$.number"),
        ("PUT", "/v1/checkpoints", {"lineage": 1, "number": 1}, "checkpoint"),
        ("POST", "/v1/lineages", {"after": -1}, "$.after"),
        ("POST", "/v1/lineages", {"after": 2**53}, "$.after"),
        ("POST", "/v1/rollouts/a/attempts/1/finish", {"rewards": [{"value": None}]}, "$.rewards[0].value"),
        ("POST", "/v1/rollouts/a/attempts/1/finish", {"rewards": [{"value": 1, "turn": "t", "agent": "a"}]}, "one of"),
        ("POST", "/v1/rollouts/a/attempts/1/finish", {"cause": "boredom"}, "boredom"),
        ("PUT", "/v1/policies", {"name": "main"}, "version"),
        ("GET", "/v1/rollouts?limit=0", b"", "$.limit"),
        ("GET", "/v1/rollouts?limit=1001", b"", "$.limit"),
        ("GET", "/v1/rollouts?limit=ten", b"", "$.limit"),
        ("GET", "/v1/rollouts?status=lost", b"", "lost"),
        ("GET", "/v1/rollouts?stauts=queued", b"", "stauts"),
        ("GET", "/v1/rollouts?limit=1&limit=2", b"", "twice"),
        ("GET", "/v1/changes?timeout=61", b"", "$.timeout"),
        ("GET", "/v1/changes?timeout=nan", b"", "$.timeout"),
        ("GET", "/v1/changes?cursor=-1", b"", "$.cursor"),
        ("GET", "/v1/changes?cursor=9223372036854775808", b"", "$.cursor"),
        ("GET", "/v1/rollouts/a/turns?attempt=x", b"", "$.attempt"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(
    stand: Stand, method: str, path: str, body: Any, words: str
) -> None:
    await stand.attempt("a")
    status, answer = await stand.ask(method, path, body)
    assert (status, answer["error"]["code"]) == (400, "malformed")
    assert words in answer["error"]["message"]
    assert [rollout.id for rollout in await stand.behind.list()] == ["a"]
    assert (await stand.behind.get("a")).status == "running"


@pytest.mark.parametrize(
    ("method", "path", "body", "refusal"),
    [
        ("GET", "/v1/rollouts/nobody", b"", (404, "unknown_id")),
        ("GET", "/v1/rollouts/%00", b"", (404, "unknown_id")),
        ("GET", "/v1/rollouts/%ff%fe", b"", (404, "unknown_id")),
        ("GET", "/v1/rollouts/a%2Fb", b"", (404, "not_found")),
        ("GET", "/v1/rollouts/", b"", (404, "not_found")),
        ("GET", "/v1/rollouts?after=nobody", b"", (404, "unknown_id")),
        ("GET", "/v1/rollouts/nobody/attempts", b"", (404, "unknown_id")),
        ("POST", "/v1/rollouts/a/attempts/2/finish", {}, (404, "unknown_id")),
        ("POST", "/v1/rollouts/a/attempts/-1/finish", {}, (404, "unknown_id")),
        ("POST", "/v1/rollouts/a/attempts/x/finish", {}, (404, "unknown_id")),
        ("POST", "/v1/rollouts/a/attempts/" + "9" * 5000 + "/finish", {}, (404, "unknown_id")),
        ("POST", "/v1/rollouts/nobody/attempts/1/finish", {}, (404, "unknown_id")),
        ("POST", "/v1/cancel", {"rollouts": ["nobody"], "detail": ""}, (404, "unknown_id")),
        ("POST", "/v1/lineages", {"after": 0}, (404, "unknown_id")),
        ("PUT", "/v1/checkpoints", {"lineage": 1, "number": 1, "checkpoint": "c"}, (404, "unknown_id")),
        ("POST", "/v1/rollouts", [{"id": "a/b", "task": {"id": "t"}}], (409, "refused")),
        ("POST", "/v1/rollouts", [{"id": "a\0", "task": {"id": "t"}}], (409, "refused")),
        ("POST", "/v1/rollouts", [{"id": "", "task": {"id": "t"}}], (409, "refused")),
        (
            "POST",
            "/v1/rollouts/a/attempts/1/finish",
            {"rewards": [{"name": "a\nb", "value": 1}]},
            (400, "bad_reward"),
        ),
        ("GET", "/v2/rollouts", b"", (404, "not_found")),
        ("GET", "/v1/lease", b"", (405, "wrong_method")),
        ("DELETE", "/v1/rollouts/a", b"", (405, "wrong_method")),
        ("OPTIONS", "/r/a/1/events", b"", (405, "wrong_method")),
    ],
)
async def test_what_is_refused_has_a_status_and_a_code(
    stand: Stand, method: str, path: str, body: Any, refusal: tuple[int, str]
) -> None:
    await stand.attempt("a")
    assert await stand.refused(method, path, body) == refusal


async def test_an_address_says_which_methods_it_knows(stand: Stand) -> None:
    answer = await stand.client("run-key").request("DELETE", "/v1/policies")
    assert answer.headers["allow"] == "GET, HEAD, PUT"


async def test_a_body_larger_than_any_batch(stand: Stand) -> None:
    assert await stand.refused("POST", "/v1/turns", b" " * (65 << 20)) == (413, "request_too_large")


async def test_content_types_do_not_matter(stand: Stand) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=latin-1"):
        answer: Response = await stand.client("run-key").request(
            "POST", "/v1/lease", b'{"runner": "w", "seconds": 1}', headers={"content-type": kind}
        )
        assert (answer.status, answer.body) == (200, b"[]")


async def test_nesting_as_deep_as_is_allowed_comes_back(stand: Stand) -> None:
    data: Any = "x"
    for _ in range(90):
        data = [data]
    deep = {"id": "deep", "task": {"id": "t", "data": data}}
    flat = [
        {"id": f"r{n}", "task": {"id": "t", "data": '[[[{"\\'}} for n in range(200)
    ]  # brackets in text do not count
    assert await stand.ask("POST", "/v1/rollouts", [deep, *flat]) == (200, {"queued": 201, "recorded": 201})
    assert (await stand.ask("GET", "/v1/rollouts/deep"))[1]["task"]["data"] == data


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (b"[" * 101 + b'"' + b'\\"' * (7 << 20), (400, "malformed")),  # a text without an end
        (b"[" * 101 + b'"' + b"\\" * (15 << 20), (400, "malformed")),
        (b"[" * (15 << 20), (400, "malformed")),
        (b"[" + b",".join([b"[" * 99 + b"]" * 99] * 80_000) + b"]", (413, "request_too_large")),
        (b"[" + b"[]," * (5 << 20) + b"[]]", (413, "request_too_large")),
        (b"[" + b'"[",' * (3 << 20) + b'"["]', (400, "malformed")),
        (b'"' + b"[" * (15 << 20) + b'"', (400, "malformed")),
    ],
    ids=["quotes", "backslashes", "brackets", "towers", "pairs", "texts", "text"],
)
async def test_junk_holds_nobody_up(stand: Stand, body: bytes, refusal: tuple[int, str]) -> None:
    attempt = await stand.attempt("a")
    began = time.process_time()
    assert await stand.refused("POST", "/r/a/1/events", body, key=attempt.key) == refusal
    assert time.process_time() - began < 3


async def test_a_store_that_cannot_be_reached_is_not_the_clients_fault(stand: Stand) -> None:
    await stand.behind.close()
    assert await stand.refused("GET", "/v1/stats") == (503, "store_unavailable")
    assert await stand.refused("POST", "/v1/lease", LEASE) == (503, "store_unavailable")


async def test_errors_nobody_thought_of_stay_in_the_log(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> dict[str, int]:
        raise ZeroDivisionError("the secret of the house")

    monkeypatch.setattr(stand.behind, "stats", broken)
    status, answer = await stand.ask("GET", "/v1/stats")
    assert (status, answer["error"]["code"]) == (500, "server_error")
    assert "secret" not in answer["error"]["message"]
    assert "the secret of the house" in caplog.text


# -- long polls --------------------------------------------------------------------------------------------------------


async def test_nothing_is_leased_for_somebody_who_is_gone(stand: Stand) -> None:
    waiting = asyncio.create_task(stand.ask("POST", "/v1/lease", LEASE | {"wait": 60}))
    await stand.waiters(1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stand.waiters(0)
    await stand.attempt("a")  # leased here, at once: nobody else took it
    assert [attempt.runner for attempt in await stand.behind.attempts("a")] == ["w"]


async def test_a_long_poll_ends_when_something_happens(stand: Stand) -> None:
    leasing = asyncio.create_task(stand.ask("POST", "/v1/lease", LEASE | {"wait": 60}))
    changing = asyncio.create_task(stand.ask("GET", "/v1/changes?timeout=60"))
    await stand.waiters(1)
    await stand.behind.enqueue([Rollout(id="a", group="a", member=0, task=Task(id="t"), created=1.0)])
    assert (await asyncio.wait_for(leasing, 20))[1][0]["rollout"]["id"] == "a"
    assert (await asyncio.wait_for(changing, 20))[1]["rollouts"][0]["id"] == "a"


async def test_long_polls_end_at_once_when_the_server_closes(stand: Stand) -> None:
    leasing = asyncio.create_task(stand.ask("POST", "/v1/lease", LEASE | {"wait": 60}))
    changing = asyncio.create_task(stand.ask("GET", "/v1/changes?cursor=7&timeout=60"))
    await stand.waiters(1)
    async with asyncio.timeout(4):  # less than the server gives to requests that are at work
        await stand.server.close()
    status, answer = await leasing
    assert (status, answer["error"]["code"]) == (503, "store_unavailable")  # a lease may be on its way: ask again
    assert await changing == (200, {"cursor": 7, "rollouts": []})
