"""The vLLM engine against a stand-in for vLLM: a real process on a real socket that counts instead of thinking."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from strop.config import VllmConfig
from strop.engines import remote
from strop.engines.base import Chunk, GivenAnswer
from strop.engines.direct_line import DirectLine, LineHolder
from strop.engines.receiver import TensorSpec
from strop.engines.served_policies import ServedVersion
from strop.engines.vllm.engine import Vllm, command, environment
from strop.engines.vllm.protocol import refuse_untested, sampling_params
from strop.engines.vllm.receiver import VllmReceiver
from strop.errors import ConfigError, ContextOverflow, EngineError
from strop.types import Sampling
from strop.weights.files import FolderTransfer
from strop.weights.publisher import Publisher
from tests.limits import stretch

STANDIN = Path(__file__).parent / "standin"
HANGS, SILENT, DIES, FAILS = 90, 91, 92, 93  # prompts that end with these are special to it


class Stand:
    def __init__(self, folder: Path, *, ranks: dict[str, int] | None = None, **settings: Any) -> None:
        self.folder = folder
        self.model = write_weights(folder / "model", 0.0)
        (self.model / "config.json").write_text(
            json.dumps({"vocab_size": 100, "max_position_embeddings": 64, "dtype": "float32"})
        )
        self.root = folder / "weights"
        env = {"PYTHONPATH": str(STANDIN), "STANDIN_FOLDER": str(folder)} | settings.pop("env", {})
        settings = {"stream_interval": 1} | settings
        self.settings = VllmConfig(env=env, start_timeout=settings.pop("start_timeout", 20.0), **settings)
        self.engine = Vllm(self.model, self.settings, log=folder / "vllm.log", renewed=True, ranks=ranks)
        self.publisher = Publisher(self.engine, FolderTransfer(self.root))

    def offer(self, version: str, shift: float, probe: float | None = None) -> Path:
        """A version's folder, as the learner leaves it. `probe`: what it says that the engine must find."""
        folder = write_weights(self.root / version, shift)
        (folder / "config.json").write_text("{}")
        ids = [3, 4, 5]
        logprobs = [-id / 1000 - (shift if probe is None else probe) for id in ids[1:]]
        (folder / "probe.json").write_text(json.dumps({"ids": ids, "logprobs": logprobs}))
        return folder

    async def load(self, version: str) -> None:
        await self.engine.load(version, self.publisher)

    def asked(self) -> list[dict[str, Any]]:
        file = self.folder / "asked.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def pid(self) -> int:
        return self.engine._server._process.pid  # pyright: ignore

    @property
    def inner(self) -> int:
        """The process that the server started."""
        return int((self.folder / "engine.pid").read_text())


def write_weights(folder: Path, shift: float, width: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"norm.weight": np.full(width, shift, np.float32)}, folder / "model.safetensors")
    return folder


Make = Callable[..., Stand]


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Make]:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(remote, "NOTICE", 0.3)
    made: list[Stand] = []

    def one(**settings: Any) -> Stand:
        made.append(Stand(tmp_path / str(len(made)), **settings))
        return made[-1]

    yield one
    for stand in made:
        await stand.engine.close()


async def play(stand: Stand, prompt: list[int], stop_ids: tuple[int, ...] = (), **sampling: Any) -> list[Chunk]:
    return [chunk async for chunk in stand.engine.generate(prompt, Sampling(**sampling), stop_ids=stop_ids)]


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [id for chunk in chunks for id in chunk.ids]


async def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - what is waited for happens in other processes
            await asyncio.sleep(0.02)


