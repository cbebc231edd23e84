import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms import find, make, names, setting_names
from strop.algorithms.credit import Scores, compare, compute_rewards_to_go, whiten
from strop.algorithms.rewards import Rewards, count_unused
from strop.algorithms.timeline import build_timelines
from strop.config import AlgorithmConfig, LearnerConfig
from strop.trajectory import assemble
from strop.types import Reward
from tests.unit.algorithms.rollouts import batch_of, by_turn, credited, sample, turn

WEIGHTS = {"reward": 1.0}
BASELINES = ("group", "agent", "role", "joint")


def rewards_of(batch, weights=None):
    return Rewards.of(batch, weights or WEIGHTS)


# -- what was given


def test_rewards_by_whom_they_were_given_to():
    batch = batch_of(
        sample(0, 1.0, turn(2), turn(1, agent="helper"), rewards=[(0.5, 0), (0.25, "helper"), (9.0, "nobody")]),
        sample(1, 2.0, turn(1), status="failed", cause="lost_runner"),
        agents=["main", "helper"],
    )
    rewards = rewards_of(batch, {"reward": 2.0})
    assert rewards.totals[0] == 2.0
    assert np.isnan(rewards.totals[1])
    assert batch.agents == ["helper", "main"]
    assert rewards.agents.tolist() == [[0.5, 0.0], [0.0, 0.0]]
    assert rewards.turns.tolist() == [1.0, 0.0, 0.0]
    assert rewards.tokens.tolist() == [0.0] * 4


def test_the_order_of_arrival_does_not_show():
    names = [f"r{k}" for k in range(5)]
    given = [Reward(name=n, value=v, turn="g1.0/1/0") for n, v in zip(names, [0.1, 0.2, 0.3, 1e16, -1e16], strict=True)]
    weights = dict.fromkeys(names, 1.0)
    orders = [given, given[::-1], given[2:] + given[:2]]
    assert len({rewards_of(batch_of(sample(0, None, turn(), rewards=o)), weights).turns[0] for o in orders}) == 1


def test_what_tokens_got_is_part_of_the_outcome():
    batch = batch_of(sample(0, 1.0, turn(2), turn(1, choices=2), turn(1, choices=2)))
    rewards = rewards_of(batch)
    rewards.tokens[:] = [-0.1, -0.2, -0.15, -0.05]  # of the choices, which lost 0.3 and 0.1, half
    assert rewards.outcomes(batch).tolist() == pytest.approx([0.5])
    assert rewards.by_turn(batch) == pytest.approx({"g1.0/1/0": -0.3, "g1.0/1/1": -0.3, "g1.0/1/2": -0.1})


def test_rewards_that_reach_nobody_are_counted():
    batch = batch_of(
        sample(
            0, 1.0, turn(), turn(finish="abandoned"), turn(agent="judge"), turn(agent="late", finish="abandoned"),
            rewards=[(1.0, 0), (1.0, 1), (1.0, 2), (1.0, "judge"), (1.0, "late"), (1.0, "nobody"), (1.0, 7)],
        ),
        agents=["main", "late"],
    )  # fmt: skip
    assert count_unused(batch, WEIGHTS) == {
        "filter_rewards/no_entries": 4,
        "filter_rewards/unknown_agent": 1,
        "filter_rewards/unknown_turn": 1,
    }


# -- time


def places(*turns):
    [line] = build_timelines(batch_of(sample(0, 1.0, *turns)))
    return [[int(t.id[-1]) for t in moment] for moment in line.moments]


def test_turns_follow_each_other_by_request_start():
    assert places(turn(at=(4, 5)), turn(at=(0, 1)), turn(at=(1, 4))) == [[1], [2], [0]]


def test_turns_that_overlap_and_choices_share_a_place():
    assert places(turn(at=(0, 3)), turn(at=(1, 2)), turn(at=(3, 4))) == [[0, 1], [2]]
    assert places(turn(at=(0, 2)), turn(at=(1, 4)), turn(at=(3, 5)), turn(at=(5, 6))) == [[0, 1, 2], [3]]
    assert places(turn(at=(0, 0), choices=2), turn(at=(0, 0), choice=1, choices=2), turn(at=(0.5, 1))) == [[0, 1], [2]]


