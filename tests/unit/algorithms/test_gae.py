from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.gae import estimate_advantages, find_timed, place_rewards
from strop.algorithms.rewards import Rewards
from tests.unit.algorithms.rollouts import batch_of, credited, sample, turn

AGENTS = ("a", "b")
SMALL = st.integers(-3, 3).map(float)
REQUEST = st.fixed_dictionaries(
    {
        "agent": st.sampled_from([*AGENTS, "judge"]),
        "start": st.integers(0, 12),
        "lasts": st.integers(0, 4),
        "lengths": st.lists(st.integers(1, 3), min_size=1, max_size=3),  # one per choice
        "abandoned": st.sampled_from([False, False, False, True]),
        "warmth": st.sampled_from([1.0, 1.0, 0.0]),
        "own": st.none() | SMALL,
    }
)
ROLLOUT = st.fixed_dictionaries(
    {
        "requests": st.lists(REQUEST, min_size=1, max_size=7),
        "total": SMALL,
        "agents": st.dictionaries(st.sampled_from(AGENTS), SMALL),
    }
)


def build(rollouts):
    samples, requests = [], {}
    for m, rollout in enumerate(rollouts):
        turns, rewards = [], [(value, agent) for agent, value in rollout["agents"].items()]
        for number, request in enumerate(rollout["requests"]):
            for choice, length in enumerate(request["lengths"]):
                id = f"g1.{m}/1/{len(turns)}"
                requests[id] = (m, number)
                if request["own"] is not None:
                    rewards.append((request["own"] + choice, len(turns)))
                turns.append(
                    turn(
                        length, (float(request["start"]), float(request["start"] + request["lasts"])),
                        agent=request["agent"], choice=choice, choices=len(request["lengths"]),
                        finish="abandoned" if request["abandoned"] else "stop", warmth=request["warmth"],
                    )
                )  # fmt: skip
        samples.append(sample(m, rollout["total"], *turns, rewards=rewards))
    return samples, requests


def oracle(sample, agent, requests, reward, value, outcome, discount, lam):
    """By turn id a list of advantages: one token after the other, as the words of the design have it."""
    turns = [t for t in sample.turns if t.agent == agent and t.finish != "abandoned"]

    def beside(one, other):
        meet = one.started < other.ended and other.started < one.ended
        return meet or one.started == other.started

    def place(one):
        found = [one]
        while more := [t for t in turns if t not in found and any(beside(t, f) for f in found)]:
            found += more
        return found

    @cache
    def next_turns(id):
        """What starts next after all that share a place with it, and what shares its place, the earliest first."""
        together = place(next(t for t in turns if t.id == id))
        ended = max(t.ended for t in together)
        later = [t for t in turns if t.started >= ended and t not in together]
        if not later:
            return ()
        first = min(later, key=lambda t: (t.started, t.choice, t.id))
        return tuple(t.id for t in sorted(place(first), key=lambda t: (t.started, t.choice, t.id)))

    @cache
    def stands(ids):
        """Value and advantage of the turns of one place."""
        if not ids:
            return 0.0, 0.0
        told = {}
        value_after, advantage_after = stands(next_turns(ids[0]))
        for id in ids:
            told.setdefault(requests[id], []).append(id)
        worth, surprise = 0.0, 0.0
        for k, choices in enumerate(told.values()):
            for id in choices:
                one, other, length = value[id][0], advantage(id, 0), len(value[id])
                if k and next_turns(id):
                    one -= discount**length * value_after
                    other -= (discount * lam) ** length * advantage_after
                elif k:
                    one -= discount ** (length - 1) * outcome
                worth, surprise = worth + one / len(choices), surprise + other / len(choices)
        return worth, surprise

    @cache
    def advantage(id, k):
        if k + 1 < len(value[id]):
            value_next, advantage_next = value[id][k + 1], advantage(id, k + 1)
        else:
            value_next, advantage_next = stands(next_turns(id))
        return reward[id][k] + discount * value_next - value[id][k] + discount * lam * advantage_next

    last = {t.id for t in turns if not next_turns(t.id)}
    return {t.id: [advantage(t.id, k) for k in range(len(value[t.id]))] for t in turns}, last


