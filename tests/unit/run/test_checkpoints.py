"""Which checkpoint is the best, where only agents are rewarded."""

import io
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from strop import config as configs
from strop.run.checkpoints import keep_checkpoints, rank_steps
from strop.run.folder import RunFolder
from strop.types import Step

DUEL = ["algorithm.rewards={reward=0, score=1}", "policies.left.model=strop/nano", "policies.right.model=strop/nano"]


def team(left: float, right: float, **more: float) -> dict[str, float]:
    """What a step measured in which two agents were trained, and a judge was not. Totals are all 0."""
    metrics = {"critic/rewards/mean": 0.0, "reward/reward": left}
    for role, score, tokens in (("left", left, 9.0), ("right", right, 9.0), ("judge", 5 * (1 - left), 0.0)):
        metrics |= {f"agents/{role}/reward/score": score, f"agents/{role}/loss_tokens": tokens}
    return metrics | {name.replace("__", "/"): value for name, value in more.items()}


def order(*steps: Mapping[str, float], scores: Mapping[int, Mapping[str, float]] | None = None) -> list[int]:
    """The numbers of a run's steps from worst to best."""
    made = [
        Step(lineage=1, number=number, rollouts=[], metrics=dict(metrics), checkpoint=f"step-{number}", time=0.0)
        for number, metrics in enumerate(steps, 1)
    ]
    evaluated = {(step, "test"): dict(means) for step, means in (scores or {}).items()}
    run: Any = SimpleNamespace(config=configs.load(sets=DUEL), steps=made, scores=evaluated)
    return [step.number for step in rank_steps(run, made)]


def test_in_training_by_what_the_trained_agents_got() -> None:
    """The weights of a step sample the next one."""
    assert order(team(0.1, 0.1), team(0.6, 0.7), team(0.2, 0.2), team(0.2, 0.3)) == [2, 3, 4, 1]
    quiet = team(0.6, 0.7, agents__left__loss_tokens=0.0, agents__right__loss_tokens=0.0)  # both solved it, say
    assert order(team(0.1, 0.1), quiet, team(0.2, 0.2), team(0.2, 0.3)) == [2, 3, 4, 1]


def test_by_an_evaluation_of_the_trained_agents() -> None:
    def scored(left: float, right: float) -> dict[str, float]:
        return {"reward": left, "agents/left/reward/score": left, "agents/right/reward/score": right}

    steps = [team(0.5, 0.5)] * 3
    assert order(*steps, scores={1: scored(0.3, 0.9), 2: scored(0.9, 0.2), 3: scored(0.4, 0.4)}) == [3, 2, 1]


def test_what_one_gains_and_the_other_loses_leaves_the_newest() -> None:
    assert order(team(0.75, 0.25), team(0.25, 0.75), team(0.5, 0.5)) == [1, 2, 3]
    even = {step: {"agents/left/reward/score": step / 4, "agents/right/reward/score": 1 - step / 4} for step in (1, 2)}
    assert order(team(0.5, 0.5), team(0.5, 0.5), scores=even) == [1, 2]
    three = {1: (1 / 3, 1 / 3, 1 / 3), 2: (1 / 6, 4 / 6, 1 / 6)}  # the second sum is 1 but for a rounding
    rounded = {
        step: {f"agents/{k}/reward/score": score for k, score in enumerate(scores)} for step, scores in three.items()
    }
    assert order(team(0.5, 0.5), team(0.5, 0.5), scores=rounded) == [1, 2]


def test_where_whole_rollouts_are_rewarded_their_total_counts() -> None:
    """Also against steps and evaluations in which none of them happened to be."""
    low, high = ({"critic/rewards/mean": total, "reward/score": total} for total in (0.2, 0.8))
    assert order(low, team(0.0, 0.0, **high), team(0.9, 0.9, **low), team(0.9, 0.9)) == [3, 4, 2, 1]
    scores = {1: {"score": 0.5, "agents/left/reward/score": 0.0}, 2: {"agents/left/reward/score": 0.9}}
    assert order(low, high, scores=scores) == [2, 1]


def test_the_best_is_kept(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    folder, steps = RunFolder(tmp_path, io.BytesIO()), list[Step]()
    config = configs.load(sets=[*DUEL, "loop.keep_checkpoints=1"])
    run: Any = SimpleNamespace(config=config, folder=folder, steps=steps, scores={}, opponents=())
    for number, score in enumerate([0.1, 0.9, 0.2, 0.3], 1):
        folder.checkpoint(name := f"step-{number:06d}-1").mkdir()
        metrics = team(score, score)
        steps.append(Step(lineage=1, number=number, rollouts=[], metrics=metrics, checkpoint=name, time=0.0))
        keep_checkpoints(run)
    assert sorted(folder.checkpoints().values()) == [1, 4]
    assert RunFolder.best_checkpoint(tmp_path).name == "step-000001-1"
