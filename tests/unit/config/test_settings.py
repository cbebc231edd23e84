"""`strop config` and what is said of a setting that is none: filters, files that load back, names that were meant."""

import json
import re
import subprocess
from pathlib import Path

import pytest

import strop
from strop import algorithms, config
from strop.cli import config as configuring
from strop.cli import main
from strop.config import AlgorithmConfig, Config, LoopConfig, OutsideConfig, PolicyConfig, toml
from strop.errors import ConfigError
from strop.run.folder import RunFolder
from tests import runs

ODD = Config(
    agent='python "my agent.py"',
    agents={"a name with spaces": "b.py:agent", "plain": "c.py:agent"},
    tasks={"train": "a.parquet", "test": "b.jsonl"},
    tasks_args={"text": 'say "hé"\n\\ \x7f', "numbers": [1, 2.5, True], "deep": {"er": {"est": "x"}}, "empty": {}},
    folder="runs/odd #1",
    policy=PolicyConfig(context=8192),
    algorithm=AlgorithmConfig(name="ppo", rewards={"reward": 1.0, "for.mat": -0.2}, settings={"lam": 0.9}),
    loop=LoopConfig(eval_splits=(), max_groups=20),
    gateway=config.GatewayConfig(outside={"judge": OutsideConfig(url="https://x/v1", agents=("judge",))}),
)