def test_abandoned_turns_are_not_part_of_time():
    assert places(turn(at=(0, 1)), turn(at=(0.5, 9), finish="abandoned"), turn(at=(2, 3))) == [[0], [2]]


def test_each_agent_has_a_time_of_its_own():
    batch = batch_of(
        sample(0, 1.0, turn(at=(0, 9), agent="a"), turn(at=(1, 2), agent="b"), turn(at=(3, 4), agent="b")),
        agents=["a", "b"],
    )
    assert [[len(moment) for moment in line.moments] for line in build_timelines(batch)] == [[1], [1, 1]]


def test_to_go():
    batch = batch_of(
        sample(
            0, 8.0, turn(at=(0, 1)), turn(at=(2, 3)), turn(at=(4, 6)), turn(at=(5, 6)),
            rewards=[(1.0, 0), (2.0, 1), (4.0, 2), (16.0, "main")],
        )
    )  # fmt: skip
    returns = compute_rewards_to_go(batch, rewards_of(batch), discount=0.5, terminal_share=0.25)
    last = 0.25 * 8.0 + 16.0
    expected = [1 + 0.5 * 2 + 0.25 * (4 + last), 2 + 0.5 * (4 + last), 4 + last, last]
    assert list(returns.values()) == pytest.approx([expected[int(id[-1])] for id in returns])


def test_choices_count_by_their_share_for_what_came_before():
    batch = batch_of(
        sample(
            0, 0.0, turn(at=(0, 1)), turn(at=(2, 3), choices=2), turn(at=(2, 3), choice=1, choices=2),
            rewards=[(1.0, 1), (3.0, 2)],
        )
    )  # fmt: skip
    returns = compute_rewards_to_go(batch, rewards_of(batch), discount=1.0, terminal_share=1.0)
    assert returns == {"g1.0/1/0": 2.0, "g1.0/1/1": 1.0, "g1.0/1/2": 3.0}


# -- compared with the like


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_one_score_each_is_the_plain_mean_and_deviation_bit_for_bit(values):
    value = np.array(values)
    size = len(value)
    scores = Scores(value, np.arange(size), np.zeros(size, np.int64), np.ones(size), np.arange(size))
    if value.min() == value.max():
        assert compare(scores, std=True) == (pytest.approx(np.zeros(size)), ["zero_variance"] * size)
        return
    assert np.array_equal(compare(scores, std=False)[0], value - value.mean())
    assert np.array_equal(compare(scores, std=True)[0], (value - value.mean()) / (value.std(ddof=1) + 1e-6))
    others = [(value.sum() - v) / (size - 1) for v in value]
    assert compare(scores, std=False, leave_one_out=True)[0] == pytest.approx(value - others, abs=1e-9)


def test_several_scores_of_one_rollout_count_as_one():
    value = np.array([0.0, 1.0, 2.0, 3.0])
    scores = Scores(value, np.array([0, 0, 0, 1]), np.zeros(4, np.int64), np.array([1.0, 0.5, 0.5, 1.0]), np.arange(4))
    mean = (0.75 + 3.0) / 2  # of the first rollout: half of 0, a quarter of 1 and of 2
    advantage, reasons = compare(scores, std=False)
    assert advantage.tolist() == pytest.approx((value - mean).tolist())
    assert reasons == [None] * 4
    variance = 0.5 * mean**2 + 0.25 * (1 - mean) ** 2 + 0.25 * (2 - mean) ** 2 + (3 - mean) ** 2
    assert compare(scores, std=True)[0] == pytest.approx((value - mean) / (variance**0.5 + 1e-6))
    apart = compare(scores, std=False, leave_one_out=True)[0]
    assert apart.tolist() == pytest.approx([-3.0, -2.0, -1.0, 2.25])


