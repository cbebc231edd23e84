"""Policies that are adapters on one vLLM server, which is a stand-in here (test_vllm.py): no two adapters have a name
in common, what nobody is served with goes, and what a server could not serve is refused before anything starts."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from strop.config import VllmConfig
from strop.engines import remote
from strop.engines.base import Engine
from strop.engines.vllm.adapters import choose_rank, make_arguments
from strop.engines.vllm.engine import command
from strop.engines.vllm.line import VllmLine
from strop.errors import ConfigError, EngineError
from strop.types import Sampling
from strop.weights.files import AdapterTransfer
from strop.weights.publisher import Publisher
from tests.unit.engines.test_vllm import HANGS, Stand, until


class Adapters(Stand):
    """A server with the policies a and b, which are adapters, and plain, which is the model as it is."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, ranks={"a": 4, "b": 4, "plain": 0}, **settings)
        self.policies = {policy: self.engine.of_policy(policy) for policy in ("a", "b", "plain")}
        self.publishers = {p: Publisher(self.policies[p], AdapterTransfer(self.root / p, p)) for p in "ab"}

    def offer_adapter(self, policy: str, version: str, shift: float, probe: float | None = None) -> Path:
        folder = self.root / policy / version
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"norm.weight": np.full(1, shift, np.float32)}, folder / "adapter_model.safetensors")
        logprobs = [-id / 1000 - (shift if probe is None else probe) for id in (4, 5)]
        (folder / "probe.json").write_text(json.dumps({"ids": [3, 4, 5], "logprobs": logprobs}))
        return folder

    async def publish(self, policy: str, version: str, shift: float, probe: float | None = None) -> None:
        self.offer_adapter(policy, version, shift, probe)
        await self.publishers[policy].publish(version)

    async def check(self, policy: str, version: str, shift: float) -> None:
        """Who asks is answered by this version, which is known by what it adds to every logprob."""
        assert await play_one(self.policies[policy]) == (version, pytest.approx(-0.006 - shift))

    async def loaded(self) -> list[str]:
        """The adapters on the server, as they were published."""
        answer = await self.engine._api._ask("GET", "/v1/models")  # pyright: ignore
        names = [model["id"] for model in json.loads(answer.body)["data"]][1:]
        return sorted(re.sub(r"-[0-9a-f]{8}$", "", name) for name in names)

    def names(self) -> list[str]:
        """What all adapters so far were loaded as."""
        return [asked["load"] for asked in self.asked() if "load" in asked]


async def play_one(engine: Engine) -> tuple[str, float]:
    (chunk,) = [chunk async for chunk in engine.generate([5], Sampling(max_tokens=1), stop_ids=())]
    return chunk.version, chunk.logprobs[0]


Make = Callable[..., Adapters]


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Make]:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(remote, "NOTICE", 0.3)
    made: list[Adapters] = []

    def one(**settings: Any) -> Adapters:
        made.append(Adapters(tmp_path / str(len(made)), **settings))
        return made[-1]

    yield one
    for stand in made:
        await stand.engine.close()


# -- versions ----------------------------------------------------------------------------------------------------------


