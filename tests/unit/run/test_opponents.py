"""Pools of past versions: what is in them, what is refused before anything starts, and what was won against whom."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop import config as configs
from strop.config import Config, PastConfig, resolve_policies
from strop.errors import ConfigError, DamagedCheckpoint
from strop.gateway.past_versions import PastVersions
from strop.models.checksums import write_sums
from strop.run.opponents import (
    OpponentPool,
    PoolSource,
    describe_opponents,
    find_pool_source,
    keep_copies,
)
from strop.run.start_from import begin_from
from strop.trajectory import Sample
from strop.types import Reward, Rollout, Step, Task, Turn

TWO = ["policies.left.model=strop/nano", "policies.right.past={of = 'left', size = 2}"]


def load(*sets: str) -> Config:
    return configs.load(sets=[*TWO, *sets])


def step(number: int, checkpoint: bool = True, **metrics: float) -> Step:
    name = f"step-{number:06d}-1" if checkpoint else None
    return Step(lineage=1, number=number, rollouts=[], dropped={}, metrics=metrics, checkpoint=name, time=0.0)


def pool(config: Config, source: PoolSource | None = None) -> OpponentPool:
    own: Any = object()
    past = config.policies["right"]["past"]
    given = PastConfig(**past)
    return OpponentPool(
        policy="right",
        config=given,
        source=source or PoolSource(config),
        engine=PastVersions("right", own, [own] * given.size),
        processes=[None] * given.size,
    )


def run_with(tmp_path: Path, config: Config, steps: list[Step]) -> Any:
    for one in steps:
        if one.checkpoint:
            (tmp_path / one.checkpoint).mkdir()
    return SimpleNamespace(
        config=config,
        steps=steps,
        policies=["left"],
        folder=SimpleNamespace(checkpoint=lambda name: tmp_path / name),
        view=SimpleNamespace(note=lambda text: None),
    )


def test_only_checkpoints_that_were_due_are_in_it(tmp_path: Path) -> None:
    """One that was made because the run was stopped is not: a run that was not stopped has none."""
    config = load("loop.checkpoint_every=2")
    steps = [step(1, False), step(2), step(3), step(4, False)]
    run = run_with(tmp_path, config, steps)
    assert [*pool(config).list_members(run)] == ["1.0", "1.2"]
    run.steps += [step(4), step(6)]
    for name in ("step-000004-1", "step-000006-1"):
        (tmp_path / name).mkdir()
    assert [*pool(config).list_members(run)] == ["1.4", "1.6"]
    notes: list[str] = []
    run.view = SimpleNamespace(note=notes.append)
    shutil.rmtree(tmp_path / "step-000006-1")
    opponents = pool(config)
    assert [[*opponents.list_members(run)] for _ in range(2)] == [["1.2", "1.4"]] * 2
    assert notes == ["step-000006-1 is missing: version 1.6 is not among the opponents of right"]


async def test_a_version_whose_checkpoint_is_damaged_is_left_out(tmp_path: Path) -> None:
    config, notes = load("loop.checkpoint_every=1"), list[str]()
    run = run_with(tmp_path, config, [step(1), step(2)])
    run.view = SimpleNamespace(note=notes.append)
    opponents = pool(config)

    async def publish(name: str) -> None:
        if name == "1.1":
            raise DamagedCheckpoint("step-000001-1 was damaged")

    for publisher in opponents._publishers:
        publisher.publish = publish
    for _ in range(2):
        await opponents.refresh(run)
    assert [member.version for member in opponents.engine.members] == ["1.2"]
    assert notes == ["step-000001-1 was damaged: version 1.1 is not among the opponents of right"]


def turn(id: str, agent: str, policy: str, versions: list[tuple[int, str]]) -> Turn:
    ids = [1] if versions else []
    return Turn(
        id=id, rollout="g1.0", attempt=1, agent=agent, policy=policy, prompt_ids=[1], response_ids=ids,
        logprobs=[0.0] * len(ids), versions=versions, finish="stop" if ids else "error", started=0.0, ended=1.0,
    )  # fmt: skip


def test_what_was_won_against_whom() -> None:
    """A turn that was given up before its first token tells no version."""
    config = load("policies.left.algorithm.rewards={score = 2.0}", "policies.left.agents=['left*']")
    rewards = (Reward(name="score", value=0.5, agent="left-1"), Reward(name="score", value=9.0, agent="right"))
    rollout = Rollout(id="g1.0", group="g1", member=0, task=Task(id="t"), created=0.0, rewards=rewards)
    met = [turn("a", "right", "right", []), turn("b", "right", "right", [(0, "1.4")])]
    nobody = [turn("a", "right", "right", []), turn("c", "left-1", "left", [(0, "1.9")])]
    told = describe_opponents(config, [Sample(rollout, met), Sample(rollout, nobody)])
    assert told == {"past/right/1.4/reward": 1.0, "past/right/1.4/rollouts": 1.0}
    opponents = pool(config)
    assert opponents.count_won([step(1, **told), step(2, **{**told, "past/right/1.4/reward": 0.0})]) == {4: 0.5}
    again = {name.replace("1.4", "2.4"): value for name, value in told.items()}  # made again in a later lineage
    assert opponents.count_won([step(1, **told), step(2, **again)]) == {4: 1.0}


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["engine.name=vllm"], r"versions are whole models, and vllm serves none beside its model"),
        (["engine.name=sglang", "learner.lora.rank=4"], r"versions are adapters, and sglang serves none"),
        (["engine.name=vllm", "learner.lora.rank=4", "engine.vllm.servers=2"], r"versions are adapters, and vllm"),
        (["policies.left.model=other"], r"their models differ \(strop/nano, other\)\. Fix: "),
        (["policies.right.past.of=nobody"], r"neither a policy nor the folder of a run\. Fix: "),
    ],
)
def test_what_no_engine_serves_is_refused_before_anything_starts(sets: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_pool_source("right", resolve_policies(load(*sets)), Path("model"))


def test_opponents_would_change_in_the_middle_of_a_group() -> None:
    with pytest.raises(ConfigError, match=r"loop\.staleness is 1: opponents would change in the middle"):
        resolve_policies(load("loop.staleness=1"))


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run with adapters of two policies."""
    for number in (2, 4, 10):
        for name in ("left", "right"):
            part = tmp_path / "earlier" / "checkpoints" / f"step-{number:06d}-1" / name
            part.mkdir(parents=True)
            about = {"r": 4, "lora_alpha": 8, "target_modules": ["q"], "base_model_name_or_path": str(tmp_path)}
            (part / "adapter_config.json").write_text(json.dumps(about))
            (part / "adapter_model.safetensors").write_text(f"{name} {number}")
            (part / "strop.json").write_text("{}")
            write_sums(part)
    return tmp_path / "earlier"