def test_whiten_counts_by_weight():
    values = np.array([1.0, 1.0, 4.0])
    assert whiten(values, np.array([0.5, 0.5, 1.0])) == pytest.approx(
        whiten(np.array([1.0, 4.0]), np.ones(2))[[0, 0, 1]]
    )


# -- baselines of GRPO: who and what is compared


def game(member, wolves, villagers, total=0.0, **more):
    names = ["wolf-1", "wolf-2", "villager-1"]
    turns = [turn(at=(k, k + 0.5), agent=name) for k, name in enumerate(names)]
    return sample(
        member, total, *turns, rewards=[(wolves, "wolf-1"), (wolves, "wolf-2"), (villagers, "villager-1")], **more
    )


GAME = ("wolf-1", "wolf-2", "villager-1")


def test_roles_are_compared_with_the_like():
    """Wolves win most games. Against a joint baseline a wolf that won an easy game and a villager that lost a hard one
    would teach; against the like only what was unusual does."""
    batch, _ = credited(
        "grpo", game(0, 1.0, 0.0), game(1, 1.0, 0.0), game(2, 0.0, 1.0), game(3, 1.0, 0.0),
        agents=GAME, baseline="role", normalize_std=False,
    )  # fmt: skip
    assert by_turn(batch)["g1.0/0"] == by_turn(batch)["g1.0/1"] == 0.25
    assert by_turn(batch)["g1.0/2"] == -0.25
    assert by_turn(batch)["g1.2/0"] == -0.75
    assert by_turn(batch)["g1.2/2"] == 0.75


def test_a_role_counts_once_per_rollout_however_many_play_it():
    three = [turn(at=(k, k + 0.5), agent=f"wolf-{k}") for k in range(3)]
    batch, _ = credited(
        "grpo",
        sample(0, 0.0, *three, rewards=[(1.0, f"wolf-{k}") for k in range(3)]),
        sample(1, 0.0, turn(agent="wolf-0"), rewards=[(0.0, "wolf-0")]),
        agents=["wolf-0", "wolf-1", "wolf-2"], baseline="role", normalize_std=False,
    )  # fmt: skip
    assert list(by_turn(batch).values()) == [0.5, 0.5, 0.5, -0.5]


def test_agents_are_compared_with_themselves_and_get_the_total_too():
    batch, metrics = credited(
        "grpo",
        sample(0, 1.0, turn(agent="a"), turn(agent="b"), turn(agent="c"), rewards=[(1.0, "a"), (0.0, "b")]),
        sample(1, 0.0, turn(agent="a"), turn(agent="b"), rewards=[(1.0, "a"), (1.0, "b")]),
        agents=["a", "b", "c"], baseline="agent", normalize_std=False,
    )  # fmt: skip
    # a: 2 and 1. b: 1 and 1, which teaches nothing. c spoke in one rollout only.
    assert by_turn(batch) == {"g1.0/0": 0.5, "g1.0/1": 0.0, "g1.0/2": 0.0, "g1.1/0": -0.5, "g1.1/1": 0.0}
    assert batch.dropped == {}
    # What b said is counted all the same: one of four tokens that could have taught.
    assert by_turn(batch, "weight") == {"g1.0/0": 0.25, "g1.0/1": 0.0, "g1.0/2": 0.0, "g1.1/0": 0.25, "g1.1/1": 0.0}
    assert (metrics["filter_tokens/zero_variance"], metrics["filter_tokens/group_of_one"]) == (2, 1)


def test_a_rollout_left_without_a_turn_is_dropped():
    """What teaches was sampled greedily, and what was not teaches nothing."""
    batch, metrics = credited(
        "grpo",
        sample(0, 0.0, turn(agent="a", warmth=0.0), turn(agent="b"), rewards=[(1.0, "a")]),
        sample(1, 0.0, turn(agent="a"), turn(agent="b"), rewards=[(0.0, "a")]),
        agents=["a", "b"],
        baseline="agent",
    )
    assert batch.dropped == {"g1.0": "zero_variance"}
    assert metrics["filter/zero_variance"] == 1
    assert [t for t, w in by_turn(batch, "weight").items() if w] == ["g1.1/0"]


