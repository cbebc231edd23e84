"""A real run that is trained to death: warm-up takes the rate higher with every step until the model breaks."""

import json
import subprocess
from pathlib import Path

import pytest

from tests import runs

TOO_HIGH = [
    *("learner.optim.lr=1e-1", "learner.optim.warmup=200", "loop.collapse_patience=3"),
    *("loop.steps=40", "loop.groups=8", "loop.group_size=8", "loop.eval_splits=[]", "loop.checkpoint_every=1"),
    "runner.workers=8",
]


def _fails(*arguments: str | Path) -> str:
    done = subprocess.run(runs.strop(*arguments), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1, (done.returncode, done.stderr)
    return done.stderr


@pytest.mark.slow
def test_a_collapse_is_called_by_name_and_the_last_good_checkpoint_is_the_result(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [f"--set={setting}" for setting in TOO_HIGH]
    said = _fails("demo", "--folder", folder, *settings)
    assert "collapsed: no rollout of steps" in said
    assert f"lower learner.optim.lr (it was 0.1) and begin again: strop train --from {folder}:best --lr 0.01;" in said
    assert "Traceback" not in said

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = {line["step"]: line["critic/rewards/mean"] for line in lines}
    assert len(rewards) < 30, "it was not stopped in time"
    assert [rewards[step] for step in sorted(rewards)[-3:]] == [0.0, 0.0, 0.0]

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["done"] is False
    assert summary["collapsed"] in said
    good = folder / "checkpoints" / summary["checkpoint"]
    assert str(good) in said
    assert (folder / "checkpoints" / "best").resolve() == good.resolve()
    sampled_by_it = int(summary["checkpoint"].split("-")[1]) + 1
    assert rewards[sampled_by_it] == max(reward for step, reward in rewards.items() if step > 1)

    listed = json.loads(runs.finish(runs.strop("runs", tmp_path, "--json")).stdout)
    assert listed["state"] == "collapsed"
    exported = tmp_path / "model"
    runs.finish(runs.strop("export", folder, exported))
    assert (exported / "model.safetensors").read_bytes() == (good / "model.safetensors").read_bytes()

    assert "collapsed: no rollout of steps" in _fails("train", "--resume", folder)
    again = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(again) == max(rewards), "it went on with broken weights"
    assert good.is_dir()
