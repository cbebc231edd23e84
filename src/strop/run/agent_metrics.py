"""What each agent of a system did and got in a step, by role: wolf-1 and wolf-2 are both `wolf`.

agents/wolf/num_turns     turns per rollout
agents/wolf/tokens        sampled tokens, and of them
agents/wolf/loss_tokens   those that carried loss: 0 for whoever is not trained
agents/wolf/outside       the share of its turns that outside models answered
agents/wolf/reward/win    the mean of each reward that was given to it: of wins the win rate

Where one agent speaks it is the run, and nothing is added to its metrics. Agents may call themselves anything: roles
that are not plain words, and those beyond the first 32, are together called `other`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from strop.algorithms.credit import parse_role
from strop.algorithms.rewards import select_last_rewards
from strop.trajectory import Batch, Sample

MOST, OTHER = 32, "other"
_PLAIN = re.compile(r"[\w.-]{1,64}", re.ASCII)


def describe_agents(samples: Sequence[Sample], batches: Sequence[Batch]) -> dict[str, float]:
    """The metrics of a step by role. `batches` are those of its policies, after credit."""
    turns = [turn for sample in samples for turn in sample.turns]
    names = name_roles(sorted({turn.agent for turn in turns}))
    roles = sorted({*names.values()})
    if len(roles) < 2:
        return {}
    loss_tokens = _count_loss_tokens(batches, names)
    rewards = _collect_rewards(samples, names)
    metrics: dict[str, float] = {}
    for role in roles:
        own = [turn for turn in turns if names[turn.agent] == role]
        metrics[f"agents/{role}/num_turns"] = len(own) / len(samples)
        metrics[f"agents/{role}/tokens"] = float(sum(len(turn.response_ids) for turn in own))
        metrics[f"agents/{role}/loss_tokens"] = loss_tokens.get(role, 0.0)
        metrics[f"agents/{role}/outside"] = sum(turn.outside for turn in own) / len(own)
        for name, values in sorted(rewards.get(role, {}).items()):
            metrics[f"agents/{role}/reward/{name}"] = sum(values) / len(values)
    return metrics


def name_roles(agents: Sequence[str]) -> dict[str, str]:
    """What each agent's role is called.

    >>> name_roles(["seer", "wolf-1", "wolf-2", "a b"])
    {'seer': 'seer', 'wolf-1': 'wolf', 'wolf-2': 'wolf', 'a b': 'other'}
    """
    roles = {agent: parse_role(agent) for agent in agents}
    plain = list(dict.fromkeys(role for role in roles.values() if _PLAIN.fullmatch(role)))[:MOST]
    return {agent: role if role in plain else OTHER for agent, role in roles.items()}


def _count_loss_tokens(batches: Sequence[Batch], names: Mapping[str, str]) -> dict[str, float]:
    counts: dict[str, float] = defaultdict(float)
    for batch in batches:
        weighted = np.bincount(batch.entries.agent[batch.entries.weight > 0], minlength=len(batch.agents))
        for agent, count in zip(batch.agents, weighted, strict=True):
            counts[names.get(agent, OTHER)] += float(count)
    return counts


def _collect_rewards(samples: Sequence[Sample], names: Mapping[str, str]) -> dict[str, dict[str, list[float]]]:
    """By role and name: what its agents were given, as agents or for turns."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        agents = {turn.id: turn.agent for turn in sample.turns}
        for reward in select_last_rewards(sample.rollout):
            agent = reward.agent or agents.get(reward.turn or "")
            if agent is not None:
                found[names.get(agent, OTHER)][reward.name].append(reward.value)
    return found
