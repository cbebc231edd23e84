"""A recipe trained for a few real steps, and what its tokens must be like.

trained = train("calc", tmp_path, "loop.steps=3")       make recipe's command, in processes of its own
assert trained.check() == {None: 96}                     token law on every turn; branches by reason, None: extends
trained.loss_text(rollout.id)                            what carries loss, turn by turn: sampled words and no others
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from safetensors import safe_open

from recipes.prepare import ready
from strop import algorithms
from strop.config import Config
from strop.gateway.template import Renderer
from strop.models.names import prepare_folder
from strop.run.folder import RunFolder
from strop.run.learn import assemble_batch
from strop.trajectory.batch import Batch, Sample
from strop.trajectory.token_tree import check, pack
from strop.types import Rollout, Turn
from tests import runs

ROOT = Path(__file__).parents[2]


def needs(recipe: str) -> pytest.MarkDecorator:
    """For tests that run a recipe in its own environment."""
    return pytest.mark.skipif(not ready(recipe), reason=f".recipes/{recipe} is not there: make recipes")


def train(
    recipe: str, folder: Path, *sets: str, config: str = "laptop", data: Path | None = None, timeout: float = 280
) -> Trained:
    """What `make recipe` runs, with some settings changed."""
    script = ROOT / "recipes" / recipe / "train.py"
    command = [sys.executable, str(script)] if script.exists() else runs.strop("train")
    command += [
        "--config",
        str(ROOT / "recipes" / recipe / f"{config}.toml"),
        "--folder",
        str(folder / recipe),
        "--json",
    ]
    command += [f"--set={one}" for one in sets] + (["--data", str(data)] if data else [])
    runs.finish(command, timeout=timeout, cwd=ROOT)
    return Trained(folder / recipe, RunFolder.config(folder / recipe), runs.story(folder / recipe))


@dataclass
class Trained:
    folder: Path
    config: Config
    story: runs.Story

    @cached_property
    def renderer(self) -> Renderer:
        return Renderer.from_folder(prepare_folder(self.config.policy))

    @property
    def rollouts(self) -> list[Rollout]:
        """Those that were sampled to be trained on."""
        return [rollout for rollout in self.story.rollouts if rollout.mode == "train"]

    def turns(self, rollout: Rollout) -> list[Turn]:
        return self.story.turns[rollout.id]

    def check(self) -> Counter[str | None]:
        """The laws: a turn holds its parent's tokens as they were sampled; nothing but sampled tokens of trained agents
        carries loss, and each once; credit is what the rewards say; steps changed the weights. Returns how many turns
        branched, by reason."""
        branches: Counter[str | None] = Counter()
        for rollout in self.rollouts:
            turns = {turn.id: turn for turn in self.turns(rollout)}
            for turn in turns.values():
                branches[turn.branch] += 1
                assert len(turn.logprobs) == len(turn.response_ids) > 0
                if turn.parent is not None and turn.branch is None:
                    assert turn.prompt_ids[: turn.shared] == turns[turn.parent].ids
        for step in range(1, len(self.story.steps) + 1):
            self._check_loss(batch := self.batch(step))
            if self.config.algorithm.name == "grpo" and "baseline" not in self.config.algorithm.settings:
                self._check_credit(batch)
        assert len(self.story.steps) == self.config.loop.steps
        assert self.changed(), "no weight changed"
        return branches

    def _check_loss(self, batch: Batch) -> None:
        for piece in (pieces := pack(batch, self.config.learner.token_budget)):
            assert len(piece.ids) <= self.config.learner.token_budget
        check(pieces, batch)
        for number, turn in enumerate(batch.turns):
            assert turn.agent in self.config.policy.agents
            assert batch.entries.target[batch.rows(number)].tolist() == turn.response_ids
        assert len(batch.entries) == sum(len(turn.response_ids) for turn in batch.turns)

    def _check_credit(self, batch: Batch) -> None:
        """Every token of every turn has the advantage of its rollout over its group, where rewards are of whole
        rollouts. Where all are alike there is nothing to learn, and no loss."""
        groups: dict[str, dict[str, float]] = {}
        for rollout in (sample.rollout for sample in batch.samples):
            assert {(reward.turn, reward.agent) for reward in rollout.rewards} == {(None, None)}
            weights = self.config.algorithm.rewards
            total = sum(weights.get(reward.name, 0.0) * reward.value for reward in rollout.rewards)
            groups.setdefault(rollout.group, {})[rollout.id] = total
        group_of = {sample.rollout.id: groups[sample.rollout.group] for sample in batch.samples}
        for number, turn in enumerate(batch.turns):
            like = group_of[turn.rollout]
            learns = len(set(like.values())) > 1
            assert (batch.skipped[number] is None and turn.rollout not in batch.dropped) == learns
            if learns:
                wanted = (like[turn.rollout] - mean(like.values())) / (stdev(like.values()) + 1e-6)
                assert batch.entries.advantage[batch.rows(number)] == pytest.approx(wanted, abs=1e-4)

    def batch(self, step: int) -> Batch:
        """What a step was trained on, with the credit that it gave (a critic's values aside)."""
        rollouts = {rollout.id: rollout for rollout in self.story.rollouts}
        samples = [Sample(rollouts[id], self.story.turns[id]) for id in self.story.steps[step - 1].rollouts]
        batch = assemble_batch(self.config, samples, "main")
        if self.config.algorithm.name != "ppo":
            algorithms.make(self.config.algorithm, self.config.learner, self.config.policy).assign_credit(batch)
        return batch

    def loss_text(self, rollout: str) -> list[tuple[str, str]]:
        """(agent, text) of each of a rollout's turns that may carry loss: only the tokens that do, as text."""
        (step,) = [n for n, step in enumerate(self.story.steps, 1) if rollout in step.rollouts]
        batch = self.batch(step)
        found: list[tuple[str, str]] = []
        for number, turn in enumerate(batch.turns):
            if turn.rollout == rollout and batch.skipped[number] is None:
                rows = batch.rows(number)
                ids = batch.entries.target[rows[batch.entries.trainable[rows]]].tolist()
                found.append((turn.agent, self.renderer.decode(ids)))
        return found

    def changed(self) -> bool:
        """Whether the last checkpoint's weights are others than those that the run began with."""
        name = self.story.steps[-1].checkpoint
        assert name is not None
        with (
            safe_open(prepare_folder(self.config.policy) / "model.safetensors", "pt") as before,
            safe_open(self.folder / "checkpoints" / name / "model.safetensors", "pt") as after,
        ):
            return any(
                not torch.equal(before.get_tensor(key).float(), after.get_tensor(key).float())
                for key in after.keys()  # noqa: SIM118
            )
