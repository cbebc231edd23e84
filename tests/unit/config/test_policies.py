"""Policies by name: each has the configuration that it would have as the only one."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop import config as configs
from strop.config import (
    MAIN,
    Config,
    default_policy,
    describe_algorithms,
    describe_models,
    refuse_frozen_adapters,
    replace_models,
    resolve_policies,
    trained_policies,
    weigh_rewards,
)
from strop.errors import ConfigError

TOML = """
[policy]
context = 512
[algorithm]
settings = {clip = 0.3}
[policies.writer]
[policies.critic]
agents = ["critic*"]
model = "smollm2-135m"
learner.optim.lr = 0.5
algorithm.name = "rloo"
"""


def test_no_table_of_policies_is_one_called_main() -> None:
    config = Config()
    assert resolve_policies(config) == {MAIN: config}
    assert describe_models(config) == config.policy.model


def test_tables_are_laid_over_those_at_the_top(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    config = configs.load(toml=tmp_path / "run.toml")
    writer, critic = resolve_policies(config).values()
    assert (writer.policy.agents, critic.policy.agents) == (("writer",), ("critic*",))
    assert (writer.policy.context, critic.policy.context) == (512, 512)
    assert (writer.policy.model, critic.policy.model) == ("strop/nano", "smollm2-135m")
    assert (writer.learner.optim.lr, critic.learner.optim.lr) == (config.learner.optim.lr, 0.5)
    assert writer.algorithm == config.algorithm
    assert (critic.algorithm.name, critic.algorithm.settings) == ("rloo", {})  # the others are another algorithm's
    assert not writer.policies
    assert describe_models(config) == "writer: strop/nano, critic: smollm2-135m"
    assert describe_algorithms(config) == "writer: grpo, critic: rloo"
    assert configs.from_json(configs.to_json(config)) == config


def test_a_teacher_is_not_among_the_models() -> None:
    teacher = {"model": "/a/long/path", "frozen": True, "agents": []}
    assert describe_models(configs.load(policies={"main": {}, "teacher": teacher})) == "strop/nano"


def test_an_agent_without_a_policy_is_answered_by_main_or_the_first() -> None:
    assert default_policy({"writer": 1, "main": 2}) == "main"
    assert default_policy({"writer": 1, "critic": 2}) == "writer"


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["policies.a.modle=x"], r"no setting 'policies\.a\.modle'\. Fix: write policies\.a\.model"),
        (["policies.a.learner.optim.lrr=1"], r"no setting 'policies\.a\.learner\.optim\.lrr'"),
        (["policies.a.learner=1"], r"'policies\.a\.learner' is a section"),
        (["policies.a.model=3"], r"policies\.a\.model does not fit"),
        (["policies.'a/b'.model=x"], r"called \"'a/b'\"|called \"'a"),
        (["policies.a.agents=['x*']", "policies.b.agents=['xy']"], r"'x\*' of policies\.a matches first\. Fix: "),
        (
            ["policies.a.agents=['x']", "policies.b.agents=['x']"],
            r"policies\.b\.agents has 'x', and so has policies\.a\. Fix: leave it out of one of them",
        ),
        (["policies.a.agents=['x*']", "policies.b.agents=['x*']"], r"has 'x\*', and so has policies\.a\. Fix: "),
        (
            ["policies.a.model=x", "policies.b.agents=['a']"],
            r"policies\.b\.agents has 'a', and so has policies\.a\. Fix",
        ),
        (
            ["policies.a.agents=['x*']", "policies.b.agents=['xy*']"],
            r"'xy\*', which 'x\*' of policies\.a matches first",
        ),
        (
            ["policies.a.past={of = 'b'}", "policies.b.frozen=true", "policies.c.model=x"],
            r"never trained and so has no",
        ),
        (["policies.a.past={of = 'a'}", "policies.b.model=x"], r"past\.of is 'a', which is never trained"),
        (["policies.a.past={of = 'b'}"], r"policy\.past needs another policy|nothing would be trained"),
        (["policies.a.agents=[]"], r"policies\.a\.agents is empty, so it would answer nobody\. Fix: "),
        (["policies.a.lr=1"], r"no setting 'policies\.a\.lr'\. Fix: write policies\.a\.learner\.optim\.lr"),
        (["policies.a.loop.steps=1"], r"no setting 'policies\.a\.loop\.steps'\. Fix: write loop\.steps"),
        (["policies.a=1"], r"policies\.a is not a table of settings\. Fix: set policies\.a\.model"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(sets: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configs.load(sets=sets)


def test_a_pattern_after_a_name_is_no_overlap() -> None:
    config = configs.load(sets=["policies.a.agents=['xy']", "policies.b.agents=['x*', '*']"])
    assert list(resolve_policies(config)) == ["a", "b"]


@pytest.mark.parametrize("name", ["a/b", "..", "", "a b", "é", "-a", "a" * 65, "a\n"])
def test_a_policys_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(ConfigError, match=r"a policy is called .*\. Fix: use letters, digits, '_' and '-', 64 at most"):
        configs.load(policies={name: {"model": "strop/nano"}})


def test_the_whole_runs_total_is_the_mean_of_the_policies() -> None:
    config = configs.load(sets=["policies.a.algorithm.rewards={x=1}", "policies.b.algorithm.rewards={x=1,y=2}"])
    assert weigh_rewards(config) == {"x": 1.0, "y": 1.0}
    assert weigh_rewards(Config()) == Config().algorithm.rewards
    assert weigh_rewards(configs.load(sets=["policies.a.model=x", "policies.b.model=y"])) == {"reward": 1.0}


def test_models_are_replaced_where_they_are_set() -> None:
    assert replace_models(Config(), {MAIN: "x"}).policy.model == "x"
    one = replace_models(configs.load(sets=["policies.a.model=y"]), {"a": "x"})
    assert resolve_policies(one)["a"].policy.model == "x"


def test_frozen_policies_are_not_trained() -> None:
    config = configs.load(sets=["policies.a.model=x", "policies.b.frozen=true", "policies.b.algorithm.rewards={y=3}"])
    assert list(trained_policies(config)) == ["a"]
    assert weigh_rewards(config) == {"reward": 1.0}  # what b would count is nobody's
    assert replace_models(config, {"a": "z"}).policies["b"] == config.policies["b"]


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["policy.frozen=true"], r"policy\.frozen is true, so that nothing would be trained"),
        (["policies.a.frozen=true", "policies.b.frozen=true"], "all policies are frozen"),
    ],
)
def test_nothing_but_frozen_policies_can_only_be_evaluated(sets: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configs.load(sets=[*sets, "loop.steps=3"])
    assert not trained_policies(configs.load(sets=[*sets, "loop.steps=0"]))


def test_an_adapter_of_a_frozen_policys_own_would_train_nothing() -> None:
    both = ["policies.a.model=x", "policies.b.frozen=true"]
    says = (
        r"policies\.b is frozen, and policies\.b\.learner\.lora\.rank would train nothing\. Fix: leave one of them out"
    )
    wrong = configs.load(sets=[*both, "policies.b.learner.lora.rank=16"])
    with pytest.raises(ConfigError, match=says):
        refuse_frozen_adapters(wrong)
    wrong = configs.load(sets=["policy.frozen=true", "policies.a.frozen=false", "policies.b.learner.lora.rank=16"])
    with pytest.raises(ConfigError, match=r"policies\.b is frozen"):  # of all of them, but for a
        refuse_frozen_adapters(wrong)
    for fine in ("learner.lora.rank=16", "policies.b.learner.lora.rank=0", "policies.b.learner.dtype=float32"):
        refuse_frozen_adapters(configs.load(sets=[*both, fine]))


ADAPTERS = ("learner.lora.rank=8", "policies.a.model=x", "policies.b.model=x")
VLLM, SGLANG = "engine.vllm.url=http://h:1", "engine.sglang.url=http://h:1"


@pytest.mark.parametrize(
    "sets",
    [
        ("policies.a.model=x", "policies.b.model=x", VLLM),
        ("policies.a.model=x", "policies.b.model=y", "learner.lora.rank=8", VLLM),
        ("policies.a.model=x", "policies.b.model=x", "policies.b.frozen=true", VLLM),
        (*ADAPTERS, "engine.name=sglang", SGLANG),
        (*ADAPTERS, "engine.vllm.servers=2", VLLM),
    ],
)
def test_one_server_does_not_take_the_weights_of_two(sets: tuple[str, ...]) -> None:
    says = (
        r"policies\.a and policies\.b have one server, http://h:1, and each would replace .*\. Fix: give each a server"
    )
    with pytest.raises(ConfigError, match=says):
        configs.load(sets=sets)


@pytest.mark.parametrize(
    "sets",
    [
        (*ADAPTERS, VLLM),
        (*ADAPTERS, "policies.b.frozen=true", VLLM),
        ("policies.a.model=x", "policies.b.engine.vllm.url=http://h:2", VLLM),
        ("policies.a.model=x", "policies.b.model=y", "engine.name=embedded", VLLM),
        ("policies.a.model=x", "policies.b.model=y", "engine.name=vllm"),
    ],
)
def test_one_server_takes_adapters_on_one_model(sets: tuple[str, ...]) -> None:
    assert list(resolve_policies(configs.load(sets=sets))) == ["a", "b"]
