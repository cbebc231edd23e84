"""A reward that is finite but huge would end training, and every resume again: it is refused where it enters."""

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from tests import runs

AGENT = """
def agent(task, llm):
    llm.client().chat.completions.create(model=llm.model, max_tokens=4, messages=[{"role": "user", "content": "Hi"}])
    number = int(llm.rollout.rpartition(".")[2])
    if number == 0:
        return 1.7e308
    if number == 1:
        llm.reward("reward", 1e39)
    return number / 4
"""


def test_a_run_goes_on_without_what_gave_a_huge_reward(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    command = runs.strop("train", tmp_path / "agent.py:agent", "--tasks", tmp_path / "tasks.jsonl")
    settings = ["policy.model=strop/nano", "loop.steps=2", "loop.groups=1", "loop.group_size=4", "loop.eval_splits=[]"]
    done = runs.finish([*command, "--folder", str(tmp_path / "run"), "--json", *(f"--set={one}" for one in settings)])
    assert json.loads(done.stdout)["steps"] == 2
    for rollout in runs.story(tmp_path / "run").rollouts:
        if rollout.member < 2:
            assert (rollout.status, rollout.cause) == ("failed", "bad_reward")
            assert "give a number between" in (rollout.detail or "")
        else:
            assert (rollout.status, rollout.reward()) == ("succeeded", rollout.member / 4)


@pytest.mark.fault
def test_a_store_from_before_the_bound_can_be_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert runs.kill_when(runs.demo(folder, *runs.SMALL), runs.during_step(folder, 2, ended=3))
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite")) as db:
        (id,) = db.execute(
            "SELECT id FROM rollouts WHERE mode = 'train' AND status = 'succeeded'"
            " AND id NOT IN (SELECT rollout FROM consumed) ORDER BY id LIMIT 1"
        ).fetchone()
        db.execute("UPDATE rollouts SET rewards = json_set(rewards, '$[0].value', 1.7e308) WHERE id = ?", (id,))
        db.commit()
    runs.finish(runs.strop("train", "--resume", folder, "--json"))
    told = runs.story(folder)
    assert len(told.steps) == 4
    step = next(step for step in told.steps if id in [*step.rollouts, *step.dropped])
    assert step.dropped[id] == "failed:bad_reward"
