"""Data sets as people have them, where they lie beside the project."""

from collections import Counter
from pathlib import Path

import pytest

from strop.tasks.load import load
from strop.tasks.sampling import hold_out

DATA = Path(__file__).parents[3].parent / "shared/data"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data sets at {DATA}")


def test_gsm8k_folder():
    tasks = load(DATA / "math/gsm8k")
    assert Counter(task.split for task in tasks) == {"train": 7473, "test": 1319}
    first = next(task for task in tasks if task.id == "train-1")
    assert set(first.data) == {"question", "answer"}
    assert first.data["answer"].endswith("#### 72")
    held = hold_out(tasks, 0.1, seed=0, split="validation")
    assert Counter(task.split for task in held) == {"train": 6726, "validation": 747, "test": 1319}


def test_dapo_keeps_verls_schema():
    tasks = load(DATA / "math/dapo_math_17k.parquet")
    assert len(tasks) == 17917
    assert {task.split for task in tasks} == {"train"}
    assert (tasks[0].id, tasks[-1].id) == ("dapo_math_17k-1", "dapo_math_17k-17917")
    for task in tasks:
        assert list(task.data) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    data = tasks[1].data
    assert data["prompt"][0].keys() == {"role", "content"}
    assert data["reward_model"] == {"ground_truth": "113", "style": "rule"}
    assert data["extra_info"] == {"answer": "", "index": 1, "split": "train"}


def test_tables_of_files_and_clashing_ids():
    spider = load({"train": str(DATA / "spider/train_small_dbs.jsonl"), "test": str(DATA / "spider/dev.jsonl")})
    assert Counter(task.split for task in spider) == {"train": 6076, "test": 513}
    mixed = load(
        {
            "train": str(DATA / "math/dapo_math_17k.parquet"),
            "aime25": str(DATA / "math/aime25.jsonl"),  # ids 0, 1, 2 ...
            "amc23": str(DATA / "math/amc23.jsonl"),  # and here
        }
    )
    assert Counter(task.split for task in mixed) == {"train": 17917, "aime25": 30, "amc23": 40}
    assert {"aime25-0", "amc23-0"} < {task.id for task in mixed}


@pytest.mark.parametrize("path", sorted(DATA.glob("**/*.jsonl")), ids=lambda path: str(path.relative_to(DATA)))
def test_every_line_of_every_file_is_a_task(path: Path):
    assert len(load(path)) == sum(bool(line.strip()) for line in path.read_bytes().splitlines())