@pytest.mark.parametrize("made", [Config(), ODD], ids=["defaults", "odd"])
def test_the_file_loads_back_to_the_same_configuration(
    made: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so does one in which every line that only tells of a setting is left out."""
    run = RunFolder.create(tmp_path / "run")
    run.keep(made)
    run.close()
    assert main(["config", str(tmp_path / "run"), "--toml"]) == 0
    (tmp_path / "a.toml").write_text(text := capsys.readouterr().out)
    wanted = config.load(base=made, folder=str(tmp_path / "run"))
    assert config.load(toml=tmp_path / "a.toml") == wanted
    for setting in algorithms.every_setting(made):
        assert setting.doc in text or setting.key == "algorithm.settings"


def test_what_no_file_can_say_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tasks_args holds null.*--json"):
        toml.dumps(config.settings(Config(tasks_args={"a": [None]})))


@pytest.mark.parametrize(
    ("words", "some", "none"),
    [
        (["learner"], ["learner.device", "learner.optim.lr", "learner.critic.lr"], ["loop.steps"]),
        (["optim.lr"], ["learner.optim.lr"], ["learner.critic.lr"]),
        (["eval"], ["policy.eval.top_p", "loop.eval_every"], ["loop.steps"]),
        (["staleness", "lr"], ["loop.staleness", "learner.optim.lr"], ["loop.steps"]),
        (["greedily"], ["loop.eval_greedy"], ["loop.steps"]),  # in what it means, where no name has it
        (["clip"], ["algorithm.settings.clip", "learner.optim.grad_clip"], ["loop.steps"]),
        (["ppo"], ["algorithm.name", "algorithm.settings.lam"], ["algorithm.settings.baseline", "loop.steps"]),
        (["grpo"], ["algorithm.settings.baseline"], ["algorithm.settings.lam"]),
    ],
)
def test_settings_are_found_by_section_word_and_algorithm(words: list[str], some: list[str], none: list[str]) -> None:
    found = [setting.key for setting in configuring._chosen(Config(), words)]
    assert set(some) <= set(found)
    assert not set(none) & set(found)
    assert len(found) == len(set(found))


@pytest.mark.parametrize("name", algorithms.names())
def test_every_setting_of_every_algorithm_has_its_line(name: str) -> None:
    found = configuring._chosen(Config(), [name])
    assert len(found) > 10
    assert all(setting.doc for setting in found)


def test_a_pipe_gets_one_whole_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = subprocess.run(runs.strop("config"), capture_output=True, text=True, check=True).stdout.splitlines()
    every = {s.key: s for s in algorithms.every_setting(Config()) if s.key != "algorithm.settings"}
    assert [line.partition(" = ")[0] for line in lines] == list(every)
    for line, setting in zip(lines, every.values(), strict=True):
        value, _, doc = line.partition(" = ")[2].rpartition(f"  # {setting.doc}")
        assert (doc, toml.parse_value(value)) == ("", json.loads(json.dumps(setting.value, default=list)))


def test_json_may_be_narrowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "lr", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"learner": {"optim": {"lr": 1e-6}, "critic": {"lr": 1e-5}}}
    assert main(["config", "--json"]) == 0
    assert config.from_json(capsys.readouterr().out.encode()) == Config()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lerner", "Fix: write `strop config learner`"),
        ("grop", "Fix: write `strop config grpo`"),
        ("loop.grups", "Fix: write `strop config loop.groups`"),
        ("loop.membrs", "Fix: write `strop config loop.group_size`"),
        ("zzzz", "Fix: choose from what `strop config` lists"),
        ("runs/nothing", "holds no run"),
    ],
)
def test_a_word_that_is_about_nothing(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", word]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("learner.lr=1", "learner.optim.lr"),
        ("algorithm.clip=1", "algorithm.settings.clip"),
        ("algorithm.lam=1", "algorithm.settings.lam"),  # another algorithm's
        ("optim.lr=1", "learner.optim.lr"),
        ("learner.optimizer.lr=1", "learner.optim.lr"),
        ("train.temperature=1", "policy.train.temperature"),
        ("steps=1", "loop.steps"),
        ("stepz=1", "loop.steps"),
        ("policy.maxtokens=1", "policy.train.max_tokens"),
        ("loop.worker=1", "runner.workers"),
        ("loop.membrs=1", "loop.group_size"),  # near to the name it had before
        ("policies.a.learner.updtes=1", "policies.a.learner.minibatches"),
    ],
)
def test_what_was_meant_is_looked_for_everywhere(setting: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load(sets=[setting])
    said = f"there is no setting {setting.partition('=')[0]!r}. Fix: write {meant}"
    assert re.fullmatch(re.escape(said) + r"( or \S+)?", str(refused.value))


def test_where_nothing_is_alike_all_names_are_told() -> None:
    with pytest.raises(ConfigError, match=r"there is no setting 'zzzz'\. Fix: name one of agent, "):
        config.load(sets=["zzzz=1"])


@pytest.mark.parametrize(
    ("setting", "named", "value", "shown"),
    [
        ("loop.steps=abc", "loop.steps", "'abc' (expected `int`, got `str`)", "loop.steps"),
        ("loop.eval_splits=[1]", "loop.eval_splits[0]", "1 (expected `str`, got `int`)", "loop.eval_splits"),
        ("policies.a.model=3", "policies.a.model", "3 (expected `str`, got `int`)", "policy.model"),
    ],
)
def test_a_value_that_does_not_fit_is_named(
    setting: str, named: str, value: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load(sets=[setting])
    assert str(refused.value) == f"{named} does not fit: it is {value}. Fix: see `strop config {shown}`"
    assert main(["config", shown]) == 0
    assert capsys.readouterr().out.startswith(f"{shown} = ")


def test_what_was_meant_in_python(tmp_path: Path) -> None:
    where = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"Fix: write learner\.optim\.lr"):
        strop.train("strop.demo:agent", "strop.demo:tasks", folder=where, learner={"lr": 1.0})
    with pytest.raises(ConfigError, match=r"Fix: write learner\.optim\.lr"):
        strop.train("strop.demo:agent", "strop.demo:tasks", folder=where, lr=1.0)
    with pytest.raises(ConfigError, match=r"Fix: write algorithm\.settings\.clip"):
        strop.GRPO(clp=0.1)
    with pytest.raises(ConfigError, match=r"Fix: write learner\.optim\.lr"):
        strop.GRPO(lr=0.1)
    assert not (tmp_path / "run").exists()