def per_turn(batch, column):
    return {t.id: column[batch.rows(k)].tolist() for k, t in enumerate(batch.turns)}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(ROLLOUT, min_size=1, max_size=3),
    st.integers(0, 2**20),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([1.0, 0.8, 0.0]),
)
def test_same_as_one_token_after_the_other(rollouts, seed, discount, lam):
    samples, requests = build(rollouts)
    batch = batch_of(*samples, agents=AGENTS)
    rng = np.random.default_rng(seed)
    rewards = Rewards.of(batch, {"reward": 1.0})
    value = rng.normal(size=len(batch.entries))
    penalty = per_turn(batch, rng.normal(size=len(batch.entries)).round(2))
    for t, one in enumerate(batch.turns):
        rewards.tokens[batch.rows(t)] = np.array(penalty[one.id]) / one.choices

    reward = place_rewards(batch, rewards)
    estimated = per_turn(batch, estimate_advantages(batch, rewards, value, discount, lam))
    timed = find_timed(batch)
    values, landed = per_turn(batch, value), per_turn(batch, reward)
    expected_rewards = {id: list(tokens) for id, tokens in penalty.items()}
    for one in samples:
        for given_ in one.rollout.rewards:
            if given_.turn in expected_rewards:
                expected_rewards[given_.turn][-1] += given_.value
    seen = set()
    for one, rollout in zip(samples, rollouts, strict=True):
        for agent in AGENTS:
            outcome = rollout["total"] + rollout["agents"].get(agent, 0.0)
            expected, last = oracle(one, agent, requests, landed, values, outcome, discount, lam)
            for id in last:
                expected_rewards[id][-1] += outcome
            for id, column in expected.items():
                assert estimated[id] == pytest.approx(column, abs=1e-9)
            seen |= expected.keys()
    # Nothing given is lost, wherever it falls and whether or not that token carries loss.
    assert sum(map(sum, landed.values())) == pytest.approx(sum(map(sum, expected_rewards.values())), abs=1e-9)
    assert landed == {id: pytest.approx(tokens, abs=1e-9) for id, tokens in expected_rewards.items()}
    for t, one in enumerate(batch.turns):
        assert timed[batch.rows(t)].all() == timed[batch.rows(t)].any() == (one.id in seen)
        assert one.id in seen or not any(estimated[one.id])


def still_to_come(sample, agent, requests, own, outcome, discount):
    """By turn id what its tokens still got: everything given later on the line, once. Told by summing rewards over
    time, without values. Within a place time runs along the request that started first."""
    turns = [t for t in sample.turns if t.agent == agent and t.finish != "abandoned"]
    places = []
    for t in sorted(turns, key=lambda t: (t.started, t.choice, t.id)):
        beside = places and (t.started < max(o.ended for o in places[-1]) or t.started == places[-1][-1].started)
        places[-1].append(t) if beside else places.append([t])

    def rewards(t, last):
        return [r + outcome * (last and k == len(own[t.id]) - 1) for k, r in enumerate(own[t.id])]

    def summed(numbers):
        return sum(discount**k * r for k, r in enumerate(numbers))

    found, later = {}, 0.0
    for number, place in reversed(list(enumerate(places))):
        last = number == len(places) - 1
        first = requests[place[0].id]
        came = 0.0
        for t in place:
            given = rewards(t, last)
            found[t.id] = [summed(given[k:]) + discount ** (len(given) - k) * later for k in range(len(given))]
            came += (found[t.id][0] if requests[t.id] == first else summed(own[t.id])) / t.choices
        later = came
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(ROLLOUT, min_size=1, max_size=2), st.integers(0, 2**20), st.sampled_from([1.0, 0.9]))
def test_what_went_in_comes_out(rollouts, seed, discount):
    """Where only what really came counts, a token's return is all that was given after it, whatever the critic says
    and however turns overlap."""
    samples, requests = build(rollouts)
    says = np.random.default_rng(seed).normal(size=len(batch_of(*samples, agents=AGENTS).entries))
    batch, _ = credited("ppo", *samples, agents=AGENTS, value=says, discount=discount, lam=1.0, whiten=False)
    came = per_turn(batch, batch.entries.ret)
    for one, rollout in zip(samples, rollouts, strict=True):
        own = {t.id: [0.0] * len(t.response_ids) for t in one.turns}
        for given_ in one.rollout.rewards:
            if given_.turn is not None:
                own[given_.turn][-1] += given_.value
        for agent in AGENTS:
            outcome = rollout["total"] + rollout["agents"].get(agent, 0.0)
            for id, expected in still_to_come(one, agent, requests, own, outcome, discount).items():
                assert came[id] == pytest.approx(expected, abs=1e-9)