def test_the_checkpoints_of_an_earlier_run_are_copied(earlier: Path, tmp_path: Path) -> None:
    """That run may train on, or be deleted."""
    config = load(f"policies.right.past.of={earlier}", f"folder={tmp_path / 'run'}")
    source = find_pool_source("right", resolve_policies(config), tmp_path)
    assert source is not None
    assert [*source.checkpoints] == ["1.4", "1.10"]
    assert source.config.learner.lora.rank == 4
    kept = keep_copies("right", source, tmp_path / "run")
    shutil.rmtree(earlier)
    again = find_pool_source("right", resolve_policies(config), tmp_path)
    assert again == kept
    assert (kept.checkpoints["1.10"] / "adapter_model.safetensors").read_text() == "right 10"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"r": 8}, r"not alike \(right has rank 4 and right has rank 8; 0 is a whole model\)\. Fix: "),
        ({"base_model_name_or_path": "/elsewhere"}, r"an adapter on /elsewhere, and the policy's model is"),
    ],
)
def test_adapters_that_are_not_alike(earlier: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    file = earlier / "checkpoints" / "step-000010-1" / "right" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    policies = resolve_policies(load(f"policies.right.past.of={earlier}"))
    with pytest.raises(ConfigError, match=says):
        find_pool_source("right", policies, tmp_path)


def test_whole_models_of_another_shape(earlier: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4, "dtype": "float32"}))
    for part in earlier.glob("checkpoints/*/right"):
        (part / "adapter_config.json").unlink()
        (part / "config.json").write_text(json.dumps({"num_hidden_layers": 4, "dtype": "bfloat16"}))
    policies = resolve_policies(load(f"policies.right.past.of={earlier}"))
    source = find_pool_source("right", policies, tmp_path)
    assert source is not None
    assert source.config.learner.lora.rank == 0
    file = earlier / "checkpoints" / "step-000010-1" / "right" / "config.json"
    file.write_text(json.dumps({"num_hidden_layers": 5}))
    with pytest.raises(ConfigError, match=r"is a whole model of another shape, and the policy's model is"):
        find_pool_source("right", policies, tmp_path)
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"cannot be read .* Fix: delete that checkpoint"):
        find_pool_source("right", policies, tmp_path)


def test_a_run_without_a_part_of_that_name(earlier: Path, tmp_path: Path) -> None:
    for part in earlier.glob("checkpoints/*/right"):
        shutil.rmtree(part)
    with pytest.raises(ConfigError, match=r"have parts of left and none of right\. Fix: call the policy like"):
        find_pool_source("right", resolve_policies(load(f"policies.right.past.of={earlier}")), tmp_path)


def test_a_new_run_from_the_weights_of_one_with_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the new model: a past version is one of the model that is trained."""
    monkeypatch.setattr("strop.learner.export.export", lambda part, place: place.mkdir(parents=True))
    (tmp_path / "checkpoint").mkdir()
    begun = begin_from(tmp_path / "checkpoint", load(f"folder={tmp_path / 'run'}"))
    models = {own.policy.model for own in resolve_policies(begun).values()}
    assert models == {str((tmp_path / "run" / "start").absolute())}
