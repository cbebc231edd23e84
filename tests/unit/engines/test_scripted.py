"""The engine users test with: plays what it was told, ends as an engine would, keeps a record."""

import asyncio
import time

import pytest

from strop.engines.base import Chunk
from strop.engines.scripted import Breaks, Failures, Hangs, Scripted
from strop.errors import ContextOverflow, EngineError
from strop.types import Sampling


class Letters:
    """One id per letter."""

    end_of_turn = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


async def play(engine: Scripted, prompt: list[int] | None = None, **sampling: int) -> list[Chunk]:
    chunks = engine.generate(prompt or [65], Sampling(**sampling), stop_ids=[0])  # type: ignore[arg-type]
    return [chunk async for chunk in chunks]


async def test_list_and_function() -> None:
    engine = Scripted(["hello", [7, 0, 8]], Letters(), chunk=4)
    first, second = await play(engine), await play(engine)
    assert [chunk.ids for chunk in first] == [[104, 101, 108, 108], [111, 0]]
    assert [chunk.finish for chunk in first] == [None, "stop"]
    assert first[0].logprobs == [-0.5] * 4
    assert second == [Chunk(ids=[7, 0], logprobs=[-0.5] * 2, version="1.0", finish="stop")], "nothing after a stop id"
    with pytest.raises(EngineError, match="2 answers"):
        await play(engine)
    assert [call.ids for call in engine.calls] == [[104, 101, 108, 108, 111, 0], [7, 0], []]
    echo = Scripted(lambda asked: asked.prompt.lower(), Letters())
    assert (await play(echo, [66]))[0].ids == [98, 0]


async def test_length_and_context() -> None:
    engine = Scripted(lambda asked: "abc", Letters(), context=3)
    assert (await play(engine, max_tokens=1))[-1] == Chunk(ids=[97], logprobs=[-0.5], version="1.0", finish="length")
    assert (await play(engine, [1, 2]))[-1].finish == "length"
    with pytest.raises(ContextOverflow):
        await play(engine, [1, 2, 3])
    assert (await play(Scripted([[]], Letters()))) == [Chunk(ids=[], logprobs=[], version="1.0", finish="stop")]


async def test_failures() -> None:
    engine = Scripted([EngineError("no"), Breaks("ab")], Letters())
    with pytest.raises(EngineError, match="no"):
        await play(engine)
    chunks = engine.generate([1], Sampling(), stop_ids=[0])
    assert (await anext(chunks)).finish is None
    with pytest.raises(EngineError, match="broke"):
        await anext(chunks)


async def test_pause_waits_and_holds_back() -> None:
    engine = Scripted(lambda asked: "abcdef", Letters(), chunk=1, latency=0.01)
    running = asyncio.create_task(play(engine))
    await asyncio.sleep(0.015)
    await engine.pause()
    assert running.done()
    held = asyncio.create_task(play(engine))
    await asyncio.sleep(0.05)
    assert not held.done()
    await engine.load("1.1")
    await engine.resume()
    assert {chunk.version for chunk in await held} == {"1.1"}
    await engine.close()


def letters(text: str) -> list[int]:
    return Letters().encode(text)


async def said(engine: Scripted, prompt: str) -> str:
    ids = [id for chunk in await play(engine, letters(prompt)) for id in chunk.ids]
    return Letters().decode(ids).removesuffix("\0")


async def test_table_goes_by_what_the_prompt_says_last() -> None:
    engine = Scripted({"weather": "call", "rain": "take it", "heavy rain": "stay"}, Letters())
    assert await said(engine, "the weather?") == "call"
    assert await said(engine, "the weather? call. light rain") == "take it"
    assert await said(engine, "the weather? call. heavy rain") == "stay"
    assert await said(engine, "rain. And the weather?") == "call"
    with pytest.raises(EngineError, match=r"add one, or ''.*who are you"):
        await said(engine, "who are you")
    assert await said(Scripted({"a": "b", "": "else"}, Letters()), "x") == "else"


async def test_some_requests_fail() -> None:
    engine = Scripted({"": "fine"}, Letters(), failures=Failures(requests=(2,), error=EngineError("down")))
    assert await said(engine, "a") == "fine"
    with pytest.raises(EngineError, match="down"):
        await anext(engine.generate([1], Sampling(), stop_ids=[0]))
    assert await said(engine, "a") == "fine"
    assert [call.finished for call in engine.calls] == [True, False, True]


async def test_a_share_of_requests_fails_the_same_in_every_run() -> None:
    def outcomes(seed: int) -> Scripted:
        return Scripted({"": "fine"}, Letters(), failures=Failures(rate=0.2, seed=seed))

    runs: list[list[bool]] = []
    for engine in (outcomes(1), outcomes(1), outcomes(2)):
        for _ in range(200):
            try:
                await said(engine, "a")
            except EngineError:
                assert engine.calls[-1].ids == [], "nothing was given out before"
        runs.append([call.finished for call in engine.calls])
    assert runs[0] == runs[1] != runs[2]
    assert all(20 <= run.count(False) <= 60 for run in runs)


async def test_failures_in_mid_stream() -> None:
    engine = Scripted({"": "abcdef"}, Letters(), chunk=2, failures=Failures(requests=(1,), after=3))
    with pytest.raises(EngineError, match="fail"):
        await play(engine)
    assert engine.calls[0].ids == letters("abc")
    assert not engine.calls[0].finished


@pytest.mark.parametrize("how", ["answer", "failure"])
async def test_hangs_until_somebody_gives_up(how: str) -> None:
    if how == "answer":
        engine = Scripted([Hangs([97]), "b"], Letters())
    else:
        engine = Scripted(["abc", "b"], Letters(), failures=Failures(requests=(1,), after=1, error=None))
    chunks = engine.generate([1], Sampling(), stop_ids=[0])
    assert (await anext(chunks)).ids == [97]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(chunks), 0.05)
    assert await said(engine, "x") == "b"
    await asyncio.wait_for(engine.pause(), 1)


async def test_latency_by_token() -> None:
    seen: list[int] = []

    def latency(given: int) -> float:
        seen.append(given)
        return 0.0 if given else 0.1

    begun = time.monotonic()
    assert await said(Scripted({"": "abc"}, Letters(), chunk=1, latency=latency), "x") == "abc"
    assert 0.1 <= time.monotonic() - begun < 0.3
    assert seen == [0, 1, 2, 3]
