"""Gateway workers that ask vLLM themselves, a stand-in that counts: what is recorded is what the owner would have got,
and the owner pauses, loads and explains as if all requests were its own."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from strop.engines import remote
from strop.engines.base import Chunk
from strop.engines.direct_line import DirectLine
from strop.engines.vllm import line as vllm_line
from strop.engines.vllm.line import VllmLine
from strop.gateway.placement import Placement
from strop.gateway.replicas import Replicas
from strop.gateway.template import Renderer
from strop.gateway.workers import GatewayWorkers
from strop.store.sqlite import SqliteStore
from strop.types import Attempt, Sampling, Turn
from tests.integration.gateway.stand import Stand, open_stand
from tests.limits import stretch
from tests.unit.engines import test_vllm
from tests.unit.engines.test_vllm import HANGS, SILENT, until

pytestmark = pytest.mark.timeout(120)


class Line:
    """A gateway with two workers before vLLM. `relayed` are the prompts that the owner was asked for."""

    def __init__(self, vllm: test_vllm.Stand, stand: Stand) -> None:
        self.vllm, self.engine, self.stand = vllm, vllm.engine, stand
        self.relayed: list[list[int]] = []
        self._generate = vllm.engine.generate
        vllm.engine.generate = self.generate
        self._attempts = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int], policy: str | None = None
    ) -> AsyncGenerator[Chunk]:
        self.relayed.append(list(prompt_ids))
        async for chunk in self._generate(prompt_ids, sampling, stop_ids=stop_ids, policy=policy):
            yield chunk

    @property
    def workers(self) -> GatewayWorkers:
        assert isinstance(self.stand.gateway.workers, GatewayWorkers)
        return self.stand.gateway.workers

    async def attempt(self) -> Attempt:
        self._attempts += 1
        return await self.stand.attempt(f"r{self._attempts}", seed=7)

    async def ask(self, prompt: list[int], max_tokens: int, attempt: Attempt | None = None) -> Turn:
        """One answer, as it was recorded."""
        attempt = attempt or await self.attempt()
        client = self.stand.client(attempt, timeout=stretch(60))
        answer = await client.completions.create(model="any", prompt=prompt, max_tokens=max_tokens)
        return next(turn for turn in await self.stand.store.turns(attempt.rollout) if turn.id == answer.id)

    async def stream(self, prompt: list[int], attempt: Attempt | None = None) -> openai.AsyncStream[Any]:
        client = self.stand.client(attempt or await self.attempt(), timeout=stretch(60))
        return await client.completions.create(model="any", prompt=prompt, max_tokens=50, stream=True, logprobs=0)

    def count(self, what: str) -> int:
        return sum(what in asked for asked in self.vllm.asked())


@pytest.fixture
async def line(model: Path, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Line]:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(remote, "NOTICE", 2.0)
    vllm = test_vllm.Stand(tmp_path / "vllm", stream_interval=4)
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await vllm.engine.start()
    engine: Any = Replicas([vllm.engine])
    try:
        async with open_stand(model, store, engine, renderer, num_workers=2) as stand:
            yield Line(vllm, stand)
    finally:
        await vllm.engine.close()
        await store.close()


def shift_of(turn: Turn) -> float:
    """By how much all its logprobs are off, which says which weights they are from."""
    shifts = {round(-logprob - id / 1000, 6) for id, logprob in zip(turn.response_ids, turn.logprobs, strict=True)}
    assert len(shifts) == 1, "one answer, one version"
    return shifts.pop()


def tokens(turn: Turn) -> tuple[Any, ...]:
    return turn.prompt_ids, turn.response_ids, turn.logprobs, turn.versions, turn.finish, turn.sampling


@pytest.mark.parametrize("max_tokens", [3, 4, 5, 20])
async def test_what_is_recorded_is_what_the_owner_would_have_got(line: Line, max_tokens: int) -> None:
    direct = [await line.ask([5, 9, n], max_tokens) for n in (7, 20)]
    assert not line.relayed
    for holder in line.engine._holders:
        holder.tell(None)
    relayed = [await line.ask([5, 9, n], max_tokens) for n in (7, 20)]
    assert line.relayed == [[5, 9, 7], [5, 9, 20]]
    assert [tokens(turn) for turn in direct] == [tokens(turn) for turn in relayed]
    assert [len(turn.response_ids) for turn in direct] == [max_tokens] * 2
    asked = [asked for asked in line.vllm.asked() if "generate" in asked]
    assert all(asked[n]["generate"] == asked[n + 2]["generate"] for n in range(2))
    assert {one["generate"]["seed"] for one in asked} == {None}, "they would be drawn for one by one"
    assert {one["stream"] for one in asked} == {max_tokens > 4}, "what fits into one message is not streamed"


async def test_what_no_server_should_see_is_refused_here_too(line: Line) -> None:
    with pytest.raises(openai.APIStatusError, match="outside the vocabulary of 100"):
        await line.ask([5, 100], 3)
    assert (line.relayed, line.count("generate")) == ([], 0)


async def test_a_pause_waits_for_what_workers_have_in_flight_and_holds_the_rest_back(line: Line) -> None:
    begun = [asyncio.create_task(line.ask([5, n], 40, await line.attempt())) for n in range(6)]
    await until(lambda: line.count("generate") == 6)
    drained = asyncio.create_task(line.engine.pause())
    await asyncio.sleep(0.1)
    assert not drained.done()
    await drained
    await asyncio.wait(begun, timeout=stretch(5))  # they are recorded, and told
    late = asyncio.create_task(line.ask([5], 3))
    await asyncio.sleep(0.3)
    assert (late.done(), line.count("generate")) == (False, 6)
    await line.engine.resume()
    assert [len((await one).response_ids) for one in begun] == [40] * 6
    assert (await late).response_ids == [6, 7, 8]
    assert not line.relayed, "it waited for the line, which is open again"


async def test_a_line_that_stays_closed_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the engine is asked, which knows how long a pause may last."""
    monkeypatch.setattr(vllm_line, "LONGEST_WAIT", 0.1)
    line = VllmLine()
    closed = DirectLine(url="http://127.0.0.1:9", model="m", version="1.0", context=9, vocabulary=9, open=False)
    line.tell(closed)
    assert not await line.wait_until_open()
    waiting = asyncio.create_task(line.wait_until_open())
    await asyncio.sleep(0)
    line.tell(replace(closed, open=True, version="1.1"))
    assert await waiting


