"""`strop rollouts`: which are listed, in which order, and what is said of them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from strop.cli import main
from strop.config import AlgorithmConfig, Config
from strop.run.folder import RunFolder
from strop.store import open_store
from strop.tasks.sampling import evaluation, group
from strop.types import Policy, Reward, Step, Task, Turn

TASKS = [Task(id="t0"), Task(id="t1"), Task(id="t2", split="test")]
FIX = (
    "the tool's server does not answer at http://127.0.0.1:9000/mcp after three tries; Fix: start it with `make tools`"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of a group of two each, evaluated before, between and after."""
    folder = tmp_path_factory.mktemp("listing") / "run"
    place = RunFolder.create(folder)
    place.keep(Config(algorithm=AlgorithmConfig(rewards={"right": 1.0, "style": 0.5})))
    place.close()
    asyncio.run(_fill(folder))
    return folder


async def _fill(folder: Path) -> None:
    store = await open_store(folder)
    try:
        await store.put_policy(Policy(name="main", version="1.0", model="strop/nano"))
        for number in (0, 1, 2):
            if number:
                made = group(TASKS[:2], seed=0, n=number - 1, members=2)
                await store.enqueue(made)
                for one, value in zip(made, (0.0, number / 2), strict=True):
                    await _end(store, one.id, value)
                ids = [rollout.id for rollout in made]
                step = Step(lineage=1, number=number, rollouts=ids, metrics={}, time=time.time())
                await store.commit_step(step)
            for greedy in (False, True):
                given = {"seed": 0, "version": f"1.{number}", "step": number, "split": "test"}
                asked = evaluation(TASKS, greedy=greedy, **given)  # type: ignore[arg-type]
                await store.enqueue(asked)
                await _end(store, asked[0].id, 1.0)
        await store.enqueue(group(TASKS[:2], seed=0, n=2, members=2))
        (lease,) = await store.lease("r", seconds=60)
        await store.finish(lease.rollout.id, 1, cause="agent_error", detail=f"Traceback ...\n  line\nToolError: {FIX}")
    finally:
        await store.close()


async def _end(store, id: str, value: float) -> None:  # type: ignore[no-untyped-def]
    (lease,) = await store.lease("r", seconds=60)
    assert lease.rollout.id == id
    ids = {"prompt_ids": [5, 6, 7], "response_ids": [8], "logprobs": [-0.1], "versions": [(0, "1.0")]}
    prompt = [{"role": "prompt", "content": [5, 6, 7]}]
    turn = Turn(id=f"{id}/0", rollout=id, attempt=1, messages=prompt, finish="stop", started=0.0, ended=1.0, **ids)
    await store.add_turns([turn])
    await store.finish(id, 1, rewards=[Reward(name="right", value=value), Reward(name="style", value=0.2)])


def listed(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> list[str]:
    assert main(["rollouts", str(run), "--json", *arguments]) == 0
    return [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        ([], "g000002.1 g000002.0 g000001.1 g000001.0 g000000.1 g000000.0"),
        (["--limit", "2"], "g000002.1 g000002.0"),
        (["--limit", "2", "--after", "g000002.0"], "g000001.1 g000001.0"),
        (["--mode", "eval"], "e1.2-test-sampled.0000 e1.1-test-sampled.0000 e1.0-test-sampled.0000"),
        (["--step", "1"], "g000000.1 g000000.0"),
        (["--step", "2", "--mode", "all"], "e1.2-test-greedy.0000 e1.2-test-sampled.0000 g000001.1 g000001.0"),
        (["--step", "0", "--mode", "greedy"], "e1.0-test-greedy.0000"),
        (["--reward", ">0.55"], "g000001.1 g000000.1"),  # the total: 1 + 0.1 and 0.5 + 0.1
        (["--reward", ">=1"], "g000001.1"),
        (["--reward", "<0.5"], "g000001.0 g000000.0"),
        (["--reward", "right=0.5"], "g000000.1"),
        (["--reward", "style>1"], ""),
        (["--reward", ">0.5", "--limit", "1"], "g000001.1"),
        (["--reward", ">0.5", "--limit", "1", "--after", "g000001.1"], "g000000.1"),
        (["--status", "failed"], "g000002.0"),
        (["--status", "queued"], "g000002.1"),
    ],
)
def test_which_are_listed(run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], ids: str) -> None:
    assert listed(capsys, run, *arguments) == ids.split()


def test_all_are_listed_where_nothing_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def fill() -> None:
        store = await open_store(tmp_path)
        await store.enqueue(evaluation(TASKS, seed=0, version="1.0", step=0, split="test", greedy=True))
        await store.close()

    asyncio.run(fill())
    assert listed(capsys, tmp_path) == ["e1.0-test-greedy.0000"]


def test_why_one_failed_is_said_to_its_end(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), "--status", "failed"]) == 0
    assert f"agent_error: ToolError: {FIX}" in capsys.readouterr().out


def test_what_else_there_is_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), "--limit", "3"]) == 0
    said = capsys.readouterr()
    assert "--after g000001.1" in said.err
    assert "--mode eval" in said.err
    assert "e1.0" not in said.out


def test_a_prompt_that_was_given_as_ids_is_shown_as_such(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), "g000000.0"]) == 0
    assert "3 token ids: 5 6 7" in capsys.readouterr().out


def test_what_cannot_be_asked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(run), "--step", "9"]) == 1
    assert "no step 9: 2 were made" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["rollouts", str(run), "--reward", "much"])
    assert "'>0.5'" in capsys.readouterr().err
