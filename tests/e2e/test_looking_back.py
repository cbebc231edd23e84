"""What a run leaves and what can be done with it: one run, killed and resumed, looked at from every side."""

import fcntl
import json
import shutil
import sqlite3
import struct
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from strop.cli import main
from tests import runs
from tests.runs import SMALL

pytestmark = pytest.mark.slow  # the run that all of them look at is killed, resumed and replayed

WRITERS = [name for name in ("tensorboard", "wandb", "mlflow") if find_spec(name)]
REWARDS = """
def same(task, answer):
    return {"style": 1.0, "reward": float(str(task.data["answer"]) in answer)}

def turns(task, answer, turns):
    assert answer == (turns[-1].answer.get("content") or "")
    return float(len(turns))

async def picky(task, answer):
    if task.id.endswith("1"):
        raise ValueError("not this one")
    return 0.5

def raises(task, answer):
    raise ValueError("no taste")

def asks(task, answer, llm):
    return 1.0

def style(task, answer):
    return {"style": 1.0}

def text(task, answer):
    return "good"
"""


class Past(NamedTuple):
    folder: Path
    while_stopped: dict[str, Any]


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    """Killed while step 4 was collected, so that step 3 is replayed, and resumed to its end."""
    folder = tmp_path_factory.mktemp("looking") / "run"
    writers = f"monitor.writers={json.dumps(WRITERS)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        assert runs.kill_when(runs.demo(folder, *SMALL, writers), runs.during_step(folder, 4, ended=2))
        stopped = json.loads(runs.finish(runs.strop("runs", folder, "--json")).stdout)
        done = runs.finish(runs.strop("train", "--resume", folder))
    assert f"{folder}/transcripts.md" in done.stdout
    return Past(folder, stopped)


@pytest.fixture(scope="module")
def other(past: Past) -> Path:
    """A run of one step beside it."""
    folder = past.folder.with_name("other")
    runs.finish(runs.demo(folder, *SMALL, "loop.steps=1", "algorithm.name=rloo", seed=1))
    return folder


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    file = tmp_path / "rewards_to_try.py"
    file.write_text(REWARDS)
    return file


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> str:
    """What a command prints, or its sentence if it must fail."""
    capsys.readouterr()
    assert main(list(map(str, arguments))) == code
    out, err = capsys.readouterr()
    if code != 2:
        return out
    assert err.startswith("strop: ")
    assert len(err.splitlines()) == 1
    return err


