"""Rollouts with their turns become a Batch. Nothing is truncated, and what is left out is counted under its reason.

A bad rollout is data: by the cause of its failure it is dropped, or counts as something else than its rewards. A bad
token is a crash: a turn without one finite logprob per sampled id is our own bug and must not train.

Reasons a rollout is dropped here: `failed:<cause>` (excluded, also from the baseline), `outside` (answered by outside
models only, whose turns have no tokens), `empty` (no sampled token at all), `untrained` (none by a trained agent),
`over_budget` (a path that no micro-batch can hold), or the reason that all its turns have: `abandoned`, `greedy`
(temperature 0), `truncated_sampling`, `excluded:<reason>` (by the agent). Only the first is outside the
baseline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain

import numpy as np

from strop.trajectory.batch import Batch, Entries, Ints, Sample
from strop.types import FAILURES, TERMINAL, Cause, Failure, Rollout, Turn


def assemble(
    samples: Sequence[Sample],
    *,
    agents: Collection[str],
    budget: int,
    failures: Mapping[Cause, Failure] = FAILURES,
    policy: str | None = None,
) -> Batch:
    """Make a batch of complete groups. `agents` are trained: names, or patterns of them; where `policy` is given, only
    the turns that it answered. `budget` is the most tokens of a micro-batch; `failures` says what failed rollouts count
    as.

    Samples are put in sampling order (group, then member), so the order in which rollouts ended changes nothing.
    """
    samples = sorted(samples, key=lambda s: (s.rollout.group, s.rollout.member))
    groups = sorted({s.rollout.group for s in samples})
    names = _match_names(samples, agents, policy)
    counted = np.ones(len(samples), bool)
    stand_in: list[Failure | None] = [None] * len(samples)
    dropped: dict[str, str] = {}
    turns: list[Turn] = []
    owner: list[int] = []
    skipped: list[str | None] = []
    for s, sample in enumerate(samples):
        failed = find_cause(sample.rollout)
        stand_in[s] = failures.get(failed, "exclude") if failed else None
        excluded = f"failed:{failed}" if stand_in[s] == "exclude" else None
        counted[s] = excluded is None
        trained, reason = _trained(sample, names, budget, policy)
        reasons = [excluded or _skip(turn, sample.rollout) for turn in trained]
        if excluded or reason or all(reasons):
            dropped[sample.rollout.id] = excluded or reason or str(reasons[0])
        turns += trained
        owner += [s] * len(trained)
        skipped += reasons
    group = np.array([groups.index(s.rollout.group) for s in samples], np.int64)
    paths = [np.array(turn.ids, np.int64) for turn in turns]
    lengths = np.array([len(turn.response_ids) for turn in turns], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Batch(
        samples=samples,
        groups=groups,
        agents=names,
        group=group,
        counted=counted,
        stand_in=stand_in,
        turns=turns,
        paths=paths,
        starts=starts,
        skipped=skipped,
        entries=_entries(turns, np.array(owner, np.int64), group, names, skipped, lengths, starts),
        dropped=dropped,
    )


def find_cause(rollout: Rollout) -> Cause | None:
    """Why it failed, if it did."""
    assert rollout.status in TERMINAL, f"rollout {rollout.id} is {rollout.status}: its group is not complete"
    if rollout.status == "succeeded":
        return None
    return rollout.cause or ("cancelled" if rollout.status == "cancelled" else "agent_error")


def _match_names(samples: Sequence[Sample], agents: Collection[str], policy: str | None) -> list[str]:
    """The names of the trained agents: those given, and those that the policy answered and match a pattern."""
    spoke = {turn.agent for sample in samples for turn in sample.turns if policy in (None, turn.policy)}
    patterns = [pattern for pattern in agents if any(sign in pattern for sign in "*?[")]
    matching = {name for name in spoke if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return sorted({*agents} - {*patterns} | matching)


def _trained(sample: Sample, agents: Collection[str], budget: int, policy: str | None) -> tuple[list[Turn], str | None]:
    """The turns that become entries, by request start, or none and why. A prompt nobody answered needs no layout."""
    sampled = [turn for turn in sample.turns if turn.response_ids]
    if not sampled:
        return [], "outside" if sample.turns and all(turn.outside for turn in sample.turns) else "empty"
    ours = (turn for turn in sampled if turn.agent in agents and policy in (None, turn.policy))
    trained = sorted(ours, key=lambda t: (t.started, t.choice, t.id))
    if not trained:
        return [], "untrained"
    for turn in trained:
        count = len(turn.response_ids)
        assert turn.prompt_ids, f"turn {turn.id} has no prompt: nothing predicts its first token"
        assert len(turn.logprobs) == count, f"turn {turn.id} has {len(turn.logprobs)} logprobs for {count} tokens"
    if any(len(turn.prompt_ids) + len(turn.response_ids) > budget for turn in trained):
        return [], "over_budget"
    return trained, None


def _skip(turn: Turn, rollout: Rollout) -> str | None:
    if turn.abandoned:
        return "abandoned"
    if turn.id in rollout.excluded:
        return f"excluded:{rollout.excluded[turn.id]}"
    if turn.sampling.temperature == 0.0:
        return "greedy"
    return None if turn.sampling.exact else "truncated_sampling"


def _entries(
    turns: list[Turn],
    owner: Ints,
    group: Ints,
    agents: list[str],
    skipped: list[str | None],
    lengths: Ints,
    starts: Ints,
) -> Entries:
    count = int(starts[-1])
    turn = np.repeat(np.arange(len(turns), dtype=np.int64), lengths)
    behaviour = np.fromiter(chain.from_iterable(t.logprobs for t in turns), np.float64, count)
    bad = np.flatnonzero(~np.isfinite(behaviour))
    assert not len(bad), f"turn {turns[turn[bad[0]]].id} has a logprob of {behaviour[bad[0]]}"
    rollout = owner[turn]
    return Entries(
        turn=turn,
        index=np.arange(count, dtype=np.int64) - starts[turn],
        target=np.fromiter(chain.from_iterable(t.response_ids for t in turns), np.int64, count),
        behaviour=behaviour,
        proximal=np.full(count, np.nan),
        ref=np.full(count, np.nan),
        value=np.full(count, np.nan),
        teacher=np.full(count, np.nan),
        advantage=np.zeros(count),
        ret=np.zeros(count),
        weight=np.zeros(count),
        temperature=np.array([t.sampling.temperature for t in turns], np.float64)[turn],
        rollout=rollout,
        agent=np.array([agents.index(t.agent) for t in turns], np.int64)[turn],
        group=group[rollout],
        trainable=np.array([reason is None for reason in skipped], bool)[turn],
        exact=np.array([t.sampling.exact for t in turns], bool)[turn],
    )
