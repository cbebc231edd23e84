"""Several servers of one model: which GPUs each gets, and what happens when one of them dies."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from msgspec.structs import replace

from strop.config import EngineConfig, SglangConfig, VllmConfig
from strop.engines import gpus, remote
from strop.engines.base import Engine, EngineSetup
from strop.engines.gpus import list_gpus, must_start_in_turn, place_replicas, share_gpus
from strop.engines.vllm.engine import Vllm
from strop.errors import ConfigError, EngineError
from strop.gateway.replicas import Replicas
from strop.types import Sampling
from strop.weights.files import FolderTransfer
from strop.weights.publisher import Publisher
from tests.limits import stretch
from tests.unit.engines.test_vllm import HANGS, SILENT, Stand, until

EIGHT = [str(n) for n in range(8)]


def test_the_learner_keeps_the_first_gpu_where_the_others_are_enough() -> None:
    assert share_gpus(EIGHT, 3, 2, beside_learner=True) == [["1", "2"], ["3", "4"], ["5", "6"]]
    assert share_gpus(EIGHT, 7, 1, beside_learner=True) == [[str(n)] for n in range(1, 8)]
    assert share_gpus(EIGHT, 4, 2, beside_learner=True) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    assert share_gpus(EIGHT, 2, 2, beside_learner=False) == [["0", "1"], ["2", "3"]]
    assert share_gpus([], 2, 4, beside_learner=True) == [[], []]


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"replicas=5 with 2 GPUs each needs 10, and there are 8\. Fix: .* at most 4$"
    ):
        share_gpus(EIGHT, 5, 2, beside_learner=True)
    with pytest.raises(ConfigError, match=r"replicas=2 with 1 GPU each needs 2, and there is 1\. Fix: .* at most 1$"):
        share_gpus(["0"], 2, 1, beside_learner=True)


def test_gpus_are_those_that_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5f,7")
    assert list_gpus() == ["3", "GPU-5f", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list_gpus() == []


def setup(config: EngineConfig) -> EngineSetup:
    return EngineSetup(model=Path("model"), config=config, folder=Path("run"))


def test_each_is_started_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "list_gpus", lambda: EIGHT)
    made = place_replicas(
        setup(EngineConfig(name="vllm", replicas=2, vllm=VllmConfig(tensor_parallel=2, env={"A": "1"}))),
        beside_learner=True,
    )
    assert [one.config.vllm.env for one in made] == [
        {"A": "1", "CUDA_VISIBLE_DEVICES": "1,2"},
        {"A": "1", "CUDA_VISIBLE_DEVICES": "3,4"},
    ]
    assert [str(one.folder) for one in made] == ["run", "run/replica-2"]
    named = EngineConfig(name="sglang", replicas=2, sglang=SglangConfig(env={"CUDA_VISIBLE_DEVICES": "6,5"}))
    made = place_replicas(setup(named), beside_learner=True)
    assert [one.config.sglang.env["CUDA_VISIBLE_DEVICES"] for one in made] == ["6", "5"]
    alone = setup(EngineConfig(name="vllm"))
    assert place_replicas(alone, beside_learner=True) == [alone]


def test_those_that_read_the_learners_memory_share_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "list_gpus", lambda: ["0"])
    config = EngineConfig(name="vllm", replicas=2, vllm=VllmConfig(weights="ipc", gpu_memory=0.2, env={"A": "1"}))
    assert must_start_in_turn(config), "each measures what the others leave"
    given = replace(config, vllm=replace(config.vllm, args=("--kv-cache-memory-bytes=4G",)))
    assert not must_start_in_turn(given)
    made = place_replicas(setup(config), beside_learner=True)
    assert [one.config.vllm.env for one in made] == [{"A": "1"}, {"A": "1"}]
    assert [str(one.folder) for one in made] == ["run", "run/replica-2"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (EngineConfig(name="embedded", replicas=2), "engine.name is embedded, which has none. Fix: set it to vllm"),
        (
            EngineConfig(name="vllm", replicas=2, vllm=VllmConfig(url="http://127.0.0.1:1")),
            "engine.vllm.url is one server",
        ),
        (
            EngineConfig(name="vllm", replicas=3, vllm=VllmConfig(weights="ipc", gpu_memory=0.5)),
            r"gpu_memory=0.5 .* more than there is. Fix: set it to at most 0.26",
        ),
    ],
)
def test_what_cannot_have_replicas_says_so(config: EngineConfig, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        place_replicas(setup(config), beside_learner=True)


# -- real processes ----------------------------------------------------------------------------------------------------


class Two:
    """Two stand-ins for vLLM, made as a run makes them."""

    def __init__(self, folder: Path) -> None:
        self.stand = Stand(folder)
        config = EngineConfig(name="vllm", replicas=2, vllm=self.stand.settings)
        made = EngineSetup(model=self.stand.model, config=config, folder=folder, renewed=True)
        self.servers = list[Vllm]()
        for number, one in enumerate(place_replicas(made, beside_learner=True)):
            one.folder.mkdir(exist_ok=True)
            vllm = one.config.vllm  # each has a folder of its own to say in what it was asked
            env = {**vllm.env, "STANDIN_FOLDER": str(one.folder)}
            self.servers.append(Vllm.make(replace(one, config=replace(one.config, vllm=replace(vllm, env=env)))))
            assert (number, self.servers[-1].serving) == (number, False)
        self.engine = Replicas(self.servers)
        self.publisher = Publisher(self.engine, FolderTransfer(self.stand.root))


@pytest.fixture
async def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Two]:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(remote, "NOTICE", 0.3)
    two = Two(tmp_path)
    await two.engine.start()
    yield two
    await two.engine.close()


async def ask(engine: Engine, prompt: list[int], **sampling: int) -> set[str]:
    """The versions that answered."""
    chunks = engine.generate(prompt, Sampling(**sampling), stop_ids=[])  # type: ignore[arg-type]
    return {chunk.version async for chunk in chunks}


async def test_a_version_reaches_all_and_rollouts_are_spread(two: Two) -> None:
    two.stand.offer("1.1", 0.5)
    await two.publisher.publish("1.1")
    assert [server.version for server in two.servers] == ["1.1", "1.1"]
    for rollout in "abcd":
        assert await ask(two.engine.of(rollout), [1, 2, 3], max_tokens=2) == {"1.1"}
    homes = [replica.rollouts for replica in two.engine._replicas]
    assert homes == [2, 2]


async def test_while_one_is_started_again_the_other_answers(two: Two) -> None:
    two.stand.offer("1.1", 0.5)
    await two.publisher.publish("1.1")
    first = two.servers[0]
    while two.engine.pick("a") is not two.engine._replicas[0]:
        two.engine._homes.clear()
    waiting = asyncio.create_task(ask(two.engine.of("a"), [1, HANGS], max_tokens=2))
    await asyncio.sleep(0.1)
    os.kill(first._server._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    await until(lambda: not first.serving)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await ask(two.engine.of("b"), [1, 2], max_tokens=2) == {"1.1"}
    with pytest.raises(EngineError, match="being started again"):
        await ask(first, [1, 2], max_tokens=2)  # it need not wait: the other one can answer
    assert loop.time() - began < stretch(1.0)
    waiting.cancel()
    await until(lambda: first.serving, stretch(20))
    assert first.version == "1.1"  # with the weights that it had lost
    two.stand.offer("1.2", 0.25)
    await two.publisher.publish("1.2")
    assert {server.version for server in two.servers} == {"1.2"}


async def test_what_got_no_token_yet_is_answered_by_the_other(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 5.0)
    while two.engine.pick("a") is not two.engine._replicas[0]:
        two.engine._homes.clear()
    waiting = asyncio.create_task(ask(two.engine.of("a"), [1, SILENT], max_tokens=2))
    await asyncio.sleep(0.3)
    os.kill(two.servers[0]._server._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    await until(lambda: two.engine._replicas[1].in_flight == 1, stretch(3))
    assert not two.servers[0].serving
    waiting.cancel()


async def test_a_publish_does_not_wait_for_one_that_is_down(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the version once it is up: until then the other answers alone, and an older one is never served."""
    two.stand.offer("1.1", 0.5)
    await two.publisher.publish("1.1")
    first = two.servers[0]
    monkeypatch.setattr(remote, "FIRST_WAIT", 2.0)
    os.kill(first._server._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    await until(lambda: not first.serving)
    for version in ("1.2", "1.3"):
        two.stand.offer(version, 0.25)
        async with asyncio.timeout(1.5):
            await two.publisher.publish(version)
        assert not first.serving
        for rollout in "abcd":
            assert await ask(two.engine.of(rollout), [1, 2], max_tokens=2) == {version}
    await until(lambda: first.serving, stretch(20))
    assert first.version == "1.3"
    assert [replica.outdated for replica in two.engine._replicas] == [False, False]
    reloads = [Path(line["reload"]).name for line in two.stand.asked() if "reload" in line]
    assert reloads == ["1.1", "1.3"]
