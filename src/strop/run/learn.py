"""From rollouts to new weights: assemble → score → credit → update. Everything that a step learns is learnt here, also
where a recorded step is replayed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from strop.algorithms import Algorithm
from strop.algorithms.credit import spread
from strop.algorithms.filters import too_stale
from strop.config import Config
from strop.learner.client import LearnerClient
from strop.trajectory import Batch, Sample, assemble, exactness


async def learn(
    samples: Sequence[Sample],
    config: Config,
    algorithm: Algorithm,
    learner: LearnerClient,
    *,
    step: int,
    names: Collection[str],
) -> tuple[Batch, dict[str, float]]:
    """From rollouts to new weights in the learner. Everything that a step learns is learnt here. `names` are the
    versions that the weights have before it: only what they sampled is compared with what the learner reads."""
    began = time.monotonic()
    batch = assemble_batch(config, samples)
    batch.entries.exact &= batch.sampled_by(names)
    metrics = too_stale(batch, step - 1, config.loop.staleness) if config.loop.staleness else {}
    metrics["timing_s/assemble"] = time.monotonic() - began
    if algorithm.needs:
        batch.entries, seconds = await learner.score(batch.bare())
        metrics |= seconds
    began = time.monotonic()
    metrics |= algorithm.assign_credit(batch) | describe_batch(batch)
    metrics["timing_s/adv"] = time.monotonic() - began
    return batch, metrics | await learner.update(batch.bare())


def assemble_batch(config: Config, samples: Sequence[Sample]) -> Batch:
    return assemble(
        samples,
        agents=config.policy.agents,
        budget=config.learner.token_budget,
        failures=config.algorithm.failures.by_cause(),
    )


def describe_batch(batch: Batch) -> dict[str, float]:
    """What was collected, as metrics."""
    turns = [turn for sample in batch.samples for turn in sample.turns if not turn.outside]
    metrics = spread("response_length", np.array([len(turn.response_ids) for turn in turns], float))
    metrics |= spread("prompt_length", np.array([len(turn.prompt_ids) for turn in turns], float))
    calls = [sum(len(turn.answer.get("tool_calls", ())) for turn in sample.turns) for sample in batch.samples]
    metrics |= spread("tool_call_counts", np.array(calls, float))
    metrics |= spread("num_turns", np.array([len(sample.turns) for sample in batch.samples], float))
    if turns:
        metrics["response_length/clip_ratio"] = sum(turn.finish == "length" for turn in turns) / len(turns)
    metrics |= exactness(batch.samples).metrics()
    rollouts = [sample.rollout for sample in batch.samples]
    for name in sorted({reward.name for rollout in rollouts for reward in rollout.rewards}):
        given = [value for rollout in rollouts if (value := rollout.reward(name)) is not None]
        metrics |= {f"reward/{name}": sum(given) / len(given)} if given else {}
    for cause, count in Counter(rollout.cause for rollout in rollouts if rollout.cause).items():
        metrics[f"failed/{cause}"] = float(count)
    return metrics
