import json
import pickle
import sys
from pathlib import Path

import pytest

from strop.errors import AgentError, TaskError
from strop.imports import resolve
from strop.tasks.load import load
from strop.types import Task


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_jsonl_of_whole_tasks_and_of_any_objects(tmp_path: Path):
    path = write(
        tmp_path / "qa.jsonl",
        {"id": "a", "split": "test", "data": {"q": 1}},
        {"question": "2 + 2?", "answer": 4},
        "",
        {"id": 17, "split": "long", "agent": "planner", "question": "é"},
        {"data": 5, "extra": 1},
    )
    assert load(path) == [
        Task(id="a", split="test", data={"q": 1}),
        Task(id="qa-2", data={"question": "2 + 2?", "answer": 4}),
        Task(
            id="17",
            split="long",
            agent="planner",
            data={"id": 17, "split": "long", "agent": "planner", "question": "é"},
        ),
        Task(id="qa-5", data={"data": 5, "extra": 1}),
    ]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"a": 1}', "{nope"], r"t\.jsonl, line 2: not valid JSON .*one JSON object per line"),
        (['{"a": 1}', "[1]"], r"t\.jsonl, line 2: a task is an object, not list"),
        (
            ['{"id": "x"}', '{"id": "x"}'],
            r"t\.jsonl, line 2: id 'x' was used before, at .*t\.jsonl, line 1\. Fix: give",
        ),
        (['{"id": null, "q": 1}'], r"line 1: 'id' is None\. Fix: write it as text"),
        (['{"split": 3}'], r"line 1: 'split' is 3\. Fix: write it as text"),
        ([""], r"t\.jsonl: no tasks there"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path: Path, lines: list[str], says: str):
    with pytest.raises(TaskError, match=says):
        load(str(write(tmp_path / "t.jsonl", *lines)))


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(TaskError, match=r"cannot read .*none\.jsonl: No such file.*check the path"):
        load(tmp_path / "none.jsonl")


def test_iterables():
    assert load([Task(id="a"), {"q": 1}]) == [Task(id="a"), Task(id="task-2", data={"q": 1})]
    assert load({"n": n} for n in range(2))[1].id == "task-2"
    with pytest.raises(TaskError, match="tasks: no tasks there"):
        load([])
    with pytest.raises(TaskError, match="item 2: id 'a'"):
        load([Task(id="a"), Task(id="a")])
    with pytest.raises(TaskError, match="item 1: a task is an object, not int"):
        load([3])  # pyright: ignore


def test_functions(tmp_path: Path):
    path = write(
        tmp_path / "my_tasks_fn.py",
        "import my_neighbour",
        "def make(num=2):\n    return ({'n': n, 'x': my_neighbour.X} for n in range(num))",
        "def text():\n    return 'hello'",
        "def splits():\n    return {'train': [{'n': 1}], 'test': [{'n': 2}, {'n': 3}]}",
        "def broken():\n    raise KeyError('k')",
        "VALUE = 3",
    )
    write(tmp_path / "my_neighbour.py", "X = 7")
    assert load(f"{path}:make", num=3)[2] == Task(id="task-3", data={"n": 2, "x": 7})
    assert [(task.id, task.split, task.data["n"]) for task in load(f"{path}:splits")] == [
        ("train-task-1", "train", 1),
        ("test-task-1", "test", 2),
        ("task-2", "test", 3),
    ]
    assert len(load("strop.demo:tasks", kind="chain", seed=3)) > 1000
    for name, says in (
        ("text", r"returned str\. Fix: return a list"),
        ("broken", "failed: KeyError: 'k'"),
        ("VALUE", "is int, not a function"),
        ("mak", r"has no 'mak'\. Fix: write .*:make$"),
    ):
        with pytest.raises(TaskError, match=says):
            load(f"{path}:{name}")
    with pytest.raises(TaskError, match=r"failed: TypeError: .*'nope'"):
        load(f"{path}:make", nope=1)
    with pytest.raises(TaskError, match=r"takes no arguments\. Fix: remove 'num'"):
        load("t.jsonl", num=1)
    with pytest.raises(TaskError, match=r"takes no arguments\. Fix: remove 'num'"):
        load([{"q": 1}], num=1)


