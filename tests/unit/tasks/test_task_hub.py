import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strop.errors import TaskError
from strop.tasks import hub
from strop.tasks.load import load

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache of its own for each test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def questions(*names: str) -> Any:
    return datasets.Dataset.from_list([{"q": name, "info": {"image": name.encode(), "tags": [1]}} for name in names])


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """What a data set looks like on the Hub, which load_dataset reads as well."""
    (tmp_path / "set" / "data").mkdir(parents=True)
    questions("a", "b", "c").to_parquet(tmp_path / "set" / "data" / "train-00000-of-00001.parquet")
    questions("d").to_parquet(tmp_path / "set" / "data" / "test-00000-of-00001.parquet")
    return str(tmp_path / "set")


def ids(sources: Any) -> dict[str, list[str]]:
    return {split: [row.id for row in rows] for split, rows in sources.items()}


@pytest.mark.parametrize("streaming", [False, True])
def test_every_split_of_a_data_set(folder: str, streaming: bool):
    sources = hub.from_hub(folder, streaming=streaming)
    assert list(sources) == ["train", "test"]
    first = next(iter(sources["train"]))
    assert first == (
        f"{folder}, split train, row 1",
        "train-1",
        {"q": "a", "info": {"image": "YQ==", "tags": [1]}},
    )
    assert ids(sources) == {"train": ["train-2", "train-3"], "test": ["test-1"]}


def test_the_arguments_are_those_of_load_dataset(folder: str):
    assert ids(hub.from_hub(folder, split="train")) == {"train": ["train-1", "train-2", "train-3"]}
    assert ids(hub.from_hub(folder, name="default", split="train[1:2]")) == {"train": ["train-1"]}
    for kwargs, says in (
        ({"name": "socratic"}, r"'socratic' not found.*check tasks_args, which are load_dataset's"),
        ({"split": "val"}, r'Unknown split "val".*check tasks_args'),
        ({"nope": 3}, r"nope.*check tasks_args"),
        ({"split": ["train", "test"]}, r"`split` is a list\. Fix: name one split"),
    ):
        with pytest.raises(TaskError, match=says) as caught:
            hub.from_hub(folder, **kwargs)
        assert "\n" not in str(caught.value)


def test_a_python_object_of_datasets(folder: str):
    tasks = load(datasets.load_dataset(folder))
    assert [(task.id, task.split, task.data["q"]) for task in tasks] == [
        ("train-task-1", "train", "a"),
        ("task-2", "train", "b"),
        ("task-3", "train", "c"),
        ("test-task-1", "test", "d"),
    ]


def test_what_save_to_disk_wrote(tmp_path: Path):
    datasets.DatasetDict({"train": questions("a", "b"), "test": questions("c").select([0])}).save_to_disk(
        tmp_path / "two"
    )
    tasks = load(tmp_path / "two")
    assert [(task.id, task.split, task.data["q"]) for task in tasks] == [
        ("train-1", "train", "a"),
        ("train-2", "train", "b"),
        ("test-1", "test", "c"),
    ]
    assert tasks[0].data["info"] == {"image": "YQ==", "tags": [1]}
    questions("a", "b").select([1]).save_to_disk(tmp_path / "one")
    assert [(task.id, task.split, task.data["q"]) for task in load(tmp_path / "one")] == [("train-1", "train", "b")]
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"hello")
    with pytest.raises(TaskError, match=r"datasets cannot read .*one .*save it again"):
        load(tmp_path / "one")


def test_without_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    questions("a").save_to_disk(tmp_path / "one")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k.jsonl").write_text("{}")
    for spec, says in (
        ("openai/gsm8k", "tasks 'openai/gsm8k': there is no such file or folder; .*: pip install datasets"),
        ("gsm8k", r"no such file or folder \(but gsm8k\.jsonl is there\); .*: pip install datasets"),
        ("one", "one was written by Hugging Face's datasets and needs it to be read: pip install datasets"),
    ):
        with pytest.raises(TaskError, match=says):
            load(spec)


def test_offline_it_fails_at_once_and_says_what_was_tried(tmp_path: Path):
    """In a process of its own: HF_HUB_OFFLINE is read when huggingface_hub is imported."""
    code = """
from strop.errors import TaskError
from strop.tasks.load import load
for spec in ("openai/gsm8k", "gsm8k", {"train": "openai/gsm8k"}):
    try:
        load(spec, name="main", revision="main")
    except TaskError as error:
        print(error)
"""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 3
    for line, name in zip(said, ("openai/gsm8k", "gsm8k", "openai/gsm8k"), strict=True):
        assert line.startswith(
            f"tasks '{name}': there is no such file or folder, and no Hugging Face data set could be"
        )
        assert "HF_HUB_OFFLINE is set and it was not downloaded before: unset that" in line
        assert f"hf download {name} --repo-type dataset" in line
