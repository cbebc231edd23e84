"""What an answer is worth, and why."""

from __future__ import annotations

from msgspec import Struct


class Verdict(Struct, frozen=True):
    """A value from 0 to 1, or None where nothing can be said, and the reason in words. Where a number is wanted it is
    one, so an agent or a reward function may return it as it is: None counts as 0.

    >>> float(Verdict(0.5)), float(Verdict(None, "the judge did not answer")), bool(Verdict(0.0, "other rows"))
    (0.5, 0.0, False)
    """

    value: float | None
    why: str = ""

    def __float__(self) -> float:
        return self.value or 0.0

    def __bool__(self) -> bool:
        return float(self) > 0.0
