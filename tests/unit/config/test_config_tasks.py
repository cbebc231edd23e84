from pathlib import Path

import pytest

from strop.config import Config, from_json, load, to_json
from strop.errors import ConfigError, TaskError
from strop.run.settings import load_tasks


def test_tasks_are_a_place_or_a_table_of_them_by_split(tmp_path: Path):
    toml = tmp_path / "run.toml"
    toml.write_text('tasks = "openai/gsm8k"\ntasks_args = {name = "main"}\nhold_out = 500\n')
    config = load(toml=toml)
    assert (config.tasks, config.tasks_args, config.hold_out) == ("openai/gsm8k", {"name": "main"}, 500)
    toml.write_text('hold_out = 0.1\n[tasks]\ntrain = "a.parquet"\ntest = "b.jsonl"\n')
    config = load(toml=toml)
    assert (config.tasks, config.hold_out) == ({"train": "a.parquet", "test": "b.jsonl"}, 0.1)
    assert from_json(to_json(config)) == config


def test_tasks_are_given_whole():
    """What is set later takes the place of what was there: splits of two sources are never mixed."""
    base = Config(tasks={"train": "a.parquet", "test": "b.jsonl"})
    assert load(base=base, sets=["tasks=c.csv"]).tasks == "c.csv"
    assert load(base=base, tasks={"train": "c.csv"}).tasks == {"train": "c.csv"}
    assert load(sets=['tasks={"train": "a.csv", "test": "b.csv"}']).tasks == {"train": "a.csv", "test": "b.csv"}


def test_what_does_not_fit():
    with pytest.raises(ConfigError, match=r"hold_out does not fit: .*>= 0"):
        load(hold_out=-1)
    with pytest.raises(ConfigError, match="tasks"):
        load(sets=["tasks=3"])


def test_a_split_that_is_not_there_can_be_kept_aside(tmp_path: Path):
    (tmp_path / "tasks.jsonl").write_text('{"q": 1}\n{"q": 2}\n')
    tasks = str(tmp_path / "tasks.jsonl")
    with pytest.raises(TaskError, match=r"no task of split 'test', only train\. Fix: .* `--set hold_out=0\.3`$"):
        load_tasks(load(tasks=tasks))
    assert {task.split for task in load_tasks(load(tasks=tasks, sets=["hold_out=0.3"]))} == {"train", "test"}


def test_arguments_of_tasks_are_given_one_by_one_or_whole(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('tasks = "data.py:tasks"\ntasks_args = { data = "made", held = 4 }\n')
    assert load(toml=toml, sets=["tasks_args.held=8"]).tasks_args == {"data": "made", "held": 8}
    assert load(toml=toml, data="hotpotqa").tasks_args == {"data": "hotpotqa", "held": 4}
    assert load(toml=toml, data=str(tmp_path)).tasks_args["data"] == str(tmp_path)
    others = ["tasks=other.py:tasks", "tasks_args.count=2"]  # other tasks know nothing of these arguments
    assert load(toml=toml, sets=others).tasks_args == {"count": 2}
