"""What an answer is worth, and why."""

from __future__ import annotations

from msgspec import Struct

from strop.errors import BadReward


class Verdict(Struct, frozen=True):
    """A value from 0 to 1, or None where nothing can be said, and the reason in words. Where a number is wanted it is
    one, so an agent or a reward function may return it as it is. None is not a number: it raises, and the rollout fails
    with the reason and is left out, since an answer that nobody looked at is not a wrong one.

    >>> float(Verdict(0.5)), bool(Verdict(0.0, "other rows"))
    (0.5, False)
    >>> float(Verdict(None, "the judge did not answer"))
    Traceback (most recent call last):
    strop.errors.BadReward: there is no verdict: the judge did not answer
    """

    value: float | None
    why: str = ""

    def __float__(self) -> float:
        if self.value is None:
            raise BadReward(f"there is no verdict: {self.why}")
        return self.value

    def __bool__(self) -> bool:
        return float(self) > 0.0