def test_what_cannot_be_read_is_told_what_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.jsonl", {"q": 1})
    write(tmp_path / "notes.txt", "hello")
    possible = r"\.jsonl, \.csv or \.parquet file, a folder .*Hugging Face data set .*FILE\.py:function"
    for spec, says in (
        ("notes.txt", possible),
        ("trian.josnl", r"'trian\.josnl' is not a source of tasks\. Fix: write train\.jsonl$"),
        ("trian.jsonl", r"cannot read trian\.jsonl: No such file or directory\. Fix: write train\.jsonl$"),
        (f"{tmp_path}/nothing/like/it", possible),
        ("https://example.org/train.jsonl", possible),
        ("", possible),
        ("nobody\0here", possible),
        ("~nobody-of-that-name/train.jsonl", "No such file"),
        ("x" * 5000 + ".jsonl", "File name too long"),
    ):
        with pytest.raises(TaskError, match=says) as caught:
            load(spec)
        assert "\n" not in str(caught.value)


def test_numbers_that_json_cannot_hold_are_named():
    for data, says in (
        ({"score": float("nan")}, "'score' is nan"),
        ({"a": {"b": [1.0, None, float("-inf")]}}, r"'a\.b\.2' is -inf"),
    ):
        with pytest.raises(TaskError, match=rf"tasks, item 1: {says}, which JSON cannot hold\. Fix: write null"):
            load([data])
        with pytest.raises(TaskError, match=says):
            load([Task(id="a", data=data)])
    with pytest.raises(TaskError, match="'data' is nan"):
        load([Task(id="a", data=float("nan"))])
    with pytest.raises(TaskError, match=r"cannot be written as JSON .*use plain types"):
        load([{"q": object()}])
    deep: list[object] = [None]
    for _ in range(600):
        deep = [deep]
    with pytest.raises(TaskError, match=r"item 1: its data cannot be written as JSON .*recursion"):
        load([{"q": deep}])
    assert load([{"q": None, "x": 1.5}])[0].data == {"q": None, "x": 1.5}


def test_an_empty_id_split_or_agent_is_none_at_all():
    item = {"id": "", "split": "", "agent": "", "q": 1}
    assert load([item]) == [Task(id="task-1", data=item)]


