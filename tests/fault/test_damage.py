"""Whole runs whose files were damaged, as a user meets them: every command says what is wrong in one sentence."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import runs
from tests.damage import cut_off, garbage
from tests.runs import SMALL

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]

SETTINGS = [
    *(*SMALL, "loop.steps=3", "loop.groups=2", "loop.group_size=2", "loop.checkpoint_every=1"),
    "loop.eval_every=0",
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed once its second step had its checkpoint: the log of its store has not been copied yet."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    assert runs.kill_when(runs.demo(folder, *SETTINGS), runs.named(folder, lineage=1, step=2))
    return folder


@pytest.fixture
def folder(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run", symlinks=True))


def refused(*arguments: str | Path, cwd: Path) -> str:
    """The one sentence that a command ends with."""
    done = subprocess.run(
        runs.strop(*arguments), capture_output=True, text=True, timeout=280, check=False, cwd=cwd, input="hello\n"
    )
    assert done.returncode in (1, 2), done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_damaged_checkpoint_is_named_by_every_command_and_made_anew_by_resume(folder: Path, tmp_path: Path) -> None:
    newest = sorted((folder / "checkpoints").glob("step-??????-1"))[-1]
    number = int(newest.name[5:11])
    cut_off(newest / "model.safetensors")
    for arguments in (["export", folder, tmp_path / "out"], ["eval", folder, "--folder", "e"], ["chat", folder]):
        said = refused(*arguments, cwd=tmp_path)
        assert said.startswith(f"strop: {newest}/model.safetensors is damaged, its ")
        assert said.endswith("or resume the run that it belongs to, which makes it anew")
    done = runs.finish(runs.strop("train", "--resume", folder), cwd=tmp_path)
    said = " ".join(done.stdout.split())
    committed = 2 if number > 2 else number  # it may have been written, and its step not committed
    if committed == number:
        assert f"going back to the checkpoint of step {number - 1}; step {number} is trained again" in said
        assert (newest.with_name(f"{newest.name}.damaged")).is_dir()
    assert [step.number for step in runs.story(folder).steps] == [1, 2, 3]
    runs.finish(runs.strop("export", folder, tmp_path / "out"))


def test_a_damaged_log_is_missed(folder: Path, tmp_path: Path) -> None:
    """Steps 1 and 2 were acknowledged; only the log has them."""
    garbage(folder / "store.sqlite-wal")
    said = refused("train", "--resume", folder, cwd=tmp_path)
    assert "are known to have been made" in said or "is known to have been made" in said or "is damaged" in said
    assert "strop train --from" in said
    assert (folder / "checkpoints" / "step-000002-1").is_dir()
    runs.finish(runs.strop("train", "--from", folder, "--folder", tmp_path / "on", "--set=loop.steps=1", "--json"))


def test_a_damaged_store_is_called_so(folder: Path, tmp_path: Path) -> None:
    (folder / "store.sqlite-wal").unlink()
    (folder / "store.sqlite").write_bytes(b"\x00" * 8192)
    assert "store.sqlite is not a Strop store, or is damaged" in refused("train", "--resume", folder, cwd=tmp_path)
    (folder / "store.sqlite").unlink()
    assert "store.sqlite is gone" in refused("train", "--resume", folder, cwd=tmp_path)
