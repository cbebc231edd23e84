"""Gymnasium's spaces as text: actions that a model says, and what it is shown.

| space | an action is | shown as |
|---|---|---|
| Discrete | a whole number, or a word for it | the number |
| MultiDiscrete, MultiBinary | a list of whole numbers | the list |
| Box | a list of numbers | the list, of at most 64 |
| Text | the text | the text |
| Tuple, Dict | (refused) | their parts |

Spaces are known by the names of their classes: nothing of Gymnasium is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from strop.errors import AgentError

MOST = 64
"""Numbers of a Box that a model is shown."""
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
WHOLE = re.compile(r"(?<![\w.])[-+]?\d+(?![\w]|\.\d)")


class ActionSpace:
    """A space of actions, and words for those of a Discrete one.

    >>> class Discrete:
    ...     n, start = 4, 0
    >>> space = ActionSpace(Discrete(), ["left", "down", "right", "up"])
    >>> space.read("I go right."), space.read("2"), space.describe_actions(calls=False)
    (2, 2, 'Say one of: left, down, right, up.')
    """

    def __init__(self, space: Any, words: Sequence[str] = ()) -> None:
        self.space, self.words, self.kind = space, [word.lower() for word in words], _kind(space)
        if self.kind not in ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text"):
            raise AgentError(
                f"actions of {space} are not read from text. Fix: write an environment of your own with "
                "strop.agent.environment.Gym"
            )
        if words and (self.kind != "Discrete" or len(words) != int(space.n)):
            raise AgentError(f"there are {len(words)} words for the actions of {space}. Fix: give one for each")

    @property
    def _start(self) -> int:
        return int(getattr(self.space, "start", 0))

    def describe_actions(self, calls: bool) -> str:
        """What the model is told about its actions."""
        if self.words:
            said = f"one of: {', '.join(self.words)}"
        elif self.kind == "Discrete":
            said = f"a number from {self._start} to {self._start + int(self.space.n) - 1}"
        elif self.kind == "Text":
            said = "a text"
        else:
            said = f"{self._size} numbers, as in [{', '.join(['0'] * self._size)}]"
        return f"Call act with {said}." if calls else f"Say {said}."

    @property
    def _size(self) -> int:
        return math.prod(int(length) for length in self.space.shape)

    @property
    def schema(self) -> dict[str, Any]:
        """The arguments of the tool `act`."""
        if self.words:
            action: dict[str, Any] = {"type": "string", "enum": self.words}
        elif self.kind in ("Discrete", "Text"):
            action = {"type": "integer" if self.kind == "Discrete" else "string"}
        else:
            whole = "number" if self.kind == "Box" else "integer"
            action = {"type": "array", "items": {"type": whole}, "minItems": self._size, "maxItems": self._size}
        return {"type": "object", "properties": {"action": action}, "required": ["action"]}

    def read(self, text: str) -> Any:
        """The action that a text says: the last one, where it names several. Raises `ValueError`."""
        if self.kind == "Text":
            return text.strip()
        if self.words:
            named = re.findall(rf"\b({'|'.join(map(re.escape, self.words))})\b", text.lower())
            if named:
                return self.words.index(named[-1]) + self._start
        found = (NUMBER if self.kind == "Box" else WHOLE).findall(text)
        if self.kind == "Discrete":
            if not found:
                raise ValueError(f"there is no action in it. {self.describe_actions(calls=False)}")
            return int(found[-1])
        if len(found) < self._size:
            raise ValueError(f"there are {len(found)} numbers in it. {self.describe_actions(calls=False)}")
        return self.read_value([float(number) for number in found[-self._size :]])

    def read_value(self, value: Any) -> Any:
        """The action that a call gave. Raises `ValueError`."""
        if isinstance(value, str):
            return self.read(value)
        try:
            if self.kind == "Discrete":
                return _whole(value)
            import numpy as np

            made = np.asarray(value, dtype=self.space.dtype).reshape(self.space.shape)
            if made.dtype.kind in "iu" and not np.array_equal(made.ravel(), np.ravel(np.asarray(value, float))):
                raise ValueError("some are not whole")
            return made
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{value!r} is not an action. {self.describe_actions(calls=True)}") from None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError("it is not whole")
    return int(value)


def is_small(space: Any) -> bool:
    """Whether what is seen in it is shown as it is."""
    kind = _kind(space)
    if kind in ("Tuple", "Dict"):
        return all(is_small(one) for one in (space.spaces if kind == "Tuple" else space.spaces.values()))
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        return math.prod(int(length) for length in space.shape) <= MOST
    return kind in ("Discrete", "Text")


def show(space: Any, seen: Any) -> str:
    """An observation as text. Raises `AgentError` for what is no small text."""
    if not is_small(space):
        raise AgentError(
            f"what is seen in {space} is not a small text. Fix: write an environment of your own with "
            "strop.agent.environment.Gym, whose `show` says it"
        )
    plain = _plain(space, seen)
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def _plain(space: Any, seen: Any) -> Any:
    kind = _kind(space)
    if kind == "Discrete":
        return int(seen)
    if kind == "Text":
        return str(seen)
    if kind == "Tuple":
        return [_plain(one, part) for one, part in zip(space.spaces, seen, strict=True)]
    if kind == "Dict":
        return {name: _plain(one, seen[name]) for name, one in space.spaces.items()}
    return [_short(number) for number in seen.reshape(-1).tolist()]


def _short(number: float) -> float:
    """Four digits say enough, and cost few tokens.

    >>> _short(0.027456), _short(3)
    (0.02746, 3)
    """
    return number if isinstance(number, int) else float(f"{number:.4g}")


def _kind(space: Any) -> str:
    """The space's class, or the one of Gymnasium's that it is made from."""
    known = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text", "Tuple", "Dict")
    return next((kind.__name__ for kind in type(space).__mro__ if kind.__name__ in known), type(space).__name__)