def test_a_reward_of_either_of_two_turns_side_by_side_reaches_the_turn_before_them():
    for which in (1, 2):
        turns = turn(1, (0, 1)), turn(1, (2, 4)), turn(1, (3, 4)), turn(1, (5, 6))
        batch, _ = credited("ppo", sample(0, 1.0, *turns, rewards=[(10.0, which)]), value=0.0, whiten=False)
        assert batch.entries.ret.tolist() == [11.0, 11.0 if which == 1 else 1.0, 11.0 if which == 2 else 1.0, 1.0]
    batch, _ = credited("ppo", sample(0, 1.0, *turns[:3], rewards=[(10.0, 2)]), value=0.0, whiten=False)
    assert batch.entries.ret.tolist() == [11.0, 1.0, 11.0]  # the outcome, which both lead to, once


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_a_critic_that_knows_is_not_surprised_by_turns_side_by_side(lam):
    turns = turn(1, (0, 1)), turn(1, (2, 4)), turn(1, (3, 4)), turn(1, (5, 6))
    given_ = sample(0, 1.0, *turns, rewards=[(4.0, 1), (10.0, 2)])
    batch, _ = credited("ppo", given_, value=[15.0, 5.0, 11.0, 1.0], lam=lam, whiten=False)
    assert batch.entries.advantage.tolist() == [0.0] * 4
    at_the_end = sample(0, 1.0, *turns[:3], rewards=[(4.0, 1), (10.0, 2)])
    batch, _ = credited("ppo", at_the_end, value=[15.0, 5.0, 11.0], lam=lam, whiten=False)
    assert batch.entries.advantage.tolist() == [0.0] * 3


def returns(*turns, total=1.0, agents=("main",), discount=1.0, lam=1.0, value=None, rewards=()):
    """Advantages by turn where the critic says nothing: what is still to come."""
    batch = batch_of(sample(0, total, *turns, rewards=rewards), agents=agents)
    says = np.zeros(len(batch.entries)) if value is None else np.array(value)
    found = per_turn(batch, estimate_advantages(batch, Rewards.of(batch, {"reward": 1.0}), says, discount, lam))
    return {int(id[-1]): column for id, column in found.items()}


def test_a_reward_on_a_token_that_carries_no_loss_still_counts():
    """The last turn is greedy and trains nothing; the one before it earned the reward all the same."""
    batch = batch_of(sample(0, 1.0, turn(2), turn(2, warmth=0.0)))
    assert batch.entries.trainable.tolist() == [True, True, False, False]
    assert returns(turn(2), turn(2, warmth=0.0)) == {0: [1.0, 1.0], 1: [1.0, 1.0]}


def test_what_the_environment_writes_takes_no_time():
    short = returns(turn(2, prompt=[1]), turn(1, prompt=[1, 3, 3, 5]), discount=0.5)
    long = returns(turn(2, prompt=[1]), turn(1, prompt=[1, 3, 3, *[5] * 50]), discount=0.5)
    assert short == long == {0: [0.25, 0.5], 1: [1.0]}


def test_time_goes_on_across_a_branch():
    """The second turn begins from a compacted history: no token of the first is in its prompt."""
    assert returns(turn(2, prompt=[1]), turn(1, prompt=[9, 9]), discount=0.5) == {0: [0.25, 0.5], 1: [1.0]}


def test_an_abandoned_turn_is_stepped_over():
    found = returns(turn(1, (0, 1)), turn(5, (2, 3), finish="abandoned"), turn(1, (4, 5)), discount=0.5)
    assert found == {0: [0.5], 1: [0.0] * 5, 2: [1.0]}


def test_the_last_turn_was_abandoned():
    """The reward lands on the last one that was delivered."""
    assert returns(turn(1, (0, 1)), turn(5, (2, 3), finish="abandoned"))[0] == [1.0]


def test_turns_side_by_side_all_lead_to_the_one_after_them():
    found = returns(turn(1, (0, 3)), turn(1, (1, 2)), turn(1, (4, 5)), value=[0.0, 0.0, 0.5], lam=0.0)
    assert found == {0: [0.5], 1: [0.5], 2: [0.5]}


def test_choices_each_get_the_outcome_and_those_before_get_their_mean():
    both = [turn(1, (2, 3), choice=c, choices=2) for c in range(2)]
    found = returns(turn(1, (0, 1)), *both, total=1.0, rewards=[(2.0, 1), (4.0, 2)])
    assert found == {0: [1.0 + 3.0], 1: [3.0], 2: [5.0]}


def test_agents_are_paid_at_the_end_of_their_own_time():
    found = returns(
        turn(1, agent="a"), turn(1, agent="b"), turn(1, agent="a"), turn(1, agent="b"),
        agents=AGENTS, rewards=[(4.0, "a"), (8.0, "b"), (2.0, 0)],
    )  # fmt: skip
    assert found == {0: [7.0], 1: [9.0], 2: [5.0], 3: [9.0]}
