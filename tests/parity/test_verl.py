"""Our advantages and losses beside verl's, number for number, where a rollout is one row as verl has it.

verl computes in an environment of its own (`make oracles`); skipped where that is missing. Where we differ on purpose,
a test says so by name and shows both numbers.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.algorithms import EntryTensors, make
from strop.algorithms.aggregate import aggregate
from strop.algorithms.kl import AdaptiveCoefficient, estimate
from strop.algorithms.losses import compute_policy_loss
from strop.algorithms.policy_gradient import PolicyGradient
from strop.algorithms.ppo import compute_value_loss
from strop.config import AlgorithmConfig, LearnerConfig
from strop.trajectory import Batch
from tests.unit.algorithms.rollouts import batch_of, credited, sample, turn

ROOT = Path(__file__).parents[2]
ORACLE = ROOT / "benchmarks" / "peers" / "verl_oracle.py"
HOME = ROOT / ".peers" / "verl"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (HOME / ".installed").is_file(), reason="verl is not there: run make oracles"),
]

RNG = np.random.default_rng(7)
SIZES = [4, 3, 2, 3]
GROUP = [f"g{g}" for g, size in enumerate(SIZES) for _ in range(size)]
MEMBER = [m for size in SIZES for m in range(size)]
ROWS, WIDTH = len(GROUP), 8
LENGTH = [int(n) for n in RNG.integers(1, WIDTH, ROWS)]
MASK = np.arange(WIDTH)[None] < np.array(LENGTH)[:, None]
TOTAL = RNG.normal(size=ROWS)
LAST = MASK & (np.cumsum(MASK, 1) == np.array(LENGTH)[:, None])
OLD = -RNG.exponential(size=(ROWS, WIDTH))
NEW = OLD + RNG.normal(scale=0.6, size=(ROWS, WIDTH))
REF = OLD + RNG.normal(scale=1.5, size=(ROWS, WIDTH))
REF[0, 0] = NEW[0, 0] + 3.0  # far
ADVANTAGE = RNG.normal(size=(ROWS, WIDTH))
VALUE = RNG.normal(size=(ROWS, WIDTH))
RETURN = RNG.normal(size=(ROWS, WIDTH))

# Two turns in a row, with what the environment wrote between them.
FIRST, BETWEEN, SECOND = ([int(n) for n in RNG.integers(1, 4, ROWS)] for _ in range(3))
TURN = np.zeros((ROWS, WIDTH + 2), int)
for row, (a, b, c) in enumerate(zip(FIRST, BETWEEN, SECOND, strict=True)):
    TURN[row, :a], TURN[row, a + b : a + b + c] = 1, 2
SAMPLED = TURN > 0
OWN = RNG.normal(size=ROWS)
LONG_VALUE, LONG_OLD, LONG_REF = (RNG.normal(size=TURN.shape) for _ in range(3))
DISCOUNT, LAM, KL = 0.97, 0.9, 0.1


def ends(which: int) -> np.ndarray:
    """1 at the last token of a turn, by row."""
    found = np.zeros(TURN.shape)
    for r in range(ROWS):
        found[r, np.flatnonzero(TURN[r] == which)[-1]] = 1.0
    return found


LANDED = ends(1) * OWN[:, None] + ends(2) * TOTAL[:, None]
LONG_REWARD = LANDED - KL * np.where(SAMPLED, LONG_OLD - LONG_REF, 0.0)
LOST = LANDED + 0.0
LOST[0] = 0.0
LOST[0, FIRST[0]] = 5.0  # on a token that the environment wrote


def ask(call: str, tensors: dict[str, np.ndarray], **more: Any) -> dict[str, Any]:
    return {"call": call, "tensors": {name: value.astype(float).tolist() for name, value in tensors.items()}, **more}


OUTCOME = {"token_level_rewards": LAST * TOTAL[:, None], "response_mask": MASK}
ONE_TOKEN = {"token_level_rewards": TOTAL[:, None], "response_mask": np.ones((ROWS, 1))}
LONG = {"token_level_rewards": LONG_REWARD, "response_mask": SAMPLED}
INDEX = {"arrays": {"index": GROUP}}
ALONE = {"arrays": {"index": ["alone", *GROUP[1:]]}}
POLICY = {"old_log_prob": OLD, "log_prob": NEW, "advantages": ADVANTAGE, "response_mask": MASK}
CLIPS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
AGGREGATIONS = {
    "token-mean": "token-mean",
    "sequence-mean": "seq-mean-token-mean",
    "sequence-sum": "seq-mean-token-sum",
    "sequence-sum-norm": "seq-mean-token-sum-norm",
}
ROLLOUT_AGGREGATIONS = {
    "token-mean": "token-mean",
    "rollout-mean": "seq-mean-token-mean",
    "rollout-sum-norm": "seq-mean-token-sum-norm",
}
HORIZON = 11
ESTIMATORS = {"k1": "kl", "k2": "mse", "abs": "abs", "low_var": "low_var_kl"}
PLUS = "compute_reinforce_plus_plus_outcome_advantage"
PLUS_BASELINE = "compute_reinforce_plus_plus_baseline_outcome_advantage"

# Whole defaults: a group that agrees, lengths that differ, a rollout that failed and counts as the lowest of its group.
WHOLE_GROUP = ["h0"] * 4 + ["h1"] * 3 + ["h2"] * 4
WHOLE_TOTAL = np.array([-1.0, 0.5, -2.0, -2.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.25])
FAILED = 3
WHOLE_OUTCOME = {"token_level_rewards": (LAST[:11] * WHOLE_TOTAL[:, None]), "response_mask": MASK[:11]}
WHOLE_POLICY = {"old_log_prob": OLD[:11], "log_prob": NEW[:11], "response_mask": MASK[:11]}
MAX_TOKENS, KL_COEF, ENTROPY_COEF = 256, 0.05, 0.01
ENTROPY = RNG.exponential(size=(ROWS, WIDTH))
WHOLE = {
    "grpo": ("compute_grpo_outcome_advantage", {"arrays": {"index": WHOLE_GROUP}}),
    "dr_grpo": (
        "compute_grpo_outcome_advantage",
        {"arrays": {"index": WHOLE_GROUP}, "plain": {"norm_adv_by_std_in_grpo": False}},
    ),
    "rloo": ("compute_rloo_outcome_advantage", {"arrays": {"index": WHOLE_GROUP}}),
    "reinforce_pp": (PLUS, {"algorithm": {"gamma": 1.0}}),
    "reinforce_pp baseline": (PLUS_BASELINE, {"arrays": {"index": WHOLE_GROUP}}),
    "ppo": ("compute_gae_advantage_return", {"plain": {"gamma": 1.0, "lam": 1.0}}),
}


def mode(name: str) -> dict[str, Any]:
    return {"loss_agg_mode": "seq-mean-token-sum-norm" if name == "dr_grpo" else "token-mean"}


def whole(name: str) -> dict[str, Any]:
    """verl's way from rewards to the policy loss, with nothing set that need not be."""
    call, more = WHOLE[name]
    scale = {"global_batch_info": {"loss_scale_factor": MAX_TOKENS}} if name == "dr_grpo" else {}
    then = ask(
        "compute_policy_loss_vanilla", WHOLE_POLICY, actor=scale, plain=mode(name), gradient="log_prob",
        takes="advantages",
    )  # fmt: skip
    values = {"values": VALUE[:11]} if name == "ppo" else {}
    return ask(call, WHOLE_OUTCOME | values, **more, then=then)