# -- all agents together


def duel(member, left, right, *turns, total=None, **more):
    """A game of two agents, each of a policy of its own, with what each of them got."""
    said = turns or [turn(2, agent="left") | {"policy": "l"}, turn(agent="right") | {"policy": "r"}]
    return sample(member, total, *said, rewards=[(left, "left"), (right, "right")], **more)


DUELS = [duel(0, 1.0, 4.0), duel(1, 0.0, 2.0), duel(2, 1.0, 0.0)]


def assign(samples, *, agents, policy=None, name="grpo", **more):
    batch = assemble(samples, agents=agents, budget=1000, policy=policy)
    make(AlgorithmConfig(name=name, settings={"baseline": "joint", **more}), LearnerConfig()).assign_credit(batch)
    return by_turn(batch)


def test_jointly_all_agents_have_one_mean_and_one_deviation():
    mean = (1 + 4 + 0 + 2 + 1 + 0) / 6
    squares = sum((value - mean) ** 2 for value in (1, 4, 0, 2, 1, 0))
    scale = (squares / 2 / (3 - 1)) ** 0.5 + 1e-6  # two agents to a rollout, which counts once; of three rollouts
    table = {"g1.0/0": 1.0, "g1.0/1": 4.0, "g1.1/0": 0.0, "g1.1/1": 2.0, "g1.2/0": 1.0, "g1.2/1": 0.0}
    expected = {name: (value - mean) / scale for name, value in table.items()}
    assert assign(DUELS, agents=["left", "right"]) == pytest.approx(expected)
    plain = {name: value - mean for name, value in table.items()}
    assert assign(DUELS, agents=["left", "right"], normalize_std=False) == pytest.approx(plain)


@pytest.mark.parametrize(
    ("name", "more"),
    [("grpo", {}), ("grpo", {"credit": "to_go", "discount": 0.5}), ("rloo", {}), ("dr_grpo", {}), ("gigpo", {})],
)
def test_jointly_each_policy_is_compared_with_the_agents_of_the_others(name, more):
    games = [
        *(duel(0, 1.0, 4.0, total=1.0), duel(1, 0.0, 2.0, total=-1.0), duel(2, 1.0, 0.0, total=0.0)),
        duel(3, 9.0, 9.0, status="failed", cause="agent_error"),
        *(duel(0, 2.0, 5.0, group="g2"), duel(1, 3.0, 1.0, group="g2")),
    ]
    whole = assign(games, agents=["left", "right"], name=name, **more)
    left = assign(games, agents=["left"], policy="l", name=name, **more)
    right = assign(games, agents=["right"], policy="r", name=name, **more)
    assert left | right == whole
    assert len(left) == len(right) == 6
    assert max(abs(value) for value in left.values()) > 0 < max(abs(value) for value in right.values())


def test_jointly_the_scale_of_one_agent_moves_the_other_and_by_agent_it_does_not():
    scaled = [duel(0, 1.0, 40.0), duel(1, 0.0, 20.0), duel(2, 1.0, 0.0)]
    by_agent = [assign(games, agents=["left"], baseline="agent") for games in (DUELS, scaled)]
    assert by_agent[0] == by_agent[1]
    jointly = [assign(games, agents=["left"]) for games in (DUELS, scaled)]
    assert jointly[0]["g1.0/0"] != pytest.approx(jointly[1]["g1.0/0"], abs=0.1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.integers(-30, 30).map(lambda tenths: tenths / 10)] * 2), min_size=2, max_size=5))
def test_jointly_agents_of_one_role_are_pooled_and_alike_ones_are_their_rollout(scores):
    wolves = ["wolf-1", "wolf-2"]

    def games(values):
        said = [turn(agent=name) for name in wolves]
        return [sample(m, None, *said, rewards=[*zip(both, wolves, strict=True)]) for m, both in enumerate(values)]

    assert assign(games(scores), agents=wolves) == assign(games(scores), agents=wolves, baseline="role")
    alike = games([(one, one) for one, _ in scores])
    assert assign(alike, agents=wolves) == pytest.approx(assign(alike, agents=wolves, baseline="agent"))
    rollouts = [sample(m, one, *(turn(agent=name) for name in wolves)) for m, (one, _) in enumerate(scores)]
    assert assign(alike, agents=wolves) == pytest.approx(assign(rollouts, agents=wolves, baseline="group"))


