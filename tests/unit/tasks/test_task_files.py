import codecs
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import TaskError
from strop.tasks import files
from strop.tasks.load import load
from strop.types import Task

TEXT = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inside: st.lists(inside) | st.dictionaries(TEXT, inside),
    max_leaves=8,
)


def put(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


class TestJsonl:
    @given(st.lists(VALUES, min_size=1))
    def test_what_was_written_is_read(self, tmp_path_factory: pytest.TempPathFactory, values: list[Any]):
        path = tmp_path_factory.getbasetemp() / "any.jsonl"
        put(path, "\r\n".join(json.dumps({"q": value}) for value in values))
        assert [task.data["q"] for task in load(path)] == values

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b'{"q": 1}\n{"q": "caf\xe9"}', r"line 2: not UTF-8 text\. Fix: save the file as UTF-8"),
            ('{"q": "é"}'.encode("utf-16"), "line 1: not valid JSON"),
            ('{"q": NaN}', "line 1: not valid JSON"),
            ('{"q": 1e999}', "line 1: not valid JSON .*out of range"),
            ('{"q": "a\\ud800b"}', r"line 1: 'q' holds \\ud800, half a character \(a lone surrogate\), as character 2"),
            ('{"q": 1}\n{"q": {"deep": ["x", "\\ude42"]}}', r"line 2: 'q\.deep\.1' holds \\ude42, half a character"),
            ('{"a\\ud83d": 1}', r"line 1: the name 'a\\ud83d' holds \\ud83d, half a character"),
            ('{"id": "\\udfff", "q": 1}', r"line 1: 'id' holds \\udfff, half a character"),
            ("[" * 9000 + "]" * 9000, "line 1: not valid JSON .*recursion"),
            ('[\n{"q": 1},\n{"q": 2}\n]', "line 1: not valid JSON"),
            ("", "no tasks there"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, tmp_path: Path, content: str | bytes, says: str):
        with pytest.raises(TaskError, match=rf"t\.jsonl.*{says}") as caught:
            load(put(tmp_path / "t.jsonl", content))
        assert "\n" not in str(caught.value)

    def test_a_byte_order_mark(self, tmp_path: Path):
        assert load(put(tmp_path / "t.JSONL", codecs.BOM_UTF8 + b'{"q": 1}')) == [Task(id="t-1", data={"q": 1})]

    def test_a_line_without_end(self, tmp_path: Path):
        path = tmp_path / "t.jsonl"
        with path.open("wb") as file:
            file.truncate(files.LONGEST + 2)
        with pytest.raises(TaskError, match=r"line 1: longer than 64 MiB\. Fix: write one JSON object per line"):
            load(path)


class TestCsv:
    @given(st.lists(TEXT, min_size=2, unique=True), st.data())
    def test_what_was_written_is_read(
        self, tmp_path_factory: pytest.TempPathFactory, names: list[str], data: st.DataObject
    ):
        names = [f"{name}," for name in names]  # never id, split or agent
        rows = data.draw(st.lists(st.lists(TEXT, min_size=len(names), max_size=len(names)), min_size=1))
        text = io.StringIO()
        csv.writer(text, quoting=csv.QUOTE_ALL).writerows([names, *rows])
        path = put(tmp_path_factory.getbasetemp() / "any.csv", text.getvalue())
        assert [list(task.data.values()) for task in load(path)] == rows

    def test_the_header_names_the_values_and_these_stay_text(self, tmp_path: Path):
        lines = (
            "\ufeffid,question,answer,split,agent",
            "7,2 + 2?,4,test,",
            "",
            ',"two\nlines, ""so""",,,planner',
            "z,é,1,,",
        )
        content = "\r\n".join(lines)
        assert load(put(tmp_path / "qa.csv", content)) == [
            Task(
                id="7",
                split="test",
                data={"id": "7", "question": "2 + 2?", "answer": "4", "split": "test", "agent": ""},
            ),
            Task(
                id="qa-4",
                agent="planner",
                data={"id": "", "question": 'two\nlines, "so"', "answer": "", "split": "", "agent": "planner"},
            ),
            Task(id="z", data={"id": "z", "question": "é", "answer": "1", "split": "", "agent": ""}),
        ]

    def test_long_cells(self, tmp_path: Path):
        limit = csv.field_size_limit()
        long = "x" * 500_000
        assert load(put(tmp_path / "t.csv", f"q\n{long}\n"))[0].data == {"q": long}
        assert csv.field_size_limit() == limit

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ('a,b\n1,"x\ny"\n1,2,3\n', r"line 4: 3 values for 2 columns\. Fix: put text with commas"),
            ("a,b\n1,2\n1\n", "line 3: 1 values for 2 columns"),
            ('a,b\n1,2\n3,"x\n4,5\n', "line 3: not valid CSV .*close every double quote"),
            ('a,b\n1,"x" y\n', "line 2: not valid CSV"),
            ("a,b,a\n1,2,3\n", "line 1: two columns are called 'a'"),
            ("a;b\n1;2\n", r"line 1: one column called 'a;b'\. Fix: separate columns by commas"),
            (b"a,b\n1,2\n3,caf\xe9\n", r"line 3: not UTF-8 text\. Fix: save the file as UTF-8"),
            ("a,b\n1,2\n".encode("utf-16"), "line 1: not UTF-8 text"),
            ("id,q\nx,1\nx,2\n", r"line 3: id 'x' was used before, at .*t\.csv, line 2"),
            ("a,b\n", "no tasks there"),
            ("", "no tasks there"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, tmp_path: Path, content: str | bytes, says: str):
        with pytest.raises(TaskError, match=rf"t\.csv.*{says}") as caught:
            load(put(tmp_path / "t.csv", content))
        assert "\n" not in str(caught.value)


def test_what_may_not_be_read(tmp_path: Path):
    """By a process of its own where the tests run as root, who may read everything."""
    secret = tmp_path / "secret"
    secret.mkdir()
    put(secret / "train.jsonl", '{"q": 1}')
    put(tmp_path / "mine.jsonl", '{"q": 1}').chmod(0)
    secret.chmod(0)
    code = """
import os, sys
from strop.errors import TaskError
from strop.tasks.load import load
os.chdir(sys.argv[1])
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
for spec in ("secret", "secret/train.jsonl", "mine.jsonl"):
    try:
        load(spec)
    except TaskError as error:
        print(error)
"""
    if os.getuid() == 0:
        for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
            folder.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    secret.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"cannot read {name}: Permission denied. Fix: allow this user to read it"
        for name in ("secret", "secret/train.jsonl", "mine.jsonl")
    ]
