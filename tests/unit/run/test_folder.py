"""A run's folder is held by one process at a time, and looking at it disturbs nobody."""

import argparse
import fcntl
import threading
import time
from pathlib import Path

import msgspec
import pytest

from strop.cli import chat as chatting
from strop.cli import main
from strop.config import Config
from strop.errors import PlaceError
from strop.run.evaluate import find_model
from strop.run.folder import RunFolder, find_free
from strop.run.start_from import find_source, require_checkpoint


def test_whoever_looks_for_a_moment_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    looking = threading.Event()

    def look() -> None:
        with (tmp_path / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            looking.set()
            time.sleep(0.03)

    thread = threading.Thread(target=look)
    thread.start()
    looking.wait()
    RunFolder.create(tmp_path)._lock.close()
    thread.join()


def test_a_held_folder_is_refused_and_seen_as_held(tmp_path: Path) -> None:
    assert not RunFolder.is_held(tmp_path)  # nobody was ever there
    run = RunFolder.create(tmp_path)
    assert RunFolder.is_held(tmp_path)
    with pytest.raises(PlaceError, match="another process"):
        RunFolder.create(tmp_path)
    run._lock.close()
    assert not RunFolder.is_held(tmp_path)


def test_a_run_of_another_version_is_left_alone_too(tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    demo.mkdir()
    (demo / "config.json").write_text('{"a setting": "of long ago"}')
    assert find_free(demo, RunFolder.is_taken) == tmp_path / "demo-2"
    with pytest.raises(PlaceError, match=r"cannot be read: .* Fix: use the strop that wrote them"):
        RunFolder.config(demo)


def test_a_run_that_is_not_there_is_answered_with_the_one_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create("runs/demo")
    run.keep(Config())
    run.close()
    Path("runs/dense.txt").touch()
    for command in (
        ["rollouts", "runs/dem"],
        ["export", "runs/dem", "model"],
        ["export", "run/demo:3", "model"],
        ["train", "--from", "runs/dem:best"],
        ["train", "--resume", "runs/dem"],
        ["config", "runs/dem"],
        ["runs", "runs/dem"],
        ["replay", "runs/dem", "--step", "1"],
    ):
        assert main(command) == 2, command
        said = capsys.readouterr().err
        assert said.endswith(". Fix: write runs/demo\n"), said
        assert "begin from" not in said
    with pytest.raises(PlaceError, match=r"runs holds no run \(no config\.json in it\)\. Fix: check the path"):
        RunFolder.config(Path("runs"))
    assert main(["rollouts", "elsewhere/entirely"]) == 2
    assert "(there is no such folder). Fix: check the path" in capsys.readouterr().err


def asked(name: str) -> list[str]:
    """What `strop export`, `--from`, `strop eval` and `strop chat` take."""
    commands = argparse.ArgumentParser().add_subparsers()
    chatting.add(commands)
    chat = commands.choices["chat"].parse_args([name])
    ours = [str(found) for found in (require_checkpoint(name, best=False), find_source(name)[1])]
    return [*ours, find_model(Config(), name, best=False), chatting.read_config(chat).policy.model]


def test_the_result_of_a_run_that_collapsed_is_its_last_good_checkpoint(tmp_path: Path, capsys) -> None:
    """Whoever asks; resumed, it goes on from the newest."""
    place = tmp_path / "run"
    run = RunFolder.create(place)
    run.keep(Config())
    for name in ("step-000002-1", "step-000008-1", "step-000009-1"):
        run.checkpoint(name).mkdir()

    def taken(summary: dict[str, str | None]) -> tuple[str, str]:
        (place / "summary.json").write_bytes(msgspec.json.encode(summary))
        (one,) = {Path(found).name for found in asked(str(place))}
        return one, capsys.readouterr().err

    fallen: dict[str, str | None] = {"collapsed": "no rollout ...", "checkpoint": "step-000002-1"}
    assert taken(fallen) == ("step-000009-1", ""), "somebody has resumed it"
    run.close()
    said = f"strop: {place} collapsed: taking step-000002-1, its last good checkpoint; {place}:STEP names another\n"
    assert taken(fallen) == ("step-000002-1", said * 4)
    assert RunFolder.last_checkpoint(place).name == "step-000009-1"
    for lost in (None, "step-000005-1"):
        name, said = taken(fallen | {"checkpoint": lost})
        assert name == "step-000009-1"
        assert "collapsed: taking step-000009-1, as no good one is left;" in said
    assert taken({"collapsed": None, "checkpoint": "step-000002-1"}) == ("step-000009-1", "")
    assert {Path(found).name for found in asked(f"{place}:8")} == {"step-000008-1"}
    assert not capsys.readouterr().err
    assert find_model(Config(), "strop/nano", best=False) == "strop/nano"
