"""Rollouts in a line each, for tests of credit."""

from strop.algorithms import make
from strop.config import AlgorithmConfig, LearnerConfig
from strop.trajectory import Sample, assemble
from strop.types import Reward, Rollout, Sampling, Task, Turn


def turn(length=1, at=None, *, agent="main", prompt=(1, 2), ids=None, choice=0, choices=1, finish="stop", warmth=1.0):
    """Everything about a turn but its name; `at` is when it started and ended, by default after the one before."""
    response = list(ids or [3] * length)
    return {
        "at": at, "agent": agent, "prompt_ids": list(prompt), "response_ids": response, "finish": finish,
        "logprobs": [-1.0] * len(response), "choice": choice, "choices": choices,
        "sampling": Sampling(temperature=warmth),
    }  # fmt: skip


def sample(member, total=None, *turns, group="g1", rewards=(), **more):
    """A rollout with turns named 0, 1, ... in the order given; rewards are (value, turn's number or agent's name)."""
    id = f"{group}.{member}"
    made = []
    for k, fields in enumerate(turns):
        started, ended = fields["at"] or (float(k), k + 0.5)
        rest = {name: value for name, value in fields.items() if name != "at"}
        made.append(
            Turn(id=f"{id}/1/{k}", rollout=id, attempt=1, versions=[(0, "1.0")], started=started, ended=ended, **rest)
        )
    given = [reward if isinstance(reward, Reward) else _reward(id, *reward) for reward in rewards]
    if total is not None:
        given.append(Reward(value=total))
    fields = {"status": "succeeded", "rewards": tuple(given), **more}
    return Sample(Rollout(id=id, group=group, member=member, task=Task(id="t"), created=0.0, **fields), made)


def _reward(rollout, value, to):
    return Reward(value=value, turn=f"{rollout}/1/{to}") if isinstance(to, int) else Reward(value=value, agent=to)


def batch_of(*samples, agents=("main",), budget=1000):
    return assemble(samples, agents=agents, budget=budget)


def credited(name, *samples, agents=("main",), budget=1000, updates=1, value=None, **settings):
    """A batch after credit, and its metrics. `value` is what the critic says of each entry."""
    batch = batch_of(*samples, agents=agents, budget=budget)
    if value is not None:
        batch.entries.value[:] = value
    algorithm = make(AlgorithmConfig(name=name, settings=settings), LearnerConfig(minibatches=updates))
    return batch, algorithm.assign_credit(batch)


def by_turn(batch, column="advantage"):
    """A number for each turn, which all its entries must have, by the names of rollout and turn."""
    values = getattr(batch.entries, column)
    found = {}
    for t, one in enumerate(batch.turns):
        rows = values[batch.rows(t)]
        assert (rows == rows[0]).all(), f"{one.id} has {rows}"
        found[one.id.replace("/1/", "/")] = float(rows[0])
    return found