async def test_no_answer_is_of_two_versions_and_nothing_is_in_flight_while_one_is_loaded(line: Line) -> None:
    turns: list[Turn] = []
    stop = asyncio.Event()

    async def ask_on(first: int) -> None:
        attempt = await line.attempt()
        while not stop.is_set():
            turns.append(await line.ask([first], 30, attempt))

    asking = [asyncio.create_task(ask_on(n)) for n in range(1, 7)]

    def has_served(version: str) -> bool:
        return any(turn.versions[0][1] == version for turn in turns)

    for number in range(1, 5):
        await until(lambda before=f"1.{number - 1}": has_served(before))
        line.vllm.offer(f"1.{number}", number / 10)
        await line.vllm.load(f"1.{number}")
        assert line.engine.version == f"1.{number}"
    await until(lambda: has_served("1.4"))
    stop.set()
    await asyncio.gather(*asking)
    served = {(turn.versions[0][1], shift_of(turn)) for turn in turns}
    assert served == {("1.0", 0.0), ("1.1", 0.1), ("1.2", 0.2), ("1.3", 0.3), ("1.4", 0.4)}
    assert all(len(turn.versions) == 1 for turn in turns)
    loads = [asked for asked in line.vllm.asked() if "reload" in asked]
    assert [asked["active"] for asked in loads] == [0] * 4
    assert len(turns) - len(line.relayed) >= 6, "the line was used"


async def test_a_server_that_dies_in_mid_answer(line: Line) -> None:
    stream, silent = await line.stream([HANGS]), asyncio.create_task(line.ask([SILENT], 3))
    await anext(stream)
    await until(lambda: line.count("generate") == 2)
    url = line.engine.url
    os.kill(line.vllm.pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="in the middle of an answer: vLLM was killed by SIGKILL; its log is"):
        async for _ in stream:
            pass
    assert (await line.ask([5], 3)).response_ids == [6, 7, 8]
    await until(lambda: line.count("generate") == 4)  # the silent one, which got no token, asks again
    assert [SILENT] in line.relayed
    silent.cancel()
    before = len(line.relayed)
    assert line.engine.url != url
    assert (await line.ask([6], 3)).response_ids == [7, 8, 9]
    assert len(line.relayed) == before, "the line leads to the server that was started again"


