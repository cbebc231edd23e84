"""The commands that share a store between processes, as a user types them: serve, enqueue, runner, rollouts."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import runs

AGENTS = """
import os, sys, time

def agent(task, llm):
    print("working on", task.id)
    assert "STROP_KEY" not in os.environ and "STROP_URL" not in os.environ
    if task.data["n"] == 3:
        raise ValueError("three is too much")
    llm.reward("style", 0.5)
    return {"reward": task.data["n"] % 2, "pid": os.getpid()}

async def quick(task, llm):
    return 1.0

def slow(task, llm):
    open(f"{task.data['folder']}/{task.id}", "w").close()
    time.sleep(600)

def answer(task, llm):
    return {"text": f"answer {task.data['n']}"}

def score(task, answer):
    return len(answer["text"])
"""


class Place:
    """A folder with agents and tasks, and a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "agents.py").write_text(AGENTS)
        (folder / "tasks.jsonl").write_text("".join(f'{{"id": "t{n}", "n": {n}}}\n' for n in range(6)))
        (folder / "wrong-key").write_text("wrong\n")
        self.server = self.popen("serve", "--folder", "served", "--port", 0, "--json")
        assert self.server.stdout is not None
        self.said = json.loads(self.server.stdout.readline())
        self.environment = os.environ | {"STROP_URL": self.said["url"], "STROP_KEY": self.said["key"]}

    def popen(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            runs.strop(*arguments),
            cwd=self.folder,
            env=getattr(self, "environment", None),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            runs.strop(*arguments),
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done

    def rollouts(self, *arguments: object) -> list[dict]:
        listed = self.run("rollouts", *arguments, "--json").stdout
        return [json.loads(line) for line in listed.splitlines()]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.server.terminate()
    _, stderr = place.server.communicate(timeout=30)
    assert place.server.returncode == 0
    assert not stderr


def test_queue_here_run_there_look_at_it(place: Place):
    queued = json.loads(place.run("enqueue", "--tasks", "tasks.jsonl", "--members", 2, "--name", "a", "--json").stdout)
    assert queued == {"name": "a", "tasks": 6, "rollouts": 12, "queued": 12}
    again = place.run("enqueue", "--tasks", "tasks.jsonl", "--members", 2, "--name", "a").stdout
    assert "queued 0 rollouts of 6 tasks as a-*; 12 were there already" in again
    (place.folder / "other.jsonl").write_text('{"id": "o", "n": 9}\n')
    assert "used for other tasks" in place.run("enqueue", "--tasks", "other.jsonl", "--name", "a", code=2).stderr
    done = place.run("runner", "--agent", "agents.py:agent", "--workers", 4, "--until-empty", "--json")
    assert json.loads(done.stdout) == {"leased": 12, "succeeded": 10, "agent_error": 2}
    found = place.rollouts()[::-1]  # the newest come first
    assert [r["id"] for r in found] == [f"a-{n:06d}.{m}" for n in range(6) for m in range(2)]
    rewards = {r["name"]: r["value"] for r in found[2]["rewards"]}
    assert (rewards["style"], rewards["reward"]) == (0.5, 1.0)
    shown = place.run("rollouts", "a-000003.0").stdout  # $STROP_URL says where
    assert "working on t3" in shown  # what it printed
    assert "ValueError: three is too much" in shown  # and why it failed
    assert [r["id"] for r in place.rollouts("--status", "failed")] == ["a-000003.1", "a-000003.0"]


def test_a_command_and_a_reward_function(place: Place):
    place.run("enqueue", "--tasks", "tasks.jsonl", "--name", "a")
    place.run("runner", "--agent", "agents.py:answer", "--reward", "agents.py:score", "--until-empty")
    assert {r["rewards"][0]["value"] for r in place.rollouts()} == {8.0}
    place.run("enqueue", "--tasks", "tasks.jsonl", "--name", "b")
    program = "sh -c 'cat >&2; echo; echo $STROP_ROLLOUT; echo 0.25'"
    place.run("runner", "--agent", program, "--workers", 2, "--until-empty")
    assert {r["rewards"][0]["value"] for r in place.rollouts("--limit", 6)} == {0.25}
    shown = place.run("rollouts", place.said["url"], "b-000004.0").stdout
    assert "b-000004.0\n" in shown
    assert '"n":4' in shown


def test_many_at_once_in_one_loop(place: Place):
    place.run("enqueue", "--tasks", "tasks.jsonl", "--members", 50, "--name", "a")
    options = ["--workers", 300, "--set", "runner.agents_in=loop", "--until-empty", "--json"]
    done = place.run("runner", "--agent", "agents.py:quick", *options)
    assert json.loads(done.stdout) == {"leased": 300, "succeeded": 300}


def test_a_runner_that_is_told_to_stop_gives_its_work_back(place: Place):
    tasks = "".join(f'{{"id": "s{n}", "folder": "{place.folder}"}}\n' for n in range(2))
    (place.folder / "slow.jsonl").write_text(tasks)
    place.run("enqueue", "--tasks", "slow.jsonl", "--name", "a")
    runner = place.popen("runner", "--agent", "agents.py:slow", "--set", "runner.drain=0.2", "--json")
    deadline = time.monotonic() + 60
    while not all((place.folder / f"s{n}").exists() for n in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    runner.send_signal(signal.SIGTERM)
    stdout, stderr = runner.communicate(timeout=60)
    assert (runner.returncode, stderr) == (130, "")
    assert json.loads(stdout)["leased"] == 2
    assert [(r["status"], r["cause"]) for r in place.rollouts()] == [("queued", None)] * 2  # at once, no lease to await
    shown = place.run("rollouts", place.said["url"], "a-000000.0", "--json").stdout
    assert [a["cause"] for a in json.loads(shown)["attempts"]] == ["interrupted"]


@pytest.mark.slow
def test_a_runner_waits_for_its_server(place: Place):
    place.run("enqueue", "--tasks", "tasks.jsonl", "--name", "a")
    place.server.terminate()
    place.server.communicate(timeout=30)
    runner = place.popen("runner", "--agent", "agents.py:quick", "--until-empty", "--json")
    time.sleep(8)  # longer than a command that is only asked once would wait
    assert runner.poll() is None
    port = place.said["url"].rpartition(":")[2]
    place.server = place.popen("serve", "--folder", "served", "--port", port, "--json")
    stdout, _ = runner.communicate(timeout=60)
    assert json.loads(stdout) == {"leased": 6, "succeeded": 6}


def test_following_shows_what_changes(place: Place):
    follow = place.popen("rollouts", "--follow", "--json")
    time.sleep(1.5)
    place.run("enqueue", "--tasks", "tasks.jsonl", "--name", "a")
    place.run("runner", "--agent", "agents.py:quick", "--until-empty")
    time.sleep(1.0)
    follow.send_signal(signal.SIGINT)
    stdout, _ = follow.communicate(timeout=30)
    last = {r["id"]: r["status"] for r in map(json.loads, stdout.splitlines())}
    assert last == {f"a-{n:06d}.0": "succeeded" for n in range(6)}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["runner", "--agent", "agents.py:agent", "--key-file", "wrong-key"], 1, "the key does not open the store"),
        (["runner", "--agent", "agents.py:nobody"], 2, "agents.py has no 'nobody'"),
        (["runner", "--agent", "no-such-program --x"], 2, "no-such-program"),
        (["runner"], 2, "which agent?"),
        (["runner", "--agent", "agents.py:agent", "--workers", 0], 2, "runner.workers"),
        (["runner", "--agent", "agents.py:agent", "--url", "127.0.0.1:8640"], 2, "Fix: write http://127.0.0.1:8640"),
        (["runner", "--agent", "agents.py:agent", "--url", "served"], 2, "http://"),
        (
            ["serve", "--store", "mysql://me:secret@x/y"],
            2,
            "'mysql://me@x/y' is not a database. Fix: write postgresql://",
        ),
        (["enqueue", "--tasks", "nothing.jsonl"], 2, "nothing.jsonl"),
        (["enqueue", "--tasks", "tasks.jsonl", "--members", 0], 2, "at least 1"),
        (["enqueue", "--tasks", "tasks.jsonl", "--split", "test"], 2, "no task of split 'test'"),
        (["serve", "--folder", "served", "--port", 0], 2, "another process is at work"),
        (["serve", "--folder", "other", "--host", "300.1.1.1"], 2, "300.1.1.1"),
        (["rollouts", "nowhere", "x"], 2, "holds no run"),
    ],
)
def test_what_users_get_wrong_is_one_sentence(place: Place, arguments: list, code: int, says: str):
    done = place.run(*arguments, code=code)
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_store_that_is_taken_away_ends_its_server(tmp_path: Path, how: str):
    command = runs.strop("serve", "--folder", tmp_path / "served", "--port", 0, "--json")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline()
    store = tmp_path / "served" / "store.sqlite"
    copy = store.read_bytes()
    store.unlink()
    if how == "replaced":
        store.write_bytes(copy)
    try:
        _, stderr = server.communicate(timeout=30)
    finally:
        server.kill()
    assert server.returncode == 2
    assert "removed or replaced while it was in use" in stderr
    assert stderr.count("\n") == 1


def test_an_unknown_rollout_is_one_sentence(place: Place):
    done = place.run("rollouts", "nobody", code=1)
    assert "there is no rollout 'nobody'" in done.stderr
