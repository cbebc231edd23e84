"""sglang as an engine, against a server that speaks its protocol as its source defines it (see sglang_server.py)."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from strop.config import SglangConfig
from strop.engines import remote
from strop.engines.base import Chunk, GivenAnswer
from strop.engines.receiver import LogprobProbe
from strop.engines.server_process import free_port
from strop.engines.sglang.engine import Sglang
from strop.errors import ConfigError, ContextOverflow, EngineError, ModelError
from strop.types import Sampling
from strop.weights.files import FolderTransfer
from strop.weights.publisher import Publisher
from tests.unit.engines import sglang_server as fake

ROOT = Path(__file__).parents[3]


def folder(path: Path, scale: float = 1.0, probe: float | None = None) -> Path:
    """A model of one tensor. `probe` is the scale that its probe was computed with."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "vocab_size": 500}))
    save_file({"model.norm.weight": np.full(4, scale, np.float32)}, path / "model.safetensors")
    if probe is not None:
        ids = [5, 7, 9]
        (path / "probe.json").write_bytes(msgspec.json.encode(LogprobProbe(ids, [-(t / 100) * probe for t in ids[1:]])))
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "NOTICE", 0.3)


@pytest.fixture
def python_path(tmp_path: Path) -> str:
    """Where `python -m sglang.launch_server` is that server."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text("from tests.unit.engines.sglang_server import main\n\nmain()\n")
    return f"{package.parent}{os.pathsep}{ROOT}"


@asynccontextmanager
async def started(tmp_path: Path, python_path: str, **more: Any) -> AsyncGenerator[Sglang]:
    settings = SglangConfig(env={"PYTHONPATH": python_path, **more.pop("env", {})}, start_timeout=30.0, **more)
    model = tmp_path / "model"
    if not model.exists():
        folder(model)
    engine = Sglang(model, settings, log=tmp_path / "sglang.log", renewed=True)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def elsewhere(tmp_path: Path, *arguments: str) -> AsyncGenerator[tuple[Sglang, str]]:
    """An engine for a server that somebody else started, with arguments of their own."""
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.unit.engines.sglang_server", "--port", str(port), *arguments, cwd=ROOT
    )
    url = f"http://127.0.0.1:{port}"
    given = SglangConfig(url=url, start_timeout=30.0, restart_timeout=0.0)
    engine = Sglang(folder(tmp_path / "model"), given, log=tmp_path / "log", renewed=True)
    try:
        await engine.start()
        yield engine, url
    finally:
        await engine.close()
        if server.returncode is None:
            server.kill()
        await server.wait()


async def give(engine: Sglang, tmp_path: Path, version: str) -> None:
    await engine.load(version, Publisher(engine, FolderTransfer(tmp_path / "weights")))


async def play(engine: Sglang, prompt: list[int], stop: int = 400, **sampling: Any) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(prompt, Sampling(**sampling), stop_ids=[stop])]


def ids(chunks: list[Chunk]) -> list[int]:
    return [id for chunk in chunks for id in chunk.ids]


def logprobs(chunks: list[Chunk]) -> list[float]:
    return [logprob for chunk in chunks for logprob in chunk.logprobs]


async def seen(url: str) -> dict[str, Any]:
    def ask() -> dict[str, Any]:
        with urllib.request.urlopen(f"{url}/seen") as answer:
            return json.load(answer)

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("arguments", [["--incremental-streaming-output"], [], ["--old-names"]])
async def test_tokens_logprobs_and_ends(tmp_path: Path, arguments: list[str]) -> None:
    async with elsewhere(tmp_path, *arguments) as (engine, url):
        chunks = await play(engine, [1, 10], stop=14)
        assert ids(chunks) == [11, 12, 13, 14], "the stop token is part of the answer"
        assert logprobs(chunks) == [-0.11, -0.12, -0.13, -0.14]
        assert [chunk.finish for chunk in chunks] == [None, None, None, "stop"]
        assert {chunk.version for chunk in chunks} == {"1.0"}
        longer = await play(engine, [1, 10], max_tokens=20)
        assert (ids(longer), longer[-1].finish) == (list(range(11, 31)), "length")
        assert (await play(engine, [1] * 62, stop=400))[-1].finish == "length", "where the context ends"
        greedy = Sampling(temperature=0.0, top_k=0, seed=7, stop=("END",), frequency_penalty=0.5, max_tokens=3)
        [_ async for _ in engine.generate([1, 2], greedy, stop_ids=[400])]
        body = (await seen(url))["bodies"][-1]
        asked = body["sampling_params"]
        assert (body["input_ids"], body["return_logprob"], body["stream"]) == ([1, 2], True, True)
        assert (asked["temperature"], asked["top_k"], asked["sampling_seed"]) == (0.0, -1, 7)
        assert (asked["max_new_tokens"], asked["stop_token_ids"], asked["frequency_penalty"]) == (3, [400], 0.5)
        assert "stop" not in asked, "stop strings are the gateway's"
        answers = await asyncio.gather(*(play(engine, [1, n], max_tokens=5) for n in range(50)))
        assert [ids(answer)[0] for answer in answers] == [n + 1 for n in range(50)]


async def test_what_goes_wrong_has_a_reason(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, "--incremental-streaming-output") as (engine, url):
        for prompt, words in {
            fake.REFUSED: "bad request",
            fake.NAN: "NaN happened",
            fake.BREAKS: "out of memory",
            fake.MIXED_UP: "do not belong together",
            fake.NO_LOGPROB: "finite numbers",
            fake.CUT: "broke the answer off",
            fake.BUSY: "queue is full",
        }.items():
            with pytest.raises(EngineError, match=words):
                await play(engine, [prompt, 1], max_tokens=8)
        times = [body["input_ids"][0] for body in (await seen(url))["bodies"]]
        assert times.count(fake.BUSY) == 3, "it is asked again while no token was given out"
        assert times.count(fake.REFUSED) == times.count(fake.BREAKS) == 1
        with pytest.raises(ContextOverflow, match="64"):
            await play(engine, [1] * 64)
        with pytest.raises(EngineError, match="empty"):
            await play(engine, [])
        with pytest.raises(EngineError, match="vocabulary"):
            await play(engine, [500])
        assert ids(await play(engine, [1, 10], max_tokens=2)) == [11, 12]


async def test_closing_early_aborts_the_request_there(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as (engine, url):
        stream = engine.generate([fake.HANGS, 10], Sampling(), stop_ids=[400])
        assert isinstance(stream, AsyncGenerator)
        assert (await anext(stream)).ids == [11]
        await stream.aclose()
        cancelled = asyncio.create_task(play(engine, [fake.HANGS, 10]))
        await asyncio.sleep(0.2)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        for _ in range(100):
            if (await seen(url))["calls"].count("/abort_request") == 2:
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("the server was not told")
        await asyncio.wait_for(engine.pause(), 5)
        held = asyncio.create_task(play(engine, [1, 10], max_tokens=1))
        await asyncio.sleep(0.1)
        assert not held.done()
        await engine.resume()
        assert ids(await held) == [11]


async def test_a_new_version_and_what_is_none(tmp_path: Path, python_path: str) -> None:
    async with started(tmp_path, python_path) as engine:
        assert logprobs(await play(engine, [1, 10], max_tokens=1)) == [-0.11]
        folder(tmp_path / "weights/1.1", scale=2.0, probe=2.0)
        running = asyncio.create_task(play(engine, [1, 10], max_tokens=30))
        await asyncio.sleep(0.01)
        await give(engine, tmp_path, "1.1")
        assert {chunk.version for chunk in await running} == {"1.0"}, "it was waited for"
        (chunk,) = await play(engine, [1, 10], max_tokens=1)
        assert (chunk.version, chunk.logprobs) == ("1.1", [-0.22])
        url = engine._server.url
        assert "/pause_generation /update_weights_from_disk /continue_generation" in " ".join(
            (await seen(url))["calls"]
        )
        folder(tmp_path / "weights/1.2", scale=float("nan"))
        with pytest.raises(EngineError, match="not finite numbers; nothing was changed"):
            await give(engine, tmp_path, "1.2")
        with pytest.raises(EngineError, match=r"weights/1\.3"):
            await give(engine, tmp_path, "1.3")
        assert (await play(engine, [1, 10], max_tokens=1))[0].version == "1.1"
        assert engine._server.url == url, "the server never heard of those"
        folder(tmp_path / "weights/1.4", scale=9.0, probe=3.0)
        with pytest.raises(EngineError, match="probe"):
            await give(engine, tmp_path, "1.4")
        (chunk,) = await play(engine, [1, 10], max_tokens=1)
        assert (chunk.version, chunk.logprobs) == ("1.1", [-0.22]), "started again, with what it served before"
        assert engine._server.url != url


async def test_somebody_elses_server_gets_the_version_before_back(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as (engine, _):
        folder(tmp_path / "weights/1.1", scale=2.0, probe=2.0)
        await give(engine, tmp_path, "1.1")
        folder(tmp_path / "weights/1.2", scale=9.0, probe=3.0)
        with pytest.raises(EngineError, match=r"does not serve what was sent as version 1\.2"):
            await give(engine, tmp_path, "1.2")
        (chunk,) = await play(engine, [1, 10], max_tokens=1)
        assert (chunk.version, chunk.logprobs) == ("1.1", [-0.22])


async def test_killed_in_mid_answer_it_is_started_again(tmp_path: Path, python_path: str) -> None:
    async with started(tmp_path, python_path) as engine:
        folder(tmp_path / "weights/1.1", scale=2.0)
        await give(engine, tmp_path, "1.1")
        with pytest.raises(EngineError, match="in the middle of an answer"):
            await play(engine, [fake.DIES, 10])
        (chunk,) = await play(engine, [1, 10], max_tokens=1)
        assert (chunk.version, chunk.logprobs) == ("1.1", [-0.22])
        about = await seen(engine._server.url)
        assert "--incremental-streaming-output" in about["argv"]
        assert about["env"].get("SGLANG_RETURN_ORIGINAL_LOGPROB") is None
        pid = engine._server._process.pid  # type: ignore[attr-defined]
        hanging = asyncio.create_task(play(engine, [fake.HANGS, 10]))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"in the middle of an answer: sglang was killed by SIGKILL; its log is"):
            await hanging
        assert "SIGKILL" in engine._state.reason
    with pytest.raises(EngineError, match="closed"):
        await play(engine, [1])


async def test_a_server_that_does_not_start(tmp_path: Path, python_path: str) -> None:
    with pytest.raises(EngineError, match=r"ended with code 1 before it answered.*not enough GPU memory.*sglang.log"):
        async with started(tmp_path, python_path, env={"REFUSE_TO_START": "1"}):
            pass
    with pytest.raises(EngineError, match=r"set engine\.sglang\.python"):
        async with started(tmp_path, python_path, python="/nowhere/python"):
            pass
    nobody = SglangConfig(url=f"http://127.0.0.1:{free_port()}", start_timeout=0.2)
    with pytest.raises(EngineError, match=r"correct engine.sglang.url"):
        await Sglang(tmp_path / "model", nobody, log=tmp_path / "log").start()
    with pytest.raises(ModelError, match="no model"):
        Sglang(tmp_path, nobody, log=tmp_path / "log")


async def test_other_versions_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"sglang 0\.9\.1 is not known"):
        async with elsewhere(tmp_path, "--version", "0.9.1"):
            pass


async def test_a_server_of_two_runs_is_noticed(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as (engine, url):
        folder(tmp_path / "weights/2.0")
        other = Sglang(
            tmp_path / "model",
            SglangConfig(url=url),
            log=tmp_path / "log",
            renewed=True,
        )
        await other.start()
        await give(other, tmp_path, "2.0")
        with pytest.raises(EngineError, match="somebody else"):
            await play(engine, [1, 10])
        await other.close()


async def test_given_answers_are_scored(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as (engine, url):
        answers = [
            GivenAnswer(prompt_ids=[1, 10], response_ids=[11, 12]),
            GivenAnswer(prompt_ids=[1], response_ids=[10]),
        ]
        assert await engine.score(answers) == [[-0.11, -0.12], [-0.1]]
        assert [body["input_ids"] for body in (await seen(url))["bodies"]] == [[1, 10, 11, 12]]
        with pytest.raises(ConfigError, match="at temperature 1 only"):
            await engine.score([GivenAnswer(prompt_ids=[1], response_ids=[10], temperature=2.0)])
