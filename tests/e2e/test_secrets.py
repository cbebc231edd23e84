"""Keys that are not an agent's are not shown to it: not in its environment, not in what /proc tells of strop's own
processes, not in a command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs

RUN_KEY = "the-run-key-4711"
PROVIDER_KEY = "sk-the-provider-4712"
SECRETS = {"STROP_KEY": RUN_KEY, "PROVIDER_KEY": PROVIDER_KEY, "HARMLESS": "for-everybody-4714"}

SPY = """
import json, os, sys
from pathlib import Path

def read(path):
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""

def parent(pid):
    return int(read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1])

def look(place, name):
    ancestors, pid = [], os.getpid()
    while "strop" in read(Path(f"/proc/{pid}/cmdline")) or pid == os.getpid():
        ancestors.append(pid)
        pid = parent(pid)
    seen = dict.fromkeys(ancestors)  # and whatever else those have started
    for one in sorted(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
        try:
            if parent(one) in seen:
                seen[one] = None
        except (IndexError, ValueError):
            pass
    found = {f"{pid} {what}": read(Path(f"/proc/{pid}/{what}")) for pid in seen for what in ("environ", "cmdline")}
    Path(place, name).write_text(json.dumps({"own": dict(os.environ), **found}))

def agent(task, llm):
    look(task.data["place"], task.id)
    return 1.0

if __name__ == "__main__":
    task = json.load(sys.stdin)
    look(task["data"]["place"], task["id"])
    print(1.0)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "spy.py").write_text(SPY)
    tasks = [{"id": "function", "place": str(tmp_path)}, {"id": "command", "place": str(tmp_path), "agent": "command"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    settings = f'agent = "{tmp_path}/spy.py:agent"\nagents.command = "{sys.executable} {tmp_path}/spy.py"\n'
    outside = '[gateway.outside.big]\nurl = "http://127.0.0.1:9/v1"\nkey_env = "PROVIDER_KEY"\nagents = ["big"]\n'
    (tmp_path / "settings.toml").write_text(settings + outside)
    return tmp_path


def seen(place: Path, name: str) -> str:
    told = json.loads((place / name).read_text())
    assert len(told) >= 5  # the agent's own process, and at least one more of strop's
    assert told["own"]["HARMLESS"] == SECRETS["HARMLESS"]
    return json.dumps(told)


@pytest.mark.parametrize("agents_in", ["processes", "threads"])
def test_agents_of_a_runner_find_neither_the_runs_key_nor_a_providers(place: Path, agents_in: str) -> None:
    (place / "key").write_text(RUN_KEY + "\n")
    serve = runs.strop("serve", "--folder", place / "served", "--port", "0", "--json", "--key-file", place / "key")
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = json.loads(server.stdout.readline())
            assert said["key"] == RUN_KEY
            environment = os.environ | SECRETS | {"STROP_URL": said["url"]}
            for arguments in (
                ["enqueue", "--tasks", place / "tasks.jsonl"],
                [
                    "runner",
                    "--config",
                    place / "settings.toml",
                    "--until-empty",
                    "--set",
                    f"runner.agents_in={agents_in}",
                ],
            ):
                done = subprocess.run(
                    runs.strop(*arguments), env=environment, capture_output=True, text=True, timeout=120, check=False
                )
                assert done.returncode == 0, done.stderr
        finally:
            server.terminate()
    for name in ("function", "command"):
        told = seen(place, name)
        assert RUN_KEY not in told
        assert PROVIDER_KEY not in told


def test_agents_of_a_run_find_neither_the_providers_key_nor_a_runs(place: Path) -> None:
    command = runs.strop("train", "--config", place / "settings.toml", "--tasks", place / "tasks.jsonl", "--json")
    settings = ["policy.model=strop/nano", "loop.steps=1", "loop.groups=2", "loop.group_size=1", "loop.eval_splits=[]"]
    command += ["--folder", str(place / "run"), *(f"--set={one}" for one in settings)]
    done = subprocess.run(
        command, env=os.environ | SECRETS, capture_output=True, text=True, timeout=200, check=False
    )  # nothing is learned from what nobody asked the model, but the agents ran
    for name in ("function", "command"):
        told = seen(place, name)
        assert PROVIDER_KEY not in told, done.stderr
        assert RUN_KEY not in told


def test_a_key_comes_on_stdin_and_never_on_the_command_line(place: Path) -> None:
    url = ["--url", "http://127.0.0.1:9"]
    for command in (["serve"], ["runner", *url], ["enqueue", *url, "--tasks", "x"], ["rollouts"]):
        done = subprocess.run(
            runs.strop(*command, "--key", RUN_KEY), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert "--key-file" in done.stderr
        assert RUN_KEY not in done.stderr
    serve = runs.strop("serve", "--folder", place / "served", "--port", "0", "--json", "--key-file", "-")
    with subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(RUN_KEY + "\n")
        server.stdin.flush()
        assert json.loads(server.stdout.readline())["key"] == RUN_KEY
        server.terminate()
    assert not (place / "served" / "key").exists()


@pytest.mark.parametrize(
    ("written", "says"), [(None, "cannot read"), ("", "holds no key"), ("a b\n", "printable ASCII")]
)
def test_a_key_file_without_a_key_is_called_by_its_name(tmp_path: Path, written: str | None, says: str) -> None:
    if written is not None:
        (tmp_path / "key").write_text(written)
    serve = runs.strop("serve", "--folder", tmp_path / "served", "--port", "0", "--key-file", tmp_path / "key")
    done = subprocess.run(serve, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert str(tmp_path / "key") in done.stderr
