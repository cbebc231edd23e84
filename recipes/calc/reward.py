"""What an answer is worth: four rewards, whose weights are in the run's settings (`algorithm.rewards`).

reward      the last number that was said is the golden one
called      the calculator was asked for something that it could compute
computed    the golden number is among what it computed
solved      it was computed and said
"""

import math
from fractions import Fraction
from typing import Any

from strop.rewards import last_number

CLOSE = 1e-3
"""How far off, beside its size, an answer may be that is not a whole number: 2/3 may be said as 0.667."""


def score(task: Any, answer: dict[str, Any]) -> dict[str, float]:
    golden = Fraction(task.data["answer"])
    right = equal(last_number(answer["answer"]), golden)
    computed = any(equal(last_number(said), golden) for said in answer["computed"])
    return {
        "reward": float(right),
        "called": float(bool(answer["computed"])),
        "computed": float(computed),
        "solved": float(right and computed),
    }


def equal(said: str | None, golden: Fraction) -> bool:
    """
    >>> equal("1250.0", Fraction(1250)), equal("0.667", Fraction(2, 3)), equal("1249.9", Fraction(1250))
    (True, True, False)
    >>> equal(None, Fraction(0)), equal("9e999999999", Fraction(9))
    (False, False)
    """
    close = 1e-9 if golden.denominator == 1 else CLOSE
    return said is not None and math.isclose(float(said), golden, rel_tol=close, abs_tol=1e-9)
