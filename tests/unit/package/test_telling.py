"""What commands say beside their work: at a run's end, before a chat, below figures, when they stop or refuse."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from strop import demo
from strop.cli import chat_loop, eval, main, training_run
from strop.config import Config
from strop.monitor.evaluations import Evaluation, EvaluationReport
from strop.monitor.statistics import Score
from strop.monitor.summary import Summary, summarize
from strop.run import loop
from strop.run.chat import Chat
from strop.run.folder import RunFolder
from tests.unit.run.chat.stand import scripted


def ended(folder: Path, config: Config) -> Summary:
    place = RunFolder.create(folder)
    place.keep(config)
    place.close()
    return summarize(config, folder, [], {(0, "test"): {"reward": 0.5}}, seconds=1.0, done=True)


@pytest.mark.parametrize(("agent", "with_agent"), [("a.py:agent", True), (demo.AGENT, False)])
def test_a_run_says_how_to_talk_to_what_it_trained(
    agent: str, with_agent: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent's model is lost without its tools; the demo's are known to the chat."""
    summary = ended(tmp_path / "run", Config(agent=agent, tasks="t.jsonl"))
    summary.checkpoint = "step-000001-1"
    training_run.print_summary(summary, tmp_path / "run", argparse.Namespace(json=False))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "to talk to it" in line]
    assert line.rstrip().endswith(f"chat {tmp_path / 'run'}" + " --agent" * with_agent)


async def test_a_chat_says_that_there_are_no_tools(tmp_path: Path) -> None:
    async with scripted(tmp_path, []) as session:
        assert "no tools: --tools; /help" in chat_loop._introduction(Chat(session), session)
        with_tools = chat_loop._introduction(Chat(session, tools=demo.TOOLS), session)
        assert ("with calculator" in with_tools, "no tools" in with_tools) == (True, False)
        session = replace(session, config=replace(session.config, agent="a.py:agent"))  # a run's
        assert "no tools: --tools or --agent; /help" in chat_loop._introduction(Chat(session), session)


@pytest.mark.parametrize("low", [None, 0.25])
def test_brackets_are_explained_where_there_are_some(low: float | None, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {f"val-core/test/reward/{measure}@1": Score(0.5, low, 0.75) for measure in ("mean", "pass")}
    one = Evaluation(number=1, model="m", weights="m", way="trained", history="sampled", folder="f")
    one.rewards, one.scores = {"test": {"reward": {"t": [0.5]}}}, scores
    said: dict[str, Any] = {"agent": "a", "tasks": "t", "seed": 0, "samples": 1, "threshold": 1.0, "measure": "mean@1"}
    eval._print_report(EvaluationReport(split="test", reward="reward", evaluations=[one], comparisons=[], **said))
    out = capsys.readouterr().out
    assert ("In brackets" in out, "mean@1: what a sample earns" in out) == (low is not None, True)


def test_a_taken_place_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "strop.learner.export", None)  # cannot be imported
    assert main(["export", str(tmp_path), str(tmp_path)]) == 2
    assert f"{tmp_path} is there already" in capsys.readouterr().err


def test_a_stop_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def pressed_twice(*_: object, stop: asyncio.Event, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)

    monkeypatch.setattr(loop, "train", pressed_twice)
    (tmp_path / "config.json").touch()
    with pytest.raises(KeyboardInterrupt):
        training_run.run_training(Config(folder=str(tmp_path)), argparse.Namespace(json=False))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("stopping after this step, with a checkpoint") == 1
    assert "press Ctrl-C again to stop at once" in said


def test_a_run_that_had_not_begun_is_stopped_at_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def pressed_while_loading(config: Config, *_: object, **__: object) -> None:
        RunFolder.create(config.folder).close()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)

    monkeypatch.setattr(loop, "train", pressed_while_loading)
    given = ["strop.demo:agent", "--tasks", "strop.demo:tasks", "--folder", str(tmp_path / "runs" / "new")]
    assert main(["train", *given]) == 130
    said = capsys.readouterr()
    assert "--resume" not in said.out + said.err
    assert said.err == "strop: stopped; the run had not begun, and nothing of it is kept\n"
    assert not (tmp_path / "runs").exists()
