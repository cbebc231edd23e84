import math

import numpy as np
import pytest

from strop.trajectory import Sample, assemble, pack
from strop.types import Rollout, Sampling, Task, Turn


def turn(rollout, number=0, prompt=(1, 2), response=(3, 4), **more):
    fields = {
        "id": f"{rollout}/1/{number}",
        "rollout": rollout,
        "attempt": 1,
        "prompt_ids": list(prompt),
        "response_ids": list(response),
        "logprobs": [-0.5] * len(response),
        "versions": [(0, "1.0")],
        "finish": "stop",
        "started": float(number),
        "ended": number + 0.5,
    }
    return Turn(**(fields | more))


def sample(group="g1", member=0, turns=None, status="succeeded", **more):
    id = f"{group}.{member}"
    rollout = Rollout(id=id, group=group, member=member, task=Task(id="t"), status=status, created=0.0, **more)
    return Sample(rollout, [turn(id)] if turns is None else turns)


def make(*samples, budget=100, agents=("main",)):
    return assemble(samples, agents=agents, budget=budget)


def test_entries_are_the_sampled_tokens_in_order():
    batch = make(sample(turns=[turn("g1.0", 1, [1, 2, 3, 4, 9], [5]), turn("g1.0", 0, [1, 2], [3, 4])]))
    entries = batch.entries
    assert entries.target.tolist() == [3, 4, 5]
    assert entries.turn.tolist() == [0, 0, 1]
    assert entries.index.tolist() == [0, 1, 0]
    assert np.isnan(entries.proximal).all()
    assert np.isnan(entries.ref).all()
    assert np.isnan(entries.value).all()
    assert (entries.weight == 0).all()
    assert batch.dropped == {}


def test_every_entry_has_the_logprob_and_temperature_of_its_own_token():
    first = turn("g1.0", 0, [1, 2], [3, 4], logprobs=[-0.1, -0.7], sampling=Sampling(temperature=0.8))
    second = turn("g1.0", 1, [1, 2, 3, 4, 9], [5], logprobs=[-0.2], sampling=Sampling(temperature=1.2))
    entries = make(sample(turns=[second, first])).entries
    assert entries.behaviour.tolist() == [-0.1, -0.7, -0.2]
    assert entries.temperature.tolist() == [0.8, 0.8, 1.2]


def test_order_of_arrival_changes_nothing():
    samples = [sample(g, m, turns=[turn(f"{g}.{m}", 0, [1, m], [m, 5])]) for g in ("g1", "g2") for m in range(12)]
    one, other = make(*samples), make(*reversed(samples))
    assert [s.rollout.id for s in one.samples] == [s.rollout.id for s in other.samples]
    assert one.samples[10].rollout.member == 10
    assert np.array_equal(one.entries.target, other.entries.target)
    for a, b in zip(pack(one, 20), pack(other, 20), strict=True):
        assert all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("ids", "pos", "end", "entry", "at"))


def test_other_agents_are_context_only():
    batch = make(sample(turns=[turn("g1.0", 0, agent="judge"), turn("g1.0", 1, [1], [7])]))
    assert batch.entries.target.tolist() == [7]
    assert make(sample(turns=[turn("g1.0", 0, agent="judge")])).dropped == {"g1.0": "untrained"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"finish": "abandoned"}, "abandoned"),
        ({"finish": "error"}, "abandoned"),
        ({"sampling": Sampling(temperature=0.0)}, "greedy"),
        ({"sampling": Sampling(top_p=0.9)}, "truncated_sampling"),
    ],
)
def test_turns_that_may_not_train_are_kept_and_counted(change, reason):
    batch = make(sample(turns=[turn("g1.0", 0), turn("g1.0", 1, [1], [7, 8, 9], **change)]))
    assert batch.entries.trainable.tolist() == [True, True, False, False, False]
    assert batch.counts() == {f"filter_tokens/{reason}": 3.0}
    assert make(sample(turns=[turn("g1.0", 0, **change)])).dropped == {"g1.0": reason}
    assert batch.entries.exact.tolist()[2:] == [reason == "abandoned"] * 3


def test_turns_that_the_agent_excluded_are_kept_and_counted():
    turns = [turn("g1.0", 0), turn("g1.0", 1, [1], [7, 8, 9]), turn("g1.0", 2, [1], [5], finish="abandoned")]
    excluded = {"g1.0/1/1": "title", "g1.0/1/2": "title", "g1.0/1/9": "title"}
    batch = make(sample(turns=turns, excluded=excluded))
    assert batch.skipped == [None, "excluded:title", "abandoned"]
    assert batch.entries.trainable.tolist() == [True, True, False, False, False, False]
    assert batch.counts() == {
        "filter_tokens/excluded:title": 3.0,
        "filter_tokens/abandoned": 1.0,
        "filter_turns/excluded_unknown": 1.0,  # there is no such turn
    }
    alone = make(sample(turns=turns[1:2], excluded=excluded))
    assert (alone.dropped, alone.counted.tolist()) == ({"g1.0": "excluded:title"}, [True])


