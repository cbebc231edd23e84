import datetime
import decimal
import sys
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.errors import TaskError
from strop.tasks import arrow
from strop.tasks.load import load
from strop.types import Task

NOON = datetime.datetime(2024, 2, 29, 12, 0, 0, 5)


def put(path: Path, columns: dict[str, Any], **kwargs: Any) -> Path:
    pq.write_table(pa.table(columns), path, **kwargs)
    return path


def test_rows_of_every_batch_in_their_order(tmp_path: Path):
    num_rows = 2 * arrow.BATCH + 7
    path = put(tmp_path / "qa.parquet", {"n": list(range(num_rows))}, row_group_size=300)
    assert load(path) == [Task(id=f"qa-{n + 1}", data={"n": n}) for n in range(num_rows)]


def test_id_split_and_agent_mean_what_they_mean(tmp_path: Path):
    columns = {"id": [17, 18], "split": ["test", "train"], "agent": pa.array([None, "planner"], pa.string())}
    first, second = load(put(tmp_path / "t.parquet", columns))
    assert first == Task(id="17", split="test", data={"id": 17, "split": "test", "agent": None})
    assert (second.id, second.split, second.agent) == ("18", "train", "planner")


def test_lists_structs_and_maps_become_lists_and_dicts(tmp_path: Path):
    prompt = [{"role": "user", "content": "é"}, {"role": "system", "content": None}]
    columns = {
        "prompt": [prompt, None],
        "reward_model": [{"ground_truth": "4", "tests": [[1, 2], []]}] * 2,
        "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
        "category": pa.array(["x", "y"]).dictionary_encode(),
    }
    first, second = load(put(tmp_path / "t.parquet", columns))
    assert first.data == {
        "prompt": prompt,
        "reward_model": {"ground_truth": "4", "tests": [[1, 2], []]},
        "map": {"a": 1},
        "category": "x",
    }
    assert (second.data["prompt"], second.data["map"]) == (None, {})


def test_what_json_has_no_word_for_becomes_text(tmp_path: Path):
    columns = {
        "bytes": [b"\x00\xff"],
        "decimal": [decimal.Decimal("1.10")],
        "date": [NOON.date()],
        "time": [NOON.time()],
        "datetime": [NOON],
        "nanoseconds": pa.array([1], pa.timestamp("ns")),
        "zone": pa.array([NOON], pa.timestamp("us", "UTC")),
        "duration": [datetime.timedelta(days=1, seconds=2)],
        "nested": [[{"when": NOON}]],
        "uuid": pa.array([uuid.UUID(int=5).bytes], pa.uuid()),
        "big": pa.array([2**63], pa.uint64()),
        "half": pa.array([0.5], pa.float16()),
    }
    assert load(put(tmp_path / "t.parquet", columns))[0].data == {
        "bytes": "AP8=",
        "decimal": "1.10",
        "date": "2024-02-29",
        "time": "12:00:00.000005",
        "datetime": "2024-02-29T12:00:00.000005",
        "nanoseconds": "1970-01-01T00:00:00.000000001",
        "zone": "2024-02-29T12:00:00.000005Z",
        "duration": "P1DT2S",
        "nested": [{"when": "2024-02-29T12:00:00.000005"}],
        "uuid": "00000000-0000-0000-0000-000000000005",
        "big": 2**63,
        "half": 0.5,
    }


def test_what_is_wrong_is_named_with_its_column(tmp_path: Path):
    twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    with pytest.raises(TaskError, match=r"t\.parquet: column 'm' cannot be written as JSON .*duplicate.*leave it out"):
        load(put(tmp_path / "t.parquet", {"ok": [1], "m": twice}))
    with pytest.raises(
        TaskError, match=r"t\.parquet, row 2: 'info\.score' is nan, which JSON cannot hold\. Fix: write null"
    ):
        load(put(tmp_path / "t.parquet", {"info": [{"score": 1.0}, {"score": float("nan")}]}))
    with pytest.raises(TaskError, match=r"t\.parquet, row 1: 'id' is 1\.5\. Fix: write it as text"):
        load(put(tmp_path / "t.parquet", {"id": [1.5]}))
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), tmp_path / "t.parquet")
    with pytest.raises(TaskError, match=r"t\.parquet: two columns are called 'x'"):
        load(tmp_path / "t.parquet")


def test_files_that_are_no_parquet(tmp_path: Path):
    path = put(tmp_path / "t.parquet", {"n": list(range(10_000))}, compression="gzip")
    whole = path.read_bytes()
    for content in (b"", b"hello" * 100, whole[: len(whole) // 2], whole[:50] + bytes(5000) + whole[5050:]):
        path.write_bytes(content)
        with pytest.raises(
            TaskError, match=r"cannot read .*t\.parquet: .*\. Fix: write or download it again"
        ) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(TaskError, match=r"No such file or directory\. Fix: write .*t\.parquet$"):
        load(tmp_path / "tt.parquet")
    with pytest.raises(TaskError, match="no tasks there"):
        load(put(path, {"n": pa.array([], pa.int64())}))


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = put(tmp_path / "t.parquet", {"n": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskError, match=r"t\.parquet needs pyarrow to be read: pip install pyarrow"):
        load(path)
