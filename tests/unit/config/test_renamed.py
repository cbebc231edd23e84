"""Settings by the names they had: in a file, on the command line, in Python, and in folders of old runs."""

import json
import subprocess
import warnings
from pathlib import Path

import pytest

import strop
from strop import algorithms, config
from strop.cli import main
from strop.config import AlgorithmConfig, Config, LearnerConfig, RenamedSetting
from strop.config.renamed import RENAMED, find_new_names
from strop.errors import ConfigError
from tests import runs

OLD = """
[loop]
groups_most = 32
members = 2
[engine.vllm]
rows = 4
patience = 7
[gateway.outside.judge]
url = "http://127.0.0.1:1/v1"
per_minute = 3
money = 2.5
price_in = 1
"""


def test_every_new_name_is_a_setting_and_no_old_one_is() -> None:
    with_outside = config.load(gateway={"outside": {"*": {"url": "http://127.0.0.1:1/v1"}}})
    outside = {f"gateway.outside.*.{name}" for name in type(with_outside.gateway.outside["*"]).__struct_fields__}
    names = {setting.key for setting in config.settings()} | outside
    names |= {setting.key for setting in algorithms.registered_settings()}
    for old, new in RENAMED.items():
        assert old not in names
        assert f"{old.rpartition('.')[0]}.{new}" in names


def test_a_file_with_old_names(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text(OLD)
    with pytest.warns(RenamedSetting) as noted:
        made = config.load(toml=tmp_path / "old.toml")
    assert (made.loop.max_groups, made.loop.group_size) == (32, 2)
    assert (made.engine.vllm.max_sequences, made.engine.vllm.restart_timeout) == (4, 7.0)
    assert (made.gateway.outside["judge"].requests_per_minute, made.gateway.outside["judge"].max_cost) == (3, 2.5)
    assert "loop.groups_most is called loop.max_groups now" in str(noted[0].message)
    assert len(noted) == 6


def test_on_the_command_line_a_sentence_names_the_new_one() -> None:
    code = "from strop.cli import main; main(['doctor', '--set', 'loop.groups_most=8', '--set', 'nothing.there=1'])"
    said = subprocess.run([runs.strop()[0], "-c", code], capture_output=True, text=True, check=False).stderr
    assert said.startswith("strop: loop.groups_most is called loop.max_groups now")
    assert "Warning" not in said


@pytest.mark.parametrize("old", [name.replace("*", "judge") for name in RENAMED])
def test_what_is_looked_up_by_its_old_name_is_shown_by_the_new_one(
    old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (new,) = find_new_names(old)
    assert main(["config", old]) == 0
    said = capsys.readouterr()
    assert said.err == f"strop: {old} is called {new} now\n"
    shown = {line.partition(" = ")[0] for line in said.out.splitlines()}
    assert shown == {"gateway.outside" if new.startswith("gateway.outside.") else new}


def test_in_python() -> None:
    with pytest.warns(RenamedSetting, match=r"learner\.updates is called learner\.minibatches now"):
        assert config.load(learner={"updates": 3}).learner.minibatches == 3
    with pytest.warns(RenamedSetting, match=r"loop\.members"):
        assert config.changed(Config(), {"loop.members": 3}).loop.group_size == 3
    with pytest.warns(RenamedSetting, match=r"algorithm\.settings\.over is called"):
        assert strop.ReinforcePP(over="rollouts").given == {"normalize_over": "rollouts"}
    with pytest.warns(RenamedSetting):
        made = config.load(sets=["algorithm.name=reinforce_pp", "algorithm.settings.over=rollouts"])
    assert made.algorithm.settings == {"normalize_over": "rollouts"}
    old = AlgorithmConfig(name="reinforce_pp", settings={"over": "rollouts"})
    assert algorithms.make(old, LearnerConfig()).given["normalize_over"] == "rollouts"


def test_old_and_new_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"both are given\. Fix: leave out loop\.groups_most"):
        config.load(sets=["loop.groups_most=8", "loop.max_groups=8"])


def test_what_comes_later_wins_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text("[loop]\nmembers = 2\n")
    with pytest.warns(RenamedSetting):
        assert config.load(toml=tmp_path / "old.toml", sets=["loop.group_size=5"]).loop.group_size == 5


def test_the_folder_of_an_old_run_is_read_without_a_note() -> None:
    now = json.loads(config.to_json(Config()))
    now["loop"]["groups_most"] = 24
    del now["loop"]["max_groups"]
    now["engine"]["rows"] = now["engine"].pop("max_sequences")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = config.from_json(json.dumps(now).encode())
    assert (made.loop.max_groups, made.engine.max_sequences) == (24, 32)
