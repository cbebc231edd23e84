"""What agents and models say is shown, never obeyed: no control character of theirs reaches a terminal or a page."""

import asyncio
import io
import json
from pathlib import Path

import pytest

from strop.cli import main
from strop.config import Config
from strop.errors import AgentError
from strop.monitor import console
from strop.monitor.screen import Screen
from strop.monitor.transcripts import leave
from strop.store.sqlite import SqliteStore
from strop.types import Event, Policy, Reward, Rollout, Step, Task, Turn

EVIL = "\x1b]0;pwned\x07\x9b2J\u202egnp\u2066\rover\x08\x7f"
WRONG = {"\x1b", "\x07", "\x9b", "\u202e", "\u2066", "\r", "\x08", "\x7f"}


def wrong_in(text: str) -> set[str]:
    return WRONG & set(text)


async def fill(folder: Path) -> None:
    """A store with a rollout that succeeded and one that failed, and an agent that had its way everywhere."""
    store = await SqliteStore.open(folder / "store.sqlite")
    task = Task(id=f"t{EVIL}", data={"q": EVIL})
    await store.enqueue([Rollout(id=id, group="g1", member=n, task=task, created=1.0) for n, id in enumerate("ab")])
    await store.put_policy(Policy(name="main", version="1.0", model="m"))
    for lease in await store.lease(f"w{EVIL}", seconds=60, count=2):
        id = lease.rollout.id
        said = {"role": f"r{EVIL}", "content": EVIL}
        turn = Turn(
            id=f"{id}/1/0",
            rollout=id,
            attempt=1,
            agent=f"a{EVIL}",
            policy="main",
            messages=[said],
            prompt_ids=[1],
            response_ids=[2],
            logprobs=[-1.0],
            versions=[(0, "1.0")],
            answer=said | {"tool_calls": [{"function": {"name": EVIL, "arguments": EVIL}}]},
            finish="stop",
            started=1.0,
            ended=2.0,
        )
        await store.add_turns([turn])
        events = [("message", {"stream": "stdout", "text": EVIL}), ("span", {EVIL: EVIL})]
        await store.add_events([Event(rollout=id, attempt=1, kind=kind, data=data, time=1.0) for kind, data in events])
    await store.finish("a", 1, rewards=[Reward(value=1.0)], detail=EVIL)
    await store.finish("b", 1, cause="agent_error", detail=f"ValueError: {EVIL}")
    await store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    asyncio.run(fill(tmp_path))
    return tmp_path


@pytest.mark.parametrize("arguments", [[], ["a"], ["b"], ["a", "--json"], ["--json"]])
def test_rollouts_are_shown_without_their_control_characters(
    folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollouts", str(folder), *arguments]) == 0
    told = capsys.readouterr()
    assert "pwned" in told.out
    assert wrong_in(told.out + told.err) == set()
    if arguments == ["--json"]:  # nothing is lost for machines
        assert json.loads(told.out.splitlines()[0])["task"]["id"] == f"t{EVIL}"


async def test_transcripts_hold_no_control_characters(tmp_path: Path) -> None:
    await fill(tmp_path)
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    step = Step(lineage=1, number=1, rollouts=["a", "b"], dropped={}, metrics={}, time=1.0)
    await leave(tmp_path, store, [step], Config())
    await store.close()
    page = (tmp_path / "transcripts.md").read_bytes().decode()
    assert "pwned" in page
    assert wrong_in(page) == set()


def test_notes_and_titles_of_a_run_hold_none() -> None:
    lines = io.StringIO()
    view = console.Lines(lines)
    view.title(EVIL, 3)
    view.note(EVIL)
    view.evaluation(1, {EVIL: 1.0})
    assert wrong_in(lines.getvalue()) == set()
    drawn = io.StringIO()
    with console.Panelled(Screen(file=drawn, force_terminal=True, width=200)) as panel:
        panel.title(EVIL, 3)
        panel.note(EVIL)
        panel.phase("running agents", 1, 2, [(EVIL, 9.0)])
    assert "pwned" in drawn.getvalue()
    assert "\x1b]" not in drawn.getvalue()  # its own colours are another matter
    assert wrong_in(drawn.getvalue()) <= {"\x1b", "\r"}


def test_errors_say_it_without() -> None:
    assert wrong_in(str(AgentError(f"all failed: {EVIL}"))) == set()
    assert str(AgentError("line\n\ttwo ä 🙂")) == "line\n\ttwo ä 🙂"
