"""What `strop.train` was given and wrote into a run's folder, also where an earlier version wrote it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from strop.agent.tool_agent import ToolAgent
from strop.imports import load_given, resolve

WRITTEN = '''"""The agent that was given as a function without a file."""

import pickle
from pathlib import Path

agent = pickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
'''


def add(left: int, right: int) -> int:
    """Add two numbers."""
    return left + right


def test_an_agent_of_an_earlier_version_is_found_where_it_is_now(tmp_path: Path) -> None:
    """Its classes were in other modules, under other names."""
    given = ToolAgent([add], max_turns=3)
    data = pickle.dumps(given, protocol=0)  # in which names are text
    for now, before in {
        b"strop.agent.tool_agent\n": b"strop.tools.agent\n",
        b"strop.agent.episode\nEpisodeLimits\n": b"strop.tools.episode\nLimits\n",
    }.items():
        assert now in data
        data = data.replace(now, before)
    (tmp_path / "agent_given.pkl").write_bytes(data)
    (tmp_path / "agent_given.py").write_text(WRITTEN)
    found = resolve(f"{tmp_path / 'agent_given.py'}:agent", "agent")
    assert isinstance(found, ToolAgent)
    assert found.limits == given.limits
    assert [tool.name for tool in found.tools] == ["add"]


@pytest.mark.parametrize(
    "name",
    [
        *("tools.tool Tool", "tools.tool Observation", "tools.episode Episode", "tools.episode Call"),
        *("tools.environment Gym", "tools.environment EnvironmentAgent", "tools.mcp Server", "tools.toolbox Tools"),
        *("runners.llm LLM", "rewards.asking Asking", "rewards.answers Answers", "rewards.mathematics math_equal"),
        *("rewards.pairs Pairwise", "rewards.forms has_format", "types Task", "demo agent"),
    ],
)
def test_every_name_that_could_be_pickled_leads_somewhere(tmp_path: Path, name: str) -> None:
    module, _, found = name.partition(" ")
    (tmp_path / "it.pkl").write_bytes(f"cstrop.{module}\n{found}\n.".encode())
    assert callable(load_given(tmp_path / "it.pkl"))
