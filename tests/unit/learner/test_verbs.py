"""The learner's verbs: the same on both sides of the process border, for every policy and process."""

import asyncio
import inspect
import shutil

import pytest
import torch
from safetensors.torch import load_file

from strop.config import load
from strop.engines.receiver import WeightsRefused
from strop.engines.weight_files import read_probe, read_specs
from strop.errors import LearnerError, ModelError
from strop.learner.child import HeldPolicy, LearnerChild
from strop.learner.client import LearnerClient
from strop.learner.model_weights import ModelWeights
from strop.learner.process import LearnerProcess
from strop.learner.rank_processes import LearnerRanks
from strop.learner.sharded_weights import ShardedWeights
from strop.learner.verbs import LearnerSettings, LearnerVerbs, RankPlace, WeightVerbs
from strop.weights.files import FolderTransfer
from tests.unit.learner.practice import credited


def test_client_and_child_have_every_verb_with_the_same_arguments() -> None:
    pairs = ((LearnerVerbs, HeldPolicy), (WeightVerbs, ModelWeights), (WeightVerbs, ShardedWeights))
    verbs = [
        (name, verb, done_by)
        for declared, done_by in pairs
        for name, verb in inspect.getmembers(declared, inspect.isfunction)
        if name[0] != "_"
    ]
    names = {name for name, _, _ in verbs}
    assert {"score", "update", "begin_save", "finish_save", "restore", "digest", "load"} <= names
    assert {"write", "export_handles"} <= names
    for name, verb, done_by in verbs:
        arguments = list(inspect.signature(verb).parameters)
        mirror = getattr(LearnerClient, name)
        assert inspect.iscoroutinefunction(mirror), name
        assert list(inspect.signature(mirror).parameters) == arguments, name
        assert list(inspect.signature(getattr(done_by, name)).parameters) == arguments, name
        assert inspect.signature(mirror).return_annotation == inspect.signature(verb).return_annotation, name


async def test_two_processes_hold_two_policies(folder, tmp_path) -> None:
    both = [LearnerProcess(tmp_path / f"{n}.log") for n in range(2)]
    try:
        for process, context in zip(both, (64, 32), strict=True):
            one = load(learner={"device": "cpu"}, policy={"context": context})
            await process.start(LearnerSettings.of(one, folder, serve=context == 32))
        assert [process.context for process in both] == [64, 32]
        assert await both[0].of().digest() == await both[1].of().digest()
        await both[0].of().begin_save(tmp_path / "checkpoint", {"version": "1.1"})
        await both[0].of().finish_save()
        assert await both[1].of().restore(tmp_path / "checkpoint") == {"version": "1.1"}
    finally:
        for process in both:
            await process.close()


async def test_a_model_that_ranks_cannot_load_is_said_and_not_that_they_ended(folder, tmp_path) -> None:
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    (damaged / "config.json").write_text("{")
    ranks = await LearnerRanks.launch(tmp_path / "learner.log", 2)
    try:
        config = load(learner={"device": "cpu", "ranks": 2})
        with pytest.raises(ModelError, match="is not a valid JSON file"):
            await ranks.start(LearnerSettings.of(config, damaged, serve=False))
    finally:
        await ranks.close()


async def test_ranks_that_another_engine_serves_give_their_weights(folder, tmp_path) -> None:
    ranks = await LearnerRanks.launch(tmp_path / "learner.log", 2)
    try:
        config = load(learner={"device": "cpu", "ranks": 2})
        await ranks.start(LearnerSettings.of(config, folder, serve=False))
        await FolderTransfer(tmp_path, ranks.of()).stage("1.0")
        given, own = load_file(tmp_path / "1.0" / "model.safetensors"), load_file(folder / "model.safetensors")
        assert given.keys() == own.keys()
        assert all(torch.equal(given[name], tensor) for name, tensor in own.items())
        assert await ranks.of().specs() == read_specs(tmp_path / "1.0")
        assert read_probe(tmp_path / "1.0") == await ranks.of().probe()
        with pytest.raises(WeightsRefused, match="sharded over several ranks"):
            await ranks.of().export_handles(None)
        await ranks.of().refuse_broken()
    finally:
        await ranks.close()


class Pickled:
    """Counts how often it is; of a size that takes a while to be sent."""

    times = 0

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        Pickled.times += 1
        return bytes, (bytes(2**23),)


async def test_what_all_ranks_are_given_is_pickled_once_and_holds_nobody_up(tmp_path) -> None:
    ranks, ticks = await LearnerRanks.launch(tmp_path / "learner.log", 2), 0
    call = asyncio.ensure_future(ranks.call(None, "nonsense", (Pickled(),)))
    try:
        while not call.done():  # the processes read nothing while they load libraries
            await asyncio.sleep(0.02)
            ticks += 1
        with pytest.raises(LearnerError):  # the verb is nonsense, and they end for want of a model
            await call
        assert Pickled.times == 1
        assert ticks > 3
    finally:
        await ranks.close()


async def test_a_process_that_is_closed_while_a_call_is_sent(tmp_path) -> None:
    process = LearnerProcess(tmp_path / "learner.log")
    call = asyncio.ensure_future(process.call(None, "nonsense", (bytes(2**26),)))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(process.close(), 20)
    with pytest.raises(LearnerError):
        await call


@pytest.mark.parametrize("sleep", [True, False])
def test_a_step_leaves_the_gpu_to_a_server_that_sleeps_meanwhile(folder, episodes, monkeypatch, sleep) -> None:
    """What passes have taken is kept for the next ones otherwise, and the server could not wake."""
    told, child = [], LearnerChild(None)  # pyright: ignore
    config = load(learner={"device": "cpu"}, engine={"name": "vllm", "vllm": {"sleep": sleep}})
    child.start([LearnerSettings.of(config, folder, serve=False)], RankPlace())
    held = child.policies["main"]
    batch = credited(held.learner, episodes())
    make_step = held.learner.optim.step
    monkeypatch.setattr(held.learner.optim, "step", lambda: (told.append("step"), make_step()))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("release"))
    held.update(batch)
    assert told == ["step", *(["release"] if sleep else [])]