def test_jointly_failing_is_no_better_than_the_worst_that_any_agent_got():
    failed = duel(2, 9.0, 9.0, status="failed", cause="agent_error")
    found = assign([duel(0, 2.0, -1.0), duel(1, 3.0, 0.0), failed], agents=["left", "right"], normalize_std=False)
    mean = (2 - 1 + 3 + 0 - 1 - 1) / 6
    values = {"g1.0/0": 2, "g1.0/1": -1, "g1.1/0": 3, "g1.1/1": 0, "g1.2/0": -1, "g1.2/1": -1}
    assert found == pytest.approx({name: value - mean for name, value in values.items()})
    lost = duel(2, 9.0, 9.0, status="failed", cause="lost_runner")  # not in the baseline at all
    assert assign([*DUELS[:2], lost], agents=["left"]) == assign(DUELS[:2], agents=["left"]) | {"g1.2/0": 0.0}


def test_jointly_agents_of_outside_models_are_not_compared():
    outside = turn(agent="right", prompt=()) | {"response_ids": [], "logprobs": []}
    games = [duel(m, left, 5.0 * m, turn(agent="left"), outside) for m, left in enumerate([1.0, 0.0])]
    assert assign(games, agents=["left"]) == assign(games, agents=["left"], baseline="agent")


def test_a_turns_own_reward_reaches_it_whoever_is_compared():
    samples = [
        sample(0, 0.0, turn(), turn(), rewards=[(1.0, 0), (0.0, 1)]),
        sample(1, 0.0, turn(), turn(), rewards=[(0.0, 0), (0.0, 1)]),
    ]
    for baseline in BASELINES:
        batch, _ = credited("grpo", *samples, baseline=baseline, normalize_std=False)
        assert by_turn(batch) == {"g1.0/0": 0.75, "g1.0/1": -0.25, "g1.1/0": -0.25, "g1.1/1": -0.25}


@pytest.mark.parametrize("baseline", BASELINES)
def test_to_go_without_discount_and_rewards_of_turns_is_the_outcome(baseline):
    samples = [sample(k, r, *[turn()] * (k + 1)) for k, r in enumerate([1.0, 0.0, 0.25])]
    outcome, _ = credited("grpo", *samples)
    returns, _ = credited("grpo", *samples, credit="to_go", baseline=baseline)
    assert by_turn(returns) == pytest.approx(by_turn(outcome))


def test_to_go_gives_a_turn_what_came_after_it():
    batch, _ = credited(
        "grpo",
        sample(0, 1.0, turn(), turn(), rewards=[(1.0, 0), (0.0, 1)]),
        sample(1, 0.0, turn()),
        credit="to_go", discount=0.5, terminal_share=1.0, normalize_std=False,
    )  # fmt: skip
    # Returns 1 + 1/2 and 1, and 0: the mean over rollouts is (1.25 + 0) / 2.
    assert by_turn(batch) == {"g1.0/0": 0.875, "g1.0/1": 0.375, "g1.1/0": -0.625}


def test_to_go_baseline_is_taken_before_anything_is_dropped():
    batch, _ = credited(
        "grpo",
        sample(0, 1.0, turn()), sample(1, 0.0, turn()),
        sample(2, 1.0, turn(60), turn(60), rewards=[(2.0, 1)]), sample(3, 1.0),
        budget=50, credit="to_go", normalize_std=False,
    )  # fmt: skip
    assert batch.dropped == {"g1.2": "over_budget", "g1.3": "empty"}
    mean = (1 + 0 + (3 + 3) / 2 + 1) / 4
    assert by_turn(batch) == {"g1.0/0": 1 - mean, "g1.1/0": -mean}


