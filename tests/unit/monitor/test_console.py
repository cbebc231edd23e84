"""What users see: on a terminal, in a pipe, and what machines get."""

import argparse
import io
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from strop import demo
from strop.cli import training_run
from strop.monitor import console as view
from strop.monitor import metrics
from strop.monitor.summary import summarize
from strop.run.folder import RunFolder
from strop.types import Step
from tests import runs

METRICS = {"critic/rewards/mean": 0.25, "actor/entropy": 0.5, "timing_s/step": 2.0, "failed/timeout": 3.0}


def show(console: Console, *, broken: bool = False) -> None:
    panel = view.Panelled(console)
    try:
        with panel:
            panel.title("runs/demo", 10)
            panel.show_past([(1, METRICS)])
            panel.phase("collecting", 3, 8, [("g000001.2", 75.0), ("g000001.3", 1.0)])
            panel.step(2, METRICS | {"critic/rewards/mean": 0.75})
            panel.evaluation(2, {"test reward": 0.5})
            panel.note("take care")
            panel._live.refresh()
            if broken:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert broken


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_fits_the_terminal(width: int) -> None:
    out = io.StringIO()
    show(Console(file=out, force_terminal=True, width=width, height=30, color_system=None))
    text = out.getvalue()
    for piece in ("runs/demo", "step 2/10", "left", "0.750", "test reward", "! take care", "failed 3", "done"):
        assert piece in text
    assert max(len(line) for line in text.splitlines() if line.startswith("│")) <= width


@pytest.mark.parametrize("width", range(40, 141, 5))
def test_a_label_and_its_value_stand_on_one_line(width: int) -> None:
    shown = dict.fromkeys(view.SHOWN, 4.91)
    out = io.StringIO()
    panel = view.Panelled(Console(file=out, force_terminal=True, width=width, height=30, color_system=None))
    with panel:
        panel.step(2, {"critic/rewards/mean": 0.25, **shown, **{f"policies/writer/{name}": 4.91 for name in shown}})
    lines = out.getvalue().splitlines()
    for name, label in view.SHOWN.items():
        figure = "5" if name in view.COUNTS else "4.910"
        assert any(f"{label} {figure}" in line for line in lines), label


def test_the_panel_names_what_is_waited_for() -> None:
    out = io.StringIO()
    show(Console(file=out, force_terminal=True, width=80, height=30, color_system=None))
    assert "g000001.2 for 1:15" in out.getvalue()
    assert "g000001.3" not in out.getvalue()  # a second is nothing to speak of


def test_a_reward_with_the_same_figures_as_one_before_it_is_not_shown() -> None:
    out = io.StringIO()
    panel = view.Panelled(Console(file=out, force_terminal=True, width=80, height=30, color_system=None))
    with panel:
        for step, right in ((0, 0.3), (5, 0.75)):
            panel.evaluation(step, {"test reward": 0.25 + step / 10, "test right_call": right})
            panel.evaluation(step, {"test-greedy reward": 0.5, "test-greedy right_call": 0.5})
        panel._live.refresh()
    text = out.getvalue()
    assert "test right_call" in text  # at the end it is the same, but it was not at the beginning
    assert "test-greedy reward" in text
    assert "test-greedy right_call" not in text


def test_the_demo_ends_on_what_can_be_learnt() -> None:
    assert demo.config("calc").loop.eval_splits == demo.config("chain").loop.eval_splits == ("test",)


@pytest.mark.parametrize("width", [80, 120])
def test_the_end_of_a_run_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.argv", ["strop"])
    monkeypatch.chdir(tmp_path)
    scores = {
        (step, split): {"reward": r, "right_call": r} for step, r in ((0, 0.25), (24, 1.0)) for split in ("test",)
    }
    config = demo.config()
    steps = [Step(lineage=1, number=24, rollouts=[], metrics={}, checkpoint="step-000024-1", time=0.0)]
    run = RunFolder.create("runs/demo")
    run.keep(config)
    run.close()
    summary = summarize(config, tmp_path, steps, scores, seconds=100.0, done=True)
    training_run.print_summary(summary, Path("runs/demo"), argparse.Namespace(json=False))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line.endswith("runs/demo/checkpoints/step-000024-1")]
    assert [line for line in lines if line.endswith("strop chat runs/demo")]
    assert not [line for line in lines if "right_call" in line]