def run(arguments: list[str], **how: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(arguments, **how)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.23.0", "0.33.0", "1.0.0", "0.9.2", "dev", ""])
def test_versions_outside_the_tested_range_are_refused_by_name(version: str) -> None:
    with pytest.raises(EngineError, match=f"vLLM {version} is not one of the versions that were tested, 0.24 to 0.32"):
        refuse_untested(version)


def test_every_field_of_sampling_is_said() -> None:
    given = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        max_tokens=99,
        stop=("END",),
        seed=5,
    )
    said = sampling_params(given, [2, 4], 9)
    assert said["max_tokens"] == 9  # what there is room for
    for name in set(Sampling.__struct_fields__) - {"stop", "max_tokens", "grammar"}:
        assert said[name] == getattr(given, name)
    assert said["structured_outputs"] is None
    assert said["stop_token_ids"] == [2, 4]
    assert said["ignore_eos"]
    assert said["logprobs"] == 0
    assert "stop" not in said
    assert sampling_params(Sampling(), [], 9)["top_k"] == -1


def test_the_command_says_what_the_settings_say() -> None:
    plain = command(Path("/m"), VllmConfig(), 512, "bfloat16")
    assert "--tokens-only" in plain
    assert plain[plain.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--enable-sleep-mode" not in plain
    assert environment(VllmConfig())["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment(VllmConfig())
    full = VllmConfig(tensor_parallel=4, sleep=True, weights="ipc", lora_rank=16, args=("--swap-space", "0"))
    said = " ".join(command(Path("/m"), full, 512, "float16"))
    for part in ("--tensor-parallel-size 4", "--enable-sleep-mode", '{"backend":"ipc"}', "--max-lora-rank 16"):
        assert part in said
    assert said.endswith("--swap-space 0")
    assert said.count("--seed ") == 1
    assert said != " ".join(command(Path("/m"), full, 512, "float16")), "two servers draw the same numbers"
    assert "--seed" not in command(Path("/m"), VllmConfig(args=("--seed=3",)), 512, "float16")
    assert environment(full)["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


@pytest.mark.parametrize("seeds", [False, True])
async def test_seeds_are_sent_where_they_are_asked_for(make: Make, seeds: bool) -> None:
    stand = make(seeds=seeds)
    await stand.engine.start()
    await play(stand, [1, 5], max_tokens=2, seed=7)
    (asked,) = [asked["generate"] for asked in stand.asked() if "generate" in asked]
    assert asked["seed"] == (7 if seeds else None)


# -- start and end -----------------------------------------------------------------------------------------------------


async def test_tokens_come_with_their_version(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    chunks = await play(stand, [1, 5], stop_ids=(9,), max_tokens=20, temperature=0.0)
    assert ids_of(chunks) == [6, 7, 8, 9]
    assert [chunk.logprobs for chunk in chunks] == [[-0.006], [-0.007], [-0.008], [-0.009]]
    assert [chunk.finish for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk.version for chunk in chunks} == {"1.0"}
    assert len(ids_of(await play(stand, [1] * 60, max_tokens=20))) == 4  # as far as the context goes
    for prompt, error, says in (
        ([], EngineError, "the prompt is empty"),
        ([1] * 64, ContextOverflow, "64 tokens and the context holds 64"),
        ([100], EngineError, "outside the vocabulary of 100"),
    ):
        with pytest.raises(error, match=says):
            await play(stand, prompt)
    with pytest.raises(EngineError, match=r"refused an answer \(status 400\): temperature is too high"):
        await play(stand, [1], temperature=60.0)
    assert ids_of(await play(stand, [5], max_tokens=1)) == [6]
    pids = stand.pid, stand.inner
    await stand.engine.close()
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(EngineError, match="closed"):
        await play(stand, [1])


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"STANDIN_VERSION": "0.99.1"}, "vLLM 0.99.1 is not one of the versions that were tested"),
        ({"STANDIN_LACKS": "/pause"}, "has no /pause. Fix: start it with VLLM_SERVER_DEV_MODE=1"),
        (
            {"STANDIN_STARTS": "0"},
            "ended with code 1 before it answered: RuntimeError: there is no GPU left; its log is",
        ),
    ],
    ids=["version", "endpoint", "exit"],
)
async def test_a_server_that_will_not_do_is_refused_at_once(make: Make, env: dict[str, str], says: str) -> None:
    stand = make(env=env)
    with pytest.raises(EngineError, match=says):
        await stand.engine.start()
    assert (stand.folder / "starts").read_text() == "1"


