"""Time limits of tests: what they say on a machine that is calm, more on one that is busy.

assert time.monotonic() - began < stretch(5)
"""

import os


def stretch(seconds: float) -> float:
    """As many seconds as `seconds` of a calm machine may take on this one, going by how many processes want to run on
    each of its cores."""
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * max(1.0, 3 * waiting)
