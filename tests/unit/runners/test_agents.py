"""Which kind of agent is meant, by how it is written."""

from pathlib import Path

import pytest

from strop.config import Config, ContainerConfig, RunnerConfig
from strop.errors import AgentError, ConfigError
from strop.run.settings import settle
from strop.runners.agents import make
from strop.runners.command import CommandAgent


def kind(spec: str, **config) -> str:
    return type(make(spec, RunnerConfig(**config), folder="/nowhere")).__name__


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("http://127.0.0.1:9000/run", "ServiceAgent"),
        ("https://agents.example/run", "ServiceAgent"),
        ("agent.py:solve", "ProcessAgent"),
        ("some/folder-1/agent.py:solve", "ProcessAgent"),
        ("package.module:solve", "ProcessAgent"),
        ("module:solve", "ProcessAgent"),
        ("node agent.js", "CommandAgent"),
        ("./agent", "CommandAgent"),
        ("python agent.py", "CommandAgent"),
        ("python agent.py:solve", "CommandAgent"),
        ("python -m package.module:solve", "CommandAgent"),
        ("agent --url http://127.0.0.1", "CommandAgent"),
    ],
)
def test_kinds(spec: str, expected: str):
    assert kind(spec) == expected


def test_where_python_agents_run():
    assert kind("agent.py:solve", agents_in="threads") == kind("agent.py:solve", agents_in="loop") == "InProcessAgent"
    assert kind("node agent.js", agents_in="loop") == "CommandAgent"


def test_a_file_may_lie_in_a_folder_with_spaces(tmp_path: Path):
    place = tmp_path / "my agents"
    place.mkdir()
    (place / "agent.py").touch()
    assert kind(f"{place}/agent.py:solve") == "ProcessAgent"


def test_a_command_may_lie_in_a_folder_with_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run keeps it by its whole path, which is still one word; settled once more, it stays that."""
    place = tmp_path / "my dir"
    place.mkdir()
    (place / "run.sh").touch()
    (place / "agent.py").touch()
    monkeypatch.chdir(place)
    once = settle(Config(agent="./run.sh", agents={"far": f"{place}/run.sh", "long": "./run.sh --fast"}))
    for kept in (once, settle(once)):
        assert CommandAgent(kept.agent).words == CommandAgent(kept.agents["far"]).words == [f"{place}/run.sh"]
        assert kept.agents["long"] == "./run.sh --fast"
    assert settle(Config(agent="agent.py:solve")).agent == f"{place}/agent.py:solve"
    assert settle(Config(agent="agent.py")).agent == "agent.py"  # the sentence says what to write instead


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "none is given: write FILE.py:function"),
        ("agent.py", "write agent.py:function, or 'python agent.py' to run it as a command"),
        ("agent.py:", "write agent.py:function"),
        ("agent.py:my-function", "write FILE.py:function"),
        ("package.module:", "names no function"),
        ("localhost:9000", "write http://localhost:9000"),
        ("10.0.0.1:80/run", "write http://10.0.0.1:80/run"),
    ],
)
def test_near_misses(spec: str, says: str):
    with pytest.raises(AgentError, match=says):
        make(spec, RunnerConfig(), folder="/nowhere")


def test_another_python_needs_processes(tmp_path: Path) -> None:
    config = RunnerConfig(python="there/bin/python", agents_in="loop")
    with pytest.raises(ConfigError, match=r"set runner\.agents_in to processes or loops"):
        make("strop.demo:agent", config, folder=str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("agent.py:solve", r"'agent.py:solve' is a Python function\. Fix: call it from a program of its own"),
        ("http://127.0.0.1:9000/run", r"is a service, which runs where it is\. Fix: "),
    ],
)
def test_containers_are_for_commands(spec: str, says: str):
    with pytest.raises(ConfigError, match=says):
        kind(spec, container=ContainerConfig(runtime="auto"))
    assert kind("node agent.js", container=ContainerConfig(runtime="auto")) == "CommandAgent"
