"""What a batch is made of: samples (whole rollouts) and entries (sampled tokens that may carry loss)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from strop.types import Failure, Rollout, Turn

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


REASONS = {
    "zero_variance": "in groups whose members all got the same reward: nothing to compare",
    "group_of_one": "alone in their group: nobody to compare with (loop.group_size)",
    "no_reward": "without a reward that algorithm.rewards counts",
    "outside": "that only outside models answered (gateway.outside)",
    "empty": "in which the model said nothing",
    "untrained": "in which no trained agent (policy.agents) spoke",
    "over_budget": "longer than learner.token_budget",
    "abandoned": "whose answers never reached the agent",
    "greedy": "sampled at temperature 0",
    "truncated_sampling": "sampled from a truncated distribution",
    "overlong": "with an answer that was cut off at its length (algorithm.settings.overlong)",
    "malformed_call": "whose tool calls could not be read (algorithm.settings.drop_malformed)",
    "turn_cap": "beyond the turns of a rollout that are trained (algorithm.settings.max_turns)",
    "teacher_prompt": "whose prompts cannot be shown to line up with the teacher's (algorithm.settings.teacher_prompt)",
    "teacher_context": "longer than the teacher's context",
    "teacher_vocabulary": "with a token that the teacher does not have",
    "teacher_schema": "held to a schema, which a teacher's logprobs know nothing of",
    "grammar_limit": "held to a grammar that grew too large to be followed",
    "too_stale": "sampled from weights that are too old by now",
    "zero_weight": "whose answers have weight 0 in their transcript",
    "no_weight": "with a reward of 0 or less, which is what they count (algorithm.settings.weighting)",
    "no_pair": "with nobody to compare with that got more or less, or whose other is left out",
    "superseded": "sampled from weights that a resumed run left behind",
    "no_loss": "that the algorithm gave no weight",
}
"""Why a rollout carries no loss, in words. Algorithms and filters bring reasons of their own; `failed:<cause>` and
`excluded:<reason>` too."""


def explain(reason: str) -> str:
    """
    >>> explain("greedy"), explain("excluded:title")
    ('sampled at temperature 0', 'that their agent excluded as title')
    """
    if reason.startswith("excluded:"):
        return f"that their agent excluded as {reason.removeprefix('excluded:')}"
    return REASONS.get(reason, f"left out as {reason}")


@dataclass(frozen=True)
class Sample:
    """One rollout that ended, with every turn of its last attempt."""

    rollout: Rollout
    turns: list[Turn]


@dataclass
class Entries:
    """Columns, one row per sampled token of a trained agent, in the order sample, turn, index.

    A rollout that sampled [7, 8] and then, its context grown, [9], in a batch of its own:

        turn       0    0    1      index into Batch.turns
        index      0    1    0      place within the turn's response
        target     7    8    9      the token that was sampled
        behaviour -.1  -.7  -.2     the engine's logprob of it
        weight    1/3  1/3  1/3     after credit: token mean over the batch

    `proximal` (the learner's logprob when the step began), `ref` (the reference model's) and `value` (the critic's) are
    NaN until `score` fills them, and so is `teacher` (the teacher's logprob) where there is none. `advantage`, `ret`
    (the return a critic learns) and `weight` are filled by the algorithm's `credit`; the batch loss is the sum of
    weight x loss. `rollout` and `group` index Batch.samples and
    Batch.groups, `agent` indexes Batch.agents. Where `trainable` is False the weight must stay 0; where `exact` is
    False the recorded logprob is not log_softmax(logits / temperature) of the weights that the step begins with, and
    cannot be compared with the learner's.
    """

    turn: Ints
    index: Ints
    target: Ints
    behaviour: Floats
    proximal: Floats
    ref: Floats
    value: Floats
    teacher: Floats
    advantage: Floats
    ret: Floats
    weight: Floats
    temperature: Floats
    rollout: Ints
    agent: Ints
    group: Ints
    trainable: Bools
    exact: Bools

    def __len__(self) -> int:
        return len(self.target)

    def take(self, rows: Ints) -> Entries:
        """The same columns with these rows only."""
        return Entries(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass
class Batch:
    """The complete groups of one step.

    `samples` are all rollouts, dropped ones too, in sampling order (group, member). `counted[s]` says whether sample s
    takes part in its group's baseline, `stand_in[s]` what it counts as instead of its rewards where it failed.
    `paths[t]` are the ids of turn t, prompt and response; its entries begin at row `starts[t]`. `skipped[t]` is the
    reason turn t may not carry loss, or None. `dropped` maps the rollouts that carry no loss at all to the reason.
    """

    samples: list[Sample]
    groups: list[str]
    agents: list[str]
    group: Ints
    counted: Bools
    stand_in: list[Failure | None]
    turns: list[Turn]
    paths: list[Ints]
    starts: Ints
    skipped: list[str | None]
    entries: Entries
    dropped: dict[str, str]

    def rows(self, turn: int) -> Ints:
        """The rows of Entries that a turn's sampled tokens have."""
        return np.arange(int(self.starts[turn]), int(self.starts[turn + 1]), dtype=np.int64)

    def bare(self) -> Batch:
        """What a learner reads of it: this is what travels to its process. Ids are in `paths` and entries: as lists of
        numbers they would be most of it."""
        nothing: dict[str, Any] = {"prompt_ids": [], "response_ids": [], "logprobs": [], "messages": []}
        bare = [structs.replace(t, requested={}, answer={}, **nothing) for t in self.turns]
        return replace(self, samples=[], turns=bare)

    def sampled_by(self, versions: Collection[str]) -> Bools:
        """Which entries' tokens one of these versions sampled."""
        found = np.zeros(len(self.entries), bool)
        for t, turn in enumerate(self.turns):
            start, stop = int(self.starts[t]), int(self.starts[t + 1])
            firsts = [first for first, _ in turn.versions] + [stop - start]
            for (first, version), end in zip(turn.versions, firsts[1:], strict=True):
                found[start + first : start + end] = version in versions
        return found

    def drop(self, sample: int, reason: str) -> None:
        """Leave a rollout out of the loss. The first reason stays: it is the one that was true first."""
        self.dropped.setdefault(self.samples[sample].rollout.id, reason)

    def owners(self) -> Ints:
        """The sample that each turn belongs to."""
        return self.entries.rollout[self.starts[:-1]]

    def shares(self) -> Floats:
        """What each entry counts beside the other choices of its request: 1/n."""
        return (1.0 / np.array([turn.choices for turn in self.turns], np.float64))[self.entries.turn]

    def alive(self) -> Bools:
        """The entries that may be trained, of rollouts that are not dropped."""
        kept = np.array([sample.rollout.id not in self.dropped for sample in self.samples], bool)
        return self.entries.trainable & kept[self.entries.rollout]

    def teaching(self) -> Ints:
        """The groups with a token that carries loss for better or worse, after credit."""
        return np.unique(self.entries.group[(self.entries.weight > 0) & (self.entries.advantage != 0)])

    def counts(self) -> dict[str, float]:
        """What was left out, as metrics: rollouts by reason, sampled tokens of turns by reason, turns of outside
        models, which have no tokens, and excluded turns that there are not."""
        counts = Counter({f"filter/{reason}": n for reason, n in Counter(self.dropped.values()).items()})
        if outside := sum(turn.outside for sample in self.samples for turn in sample.turns):
            counts["filter_turns/outside"] = outside
        known = {turn.id for sample in self.samples for turn in sample.turns}
        if unknown := sum(turn not in known for sample in self.samples for turn in sample.rollout.excluded):
            counts["filter_turns/excluded_unknown"] = unknown
        for t, reason in enumerate(self.skipped):
            if reason is not None:
                counts[f"filter_tokens/{reason}"] += int(self.starts[t + 1] - self.starts[t])
        return {name: float(n) for name, n in sorted(counts.items())}