@pytest.mark.parametrize("cause", ["lost_runner", "engine_error", "bad_reward", "cancelled"])
def test_what_happened_to_an_agent_is_excluded(cause):
    batch = make(sample(status="failed", cause=cause))
    assert not batch.counted[0]
    assert not batch.entries.trainable.any()
    assert batch.dropped == {"g1.0": f"failed:{cause}"}


@pytest.mark.parametrize("cause", ["agent_error", "timeout"])
def test_what_an_agent_did_counts_as_zero_and_trains(cause):
    batch = make(sample(status="failed", cause=cause))
    assert batch.counted[0]
    assert batch.stand_in[0] == "zero"
    assert batch.entries.trainable.all()
    assert batch.dropped == {}


def test_empty_and_over_budget_rollouts_stay_in_the_baseline():
    refused = turn("g1.1", 0, prompt=[1] * 500, response=[], finish="error")  # a prompt that did not fit the context
    batch = make(
        sample(member=0, turns=[]),
        sample(member=1, turns=[refused]),
        sample(member=2, turns=[turn("g1.2", 0), turn("g1.2", 1, [1] * 9, [2, 3])]),
        sample(member=3, turns=[refused, turn("g1.3", 0)]),
        budget=10,
    )
    assert batch.dropped == {"g1.0": "empty", "g1.1": "empty", "g1.2": "over_budget"}
    assert batch.counted.all()
    assert set(batch.entries.rollout) == {3}
    assert batch.counts() == {"filter/empty": 2.0, "filter/over_budget": 1.0}


@pytest.mark.parametrize(
    "bad",
    [
        {"logprobs": [-0.5]},
        {"logprobs": [-0.5, math.nan]},
        {"logprobs": [-0.5, -math.inf]},
        {"prompt_ids": []},
    ],
)
def test_a_bad_token_is_a_crash(bad):
    with pytest.raises(AssertionError, match=r"g1\.0/1/0"):
        make(sample(turns=[turn("g1.0", **bad)]))


def test_a_running_rollout_is_a_crash():
    with pytest.raises(AssertionError, match="not complete"):
        make(sample(status="running"))


def test_turns_of_outside_models_have_no_tokens_and_are_left_out_and_counted():
    def outside(rollout, number, agent="main"):
        none = {"prompt_ids": [], "response_ids": [], "logprobs": [], "versions": []}
        return turn(rollout, number, agent=agent, policy="judge", **none)

    mixed = sample("g1", 0, turns=[outside("g1.0", 0), turn("g1.0", 1, [1], [7]), outside("g1.0", 2, "judge")])
    only = sample("g1", 1, turns=[outside("g1.1", 0), outside("g1.1", 1, "judge")])
    silent = sample("g1", 2, turns=[])
    batch = make(mixed, only, silent)
    assert batch.entries.target.tolist() == [7]
    assert batch.dropped == {"g1.1": "outside", "g1.2": "empty"}
    assert batch.counted.all()  # a rollout without tokens still tells what the task is worth
    assert batch.counts() == {"filter/empty": 1.0, "filter/outside": 1.0, "filter_turns/outside": 4.0}
    assert sum(len(piece.ids) for piece in pack(batch, 20)) == 2


def test_a_policy_learns_from_its_own_turns_alone():
    turns = [
        turn("g1.0", 0, [1], [2], agent="writer", policy="writer"),
        turn("g1.0", 1, [1], [3, 4], agent="critic-a", policy="critic"),
        turn("g1.0", 2, [1], [5], agent="critic-b", policy="writer"),  # as it was routed when it was sampled
    ]
    one = sample(turns=turns)
    by = {
        name: assemble([one], agents=agents, budget=100, policy=name)
        for name, agents in {"writer": ["writer"], "critic": ["critic-*"], "judge": ["judge"]}.items()
    }
    assert {name: batch.entries.target.tolist() for name, batch in by.items()} == {
        "writer": [2],
        "critic": [3, 4],
        "judge": [],
    }
    assert by["critic"].agents == ["critic-a"]  # what another policy's agent got is compared with nobody here
    assert by["judge"].dropped == {"g1.0": "untrained"}
    assert all(batch.counted.all() for batch in by.values())  # what the rollout got counts for all of them
