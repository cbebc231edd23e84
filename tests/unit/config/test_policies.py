"""Policies by name: each has the configuration that it would have as the only one."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop import config as configs
from strop.config import MAIN, Config, default_policy, describe_models, resolve_policies
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
    assert configs.from_json(configs.to_json(config)) == config


def test_an_agent_without_a_policy_is_answered_by_main_or_the_first() -> None:
    assert default_policy({"writer": 1, "main": 2}) == "main"
    assert default_policy({"writer": 1, "critic": 2}) == "writer"


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["policies.a.modle=x"], r"no setting 'policies\.a\.modle'; did you mean 'policies\.a\.model'"),
        (["policies.a.learner.optim.lrr=1"], r"no setting 'policies\.a\.learner\.optim\.lrr'"),
        (["policies.a.learner=1"], r"'policies\.a\.learner' is a section"),
        (["policies.a.model=3"], r"policies\.a\.model does not fit"),
        (["policies.'a/b'.model=x"], r"called \"'a/b'\"|called \"'a"),
        (["policies.a.agents=['x*']", "policies.b.agents=['xy']"], r"'x\*' of policies\.a matches first\. Fix: "),
        (["policies.a.agents=['x']", "policies.b.agents=['x']"], "matches first"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(sets: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configs.load(sets=sets)


def test_a_pattern_after_a_name_is_no_overlap() -> None:
    config = configs.load(sets=["policies.a.agents=['xy']", "policies.b.agents=['x*', '*']"])
    assert list(resolve_policies(config)) == ["a", "b"]