async def test_two_versions_of_an_adapter_are_at_work_and_the_third_waits(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    await stand.publish("a", "1.1", 0.1)
    old = stand.policies["a"].generate([HANGS], Sampling(), stop_ids=())
    assert (await anext(old)).version == "1.1"  # pyright: ignore
    await stand.publish("b", "1.1", 0.2)
    await stand.publish("a", "1.2", 0.3)
    assert await stand.loaded() == ["a-1.1", "a-1.2", "b-1.1"]
    third = asyncio.create_task(stand.publish("a", "1.3", 0.4))
    await stand.publish("b", "1.2", 0.5)  # others do not wait
    assert not third.done()
    await stand.check("a", "1.2", 0.3)
    await stand.check("plain", "1.0", 0.0)
    await old.aclose()  # pyright: ignore
    await third
    await stand.check("a", "1.3", 0.4)
    assert await stand.loaded() == ["a-1.3", "b-1.2"]


async def test_a_pause_holds_no_adapter_up_and_nobody_else_asks_the_server(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    line = VllmLine()
    stand.engine.lend(line)
    await stand.engine.pause()
    await stand.publish("a", "1.1", 0.1)
    await stand.engine.resume()
    await stand.check("a", "1.1", 0.1)
    assert not [asked for asked in stand.asked() if asked.get("path") in ("/pause", "/resume")]
    assert not await line.wait_until_open(), "which adapter a request is for is the engine's to say"


async def test_an_adapter_that_is_not_what_was_sent_is_unloaded(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    await stand.publish("a", "1.1", 0.1)
    with pytest.raises(EngineError, match=r"does not serve what was sent as version 1\.2"):
        await stand.publish("a", "1.2", 0.2, probe=0.9)
    assert await stand.loaded() == ["a-1.1"]
    await stand.check("a", "1.1", 0.1)
    await stand.publish("a", "1.2", 0.3)  # keys of the one before by that name are not taken for its own
    await stand.check("a", "1.2", 0.3)
    assert await stand.loaded() == ["a-1.2"]
    assert (stand.folder / "starts").read_text() == "1"


async def test_a_version_that_is_published_again_is_loaded_anew(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    for shift in (0.1, 0.2):
        await stand.publish("a", "1.1", shift)
        await stand.check("a", "1.1", shift)
        assert await stand.loaded() == ["a-1.1"]
    assert len(set(stand.names())) == 2


async def test_a_load_that_is_given_up_leaves_nothing(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    slow = stand.offer_adapter("a", "1.1", 0.1) / "slow"
    slow.touch()
    loading = asyncio.create_task(stand.publishers["a"].publish("1.1"))
    await until(lambda: bool(stand.names()))
    loading.cancel()
    await asyncio.sleep(0.05)
    slow.unlink()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert len(stand.names()) == 1
    assert await stand.loaded() == []
    await stand.check("a", "1.0", 0.0)


async def test_a_killed_server_gets_all_adapters_again(make: Make) -> None:
    stand = make()
    await stand.engine.start()
    await stand.publish("a", "1.1", 0.1)
    await stand.publish("b", "1.1", 0.2)
    os.kill(stand.pid, signal.SIGKILL)
    await until(lambda: not stand.engine._state.serving.is_set())
    await stand.check("a", "1.1", 0.1)
    await stand.check("b", "1.1", 0.2)
    assert await stand.loaded() == ["a-1.1", "b-1.1"]


async def test_an_adapter_that_is_gone_is_waited_for_and_the_others_come_with_it(make: Make) -> None:
    stand = make(restart_timeout=2.0)
    await stand.engine.start()
    await stand.publish("a", "1.1", 0.1)
    await stand.publish("b", "1.1", 0.2)
    (stand.root / "a" / "1.1" / "adapter_model.safetensors").unlink()
    os.kill(stand.pid, signal.SIGKILL)
    await until(lambda: not stand.engine._state.serving.is_set())
    with pytest.raises(EngineError, match="holds no weights"):
        await play_one(stand.policies["b"])
    await stand.publish("a", "1.2", 0.3)
    await stand.check("a", "1.2", 0.3)
    await stand.check("b", "1.1", 0.2)


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "limit"), [(1, 8), (8, 8), (12, 16), (300, 320), (321, 512), (512, 512)])
def test_a_rank_is_held_by_the_next_that_vllm_takes(tmp_path: Path, rank: int, limit: int) -> None:
    stand = Stand(tmp_path, ranks={"a": rank})
    given = stand.engine._command()
    assert given[given.index("--max-lora-rank") + 1] == str(limit)
    assert choose_rank({}, rank) == limit  # engine.vllm.lora_rank, without policies that are adapters


@pytest.mark.parametrize(
    ("ranks", "settings", "says"),
    [
        (
            {"a": 4, "b": 24},
            {"lora_rank": 16},
            r"the adapter of b has rank 24, and engine\.vllm\.lora_rank allows 16\. Fix: raise",
        ),
        (
            {"a": 1024},
            {},
            r"the adapter of a has rank 1024, and vLLM takes 512 at most\. Fix: lower learner\.lora\.rank",
        ),
        ({}, {"lora_rank": 600}, r"engine\.vllm\.lora_rank is 600, and vLLM takes 512 at most\. Fix: lower it"),
        (
            {"a": 24},
            {"args": ("--max-lora-rank", "16")},
            r"engine\.vllm\.args has --max-lora-rank 16, and the adapter of a has rank 24\. Fix: leave it out",
        ),
        (
            {"a": 4, "b": 4, "plain": 0},
            {"args": ("--max_cpu_loras=3",)},
            r"engine\.vllm\.args has --max-cpu-loras 3, and two versions of every adapter are 4\. Fix: leave it out",
        ),
    ],
)
def test_what_the_server_could_not_serve_is_refused(
    tmp_path: Path, ranks: dict[str, int], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Stand(tmp_path, ranks=ranks, **settings)


def test_there_is_room_for_the_versions_that_still_answer() -> None:
    given = command(Path("m"), VllmConfig(lora_rank=16), 64, "float32", num_adapters=3)
    told = dict(pairwise(given))
    assert (told["--max-lora-rank"], told["--max-loras"], told["--max-cpu-loras"]) == ("16", "6", "12")
    assert make_arguments(16, 1, ("--max-loras", "9"))[-1] == "9"  # vLLM wants it to be as much at least


@pytest.mark.parametrize(
    ("host", "rank", "says"),
    [
        (
            {},
            4,
            r"vLLM at http://\S+ takes no LoRA adapters, and learner\.lora\.rank is 4\. Fix: start it with VLLM_ALLOW",
        ),
        (
            {"lora_rank": 8},
            12,
            r"was started with --max-lora-rank 8, and the adapter of a has rank 12\. Fix: start it with .*"
            r" --enable-lora --max-lora-rank 16 --max-loras 2 --max-cpu-loras 4",
        ),
        (
            {"lora_rank": 8, "args": ("--max-loras", "1", "--max-cpu-loras", "1")},
            4,
            r"was started with --max-cpu-loras 1, and two versions of every adapter are 2\. Fix: start it with",
        ),
    ],
    ids=["none", "rank", "kept"],
)
async def test_somebody_elses_server_that_is_too_small_is_refused(
    tmp_path: Path, host: dict[str, Any], rank: int, says: str
) -> None:
    theirs = Stand(tmp_path / "theirs", **host)
    await theirs.engine.start()
    try:
        ours = Stand(tmp_path / "ours", url=theirs.engine.url, ranks={"a": rank})
        with pytest.raises(EngineError, match=says):
            await ours.engine.start()
    finally:
        await theirs.engine.close()


async def test_two_runs_may_use_one_server_of_somebody_else(tmp_path: Path) -> None:
    theirs = Adapters(tmp_path / "theirs")
    await theirs.engine.start()
    guests = [Adapters(tmp_path / str(n), url=theirs.engine.url) for n in range(2)]
    try:
        for n, guest in enumerate(guests):
            await guest.engine.start()
            await guest.publish("a", "1.1", n / 10)
        for n, guest in enumerate(guests):
            await guest.check("a", "1.1", n / 10)
        assert await theirs.loaded() == ["a-1.1", "a-1.1"]
    finally:
        for one in (*guests, theirs):
            await one.engine.close()
