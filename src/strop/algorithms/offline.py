"""What algorithms share that learn from stored data instead of agents at work: where the data comes from, and which of
it is taken.

    stored rollouts, transcripts ──read──▶ candidates ──select──▶ items ──▶ one group of this run each

An item is what is learnt from at once: one rollout (imitation), or two that are compared (preferences). Which rollouts
make items is the algorithm's to say (`choose`), and what it leaves out it counts under a reason. Reading files and
stores is not done here: run/data does that.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from strop.algorithms.base import Algorithm
from strop.algorithms.filters import leave_out
from strop.algorithms.rewards import select_last_rewards, total_reward
from strop.trajectory import Batch
from strop.types import Mode, Rollout, Turn

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Item = tuple[int, ...]
"""Candidates, by their places, that are learnt from at once."""


@dataclass(frozen=True)
class Candidate:
    """A rollout that may be learnt from. `key` is shared by rollouts that may be compared: of one task, sampled
    together. `tokens` is a digest of what the trained agents saw and said in it; `reward` is as `measure_reward` has
    it."""

    source: str
    task: str
    key: str
    reward: float | None
    tokens: bytes


class Offline(Algorithm):
    """Algorithms add settings of their own."""

    runs: Annotated[
        str | tuple[str, ...],
        Meta(description="runs whose rollouts are learnt from, by their folders"),
    ] = ()
    transcripts: Annotated[
        str | tuple[str, ...],
        Meta(description="files of conversations that are learnt from: JSON lines with `messages`"),
    ] = ()
    rollouts: Annotated[
        tuple[Mode, ...],
        Meta(description="which rollouts of the runs are taken: of training (train), of evaluations (eval, greedy)"),
    ] = ("train", "eval", "greedy")
    splits: Annotated[
        tuple[str, ...],
        Meta(description="splits of the tasks whose rollouts are taken; default: all but loop.eval_splits"),
    ] = ()
    dedupe: Annotated[bool, Meta(description="take what has the very same tokens once")] = True
    mix: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]],
        Meta(
            description="data mixture: how often what comes from a run or a file is seen in an epoch; 0.5: half of it, "
            "another half each time; default: once"
        ),
    ] = field(default_factory=dict[str, float])
    epochs: Annotated[
        Positive | None,
        Meta(description="how often the data is gone through; default: as often as loop.steps takes"),
    ] = None
    batch_size: Annotated[
        Count | None,
        Meta(description="rollouts per step (dpo: pairs); default: loop.groups x loop.group_size, an epoch at most"),
    ] = None

    item_size = 1
    """Rollouts in an item."""

    def list_runs(self) -> list[str]:
        return _list(self.runs)

    def list_transcripts(self) -> list[str]:
        return _list(self.transcripts)

    @property
    def compares_groups(self) -> bool:
        return False

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate]) -> tuple[list[Item], Counter[str]]:
        """The items that the candidates make, in an order of their own, and what was left out, by reason."""


def _list(given: str | tuple[str, ...]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def measure_reward(
    rollout: Rollout, turns: Iterable[Turn], weights: Mapping[str, float], is_trained: Callable[[str], bool]
) -> float | None:
    """The total of a rollout with what its trained agents and their turns got, since it is learnt from as a whole; None
    where it got nothing that counts. The choices of one n > 1 request hold 1/n of theirs."""
    total = total_reward(rollout, weights)
    if total is None:
        return None
    shares = {turn.id: 1 / turn.choices for turn in turns if is_trained(turn.agent)}
    given = [(one, weights.get(one.name, 0.0) * one.value) for one in select_last_rewards(rollout)]
    by_agent = [value for one, value in given if one.agent is not None and is_trained(one.agent)]
    by_turn = [shares[one.turn] * value for one, value in given if one.turn in shares]
    return math.fsum([total, *by_agent, *by_turn])


def is_unweighted(turn: Turn) -> bool:
    """Whether its transcript says that it carries no loss (`weight` 0 of a message)."""
    return turn.requested.get("weight") == 0


def skip_unweighted(batch: Batch) -> None:
    """Leave out the turns that are to be read and not learnt."""
    leave_out(batch, ["zero_weight" if is_unweighted(turn) else None for turn in batch.turns])
