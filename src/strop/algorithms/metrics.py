"""Numbers that algorithms report."""

from __future__ import annotations

from strop.trajectory.batch import Floats


def summarize(name: str, values: Floats) -> dict[str, float]:
    """The three numbers people look at.

    >>> import numpy as np
    >>> summarize("critic/rewards", np.array([0.0, 1.0]))
    {'critic/rewards/mean': 0.5, 'critic/rewards/max': 1.0, 'critic/rewards/min': 0.0}
    """
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