class TestTables:
    def test_every_task_of_a_source_gets_the_split(self, tmp_path: Path):
        write(tmp_path / "a.jsonl", {"q": 1}, {"q": 2, "split": "test"}, {"id": "x", "split": 3})
        write(tmp_path / "b.jsonl", {"id": "y", "split": "train", "data": {"q": 4}})
        tasks = load({"train": str(tmp_path / "a.jsonl"), "test": tmp_path / "b.jsonl", "val": [Task(id="z")]})
        assert [(task.id, task.split) for task in tasks] == [
            ("a-1", "train"),
            ("a-2", "train"),
            ("x", "train"),
            ("y", "test"),
            ("z", "val"),
        ]
        assert tasks[1].data == {"q": 2, "split": "test"}  # what the row said is still there

    def test_ids_that_two_splits_have_get_the_split_in_front(self):
        tasks = load({"train": [{"id": 1}, {"id": 2}], "test": [{"id": 2}, {"id": 3}]})
        assert [task.id for task in tasks] == ["1", "train-2", "test-2", "3"]
        with pytest.raises(TaskError, match=r"item 2: id '2' was used before, at tasks, item 1"):
            load({"train": [{"id": 2}, {"id": 2}], "test": [{"id": 1}]})
        with pytest.raises(TaskError, match=r"id 'train-2' was used before"):
            load({"train": [{"id": 2}, {"id": "train-2"}], "test": [{"id": 2}]})

    def test_a_folder_gives_the_split_of_that_name_and_never_a_mix(self, tmp_path: Path):
        for name in ("train", "test"):
            write(tmp_path / f"{name}.jsonl", {"from": name})
        tasks = load({"train": str(tmp_path), "val": str(tmp_path / "test.jsonl")})
        assert [(task.split, task.data["from"]) for task in tasks] == [("train", "train"), ("val", "test")]
        with pytest.raises(
            TaskError, match=r"has the splits test, train and none called 'val'\. Fix: name the split as it"
        ):
            load({"val": str(tmp_path)})
        (tmp_path / "test.jsonl").unlink()
        assert load({"val": str(tmp_path)}) == [Task(id="train-1", split="val", data={"from": "train"})]

    def test_arguments_go_to_those_that_take_any(self, tmp_path: Path):
        path = write(tmp_path / "table_tasks_fn.py", "def make(num):\n    return [{'n': n} for n in range(num)]")
        file = write(tmp_path / "a.jsonl", {"q": 1})
        assert len(load({"train": f"{path}:make", "test": str(file)}, num=3)) == 4
        with pytest.raises(TaskError, match=r"none of these tasks takes arguments\. Fix: remove 'num'"):
            load({"train": str(file)}, num=3)

    def test_what_is_wrong(self, tmp_path: Path):
        empty = write(tmp_path / "empty.jsonl", "")
        for table, says in (
            ({}, "tasks: no tasks there"),
            ({"train": [{"q": 1}], "test": str(empty)}, r"empty\.jsonl: no tasks there"),
            ({"train": {"a": "b.jsonl"}}, "the split 'train' are a table"),
            ({"": [{"q": 1}]}, "'' is not the name of a split"),
            ({"train": 3}, "'int' object is not iterable"),
            ({"question": "2 + 2?", "answer": 4}, r"'2 \+ 2\?' is not a source of tasks"),
        ):
            with pytest.raises(TaskError, match=says):
                load(table)  # pyright: ignore


def test_resolving_says_what_is_wrong(tmp_path: Path):
    for name, text in (("syntax", "def f(:"), ("imports", "import not_there_xyz"), ("exits", "raise SystemExit(3)")):
        write(tmp_path / f"{name}_case.py", text)
    for spec, says in (
        ("agent", r"names no function\. Fix: write FILE.py:function"),
        (f"{tmp_path}/none.py:f", r"there is no file .*none\.py\. Fix: check the path"),
        (f"{tmp_path}/syntax_case.py:f", "failed: SyntaxError: "),
        (f"{tmp_path}/imports_case.py:f", "failed: ModuleNotFoundError: No module named 'not_there_xyz'"),
        (f"{tmp_path}/exits_case.py:f", "failed: SystemExit: 3"),
        ("no_such_package.agents:f", "there is no module 'no_such_package'"),
        ("strop.demo:agnet", r"has no 'agnet'\. Fix: write strop\.demo:agent$"),
    ):
        with pytest.raises(AgentError, match=says) as caught:
            resolve(spec, "agent")
        assert "\n" not in str(caught.value)
    assert "syntax_case" not in sys.modules


def test_a_file_is_loaded_once_by_the_name_its_neighbours_use(tmp_path: Path):
    path = write(tmp_path / "once_agent.py", "def f():\n    return 1")
    function = resolve(f"{path}:f", "agent")
    assert resolve(f"{path}:f", "agent") is function
    assert sys.modules["once_agent"].f is function
    assert pickle.loads(pickle.dumps(function)) is function


def test_a_file_does_not_stand_in_for_an_loaded_module(tmp_path: Path):
    path = write(tmp_path / "json.py", "def agent():\n    return 1")
    assert resolve(f"{path}:agent", "agent")() == 1  # pyright: ignore
    assert sys.modules["json"] is json
    assert resolve(f"{path}:agent", "agent") is resolve(f"{path}:agent", "agent")