def test_rewards_that_differ_little_are_told_apart():
    """bfloat16 would call these the same."""
    batch, _ = credited("grpo", sample(0, 100.001, turn()), sample(1, 100.0, turn()), normalize_std=False)
    assert by_turn(batch)["g1.0/0"] == pytest.approx(0.0005)


def test_an_answer_in_one_turn_trains_beside_longer_ones():
    batch, _ = credited("grpo", sample(0, 1.0, turn()), sample(1, 0.0, turn(), turn(), turn()), normalize_std=False)
    assert by_turn(batch)["g1.0/0"] == 0.5
    assert by_turn(batch, "weight")["g1.0/0"] == 0.25


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "reinforce_pp", "gigpo"])
def test_every_choice_of_one_request_trains(name):
    """Best of n: equal prompts are no reason to keep only the last."""
    batch, _ = credited(
        name, sample(0, 1.0, turn(at=(0, 1), choices=2, ids=[5]), turn(at=(0, 1), choice=1, choices=2, ids=[6])),
        sample(1, 0.0, turn()),
    )  # fmt: skip
    one, other, alone = by_turn(batch, "weight").values()
    assert one == other == alone / 2 > 0
    assert by_turn(batch)["g1.0/0"] == by_turn(batch)["g1.0/1"] > 0 > by_turn(batch)["g1.1/0"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(
            (name, more)
            for name in ("grpo", "rloo", "dr_grpo")
            for more in ({}, {"credit": "to_go"}, {"baseline": "role"})
        ),
        ("gigpo", {"discount": 1.0}),
        ("reinforce_pp", {"over": "rollouts"}),
        ("reinforce_pp", {"over": "rollouts", "baseline": True}),
    ],
)
def test_a_long_rollout_does_not_outweigh_its_group(name, more):
    long, _ = credited(name, sample(0, 1.0, *[turn(5)] * 20), sample(1, 0.0, turn()), **more)
    short, _ = credited(name, sample(0, 1.0, turn()), sample(1, 0.0, turn()), **more)
    assert by_turn(long)["g1.1/0"] == pytest.approx(by_turn(short)["g1.1/0"])
    assert by_turn(long)["g1.0/0"] == pytest.approx(by_turn(short)["g1.0/0"])


@pytest.mark.parametrize(("value", "members"), [(0.03, 9), (0.05, 3), (0.1, 8)])
def test_equal_rewards_of_turns_teach_nothing_whatever_their_sum_rounds_to(value, members):
    samples = [sample(m, 0.0, turn(2, ids=[3, m + 4]), rewards=[(value, 0)]) for m in range(members)]
    batch, _ = credited("grpo", *samples)
    assert set(batch.dropped.values()) == {"zero_variance"}
    assert not batch.entries.weight.any()


def test_a_rollout_that_counts_as_0_counts_as_0_for_its_turns_too():
    """Otherwise one that failed could be the best of its group."""
    failed = sample(0, 0.0, turn(2), rewards=[(1.0, 0)], status="failed", cause="agent_error")
    others = [sample(m, 0.0, turn(2, ids=[3, m + 4]), rewards=[(0.2, 0)]) for m in (1, 2)]
    batch, _ = credited("grpo", failed, *others)
    advantage = {m: batch.entries.advantage[batch.entries.rollout == m].mean() for m in range(3)}
    assert advantage[0] < advantage[1] == advantage[2]


# -- what was not given


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_reward_that_one_turn_got_and_no_other_rollout_teaches(baseline):
    batch, _ = credited(
        "grpo", sample(0, 0.0, turn(), turn(), rewards=[(1.0, 0)]), sample(1, 0.0, turn()), sample(2, 0.0, turn()),
        baseline=baseline,
    )  # fmt: skip
    assert by_turn(batch) == pytest.approx({"g1.0/0": 2 / 3, "g1.0/1": 0.0, "g1.1/0": 0.0, "g1.2/0": 0.0})
    assert batch.dropped == {}