def summed(name: str, loss: np.ndarray) -> dict[str, Any]:
    """What verl's aggregation makes of a loss per token."""
    scale = {"loss_scale_factor": MAX_TOKENS} if name == "dr_grpo" else {}
    return ask("agg_loss", {"loss_mat": loss, "loss_mask": MASK[:11]}, plain=mode(name) | scale, gradient="loss_mat")


ASKED = {
    **{f"whole {name}": whole(name) for name in WHOLE},
    **{f"entropy {name}": summed(name, ENTROPY[:11]) for name in WHOLE},
    "whole kl": ask(
        "kl_penalty", {"logprob": NEW[:11], "ref_logprob": REF[:11]}, plain={"kl_penalty": "low_var_kl"},
        gradient="logprob",
    ),
    "grpo": ask("compute_grpo_outcome_advantage", OUTCOME, **INDEX),
    "grpo alone": ask("compute_grpo_outcome_advantage", OUTCOME, **ALONE),
    "dr_grpo": ask("compute_grpo_outcome_advantage", OUTCOME, **INDEX, plain={"norm_adv_by_std_in_grpo": False}),
    "rloo": ask("compute_rloo_outcome_advantage", OUTCOME, **INDEX),
    "reinforce_pp": ask(PLUS, ONE_TOKEN, algorithm={"gamma": 1.0}),
    "reinforce_pp rows": ask(PLUS, OUTCOME, algorithm={"gamma": 1.0}),
    "reinforce_pp turns": ask(PLUS, LONG, algorithm={"gamma": 1.0}),
    "reinforce_pp baseline": ask(PLUS_BASELINE, ONE_TOKEN, **INDEX),
    "gae": ask("compute_gae_advantage_return", LONG | {"values": LONG_VALUE}, plain={"gamma": DISCOUNT, "lam": LAM}),
    "gae lost": ask(
        "compute_gae_advantage_return",
        {"token_level_rewards": LOST, "response_mask": SAMPLED, "values": 0 * LONG_VALUE},
        plain={"gamma": 1.0, "lam": 1.0},
    ),
    "clip": ask("compute_policy_loss_vanilla", POLICY, actor=CLIPS | {"clip_ratio_c": 1e9}, gradient="log_prob"),
    "dual_clip": ask("compute_policy_loss_vanilla", POLICY, actor=CLIPS | {"clip_ratio_c": 1.5}, gradient="log_prob"),
    "gspo": ask("compute_policy_loss_gspo", POLICY, actor=CLIPS, gradient="log_prob"),
    "cispo": ask("compute_policy_loss_cispo", POLICY, actor=CLIPS, gradient="log_prob"),
    "plain": ask("compute_policy_loss_gpg", POLICY, actor=CLIPS, gradient="log_prob"),
    "gspo turns": ask(
        "compute_policy_loss_gspo",
        {"old_log_prob": LONG_OLD, "log_prob": LONG_OLD + 0.1 * LONG_REF, "response_mask": SAMPLED,
         "advantages": np.ones(TURN.shape)},
        actor=CLIPS,
    ),
    **{
        f"turns {ours}": ask(
            "agg_loss", {"loss_mat": LONG_OLD, "loss_mask": SAMPLED},
            plain={"loss_agg_mode": theirs} | ({"loss_scale_factor": HORIZON} if ours.endswith("norm") else {}),
            gradient="loss_mat",
        )
        for ours, theirs in ROLLOUT_AGGREGATIONS.items()
    },
    "value": ask(
        "compute_value_loss",
        {"vpreds": VALUE, "returns": RETURN, "values": VALUE + NEW - OLD, "response_mask": MASK},
        plain={"cliprange_value": 0.3},
        gradient="vpreds",
    ),
    "controller": {
        "call": "AdaptiveKLController",
        "plain": {"init_kl_coef": 0.1, "target_kl": 2.0, "horizon": 1000},
        "method": ["update", 2.1, 64],
    },
    "controller far": {
        "call": "AdaptiveKLController",
        "plain": {"init_kl_coef": 0.1, "target_kl": 2.0, "horizon": 1000},
        "method": ["update", 0.1, 64],
    },
    **{
        f"aggregation {ours}": ask(
            "agg_loss",
            {"loss_mat": ADVANTAGE, "loss_mask": MASK},
            plain={"loss_agg_mode": theirs} | ({"loss_scale_factor": HORIZON} if ours.endswith("norm") else {}),
            gradient="loss_mat",
        )
        for ours, theirs in AGGREGATIONS.items()
    },
    **{
        f"kl {ours}": ask(
            "kl_penalty", {"logprob": NEW, "ref_logprob": REF}, plain={"kl_penalty": theirs}, gradient="logprob"
        )
        for ours, theirs in ESTIMATORS.items()
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What verl says to each question, asked all at once: its imports take longer than its sums."""
    folder = tmp_path_factory.mktemp("verl")
    (folder / "ask").write_text(json.dumps(list(ASKED.values())))
    command = [HOME / "bin" / "python", ORACLE, folder / "ask", folder / "answer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(ASKED, json.loads((folder / "answer").read_text()), strict=True))


def one_turn_each() -> list[Any]:
    return [sample(MEMBER[r], TOTAL[r], turn(LENGTH[r]), group=GROUP[r]) for r in range(ROWS)]


def two_turns_each() -> list[Any]:
    return [
        sample(MEMBER[r], TOTAL[r], turn(FIRST[r]), turn(SECOND[r]), group=GROUP[r], rewards=[(OWN[r], 0)])
        for r in range(ROWS)
    ]


def flat(matrix: Any, mask: np.ndarray = MASK) -> list[float]:
    """The sampled tokens of rows, in the order that entries have."""
    return np.array(matrix)[mask].tolist()


def near(values: Any) -> Any:
    return pytest.approx(values, rel=1e-9, abs=1e-9)


# -- advantages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_groups(verl: dict[str, Any], name: str) -> None:
    batch, _ = credited(name, *one_turn_each())
    assert batch.entries.advantage.tolist() == near(flat(verl[name]["returned"][0]))


def test_differs_a_group_of_one_is_filtered_where_verl_trains_on_its_bare_reward(verl: dict[str, Any]) -> None:
    samples = [sample(0, TOTAL[0], turn(LENGTH[0]), group="alone"), *one_turn_each()[1:]]
    batch, _ = credited("grpo", *samples)
    assert batch.dropped == {"alone.0": "group_of_one"}
    assert verl["grpo alone"]["returned"][0][0][0] == pytest.approx(TOTAL[0], rel=1e-5)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp baseline"])
def test_reinforce_pp_over_rollouts(verl: dict[str, Any], name: str) -> None:
    """With one token per row verl too counts each rollout once; over rollouts we do however long they are."""
    batch, _ = credited("reinforce_pp", *one_turn_each(), baseline=name.endswith("baseline"), normalize_over="rollouts")
    expected = np.array(verl[name]["returned"][0])[:, 0]
    assert batch.entries.advantage.tolist() == near(expected[batch.entries.rollout].tolist())


def test_differs_over_rollouts_long_ones_do_not_weigh_more_in_reinforce_pp(verl: dict[str, Any]) -> None:
    theirs = np.array(flat(verl["reinforce_pp rows"]["returned"][0]))
    batch, _ = credited("reinforce_pp", *one_turn_each())
    assert batch.entries.advantage.tolist() == near(theirs.tolist())  # by default the same
    batch, _ = credited("reinforce_pp", *one_turn_each(), normalize_over="rollouts")
    ours = batch.entries.advantage
    assert theirs.mean() == pytest.approx(0.0, abs=1e-6)
    assert np.mean([ours[batch.entries.rollout == r][0] for r in range(ROWS)]) == pytest.approx(0.0, abs=1e-9)
    assert abs(ours.mean()) > 1e-3
    assert np.corrcoef(ours, theirs)[0, 1] == pytest.approx(1.0)  # the same but for shift and scale


LONG_SETTINGS = {"discount": DISCOUNT, "lam": LAM, "kl": "reward", "kl_estimator": "k1", "kl_coef": KL}


def scored(samples: list[Any]) -> Batch:
    batch = batch_of(*samples)
    batch.entries.value[:] = flat(LONG_VALUE, SAMPLED)
    batch.entries.proximal[:] = flat(LONG_OLD, SAMPLED)
    batch.entries.ref[:] = flat(LONG_REF, SAMPLED)
    return batch


def test_gae_over_turns(verl: dict[str, Any]) -> None:
    batch = scored(two_turns_each())
    make(AlgorithmConfig(name="ppo", settings=LONG_SETTINGS), LearnerConfig()).assign_credit(batch)
    advantage, returns = verl["gae"]["returned"]
    assert batch.entries.ret.tolist() == near(flat(returns, SAMPLED))
    assert batch.entries.advantage.tolist() == near(flat(advantage, SAMPLED))


def test_returns_over_turns(verl: dict[str, Any]) -> None:
    """REINFORCE++'s, before they are scaled: GAE that looks only at what really came."""
    batch = scored(two_turns_each())
    settings = LONG_SETTINGS | {"lam": 1.0, "discount": 1.0}
    make(AlgorithmConfig(name="ppo", settings=settings), LearnerConfig()).assign_credit(batch)
    assert batch.entries.ret.tolist() == near(flat(verl["reinforce_pp turns"]["returned"][1], SAMPLED))


def test_differs_verl_loses_a_reward_that_sits_on_a_masked_token(verl: dict[str, Any]) -> None:
    assert LOST[0].sum() == 5.0
    assert not any(np.array(verl["gae lost"]["returned"][1])[0][SAMPLED[0]])
    batch, _ = credited("ppo", sample(0, 5.0, turn(2), turn(1, warmth=0.0)), value=0.0)
    assert batch.entries.ret.tolist() == [5.0, 5.0, 5.0]


# -- losses ------------------------------------------------------------------------------------------------------------


def view(batch: Batch) -> EntryTensors:
    columns = {name: torch.zeros(len(batch.entries), dtype=torch.float64) for name in EntryTensors.__dataclass_fields__}
    return EntryTensors(**columns | {"turn": torch.from_numpy(batch.entries.turn), "advantage": column(ADVANTAGE)})


def column(matrix: np.ndarray) -> torch.Tensor:
    return torch.tensor(flat(matrix), dtype=torch.float64)


@pytest.mark.parametrize("name", ["clip", "dual_clip", "gspo", "cispo", "plain"])
def test_policy_losses(verl: dict[str, Any], name: Any) -> None:
    batch = batch_of(*one_turn_each())
    aggregate(batch, "sequence-mean" if name == "gspo" else "token-mean", HORIZON)
    weight = torch.from_numpy(batch.entries.weight)
    logp = column(NEW).requires_grad_()
    loss, metrics = compute_policy_loss(name, logp, column(OLD), view(batch), low=0.2, high=0.3, dual=1.5)
    (weight * loss).sum().backward()
    returned, told = verl[name]["returned"]
    # Of a sequence's mean verl divides by its length plus 1e-8, and counts in single precision.
    assert (weight * loss).sum().item() == pytest.approx(returned, rel=1e-6)
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx(flat(verl[name]["gradient"]), rel=1e-6, abs=1e-9)
    for metric in set(told) & set(metrics):
        assert metrics[metric].double().mean().item() == pytest.approx(told[metric], rel=1e-6, abs=1e-9)
    assert name == "plain" or {"actor/pg_clipfrac", "actor/ppo_kl"} <= set(told) & set(metrics)
    assert name != "dual_clip" or "actor/pg_clipfrac_lower" in set(told) & set(metrics)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations(verl: dict[str, Any], name: Any) -> None:
    batch = batch_of(*one_turn_each())
    aggregate(batch, name, HORIZON)
    answer = verl[f"aggregation {name}"]
    assert (batch.entries.weight * flat(ADVANTAGE)).sum() == pytest.approx(answer["returned"][0], rel=1e-6)
    assert batch.entries.weight.tolist() == pytest.approx(flat(answer["gradient"]), rel=1e-6)


@pytest.mark.parametrize("name", ROLLOUT_AGGREGATIONS)
def test_aggregations_over_turns(verl: dict[str, Any], name: Any) -> None:
    """verl's rows are our rollouts."""
    batch = batch_of(*two_turns_each())
    aggregate(batch, name, HORIZON)
    expected = flat(verl[f"turns {name}"]["gradient"], SAMPLED)
    assert batch.entries.weight.tolist() == pytest.approx(expected, rel=1e-6)


def test_differs_a_sequence_is_a_turn_where_verl_has_rollouts(verl: dict[str, Any]) -> None:
    batch = batch_of(*two_turns_each())
    aggregate(batch, "sequence-mean", HORIZON)
    entries = batch.entries
    for t in range(len(batch.turns)):
        assert entries.weight[batch.rows(t)].sum() == pytest.approx(1 / len(batch.turns))
    assert entries.weight.tolist() != pytest.approx(flat(verl["turns rollout-mean"]["gradient"], SAMPLED), rel=1e-3)
    ones = torch.ones(len(entries), dtype=torch.float64)
    columns = dict.fromkeys(EntryTensors.__dataclass_fields__, ones) | {"turn": torch.from_numpy(entries.turn)}
    old = torch.tensor(flat(LONG_OLD, SAMPLED), dtype=torch.float64)
    new = torch.tensor(flat(LONG_OLD + 0.1 * LONG_REF, SAMPLED), dtype=torch.float64)
    ours, _ = compute_policy_loss("gspo", new, old, EntryTensors(**columns), low=0.2, high=0.3, dual=3.0)
    theirs, _ = compute_policy_loss(
        "gspo",
        new,
        old,
        EntryTensors(**columns | {"turn": torch.from_numpy(entries.rollout)}),
        low=0.2,
        high=0.3,
        dual=3.0,
    )
    aggregate(batch, "rollout-mean", HORIZON)
    weight = torch.from_numpy(entries.weight)
    assert (weight * theirs).sum().item() == pytest.approx(verl["gspo turns"]["returned"][0], rel=1e-6)
    assert abs((weight * (ours - theirs)).sum().item()) > 1e-4


def test_value_loss(verl: dict[str, Any]) -> None:
    value = column(VALUE).requires_grad_()
    loss, clipped = compute_value_loss(value, column(VALUE + NEW - OLD), column(RETURN), 0.3)
    loss.mean().backward()
    returned = verl["value"]["returned"]
    assert [loss.mean().item(), clipped.mean().item()] == pytest.approx(returned, rel=1e-6)
    assert value.grad is not None
    assert value.grad.tolist() == near(flat(verl["value"]["gradient"]))


# -- whole defaults ----------------------------------------------------------------------------------------------------


def whole_batch(name: str, **more: Any) -> tuple[Batch, Any]:
    """The batch after credit, and the algorithm, with nothing set that need not be."""
    failed = {"status": "failed", "cause": "agent_error"}
    samples = [
        sample(
            r, None if r == FAILED else float(WHOLE_TOTAL[r]), turn(LENGTH[r]), group=WHOLE_GROUP[r],
            **(failed if r == FAILED else {}),
        )
        for r in range(11)
    ]  # fmt: skip
    batch = batch_of(*samples)
    batch.entries.proximal[:], batch.entries.ref[:] = flat(OLD[:11], MASK[:11]), flat(REF[:11], MASK[:11])
    batch.entries.value[:] = flat(VALUE[:11], MASK[:11])
    settings = more | ({"baseline": True} if name.endswith("baseline") else {})
    algorithm = make(AlgorithmConfig(name=name.split()[0], settings=settings), LearnerConfig(minibatches=2))
    algorithm.assign_credit(batch)
    return batch, algorithm


def policy_part(batch: Batch, algorithm: Any) -> tuple[float, list[float]]:
    """The batch loss without the critic's part, and its gradient by token."""
    entries = batch.entries
    columns = {name: torch.from_numpy(getattr(entries, name)) for name in EntryTensors.__dataclass_fields__}
    logp = torch.tensor(flat(NEW[:11], MASK[:11]), dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor(flat(ENTROPY[:11], MASK[:11]), dtype=torch.float64)
    loss, _ = PolicyGradient.compute_loss(algorithm, logp, entropy, None, EntryTensors(**columns))
    total = (columns["weight"] * loss).sum()
    total.backward()
    assert logp.grad is not None
    return total.item(), logp.grad.tolist()


@pytest.mark.parametrize("name", WHOLE)
def test_whole_defaults(verl: dict[str, Any], name: str) -> None:
    """From rewards to the batch loss and what every token's logprob gets of it."""
    theirs = verl[f"whole {name}"]
    batch, algorithm = whole_batch(name)
    assert batch.entries.advantage.tolist() == near(flat(theirs["returned"][0], MASK[:11]))
    value, gradient = policy_part(batch, algorithm)
    assert value == pytest.approx(theirs["then"]["returned"][0], rel=1e-6)
    assert gradient == pytest.approx(flat(theirs["then"]["gradient"], MASK[:11]), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_defaults_with_kl_and_entropy(verl: dict[str, Any], name: str) -> None:
    """Groups that agree carry both, though they teach nothing."""
    theirs, kl, entropy = verl[f"whole {name}"]["then"], verl["whole kl"], verl[f"entropy {name}"]
    weight = np.array(entropy["gradient"])  # what one token counts
    batch, algorithm = whole_batch(name, kl="loss", kl_coef=KL_COEF, entropy_coef=ENTROPY_COEF)
    value, gradient = policy_part(batch, algorithm)
    distance = (weight * np.array(kl["returned"][0]) * MASK[:11]).sum()
    expected = theirs["returned"][0] + KL_COEF * distance - ENTROPY_COEF * entropy["returned"][0]
    assert value == pytest.approx(expected, rel=1e-6)
    slope = np.array(theirs["gradient"]) + KL_COEF * weight * np.array(kl["gradient"])
    assert gradient == pytest.approx(flat(slope, MASK[:11]), rel=1e-6, abs=1e-12)
    agree = np.isin(batch.entries.group, [1])
    assert (batch.entries.weight[agree] > 0).all()


def test_differs_groups_that_agree_can_be_left_out_of_the_denominators(verl: dict[str, Any]) -> None:
    """As DAPO's dynamic sampling does by replacing them: `loop.max_groups` sets this too."""
    batch, algorithm = whole_batch("grpo", filter_groups=["zero_variance", "group_of_one"])
    share = sum(LENGTH[r] for r in range(11) if WHOLE_GROUP[r] != "h1") / sum(LENGTH[:11])
    theirs = verl["whole grpo"]["then"]["returned"][0]
    assert policy_part(batch, algorithm)[0] == pytest.approx(theirs / share, rel=1e-6)


# -- distance to the reference -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl(verl: dict[str, Any], name: Any) -> None:
    logp = column(NEW).requires_grad_()
    distance = estimate(name, logp, column(REF))
    distance.sum().backward()
    answer = verl[f"kl {name}"]
    assert distance.tolist() == near(flat(answer["returned"][0]))
    assert logp.grad is not None
    assert logp.grad.tolist() == near(flat(answer["gradient"]))


def test_differs_our_k3_is_not_cut_at_10(verl: dict[str, Any]) -> None:
    theirs, ours = flat(verl["kl low_var"]["returned"][0]), estimate("k3", column(NEW), column(REF)).numpy()
    assert ours[ours < 10].tolist() == near(np.array(theirs)[ours < 10].tolist())
    assert (theirs[0], ours[0]) == (10.0, pytest.approx(np.exp(3.0) - 4.0))


@pytest.mark.parametrize(("name", "distance"), [("controller", 2.1), ("controller far", 0.1)])
def test_adaptive_kl(verl: dict[str, Any], name: str, distance: float) -> None:
    ours = AdaptiveCoefficient(0.1, target=2.0, horizon=1000)
    ours.follow(distance, rollouts=64)
    assert ours.coef == near(verl[name]["returned"][0]["value"])
