"""What a model says as actions of Gymnasium's spaces, and what it is shown. The real ones are in tests/frameworks."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strop.compat.gymnasium import agent, draw, tasks
from strop.compat.gymnasium.spaces import ActionSpace, is_small, show
from strop.errors import AgentError
from strop.testing import run


class Discrete:
    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start


class Box:
    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype = shape, np.float32


class MultiDiscrete(Box):
    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype = shape, np.int64


class Text: ...


class Tuple:
    def __init__(self, *spaces: Any) -> None:
        self.spaces = spaces


class Dict:
    def __init__(self, **spaces: Any) -> None:
        self.spaces = spaces


class Own(Discrete):
    """What a user makes of one of them."""


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (Discrete(4), "2", 2),
        (Discrete(4), "First 1, no: 3.", 3),
        (Discrete(4), "-1", -1),  # not in it, which the environment's own space says
        (Own(3, start=-1), "I say -1!", -1),
        (Text(), " open the door\n", "open the door"),
        (MultiDiscrete(2), "[1, 2]", [1, 2]),
        (MultiDiscrete(2), "not 9 but 1 and 2", [1, 2]),
        (Box(2), "(0.5, -1e-1)", [0.5, -0.1]),
        (Box(), "turn 0.25", 0.25),
    ],
)
def test_actions(space: Any, text: str, action: Any) -> None:
    said = ActionSpace(space).read(text)
    assert np.allclose(said, action) if isinstance(space, Box) else said == action
    if isinstance(space, Box):
        assert (said.shape, said.dtype) == (space.shape, space.dtype)


@pytest.mark.parametrize(
    ("space", "text", "why"),
    [
        (Discrete(4), "2.5 or v2", "there is no action in it. Say a number from 0 to 3."),
        (Own(3, start=1), "", "Say a number from 1 to 3."),
        (Box(2), "0.5", "there are 1 numbers in it. Say 2 numbers, as in [0, 0]."),
    ],
)
def test_what_is_no_action(space: Any, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        ActionSpace(space).read(text)


def test_words_for_actions() -> None:
    space = ActionSpace(Discrete(3, start=1), ["Left", "up", "upper right"])
    assert [space.read(text) for text in ("LEFT", "not left: up", "go upper right", "2")] == [1, 2, 3, 2]
    assert space.describe_actions(calls=True) == "Call act with one of: left, up, upper right."
    assert space.schema["properties"]["action"] == {"type": "string", "enum": ["left", "up", "upper right"]}
    assert (space.read_value("up"), space.read_value(3)) == (2, 3)
    with pytest.raises(AgentError, match="there are 2 words"):
        ActionSpace(Discrete(3), ["a", "b"])
    with pytest.raises(ValueError, match=r"\[1\] is not an action"):
        space.read_value([1])


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (Discrete(4), 2.9),
        (Discrete(4), True),
        (Discrete(4), None),
        (Discrete(4), float("inf")),
        (MultiDiscrete(2), [0.5, 1]),
        (MultiDiscrete(2), [1]),
    ],
)
def test_calls_that_are_no_action(space: Any, value: Any) -> None:
    """Nothing is rounded: the model would be trained on what it did not say."""
    with pytest.raises(ValueError, match=re.escape(f"{value!r} is not an action. Call act with")):
        ActionSpace(space).read_value(value)


def test_calls_that_are_an_action() -> None:
    assert ActionSpace(Discrete(4)).read_value(2.0) == 2
    assert ActionSpace(MultiDiscrete(2)).read_value([1, 2.0]).tolist() == [1, 2]
    assert ActionSpace(Box(2)).read_value([0.5, 1]).tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("space", "seen", "text"),
    [
        (Discrete(16), np.int64(3), "3"),
        (Text(), "a door", "a door"),
        (Box(4), np.array([0.123456, -2, 0, 1e9], np.float32), "[0.1235,-2.0,0.0,1000000000.0]"),
        (Tuple(Discrete(32), Discrete(2)), (7, 1), "[7,1]"),
        (
            Dict(at=MultiDiscrete(2), door=Text()),
            {"at": np.array([1, 2]), "door": "open"},
            '{"at":[1,2],"door":"open"}',
        ),
    ],
)
def test_observations(space: Any, seen: Any, text: str) -> None:
    assert is_small(space)
    assert show(space, seen) == text


@pytest.mark.parametrize("space", [Box(210, 160, 3), Tuple(Discrete(2), Box(8, 9)), object()])
def test_what_is_not_small_is_refused(space: Any) -> None:
    with pytest.raises(AgentError, match=r"is not a small text\. Fix: "):
        show(space, None)


def test_colours_are_brackets() -> None:
    assert draw("\n|\x1b[35mR\x1b[0m: |\x1b[34;1mB\x1b[0m|\x1b[1m\n") == "|[R]: |[B]|"


def test_tasks_have_seeds_of_their_own() -> None:
    made = tasks("FrozenLake-v1", {"is_slippery": False}, count=2, held=1, seed=7, max_turns=9)
    assert [(task.split, task.data["seed"]) for task in made] == [("train", 7), ("train", 8), ("test", 9)]
    assert made[0].data["args"] == {"is_slippery": False}
    assert made[0].data["max_turns"] == 9


class Made:
    """As much of an environment as is there before its first step."""

    render_mode, spec, metadata, observation_space = None, None, {}, Discrete(2)
    closed = 0

    def __init__(self, action_space: Any) -> None:
        self.action_space = action_space

    def reset(self, **given: Any) -> Any:
        raise RuntimeError("the level is not there")

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("space", "why"), [(Dict(), "are not read from text"), (Discrete(2), "the level is not there")]
)
def test_an_environment_that_cannot_be_played_is_closed(monkeypatch: pytest.MonkeyPatch, space: Any, why: str) -> None:
    made = Made(space)
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=lambda name: made))
    with pytest.raises((AgentError, RuntimeError), match=why):
        run(agent, {"environment": "Level-v0", "seed": 1}, answers=["1"])
    assert made.closed == 1


def test_a_task_of_something_else_is_refused() -> None:
    with pytest.raises(AgentError, match="names no environment of Gymnasium"):
        run(agent, {"question": "?"}, answers=["1"])
