from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.errors import TaskError
from strop.tasks.load import load


def put(path: Path, *questions: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"q": list(questions)}), path)
    elif path.suffix == ".csv":
        path.write_text("\n".join(["q", *questions]))
    else:
        path.write_text("\n".join(f'{{"q": "{question}"}}' for question in questions))
    return path


def seen(folder: Path) -> set[tuple[str, str, str]]:
    return {(task.id, task.split, task.data["q"]) for task in load(folder)}


def test_files_of_mixed_kinds_are_named_by_split(tmp_path: Path):
    put(tmp_path / "train.jsonl", "a", "b")
    put(tmp_path / "test.csv", "c")
    put(tmp_path / "data" / "validation.parquet", "d")
    (tmp_path / "README.md").write_text("hello")
    put(tmp_path / ".cache" / "train.jsonl", "hidden")
    put(tmp_path / "._train.jsonl", "hidden")
    put(tmp_path / "too" / "deep" / "more.jsonl", "e")
    assert seen(tmp_path) == {
        ("train-1", "train", "a"),
        ("train-2", "train", "b"),
        ("test-2", "test", "c"),
        ("validation-1", "validation", "d"),
    }


@pytest.mark.parametrize("first", [0, 1])
def test_parts_are_one_split_and_counted_through(tmp_path: Path, first: int):
    put(tmp_path / "data" / f"validation-{first:05d}-of-00002.parquet", "a", "b")
    put(tmp_path / "data" / f"validation-{first + 1:05d}-of-00002-0123456789abcdef.parquet", "c")
    put(tmp_path / "data" / "test-00000-of-00001.jsonl", "d")
    assert seen(tmp_path) == {
        ("validation-1", "validation", "a"),
        ("validation-2", "validation", "b"),
        ("validation-3", "validation", "c"),
        ("test-1", "test", "d"),
    }


def test_own_ids_that_two_splits_have_get_the_split_in_front(tmp_path: Path):
    (tmp_path / "train.csv").write_text("id,q\n1,a\n2,b")
    (tmp_path / "test.csv").write_text("id,q\n1,c")
    assert seen(tmp_path) == {("train-1", "train", "a"), ("2", "train", "b"), ("test-1", "test", "c")}


def test_a_folder_with_an_empty_split(tmp_path: Path):
    put(tmp_path / "train.jsonl", "a")
    put(tmp_path / "test.jsonl")
    assert seen(tmp_path) == {("train-1", "train", "a")}
    put(tmp_path / "train.jsonl")
    with pytest.raises(TaskError, match="no tasks there"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["main/train.jsonl", "socratic/train.jsonl"],
            r"main/.* and .*socratic/.* are both of .*'train'\. Fix: give the folder",
        ),
        (["train.jsonl", "train.csv"], r"train\.csv and .*train\.jsonl are both of the split 'train'\. Fix: keep one"),
        (["train-00000-of-00002.jsonl"], r"the split 'train' has 1 of 2 files, .*\. Fix: download what is missing"),
        (["train-00001-of-00002.jsonl"], "the split 'train' has 1 of 2 files"),
        (["train.jsonl", "train-00000-of-00001.jsonl"], "the split 'train' has 2 of 1 files, .* or remove what"),
        (["train.json"], r"holds no tasks: looked there and one folder down for files named by split, such as train\."),
    ],
)
def test_what_is_wrong_is_a_sentence(tmp_path: Path, names: list[str], says: str):
    for name in names:
        put(tmp_path / name, "a")
    with pytest.raises(TaskError, match=says):
        load(str(tmp_path))


def test_a_folder_takes_no_arguments(tmp_path: Path):
    put(tmp_path / "train.jsonl", "a")
    with pytest.raises(TaskError, match=r"takes no arguments\. Fix: remove 'name'"):
        load(str(tmp_path), name="main")
