"""From rollouts to new weights: assemble → score, by a teacher too → credit → update. Everything that a step learns is
learnt here, also where a recorded step is replayed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import numpy as np

from strop.algorithms.filters import drop_stale, skip_turns
from strop.algorithms.metrics import summarize
from strop.config import Config
from strop.monitor.metrics import combine, refuse_undeclared
from strop.run.agent_metrics import describe_agents
from strop.run.state import PolicyLearner
from strop.trajectory import Batch, Sample, assemble, count_tokens, describe_tokens, exactness
from strop.types import TokenCounts


@dataclass(frozen=True)
class Learnt:
    """What a step came to: the rollouts it consumed in sampling order, those that taught no policy anything and why,
    what became of each one's tokens, and its metrics."""

    rollouts: list[str]
    dropped: dict[str, str]
    tokens: dict[str, TokenCounts]
    metrics: dict[str, float]


async def learn_all(
    policies: Mapping[str, PolicyLearner], samples: Sequence[Sample], *, step: int, versions: Collection[str]
) -> Learnt:
    """Every policy learns from its own turns of the same rollouts, one after the other. One that said nothing in them
    keeps its weights."""
    learnt = {name: await learn(one, samples, step=step, versions=versions) for name, one in policies.items()}
    batches = [batch for batch, _ in learnt.values()]
    metrics = combine({name: metrics for name, (_, metrics) in learnt.items()})
    ordered = batches[0].samples
    tokens = count_tokens(ordered, {name: batch for name, (batch, _) in learnt.items()})
    return Learnt(
        rollouts=[sample.rollout.id for sample in ordered],
        dropped=find_dropped([batch.dropped for batch in batches]),
        tokens=tokens,
        metrics=metrics | describe_samples(ordered) | describe_agents(ordered, batches) | describe_tokens(tokens),
    )


def find_dropped(policies: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The rollouts that taught no policy anything, with the reason of the first that was to learn from it.

    >>> find_dropped([{"a": "untrained", "b": "zero_variance"}, {"a": "zero_variance"}])
    {'a': 'zero_variance'}
    """
    in_all = [rollout for rollout in policies[0] if all(rollout in dropped for dropped in policies)]
    reasons = {rollout: [dropped[rollout] for dropped in policies] for rollout in in_all}
    return {rollout: next((why for why in some if why != "untrained"), some[0]) for rollout, some in reasons.items()}


async def learn(
    policy: PolicyLearner, samples: Sequence[Sample], *, step: int, versions: Collection[str]
) -> tuple[Batch, dict[str, float]]:
    """From rollouts to new weights in a policy's learner. `versions` are those that the weights have before it: only
    what they sampled is compared with what the learner reads."""
    began, config, learner = time.monotonic(), policy.config, policy.learner
    batch = assemble_batch(config, samples, policy.name)
    batch.entries.exact &= batch.sampled_by(versions)
    metrics = drop_stale(batch, step - 1, config.loop.staleness) if config.loop.staleness else {}
    metrics["timing_s/assemble"] = time.monotonic() - began
    if policy.teacher is not None:
        metrics |= await policy.teacher.score(batch)
    if any(turn.sampling.grammar is not None for turn in batch.turns):
        skip_turns(batch, await learner.find_masks(batch.bare()), "grammar_limit")
    if policy.algorithm.needs:
        batch.entries, seconds = await learner.score(batch.bare())
        metrics |= seconds
    began = time.monotonic()
    metrics |= policy.algorithm.assign_credit(batch)
    metrics["timing_s/adv"] = time.monotonic() - began
    metrics |= await learner.update(batch.bare())
    refuse_undeclared(metrics)
    return batch, metrics


def assemble_batch(config: Config, samples: Sequence[Sample], policy: str) -> Batch:
    """The batch of one policy: turns that others answered carry no loss in it."""
    return assemble(
        samples,
        agents=config.policy.agents,
        budget=config.learner.token_budget,
        failures=config.algorithm.failures.by_cause(),
        policy=policy,
    )


async def take_digest(policies: Mapping[str, PolicyLearner]) -> str | None:
    """A fingerprint of all weights, where every policy is deterministic: of one its own, of several one over theirs."""
    if not all(policy.config.engine.deterministic for policy in policies.values()):
        return None
    found = {name: await policy.learner.digest() for name, policy in policies.items()}
    if len(found) == 1:
        return found.popitem()[1]
    return blake2b(msgspec.json.encode(found, order="sorted"), digest_size=16).hexdigest()


def describe_samples(samples: Sequence[Sample]) -> dict[str, float]:
    """What was collected, as metrics."""
    turns = [turn for sample in samples for turn in sample.turns if not turn.outside]
    metrics = summarize("response_length", np.array([len(turn.response_ids) for turn in turns], float))
    metrics |= summarize("prompt_length", np.array([len(turn.prompt_ids) for turn in turns], float))
    calls = [sum(len(turn.answer.get("tool_calls", ())) for turn in sample.turns) for sample in samples]
    metrics |= summarize("tool_call_counts", np.array(calls, float))
    metrics |= summarize("num_turns", np.array([len(sample.turns) for sample in samples], float))
    if turns:
        metrics["response_length/clip_ratio"] = sum(turn.finish == "length" for turn in turns) / len(turns)
    metrics |= exactness(samples).metrics()
    rollouts = [sample.rollout for sample in samples]
    for name in sorted({reward.name for rollout in rollouts for reward in rollout.rewards}):
        given = [value for rollout in rollouts if (value := rollout.reward(name)) is not None]
        metrics |= {f"reward/{name}": sum(given) / len(given)} if given else {}
    for cause, count in Counter(rollout.cause for rollout in rollouts if rollout.cause).items():
        metrics[f"failed/{cause}"] = float(count)
    return metrics