def test_handles_that_would_not_reach_every_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.vllm.weights=ipc reaches one GPU.*asks for 2"):
        Stand(tmp_path, weights="ipc", tensor_parallel=2)


async def test_a_python_that_is_not_there_is_named(make: Make) -> None:
    with pytest.raises(EngineError, match=r"cannot be started: /nowhere/python: No such file.*engine\.vllm\.python"):
        await make(python="/nowhere/python").engine.start()


async def test_nothing_outlives_whoever_started_it(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from tests.unit.engines.test_vllm import Stand
async def main():
    stand = Stand(Path({str(tmp_path)!r}))
    await stand.engine.start()
    print(stand.pid, stand.inner, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pids = [int(word) for word in (await asyncio.to_thread(parent.stdout.readline)).split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await until(lambda: not any(alive(pid) for pid in pids))


# -- when it dies ------------------------------------------------------------------------------------------------------


async def test_what_had_begun_fails_with_the_reason_and_what_had_not_waits(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    begun = stand.engine.generate([HANGS], Sampling(), stop_ids=())
    await anext(begun)
    silent = asyncio.create_task(play(stand, [SILENT], max_tokens=2))
    await until(lambda: sum("generate" in asked for asked in stand.asked()) == 2)
    inner = stand.inner
    os.kill(stand.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="in the middle of an answer: vLLM was killed by SIGKILL; its log is"):
        await anext(begun)
    assert "being started again" in stand.engine._state.reason
    assert ids_of(await play(stand, [5], max_tokens=2)) == [6, 7]
    assert not alive(inner)
    await until(lambda: sum("generate" in asked for asked in stand.asked()) == 4)  # the silent one asks again
    silent.cancel()


async def test_a_request_that_ends_every_server_is_given_up(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    with pytest.raises(EngineError, match="vLLM ended with code 7"):
        await play(stand, [DIES])
    assert (stand.folder / "starts").read_text() in ("3", "4")
    assert ids_of(await play(stand, [5], max_tokens=1)) == [6]


async def test_an_error_in_place_of_tokens_is_tried_again_and_then_told(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    with pytest.raises(EngineError, match="EngineCore encountered an issue"):
        await play(stand, [FAILS])
    assert sum("generate" in asked for asked in stand.asked()) == 3


async def test_a_server_that_cannot_be_started_again_is_given_up(make: Make) -> None:
    stand = make(env={"STANDIN_STARTS": "1"}, restarts=2)
    await stand.engine.start()
    os.kill(stand.pid, signal.SIGKILL)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(EngineError, match=r"cannot be started again: .*there is no GPU left; its log is"):
            await play(stand, [5])
    assert time.monotonic() - began < stretch(30)  # far less than a request's patience
    with pytest.raises(EngineError, match="cannot be started again"):
        await stand.load("1.1")


async def test_patience_ends(make: Make) -> None:
    stand = make(env={"STANDIN_STARTS": "1"}, restart_timeout=0.2, restarts=50)
    await stand.engine.start()
    os.kill(stand.pid, signal.SIGKILL)
    await until(lambda: not stand.engine._state.serving.is_set())
    with pytest.raises(EngineError, match="started again"):
        await play(stand, [5])


# -- pauses and versions -----------------------------------------------------------------------------------------------


async def test_a_version_is_loaded_while_nothing_is_in_flight(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    stand.offer("1.1", 0.5)
    begun = asyncio.create_task(play(stand, [5], max_tokens=30))
    await until(lambda: bool(stand.asked()))
    loading = asyncio.create_task(stand.load("1.1"))
    await asyncio.sleep(0.05)
    late = asyncio.create_task(play(stand, [5], max_tokens=3))
    await loading
    assert {chunk.version for chunk in await begun} == {"1.0"}
    assert [(chunk.version, chunk.logprobs) for chunk in await late] == [
        ("1.1", [-0.506]),
        ("1.1", [-0.507]),
        ("1.1", [-0.508]),
    ]
    assert len(ids_of(await begun)) == 30
    told = [asked.get("path") or ("reload" if "reload" in asked else "generate") for asked in stand.asked()]
    assert told == ["generate", "/pause", "reload", "/resume", "generate", "generate"]
    assert next(asked for asked in stand.asked() if "reload" in asked)["paused"]


async def test_a_paused_engine_stays_paused_over_a_load(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    await stand.engine.pause()
    stand.offer("1.1", 0.5)
    await stand.load("1.1")
    waiting = asyncio.create_task(play(stand, [5], max_tokens=1))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await stand.engine.resume()
    assert [chunk.version for chunk in await waiting] == ["1.1"]


async def test_a_pause_in_the_middle_of_a_load_lasts(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    slow = stand.offer("1.1", 0.5) / "slow"
    slow.touch()
    loading = asyncio.create_task(stand.load("1.1"))
    await until(lambda: any("reload" in asked for asked in stand.asked()))
    pausing = asyncio.create_task(stand.engine.pause())
    await asyncio.sleep(0.05)
    slow.unlink()
    await asyncio.gather(loading, pausing)
    waiting = asyncio.create_task(play(stand, [5], max_tokens=1))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await stand.engine.resume()
    assert [chunk.version for chunk in await waiting] == ["1.1"]


class Told(LineHolder):
    """Somebody else who may ask the server: which lines it was given."""

    def __init__(self) -> None:
        self.lines: list[DirectLine | None] = []

    def tell(self, line: DirectLine | None) -> None:
        self.lines.append(line)

    def of_replica(self, number: int) -> "Told":
        return self

    async def wait_until_idle(self) -> None: ...


async def test_a_server_that_comes_back_during_a_load_is_asked_for_the_new_version_only(make: Make) -> None:
    """Others go on meanwhile, and so the pause is over before it is up."""
    stand, told = make(), Told()
    await stand.engine.start()
    stand.engine.lend(told)
    os.kill(stand.pid, signal.SIGKILL)
    await until(lambda: not stand.engine._state.serving.is_set())
    stand.offer("1.1", 0.5)
    await stand.engine.pause()
    loading = asyncio.create_task(stand.load("1.1"))
    await asyncio.sleep(0)
    told.lines.clear()
    await stand.engine.resume()
    asking = asyncio.create_task(play(stand, [5], max_tokens=1))
    await asyncio.wait_for(loading, stretch(30))
    assert [(chunk.version, chunk.logprobs) for chunk in await asking] == [("1.1", [-0.506])]
    assert {line.version for line in told.lines if line is not None and line.open} == {"1.1"}
    assert told_of(stand).index("reload") < told_of(stand).index("generate")


async def test_a_server_that_dies_as_it_is_first_met_is_started_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = make()
    meet, first = Vllm._meet, iter([True])

    async def die(engine: Vllm, client: Any) -> Any:
        if next(first, False):
            os.kill(stand.pid, signal.SIGKILL)
            await engine._server.wait_until_gone()
        return await meet(engine, client)

    monkeypatch.setattr(Vllm, "_meet", die)
    await stand.engine.start()
    assert ids_of(await play(stand, [5], max_tokens=1)) == [6]
    assert (stand.folder / "starts").read_text() == "2"


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_server_that_dies_while_it_takes_a_version_gets_it_once_it_is_back(
    make: Make, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = make()
    await stand.engine.start()
    slow = stand.offer("1.1", 0.5) / "slow"
    slow.touch()
    if noticed:  # by those who watch it, before the load hears that its connection is gone
        load, first = ServedVersion.load, iter([True])

        async def load_later(*args: Any) -> None:
            try:
                await load(*args)
            finally:
                if next(first, False):
                    await until(lambda: stand.engine._api is None)

        monkeypatch.setattr(ServedVersion, "load", load_later)
    loading = asyncio.create_task(stand.load("1.1"))
    await until(lambda: any("reload" in asked for asked in stand.asked()))
    slow.unlink()
    os.kill(stand.pid, signal.SIGKILL)
    await asyncio.wait_for(loading, stretch(30))
    assert [(chunk.version, chunk.logprobs) for chunk in await play(stand, [5], max_tokens=1)] == [("1.1", [-0.506])]
    assert (stand.folder / "starts").read_text() == "2"


async def test_a_load_that_is_given_up_leaves_the_version_before(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    (stand.offer("1.1", 0.5) / "slow").touch()
    loading = asyncio.create_task(stand.load("1.1"))
    await until(lambda: any("reload" in asked for asked in stand.asked()))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert re.search(r"started again|could not be loaded: it was given up", stand.engine._state.reason)
    assert [(chunk.version, chunk.logprobs) for chunk in await play(stand, [5], max_tokens=1)] == [("1.0", [-0.006])]
    assert (stand.folder / "starts").read_text() == "2"


async def test_what_is_refused_leaves_the_version_before(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    write_weights(stand.offer("1.1", 0.5), 0.5, width=5)
    stand.offer("1.2", float("nan"))
    for version, says in (
        ("1.1", r"norm.weight has shape \[5\] and should have \[4\]; nothing was changed"),
        ("1.2", "norm.weight has values that are not finite numbers; nothing was changed"),
        ("1.3", "holds no weights"),
    ):
        with pytest.raises(EngineError, match=says):
            await stand.load(version)
        assert [(chunk.version, chunk.logprobs) for chunk in await play(stand, [5], max_tokens=1)] == [
            ("1.0", [-0.006])
        ]
    assert not any("reload" in asked for asked in stand.asked())
    assert (stand.folder / "starts").read_text() == "1"


async def test_a_killed_server_gets_the_current_version_again(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    stand.offer("1.1", 0.5)
    await stand.load("1.1")
    os.kill(stand.pid, signal.SIGKILL)
    await until(lambda: not stand.engine._state.serving.is_set())
    assert [(chunk.version, chunk.logprobs) for chunk in await play(stand, [5], max_tokens=1)] == [("1.1", [-0.506])]


async def test_a_server_that_does_not_have_what_was_sent_is_started_again(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    stand.offer("1.1", 0.5)
    await stand.load("1.1")
    stand.offer("1.2", 0.7, probe=0.8)
    with pytest.raises(EngineError, match=r"does not serve what was sent as version 1.2: .* differ by 0.1 in the mean"):
        await stand.load("1.2")
    assert [(chunk.version, chunk.logprobs) for chunk in await play(stand, [5], max_tokens=1)] == [("1.1", [-0.506])]
    assert (stand.folder / "starts").read_text() == "2"
    stand.offer("1.3", 0.9)
    await stand.load("1.3")
    assert [chunk.version for chunk in await play(stand, [5], max_tokens=1)] == ["1.3"]


async def test_a_version_that_is_gone_is_not_served_as_if_it_were_there(make: Make) -> None:
    stand = make(restart_timeout=2.0)
    await stand.engine.start()
    (stand.offer("1.1", 0.5) / "keep").touch()
    await stand.load("1.1")
    (stand.root / "1.1" / "model.safetensors").unlink()
    os.kill(stand.pid, signal.SIGKILL)
    await until(lambda: not stand.engine._state.serving.is_set())
    with pytest.raises(EngineError, match="holds no weights"):
        await play(stand, [5])
    stand.offer("1.2", 0.25)
    await stand.load("1.2")
    assert [(chunk.version, chunk.logprobs) for chunk in await play(stand, [5], max_tokens=1)] == [("1.2", [-0.256])]


def told_of(stand: Stand) -> list[str]:
    return [asked.get("path") or ("reload" if "reload" in asked else "generate") for asked in stand.asked()]


async def test_a_server_pauses_when_the_engine_does_and_not_again_for_new_weights(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    await stand.engine.pause()
    await until(lambda: told_of(stand) == ["/pause"])
    assert stand.asked()[0]["query"] == {"mode": "wait", "clear_cache": "true"}  # what is cached is of older weights
    stand.offer("1.1", 0.5)
    await stand.load("1.1")
    await stand.engine.resume()
    assert told_of(stand) == ["/pause", "reload", "/resume", "generate"]
    await stand.engine.pause()
    await stand.engine.resume()  # before it can have paused
    assert told_of(stand)[4:] == ["/pause", "/resume"]
    assert ids_of(await play(stand, [5], max_tokens=1)) == [6]


async def test_a_refused_version_leaves_no_server_paused(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    await stand.engine.pause()
    with pytest.raises(EngineError, match="holds no weights"):
        await stand.load("1.1")
    await stand.engine.resume()
    assert told_of(stand) == ["/pause", "/resume"]


async def test_a_server_that_dies_while_it_is_paused_is_started_again(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    await stand.engine.pause()
    os.kill(stand.pid, signal.SIGKILL)
    await stand.engine.resume()
    assert ids_of(await play(stand, [5], max_tokens=1)) == [6]


async def test_a_server_whose_weights_stay_is_never_paused(make: Make) -> None:
    """It may be somebody else's, and serve others."""
    stand = make()
    stand.engine = Vllm(stand.model, stand.settings, log=stand.folder / "vllm.log")
    await stand.engine.start()
    await stand.engine.pause()
    await stand.engine.resume()
    assert not stand.asked()


async def test_who_gives_up_a_whole_answer_closes_its_connection(make: Make) -> None:
    stand = make(stream_interval=8)
    await stand.engine.start()
    asking = asyncio.create_task(play(stand, [SILENT], max_tokens=8))
    await until(lambda: bool(stand.asked()))
    asking.cancel()
    await until(lambda: any("dropped" in asked for asked in stand.asked()))
    assert [(chunk.ids, chunk.finish) for chunk in await play(stand, [5], max_tokens=3)] == [([6, 7, 8], "length")]
    assert [(chunk.ids, chunk.finish) for chunk in await play(stand, [5], (7,), max_tokens=3)] == [([6, 7], "stop")]


async def test_a_whole_answer_that_fails_is_asked_for_again(make: Make) -> None:
    stand = make(stream_interval=8)
    await stand.engine.start()
    with pytest.raises(EngineError, match="EngineCore encountered an issue"):
        await play(stand, [FAILS], max_tokens=8)
    assert sum("generate" in asked for asked in stand.asked()) == 3
    with pytest.raises(EngineError, match="temperature is too high"):
        await play(stand, [5], max_tokens=8, temperature=60.0)
    assert sum("generate" in asked for asked in stand.asked()) == 4


async def test_an_update_by_its_own_tensors_goes_on_from_version_to_version(make: Make) -> None:
    stand = make(env={"STANDIN_VERSION": "0.24.0"})
    await stand.engine.start()
    api, tensors = stand.engine._api, stand.engine._tensors
    assert api is not None
    assert tensors is not None
    receiver, spec = VllmReceiver(api, tensors, "float32", fusable=True), TensorSpec("float32", (4,))

    async def send(name: str, *, fused: bool) -> list[str]:
        before = len(stand.asked())
        with contextlib.suppress(EngineError):
            await receiver.start_update(fused=fused)
            await receiver.update({name: spec}, b"handles")
            await receiver.finish_update()
        return [asked["path"].split("_")[0] + "!" * asked["failed"] for asked in stand.asked()[before:]]

    assert await send("norm.weight", fused=True) == ["/start", "/update"]
    assert await send("norm.weight", fused=True) == ["/update"]
    assert await send("no such tensor", fused=True) == ["/update!"]
    assert await send("norm.weight", fused=False) == ["/start", "/update", "/finish"]
    assert await send("norm.weight", fused=True) == ["/start", "/update"]


async def test_it_sleeps_while_it_is_paused(make: Make) -> None:
    stand = make(sleep=True)
    await stand.engine.start()
    await stand.engine.pause()
    stand.offer("1.1", 0.5)
    await stand.load("1.1")
    await stand.engine.resume()
    await stand.engine.pause()
    await stand.engine.resume()
    told = [(asked["path"], asked["query"].get("tags")) for asked in stand.asked() if "path" in asked]
    assert told == [
        ("/sleep", None),
        ("/wake_up", "weights"),
        ("/wake_up", "kv_cache"),
        ("/sleep", None),
        ("/wake_up", None),
    ]


async def test_one_that_cannot_wake_for_want_of_memory_says_what_to_do(make: Make) -> None:
    stand = make(sleep=True, env={"STANDIN_OUT_OF_MEMORY": "/wake_up"})
    await stand.engine.start()
    await stand.engine.pause()
    with pytest.raises(EngineError, match=r"leaves it too little of the GPU's memory. Fix: lower engine.vllm.gpu_mem"):
        await stand.engine.resume()


async def test_one_that_sleeps_is_started_again_only_once_it_is_needed(make: Make) -> None:
    """Until then the learner has its memory."""
    stand = make(sleep=True)
    await stand.engine.start()
    stand.offer("1.1", 0.5)
    await stand.load("1.1")
    await stand.engine.pause()
    os.kill(stand.pid, signal.SIGKILL)
    await until(lambda: not stand.engine.serving)
    waiting = asyncio.create_task(play(stand, [5], max_tokens=1))
    await asyncio.sleep(0.3)
    assert (stand.folder / "starts").read_text() == "1"
    assert await stand.engine.score([given([3], [4])]) == [[-0.504]]
    assert not waiting.done()
    await stand.engine.resume()
    assert [(chunk.version, chunk.logprobs) for chunk in await waiting] == [("1.1", [-0.506])]
    told = told_of(stand)
    assert told[told.index("/sleep") :] == [
        "/sleep",
        *("/pause", "reload", "/resume", "generate", "/sleep"),
        *("/wake_up", "generate", "/sleep"),
        *("/wake_up", "generate"),
    ]


async def test_one_that_sleeps_and_died_is_started_for_a_new_version(make: Make) -> None:
    stand = make(sleep=True)
    await stand.engine.start()
    await stand.engine.pause()
    os.kill(stand.pid, signal.SIGKILL)
    await until(lambda: not stand.engine.serving)
    stand.offer("1.1", 0.5)
    await stand.load("1.1")
    await stand.engine.resume()
    assert [(chunk.version, chunk.logprobs) for chunk in await play(stand, [5], max_tokens=1)] == [("1.1", [-0.506])]
    assert (stand.folder / "starts").read_text() == "2"


async def test_closed_while_it_is_started_again_it_leaves_nothing(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    os.kill(stand.pid, signal.SIGKILL)
    await until(lambda: (stand.folder / "starts").read_text() == "2")
    pid = stand.pid
    waiting = asyncio.create_task(play(stand, [5]))
    await asyncio.sleep(0.01)
    await stand.engine.close()
    with pytest.raises(EngineError, match="vLLM was closed"):
        await waiting
    assert not alive(pid)
    assert not alive(stand.inner)


async def test_somebody_elses_server_gets_its_version_again_when_it_comes_back(make: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr("strop.engines.server_process.WATCH", 0.05)
    stand = make()
    await stand.engine.start()
    guest = make(url=stand.engine._server.url)
    await guest.engine.start()
    guest.offer("1.1", 0.5)
    await guest.load("1.1")
    arguments = command(stand.model, stand.settings, 64, "float32")
    port = stand.engine._server.url.rpartition(":")[2]
    await stand.engine.close()
    await until(lambda: not guest.engine._state.serving.is_set())
    env = {**os.environ, **environment(stand.settings)}
    again = run([sys.executable, *arguments, "--host", "127.0.0.1", "--port", port], env=env, start_new_session=True)
    try:
        chunks = await play(guest, [5], max_tokens=1)
        assert [(chunk.version, chunk.logprobs) for chunk in chunks] == [("1.1", [-0.506])]
    finally:
        os.killpg(again.pid, signal.SIGKILL)
        os.kill(stand.inner, signal.SIGKILL)
        again.wait()


async def test_closing_a_stream_closes_its_connection(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    async with aclosing(stand.engine.generate([HANGS], Sampling(), stop_ids=())) as stream:
        await anext(stream)
    await stand.engine.pause()  # nothing is in flight
    await stand.engine.resume()
    assert ids_of(await play(stand, [5], max_tokens=1)) == [6]


# -- tokens that somebody else sampled ---------------------------------------------------------------------------------


def given(prompt: list[int], response: list[int], temperature: float = 1.0) -> GivenAnswer:
    return GivenAnswer(prompt_ids=prompt, response_ids=response, temperature=temperature)


async def test_given_answers_are_scored_with_one_request_for_each_path(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    answers = [given([5, 6], [7, 8]), given([5, 6, 7, 8, 9], [10]), given([5, 6], [11]), given([5, 6], [7, 8])]
    assert await stand.engine.score(answers) == [[-0.007, -0.008], [-0.010], [-0.011], [-0.007, -0.008]]
    asked = [asked["generate"] for asked in stand.asked() if "generate" in asked]
    assert asked == [{"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}] * 2
    stand.offer("1.1", 0.5)
    await stand.load("1.1")
    assert await stand.engine.score(answers[2:3]) == [[pytest.approx(-0.511)]], "the weights that are served"
    assert await stand.engine.score([]) == []


async def test_what_cannot_be_scored_is_refused(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    with pytest.raises(
        ConfigError, match=r"vLLM gives logprobs of given tokens at temperature 1 only.* sampled at 0\.7"
    ):
        await stand.engine.score([given([5], [6], 0.7)])
    with pytest.raises(ContextOverflow):
        await stand.engine.score([given([5] * 60, [6] * 4)])
    with pytest.raises(EngineError, match="outside the vocabulary"):
        await stand.engine.score([given([5], [100])])
    assert not [asked for asked in stand.asked() if "generate" in asked]


async def test_a_server_that_sleeps_is_woken_to_score(make: Make) -> None:
    stand = make(sleep=True)
    await stand.engine.start()
    await stand.engine.pause()
    assert await stand.engine.score([given([5], [6])]) == [[-0.006]]
    told = [asked.get("path") or "generate" for asked in stand.asked()]
    assert told == ["/sleep", "/wake_up", "generate", "/sleep"]
    waiting = asyncio.create_task(play(stand, [5], max_tokens=1))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "it is paused still"
    await stand.engine.resume()
    assert ids_of(await waiting) == [6]


async def test_a_server_that_fails_to_score_sleeps_again(make: Make) -> None:
    stand = make(sleep=True)
    await stand.engine.start()
    await stand.engine.pause()
    with pytest.raises(EngineError, match="EngineCore encountered an issue"):
        await stand.engine.score([given([5], [FAILS])])
    told = [asked.get("path") or "generate" for asked in stand.asked()]
    assert told == ["/sleep", "/wake_up", "generate", "/sleep"]
    await stand.engine.resume()
    assert ids_of(await play(stand, [5], max_tokens=1)) == [6]


async def test_a_killed_server_is_asked_again(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    os.kill(stand.pid, signal.SIGKILL)
    assert await stand.engine.score([given([5], [6])]) == [[-0.006]]
    assert (stand.folder / "starts").read_text() == "2"