async def test_a_killed_worker_has_nothing_in_flight_and_its_successor_has_the_line(line: Line) -> None:
    attempt = await line.attempt()
    stream = await line.stream([HANGS], attempt)
    await anext(stream)
    place = Placement(line.stand.store, 2).of_rollout(attempt.rollout)
    paused = asyncio.create_task(line.engine.pause())
    await asyncio.sleep(0.2)
    assert not paused.done()
    os.kill(line.workers._workers[place].process.pid, signal.SIGKILL)
    await asyncio.wait_for(paused, stretch(20))
    await line.engine.resume()
    await until(lambda: line.workers.replaced[place] == 1 and place in line.workers._workers, stretch(30))
    client = line.stand.client(attempt, max_retries=5, timeout=stretch(60))
    answer = await client.completions.create(model="any", prompt=[5], max_tokens=3)
    turn = (await line.stand.store.turns(attempt.rollout))[-1]
    assert (turn.id, turn.response_ids, line.relayed) == (answer.id, [6, 7, 8], [])


async def test_a_client_that_leaves_frees_the_servers_row(line: Line) -> None:
    attempt = await line.attempt()
    asking = asyncio.create_task(line.ask([SILENT], 3, attempt))
    await until(lambda: line.count("generate") == 1)
    asking.cancel()
    await until(lambda: line.count("dropped") == 1)
    await asyncio.wait_for(line.engine.pause(), stretch(20))


async def test_an_engine_that_was_closed_says_so(line: Line) -> None:
    await line.engine.close()
    with pytest.raises(openai.APIStatusError, match="vLLM was closed"):
        await line.ask([5], 3)


# -- several servers ---------------------------------------------------------------------------------------------------


class Lines(Line):
    """A gateway with two workers before two servers of one policy."""

    def __init__(self, servers: Sequence[test_vllm.Stand], stand: Stand) -> None:
        super().__init__(servers[0], stand)
        self.servers = servers

    def asked(self) -> list[set[int]]:
        """How many tokens each server was asked for, at a time."""
        return [{one["generate"]["max_tokens"] for one in s.asked() if "generate" in one} for s in self.servers]


@pytest.fixture
async def lines(
    model: Path, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Lines]:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(remote, "NOTICE", 2.0)
    servers = [test_vllm.Stand(tmp_path / f"vllm-{number}", stream_interval=4) for number in range(2)]
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    engine: Any = Replicas([server.engine for server in servers], in_turn=True)
    await engine.start()
    try:
        async with open_stand(model, store, engine, renderer, num_workers=2) as stand:
            yield Lines(servers, stand)
    finally:
        await engine.close()
        await store.close()


async def test_rollouts_are_spread_over_servers_and_each_stays_with_one(lines: Lines) -> None:
    attempts = [await lines.attempt() for _ in range(8)]
    for _ in range(3):
        for number, attempt in enumerate(attempts):
            await lines.ask([5], 3 + number, attempt)
    first, second = lines.asked()
    assert first | second == set(range(3, 11))
    assert not first & second, "a rollout asks one server, which has its prefix"
    assert min(len(first), len(second)) >= 1
    assert not lines.relayed, "the owner relays nothing"


async def test_a_pause_waits_for_what_is_in_flight_on_every_line(lines: Lines) -> None:
    (engine,) = lines.workers.engines.values()
    asking = [asyncio.create_task(lines.ask([5], 40 + n, await lines.attempt())) for n in range(8)]
    await until(lambda: sum(map(len, lines.asked())) == 8, stretch(20))
    await asyncio.wait_for(engine.pause(), stretch(30))
    assert all(task.done() for task in asking) or not any(server.engine._in_flight for server in lines.servers)
    late = asyncio.create_task(lines.ask([30], 3))
    await asyncio.sleep(0.3)
    assert not late.done()
    await engine.resume()
    await asyncio.wait_for(asyncio.gather(late, *asking), stretch(30))


async def test_what_a_dead_server_had_another_answers(lines: Lines) -> None:
    attempts = [await lines.attempt() for _ in range(8)]
    for number, attempt in enumerate(attempts):
        await lines.ask([5 + number], 3, attempt)
    os.kill(lines.servers[1].pid, signal.SIGKILL)
    for number, attempt in enumerate(attempts):
        turn = await lines.ask([5 + number], 3, attempt)
        assert turn.response_ids == [6 + number, 7 + number, 8 + number]
