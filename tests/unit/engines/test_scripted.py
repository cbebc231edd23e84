"""The engine users test with: plays what it was told, ends as an engine would, keeps a record."""

import asyncio

import pytest

from strop.engines.base import Chunk
from strop.engines.scripted import Breaks, Scripted
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
