"""`--passed FILE`: tests that take hours go on where they were stopped."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one process", "a worker"])
def test_what_has_passed_is_left_out(tmp_path: Path, workers: list[str]) -> None:
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(
        "import os\ndef test_a(): pass\ndef test_b(): assert os.path.exists('there')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, "--passed", "passed"]

    def run() -> str:
        return subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True, check=False).stdout

    assert "1 failed, 1 passed" in run()
    assert (tmp_path / "passed").read_text() == "test_some.py::test_a\n"
    (tmp_path / "there").touch()
    again = run()
    assert "1 passed" in again
    assert "left out: 1 marked not selected" in again
    assert (tmp_path / "passed").read_text() == "test_some.py::test_a\ntest_some.py::test_b\n"
