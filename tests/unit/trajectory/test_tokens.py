"""Every sampled token is trained or left out for one reason, and the sums agree."""

from strop import algorithms
from strop.config import AlgorithmConfig, LearnerConfig, PolicyConfig
from strop.trajectory import Batch, Sample, assemble, count_tokens, describe_tokens
from strop.types import Reward, Sampling
from tests.unit.trajectory.test_assemble import sample, turn


def credited(samples: list[Sample], policy: str = "main", **settings: object) -> Batch:
    """A policy's batch of what agents named like it and `main` said, after GRPO's credit."""
    batch = assemble(samples, agents=("main", policy), budget=8, policy=policy)
    config = AlgorithmConfig(name="grpo", settings=settings)
    algorithms.make(config, LearnerConfig(), PolicyConfig()).assign_credit(batch)
    return batch


def member(number: int, value: float | None, *turns: dict[str, object], group: str = "g1", **more: object) -> Sample:
    """A rollout with a reward, and a turn for each set of fields."""
    id = f"{group}.{number}"
    made = [turn(id, n, **fields) for n, fields in enumerate(turns)]
    rewards = () if value is None else (Reward(value=value),)
    return sample(group, number, made, rewards=rewards, **more)


def test_a_token_of_each_kind() -> None:
    greedy = Sampling(temperature=0.0)
    samples = [
        member(
            0,
            1.0,
            {},
            {"response": [5], "finish": "abandoned"},
            {"response": [5, 6], "sampling": greedy},
            {"response": [5, 6, 7]},
            {"response": [5], "agent": "judge"},
            {"response": [5, 6], "policy": "frozen"},
            {"response": []},
            {"response": [5], "prompt": [1] * 2, "agent": "main"},
            excluded={"g1.0/1/3": "title"},
        ),
        member(1, 0.0, {}),
        member(2, None, {}),
        member(3, None, {"response": [5]}, {"response": [4], "agent": "judge"}, status="failed", cause="lost_runner"),
        member(4, 1.0, {"prompt": [1] * 9}),
        member(0, 1.0, {}, {"response": [5, 6, 7], "finish": "abandoned"}, group="g2"),
        member(1, 1.0, {}, group="g2"),
    ]
    counted = count_tokens(samples, {"main": credited(samples)})
    assert counted == {
        "g1.0": {
            "g1.0/1/0": {"trained": 2},
            "g1.0/1/1": {"abandoned": 1},
            "g1.0/1/2": {"greedy": 2},
            "g1.0/1/3": {"excluded:title": 3},
            "g1.0/1/4": {"untrained": 1},
            "g1.0/1/5": {"untrained": 2},
            "g1.0/1/7": {"trained": 1},
        },
        "g1.1": {"g1.1/1/0": {"trained": 2}},
        "g1.2": {"g1.2/1/0": {"no_reward": 2}},
        "g1.3": {"g1.3/1/0": {"failed:lost_runner": 1}, "g1.3/1/1": {"untrained": 1}},
        "g1.4": {"g1.4/1/0": {"over_budget": 2}},
        "g2.0": {"g2.0/1/0": {"zero_variance": 2}, "g2.0/1/1": {"abandoned": 3}},
        "g2.1": {"g2.1/1/0": {"zero_variance": 2}},
    }
    metrics = describe_tokens(counted)
    left_out = {name: n for name, n in metrics.items() if name.startswith("tokens/left_out/")}
    assert metrics["tokens/sampled"] == sum(len(turn.response_ids) for one in samples for turn in one.turns) == 27
    assert metrics["tokens/trained"] == 5
    assert metrics["tokens/trained"] + sum(left_out.values()) == metrics["tokens/sampled"]
    assert left_out["tokens/left_out/untrained"] == 4


def test_several_policies_count_each_turn_once() -> None:
    fields = [{"agent": "a", "policy": "a"}, {"response": [5], "agent": "b", "policy": "b", "finish": "abandoned"}]
    samples = [member(0, 1.0, *fields), member(1, 0.0, *fields)]
    batches = {name: credited(samples, name) for name in ("a", "b")}
    turns = {"/1/0": {"trained": 2}, "/1/1": {"abandoned": 1}}
    assert count_tokens(samples, batches) == {
        id: {id + turn: counts for turn, counts in turns.items()} for id in ("g1.0", "g1.1")
    }


def test_what_carries_loss_counts_as_trained_whatever_was_said_of_it() -> None:
    samples = [member(0, 1.0, {}), member(1, 0.0, {})]
    batch = credited(samples)
    batch.skipped[0] = "abandoned"
    assert count_tokens(samples, {"main": batch})["g1.0"] == {"g1.0/1/0": {"trained": 2}}


def test_tokens_of_a_trained_turn_without_weight() -> None:
    samples = [member(0, 1.0, {}), member(1, 0.0, {})]
    batch = credited(samples)
    batch.entries.weight[1] = 0.0
    assert count_tokens(samples, {"main": batch})["g1.0"] == {"g1.0/1/0": {"trained": 1, "no_loss": 1}}
