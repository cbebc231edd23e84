"""What the Makefile would do in a fresh clone, without doing it."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def would(target: str, tmp_path: Path) -> list[str]:
    command = ["make", "--dry-run", "--no-print-directory", f"VENV={tmp_path / 'env'}", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_demo_installs_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    lines = would("demo", tmp_path)
    installs = [line for line in lines if " pip install " in line]
    assert len(installs) >= 2
    assert "torch" in installs[0]
    assert not any(extra in line.partition(" install ")[2] for line in installs for extra in ("dev", "postgres"))
    assert lines[-1].startswith(f"{tmp_path}/env/bin/strop demo")


def test_the_tests_install_what_they_need(tmp_path: Path) -> None:
    lines = would("test", tmp_path)
    assert any("dev" in line.partition(" pip install ")[2] for line in lines)
    assert f"touch {tmp_path}/env/.installed" in lines
    assert f"touch {tmp_path}/env/.dev" in lines
    assert "-m pytest" in lines[-1]


def test_what_pip_does_is_seen(tmp_path: Path) -> None:
    installs = [line for line in would("test", tmp_path) if " pip install " in line]
    assert not [line for line in installs if "--quiet" in line or " -q " in line]
    stages = [line for line in would("test", tmp_path) if line.startswith("echo ")]
    assert len(stages) == len(installs)
