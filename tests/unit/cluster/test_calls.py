"""Calls to actors: what went wrong is what was raised on the node."""

import pytest

from strop.cluster.calls import find_cause

exceptions = pytest.importorskip("ray.exceptions", reason="Ray is not installed: make cluster")


def test_the_cause_of_an_error_on_a_node_is_told() -> None:
    error = exceptions.RayTaskError("RankHost.start", "Traceback ...\n" * 99, PermissionError(13, "Permission denied"))
    assert find_cause(error) == "PermissionError: [Errno 13] Permission denied"
    assert find_cause(TimeoutError()) == "TimeoutError"
    assert len(find_cause(ValueError("a " * 999))) < 320