def fingerprint(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def metrics(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """metrics.jsonl by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        step = values.pop("step")
        for name, value in values.items():
            found.setdefault(name, []).append((step, value))
    return found


# -- strop runs --------------------------------------------------------------------------------------------------------


def test_runs_are_listed_with_what_they_came_to(
    past: Past, other: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(past.folder)
    lines = said(capsys, "runs", past.folder.parent, "--json").splitlines()
    first, second = map(json.loads, lines)  # the earlier one first
    summary = json.loads((past.folder / "summary.json").read_text())
    points = metrics(past.folder)["val-core/test/reward/mean@1"]
    assert (first["name"], second["name"]) == (str(past.folder), str(other))
    assert (first["state"], first["steps"], first["of"]) == ("done", 4, 4)
    assert (first["on"], first["start"], first["end"]) == ("test", summary["start"], summary["end"])
    assert first["best"] == max(value for _, value in points)
    assert dict(points)[first["best_step"]] == first["best"]
    assert first["seconds"] == summary["seconds"]
    assert (second["algorithm"], second["of"]) == ("rloo", 1)
    assert fingerprint(past.folder) == before

    monkeypatch.chdir(past.folder.parent.parent)
    (past.folder.parent.parent / "runs").symlink_to(past.folder.parent)
    table = said(capsys, "runs")
    assert "runs/run" in table
    assert "strop/nano" in table


def test_a_run_is_running_while_its_lock_is_held(past: Past, capsys: pytest.CaptureFixture[str]) -> None:
    assert (past.while_stopped["state"], past.while_stopped["steps"]) == ("stopped", 3)
    with (past.folder / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert json.loads(said(capsys, "runs", past.folder, "--json"))["state"] == "running"
    assert json.loads(said(capsys, "runs", past.folder, "--json"))["state"] == "done"


def test_runs_side_by_side(past: Past, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "both.png"
    found = json.loads(said(capsys, "runs", past.folder, other, "--plot", picture, "--json"))
    assert found["settings"]["algorithm.name"] == ["grpo", "rloo"]
    assert found["settings"]["loop.steps"] == [4, 1]
    assert found["settings"]["seed"] == [0, 1]
    assert not {"folder", "loop.groups", "policy.model"} & found["settings"].keys()
    assert [run["steps"] for run in found["runs"]] == [4, 1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = said(capsys, "runs", past.folder, other)
    assert "settings that differ" in shown
    assert "rloo" in shown


def test_runs_that_are_not_there(past: Past, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no folder" in said(capsys, "runs", tmp_path / "nothing", code=2)
    assert "no run" in said(capsys, "runs", tmp_path, code=2)
    assert ".png" in said(capsys, "runs", past.folder, "--plot", "curve.gif", code=2)
    assert "cannot write" in said(capsys, "runs", past.folder, "--plot", tmp_path / "no" / "x.png", code=2)


def test_a_run_without_steps(past: Past, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = tmp_path / "begun"
    (begun / "checkpoints").mkdir(parents=True)
    shutil.copy(past.folder / "config.json", begun)
    found = json.loads(said(capsys, "runs", begun, "--json"))
    assert (found["state"], found["steps"], found["start"], found["best"]) == ("stopped", 0, None, None)
    assert "- → -" in said(capsys, "runs", begun)
    assert "no setting differs" in said(capsys, "runs", begun, past.folder)
    assert "holds no store" in said(capsys, "replay", begun, "--step", "1", code=2)
    (begun / "metrics.jsonl").write_text('{"step":0,"val-core/test/reward/mean@1":0.5}\n{"step":1,"timi')
    found = json.loads(said(capsys, "runs", begun, "--json"))  # half a line is not there yet
    assert (found["start"], found["end"]) == (0.5, None)


# -- transcripts -------------------------------------------------------------------------------------------------------


def test_transcripts_show_the_best_and_the_worst(past: Past) -> None:
    text = (past.folder / "transcripts.md").read_text()
    best, worst = text.partition("## Worst")[::2]
    told = runs.story(past.folder)
    recent = {id for step in told.steps[-3:] for id in step.rollouts}
    rewards = {rollout.id: rollout.reward() for rollout in told.rollouts if rollout.id in recent}
    shown = [[id for id in rewards if f"### {id}:" in part] for part in (best, worst)]
    assert {rewards[id] for id in shown[0]} == {1.0}
    assert {rewards[id] for id in shown[1]} == {0.0}
    assert [len({id.partition(".")[0] for id in ids}) for ids in shown] == [3, 3]
    assert 'calculator({"expression":' in best
    one = told.turns[shown[0][0]]
    assert one[-1].answer["content"] in best
    assert f"{sum(len(turn.response_ids) for turn in one)} tokens sampled" in best
    left_out = {id: reason for step in told.steps for id, reason in step.dropped.items()}
    for id in [*shown[0], *shown[1]]:
        assert ("none trained" in text.partition(f"### {id}:")[2].partition("###")[0]) == (id in left_out)


# -- writers -----------------------------------------------------------------------------------------------------------


def test_tensorboard_has_the_points_of_metrics_jsonl_once(past: Past) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (strop[monitor])")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(past.folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert len(list((past.folder / "tensorboard").iterdir())) == 2  # before the kill and after it
    truth = metrics(past.folder)
    assert set(events.Tags()["scalars"]) == set(truth)
    for name, points in truth.items():
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in points]
        assert [value for _, value in found] == pytest.approx([value for _, value in points])
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["loop.steps"].number_value == 4
    assert settings["engine.deterministic"].bool_value
    assert settings["policy.model"].string_value == "strop/nano"


def test_mlflow_goes_on_with_its_run(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed (strop[monitor])")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(past.folder / "mlruns").as_uri())
    run = client.get_run(json.loads((past.folder / "monitor.json").read_text())["mlflow"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["loop.steps"] == "4"
    truth = {name.replace("@", "_at_"): points for name, points in metrics(past.folder).items()}
    assert set(run.data.metrics) == set(truth)
    for name, points in truth.items():
        found = sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))
        assert [step for step, _ in found] == [step for step, _ in points]
        if not name.startswith(("timing_s/", "perf/")):  # of the replayed step it keeps what was measured first
            assert found == points


def test_wandb_offline_has_the_whole_story_in_its_newest_folder(past: Past) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (strop[monitor])")
    folders = sorted((past.folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1  # one run
    settings, rows = wandb_story(next(folders[-1].glob("*.wandb")))
    assert settings["loop.steps"] == 4
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        step = row["_step"]
        for name in [name for name in row if not name.startswith("_")]:
            found.setdefault(name, []).append((step, row[name]))
    assert found == metrics(past.folder)


def wandb_story(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings and the rows of a .wandb file: a log in LevelDB's format, after seven bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    settings: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # what is left of a block is padding
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(parts)
            parts = b""
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
            if record.HasField("run"):
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return settings, rows


# -- strop replay ------------------------------------------------------------------------------------------------------


def test_another_reward_is_set_against_the_old_one(
    past: Past, rewards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = runs.story(past.folder)
    found = json.loads(said(capsys, "replay", past.folder, "--reward", f"{rewards}:same", "--json"))
    assert len(found["scored"]) == sum(rollout.status == "succeeded" for rollout in told.rollouts)
    assert found["pairs"] == found["alike"] + found["reversed"] + sum(
        one["old"] != two["old"] and one["new"] == two["new"]
        for i, one in enumerate(found["scored"])
        for two in found["scored"][:i]
        if one["group"] == two["group"] and one["mode"] == "train"
    )
    assert found["pairs"] > 0
    assert 0 < found["agreement"] <= 1
    by_id = {rollout.id: rollout for rollout in told.rollouts}
    for one in found["scored"]:
        rollout, turns = by_id[one["rollout"]], told.turns[one["rollout"]]
        assert one["old"] == rollout.reward()
        assert one["new"] == float(str(rollout.task.data["answer"]) in (turns[-1].answer.get("content") or ""))
    counts = Counter(one["mode"] for one in found["scored"])
    assert {mode: row[0] for mode, row in found["means"].items()} == counts
    assert "where they differ most" in said(capsys, "replay", past.folder, "--reward", f"{rewards}:turns")
    after = runs.story(past.folder)
    assert after.rollouts == told.rollouts
    assert after.history == told.history


def test_a_reward_that_fails(past: Past, rewards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = runs.story(past.folder)
    found = json.loads(said(capsys, "replay", past.folder, "--reward", f"{rewards}:picky", "--json"))
    assert set(found["failed"]) == {rollout.id for rollout in told.rollouts if rollout.task.id.endswith("1")}
    assert all("ValueError: not this one" in why for why in found["failed"].values())
    assert found["agreement"] is None  # the same everywhere
    shown = said(capsys, "replay", past.folder, "--reward", f"{rewards}:picky")
    assert f"failed on {len(found['failed'])} rollouts" in shown
    assert "no taste" in said(capsys, "replay", past.folder, "--reward", f"{rewards}:raises", code=2)
    assert "'good'" in said(capsys, "replay", past.folder, "--reward", f"{rewards}:text", code=2)
    assert "llm" in said(capsys, "replay", past.folder, "--reward", f"{rewards}:asks", code=2)
    assert "counts reward" in said(capsys, "replay", past.folder, "--reward", f"{rewards}:style", code=2)
    assert "turns" in said(capsys, "replay", past.folder, "--reward", f"{rewards}:turn", code=2)


@pytest.mark.parametrize(("step", "base"), [(2, 0), (4, 2)])
def test_a_step_made_again_is_bit_for_bit_the_same(
    past: Past, capsys: pytest.CaptureFixture[str], step: int, base: int
) -> None:
    """Step 2 from the model the run began with, since its own checkpoint comes after it; step 4 from that one."""
    before = fingerprint(past.folder)
    found = json.loads(said(capsys, "replay", past.folder, "--step", str(step), "--json"))
    assert (found["differ"], found["same_weights"], found["replay"]["base"]) == ({}, True, base)
    recorded = runs.story(past.folder).steps[step - 1]
    assert found["replay"]["digest"] == [recorded.digest, recorded.digest]
    assert {"actor/pg_loss", "critic/rewards/mean"} <= found["replay"]["metrics"].keys()
    assert fingerprint(past.folder) == before


def test_a_step_that_comes_out_otherwise_is_named(
    past: Past, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(past.folder, folder, symlinks=True)
    db = sqlite3.connect(folder / "store.sqlite")
    with db:
        db.execute("UPDATE steps SET digest = 'another', metrics = json_set(metrics, '$.\"actor/pg_loss\"', 9.0)")
    db.close()
    shown = said(capsys, "replay", folder, "--step", "3", code=1)
    assert "the weights are not those that were recorded" in shown
    assert "actor/pg_loss" in shown


def test_what_cannot_be_replayed(past: Past, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 to 4" in said(capsys, "replay", past.folder, "--step", "9", code=2)
    assert "1 to 4" in said(capsys, "replay", past.folder, "--step", "0", code=2)
    assert "holds no run" in said(capsys, "replay", tmp_path, "--step", "1", code=2)
    assert "holds no run" in said(capsys, "replay", tmp_path, "--reward", "a.py:b", code=2)
    assert "--step" in said(capsys, "replay", past.folder, code=2)