def test_an_agents_reward_that_others_did_not_get_counts_as_0_on_its_turns_there():
    samples = [sample(m, 0.0, turn(agent="a"), turn(agent="b"), rewards=[(3.0, "a")] * (m == 0)) for m in range(3)]
    batch, _ = credited("grpo", *samples, agents=["a", "b"])
    assert by_turn(batch) == {
        "g1.0/0": 2.0,
        "g1.1/0": -1.0,
        "g1.2/0": -1.0,
        "g1.0/1": 0.0,
        "g1.1/1": 0.0,
        "g1.2/1": 0.0,
    }


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, {"baseline": one}) for one in BASELINES for name in ("grpo", "dr_grpo", "rloo", "gigpo")),
        ("grpo", {"credit": "to_go"}),
        ("reinforce_pp", {}),
        ("reinforce_pp", {"baseline": True}),
    ],
)  # fmt: skip
def test_what_an_agent_did_not_get_is_as_a_0_that_it_got(name, more):
    def credit(*absent):
        def of(m, total, got, *turns, **failed):
            return sample(m, total, *turns, rewards=[(got, "a-1")] if got else absent, **failed)

        both = turn(2, agent="a-1"), turn(agent="b"), turn(agent="a-1")
        samples = [
            of(0, 1.0, 3.0, *both),
            of(1, 0.0, 0.0, *both),
            of(2, 1.0, -1.0, *both[:2]),
            of(3, 0.0, 0.0, both[1]),
        ]
        samples.append(of(4, 0.0, 1.0, *both, status="failed", cause="agent_error"))
        return credited(name, *samples, agents=["a-1", "b"], **more)[0]

    given, absent = credit((0.0, "a-1")), credit()
    assert by_turn(absent) == by_turn(given)
    assert by_turn(absent)["g1.1/0"] < by_turn(absent)["g1.0/0"]
    assert (absent.dropped, absent.skipped) == (given.dropped, given.skipped)


def test_a_name_that_a_rollout_did_not_get_counts_as_0():
    def got(member, **named):
        return sample(member, None, turn(), rewards=[Reward(name=name, value=value) for name, value in named.items()])

    config = AlgorithmConfig(rewards={"reward": 1.0, "bonus": 0.5}, settings={"normalize_std": False})
    batch = batch_of(got(0, reward=1.0), got(1, reward=1.0, bonus=2.0), got(2, bonus=2.0), got(3, seen=9.0), got(4))
    make(config, LearnerConfig()).assign_credit(batch)
    assert by_turn(batch) == pytest.approx(
        {"g1.0/0": -1 / 3, "g1.1/0": 2 / 3, "g1.2/0": -1 / 3, "g1.3/0": 0.0, "g1.4/0": 0.0}
    )
    assert batch.dropped == {"g1.3": "no_reward", "g1.4": "no_reward"}


def test_a_bad_reward_is_left_out_whatever_else_was_given():
    bad = sample(2, 1.0, turn(), status="failed", cause="bad_reward")
    batch, _ = credited("grpo", sample(0, 1.0, turn()), sample(1, 0.0, turn()), bad, normalize_std=False)
    assert by_turn(batch) == {"g1.0/0": 0.5, "g1.1/0": -0.5, "g1.2/0": 0.0}
    assert batch.dropped == {"g1.2": "failed:bad_reward"}


# -- a policy whose agent said nothing in the step


@pytest.mark.parametrize("name", [name for name in names() if find(name).improves == "weights"])
@pytest.mark.parametrize("correction", ["none", "token"])
def test_every_algorithm_bears_a_batch_in_which_its_agent_said_nothing(name, correction):
    members = [sample(member, float(member), turn(2, agent="other")) for member in range(2)]
    settings = {"correction": correction} if "correction" in setting_names(name) else {}
    batch, metrics = credited(name, *members, **settings)
    assert not len(batch.turns)
    assert not len(batch.teaching())
    assert metrics["filter/untrained"] == 2.0
    assert np.isfinite(list(metrics.values())).all()
