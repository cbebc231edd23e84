"""A run whose agent is a command in containers, from the command line: it is trained, and they see nothing of it."""

import json
import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests import runs

PYTHON = "/usr/bin/python3"
AGENT = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
body = {"model": os.environ["STROP_MODEL"], "messages": [{"role": "user", "content": task["data"]["question"]}]}
head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("seen", sorted(os.listdir("runs")), os.listdir("runs/mine"), file=sys.stderr)
print(json.dumps({"reward": len(said) % 5}))
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed (make sandbox)")
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="there is no Python below /usr")
def test_a_command_in_containers_is_trained(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"id": "t{n}", "question": "{n} + 1?"}}\n' for n in range(4)))
    settings = ["loop.steps=2", "loop.groups=2", "loop.group_size=4", "runner.workers=4", "policy.model=strop/nano"]
    settings += ["runner.container.runtime=bubblewrap", "policy.train.max_tokens=8", "loop.eval_splits=[]"]
    command = runs.strop("train", f"{PYTHON} agent.py", "--tasks", "tasks.jsonl", "--folder", "runs/mine", "--json")
    runs.finish([*command, *(f"--set={setting}" for setting in settings)], cwd=tmp_path)
    store = tmp_path / "runs" / "mine" / "store.sqlite"
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as db:
        assert db.execute("SELECT count(*) FROM steps").fetchone() == (2,)
        assert db.execute("SELECT count(*) FROM rollouts WHERE status = 'succeeded'").fetchone() == (16,)
        assert db.execute("SELECT count(*) FROM turns").fetchone() == (16,)
        said = [json.loads(data) for (data,) in db.execute("SELECT data FROM events WHERE kind = 'message'")]
    assert {one["text"] for one in said if one["stream"] == "stderr"} == {"seen ['mine'] []\n"}
    assert oct(os.stat(store.parent).st_mode & 0o777) == "0o700"


def test_a_python_function_is_refused_before_anything_begins(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def solve(task, llm): return 1\n")
    (tmp_path / "tasks.jsonl").write_text('{"id": "t", "n": 1}\n')
    command = runs.strop("train", "agent.py:solve", "--tasks", "tasks.jsonl", "--set", "runner.container.runtime=auto")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "runner.container is for agents that are commands" in done.stderr
    assert not list(tmp_path.glob("runs/*/store.sqlite"))