def test_a_stopped_run_does_not_say_that_it_is_done() -> None:
    out = io.StringIO()
    show(Console(file=out, force_terminal=True, width=80, height=30, color_system=None), broken=True)
    assert "stopped" in out.getvalue()
    assert "done" not in out.getvalue()


def test_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    lines = view.choose(json=False, out=out)
    lines.title("runs/demo", 10)
    lines.step(1, METRICS)
    assert out.getvalue().splitlines()[-1] == "step 1/10  reward 0.250  entropy 0.500  s/step 2.000  failed 3"


def test_a_run_on_stored_data_shows_its_loss() -> None:
    metrics = {"actor/sft_loss": 0.75, "actor/entropy": 0.5, "timing_s/step": 2.0}
    out = io.StringIO()
    lines = view.choose(json=False, out=out)
    lines.title("runs/taught", 10)
    lines.step(1, metrics)
    assert out.getvalue().splitlines()[-1] == "step 1/10  loss 0.750  entropy 0.500  s/step 2.000"
    screen = io.StringIO()
    with view.Panelled(Console(file=screen, force_terminal=True, width=80, height=30, color_system=None)) as panel:
        panel.show_past([(1, metrics)])
        panel.step(2, metrics | {"actor/sft_loss": 0.5})
    assert re.search(r"loss +0\.750 \S+ 0\.500", screen.getvalue())
    assert "reward" not in screen.getvalue()


def test_a_run_on_a_real_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    settings = [*runs.SMALL, "loop.steps=1", "loop.eval_splits=[]"]
    command = [word for word in runs.demo(tmp_path / "run", *settings) if word != "--json"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"})
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the terminal is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait() == 0, seen.decode()
    assert "╭" in seen.decode()
    assert b"Traceback" not in seen


def test_metrics_nobody_declared_are_refused(tmp_path: Path) -> None:
    file = metrics.MetricsFile(tmp_path / "m.jsonl", [], {})
    with pytest.raises(AssertionError, match="actor/typo"):
        file.write(1, {"actor/typo": 1.0})


def test_the_metrics_file_is_made_anew_from_the_store(tmp_path: Path) -> None:
    step = Step(lineage=2, number=1, rollouts=[], metrics={"actor/lr": 0.1}, time=0.0)
    (tmp_path / "m.jsonl").write_text("what a killed run left\n")
    metrics.MetricsFile(tmp_path / "m.jsonl", [step], {(0, "test"): {"reward": 0.5}})
    assert (tmp_path / "m.jsonl").read_text().splitlines() == [
        '{"step":0,"val-core/test/reward/mean@1":0.5}',
        '{"step":1,"actor/lr":0.1}',
    ]


def test_each_of_several_policies_has_a_line_of_its_own() -> None:
    found = {"actor/skipped": 0.0, "critic/rewards/mean": 0.5, "timing_s/step": 2.0}
    own = {"policies/writer/actor/entropy": 0.25, "policies/writer/actor/skipped": 0.0}
    silent = {"policies/critic/actor/skipped": 1.0, "policies/critic/filter/untrained": 12.0}
    out = io.StringIO()
    lines = view.Lines(out)
    lines.title("two", 3)
    lines.step(1, found | own | silent)
    assert out.getvalue().splitlines() == [
        "two",
        "step 1/3  reward 0.500  s/step 2.000",
        "  writer:  entropy 0.250",
        "  critic:  nothing to train on",
    ]


def test_a_plan_stays_above_the_panel() -> None:
    screen = io.StringIO()
    with view.Panelled(Console(file=screen, force_terminal=True, width=80, height=30, color_system=None)) as panel:
        panel.plan([f"rank {number} on 10.0.0.7: 1 CPU" for number in range(9)])
        panel.title("a run", 3)
    shown = screen.getvalue()
    assert all(shown.count(f"rank {number} on 10.0.0.7: 1 CPU") == 1 for number in range(9))
    out = io.StringIO()
    view.Lines(out).plan(["rank 0 on 10.0.0.7: 1 CPU"])
    assert out.getvalue() == "note: plan: rank 0 on 10.0.0.7: 1 CPU\n"
