"""Would this run learn anything? A few groups of it, sampled before the first step and seen as the algorithm would.

An algorithm that compares the members of a group learns nothing from one whose rewards are all the same, and a run of
such groups trains for hours on nothing. So the very rollouts that the first step would begin with are run, in a folder
that is gone afterwards, and the algorithm says which groups carry any loss. Of one that compares otherwise only the
rewards are told.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from strop.algorithms import Algorithm
from strop.algorithms.rewards import Rewards
from strop.config import Config, MonitorConfig, describe_models, trained_policies
from strop.errors import AgentError, ConfigError
from strop.monitor.console import View
from strop.run.collect import check_rewards, explain_if_all_failed, give_group_rewards, wait_until_ended
from strop.run.data.prepare import find_offline
from strop.run.evaluate import run_here
from strop.run.health import suggest_easier
from strop.run.learn import assemble_batch
from strop.run.prepare import make_algorithm
from strop.run.rollouts import read_samples
from strop.run.runtime import open_run
from strop.run.settings import settle
from strop.run.state import PolicyLearner
from strop.run.supervise import run_with_agents
from strop.trajectory import Batch, Sample, explain


class PreflightResult(Struct, kw_only=True):
    """What came of some groups. `flat` are those that would teach nothing (None where groups are not compared), `left`
    how many rollouts would carry no loss by reason, `lowest`, `highest` and `mean` what those that count got,
    `failed` how many failed by cause, `seconds` how long a rollout took in the mean, `rewarded` whether any was or
    should have been, `model` whose they are. Of several policies `policies` has the result of each by name, and the
    rest is that of the one called `policy`, for which most groups would teach nothing."""

    groups: int
    members: int
    flat: int | None
    left: dict[str, int]
    mean: float
    lowest: float
    highest: float
    failed: dict[str, int]
    seconds: float
    rewarded: bool = True
    model: str = ""
    policy: str = ""
    policies: dict[str, PreflightResult] = {}

    @property
    def verdict(self) -> str:
        every, section = f"every rollout got {self.highest:g}", f"policies.{self.policy}" if self.policy else "policy"
        if self.flat is None and not self.rewarded:
            return "no rollout was rewarded, and this algorithm needs no reward"
        if self.flat is None:
            got = every if self.highest == self.lowest else f"rollouts got {self.lowest:g} to {self.highest:g}"
            return f"{got}; this algorithm does not compare them within groups"
        said = f"{self.groups - self.flat} of {self.groups} groups would teach something"
        if not self.flat:
            return said
        if self.flat < self.groups:
            return f"{said}; loop.max_groups has the others replaced"
        if not self.left:
            return f"{said}: none of their turns is trained. Fix: set {section}.agents, which says whose are"
        reason, count = max(self.left.items(), key=lambda item: item[1])
        if reason != "zero_variance":
            return f"{said}: {count} rollouts {explain(reason)}, so nothing would be learnt"
        if self.highest > self.lowest:
            return (
                f"{said}: members of a group all got the same, so nothing would be learnt. Fix: raise "
                f"{section}.train.temperature"
            )
        if self.highest > 0:
            return f"{said}: {every}, so nothing would be learnt. Fix: take harder tasks"
        return (
            f"{said}: {every}, so nothing would be learnt. Fix: {suggest_easier(self.model)}, or begin with a model "
            "that sometimes succeeds"
        )


async def probe(config: Config, view: View, *, groups: int) -> PreflightResult:
    """Run the first `groups` groups of what `config` would train. Nothing is kept. Of several policies the result is
    that of the one for which most groups would teach nothing."""
    for own in trained_policies(config).values():
        make_algorithm(own)  # contradictions are refused before settings of the preflight's own hide them
    if (offline := find_offline(config)) is not None:
        raise ConfigError(
            f"{offline.config.algorithm.name} learns from stored data, so there are no groups to try. Fix: leave out "
            "the agent and --probe"
        )
    with TemporaryDirectory(prefix="strop-probe-") as place:
        config = configure_probe(settle(config), groups, Path(place) / "run")
        view.title(f"probing {describe_models(config)}", 0)
        async with open_run(config, view, resume=False) as run:
            wanted = run.next_rollouts(groups)
            began = time.monotonic()
            ended = await run_with_agents(run, wait_until_ended(run, wanted, "probing"))
            if why := await explain_if_all_failed(run, ended, "probing"):  # nobody can look at them afterwards
                raise AgentError(f"{why}. Fix: correct the agent, then ask again")
            samples = await give_group_rewards(run, await read_samples(run.store, ended))
            check_rewards(run, [one.rollout for one in samples])
            waited = (time.monotonic() - began) * min(config.runner.workers, len(ended)) / len(ended)
            found = {name: judge_policy(policy, samples, waited) for name, policy in run.policies.items()}
            if len(found) == 1:
                return found.popitem()[1]
            found = {name: replace(one, policy=name) for name, one in found.items()}
            return replace(max(found.values(), key=lambda one: one.flat or 0), policies=found)


def judge_policy(policy: PolicyLearner, samples: Sequence[Sample], seconds: float) -> PreflightResult:
    config = policy.config
    batch = assemble_batch(config, samples, policy.name)
    found = judge_batch(batch, policy.algorithm, config.algorithm.rewards, seconds)
    return replace(found, model=config.policy.model)


def configure_probe(config: Config, groups: int, folder: Path) -> Config:
    """A configuration for some groups and nothing else: no evaluation, a store of its own, nobody who is told of
    metrics."""
    return replace(
        config,
        folder=str(folder),
        loop=replace(config.loop, eval_splits=(), staleness=0, groups=groups, max_groups=None),
        store=replace(config.store, url=""),
        runner=run_here(config.runner),
        monitor=MonitorConfig(),
    )


def judge_batch(batch: Batch, algorithm: Algorithm, weights: Mapping[str, float], seconds: float) -> PreflightResult:
    """As a step would see it: `weights` are those of the rewards that count."""
    every, flat, entries, left = compute_totals(batch, weights), None, batch.entries, Counter[str]()
    if algorithm.compares_groups:
        entries.proximal[:] = entries.ref[:] = entries.behaviour  # before the first step all three are one model's
        algorithm.assign_credit(batch)
        flat = len(batch.groups) - len(batch.teaching())
        carried = ~np.isin(entries.group, batch.teaching()) & (entries.weight > 0)  # loss, but no advantage
        left["zero_variance"] = len(np.unique(entries.rollout[carried]))
    rollouts = [sample.rollout for sample in batch.samples]
    return PreflightResult(
        groups=len(batch.groups),
        members=max(Counter(rollout.group for rollout in rollouts).values()),
        flat=flat,
        left=dict(+(left + Counter(batch.dropped.values()))),
        mean=sum(every) / max(len(every), 1),
        lowest=min(every, default=0.0),
        highest=max(every, default=0.0),
        failed=dict(Counter(str(rollout.cause) for rollout in rollouts if rollout.cause)),
        seconds=seconds,
        rewarded=bool(every) or algorithm.needs_rewards,
    )


def compute_totals(batch: Batch, weights: Mapping[str, float]) -> list[float]:
    """What each rollout that counts got, with what its agents and its turns got of their own."""
    rewards = Rewards.of(batch, weights)
    return [
        float(rewards.totals[s] + rewards.agents[s].sum())
        + sum(rewards.own.get(turn.id, 0.0) / turn.choices for turn in batch.samples[s].turns)
        for s in map(int, np.flatnonzero(batch.counted))
    ]
