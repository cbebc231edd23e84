"""What gateways on nodes share, and what they cannot have."""

import pytest

from strop.cluster.gateways import NodeWorker, share_out
from strop.config import Config, load
from strop.errors import ConfigError


def given(*sets: str) -> Config:
    return load(sets=["cluster.gateways=3", *sets])


def test_limits_are_shared_with_the_commands_own() -> None:
    gateway = share_out(given("gateway.in_flight=10", "gateway.in_flight_per_attempt=7")).gateway
    assert (gateway.in_flight, gateway.in_flight_per_attempt, gateway.workers) == (2, 7, 1)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            ["gateway.outside.judge.url=http://127.0.0.1:9/v1"],
            r"are counted in one process\. Fix: leave cluster",
        ),
        (["gateway.workers=2"], r"gateways are either on nodes or beside the run\. Fix: leave one"),
        (["gateway.in_flight=3"], r"in_flight is 3, and 4 gateways share it\. Fix: raise it to 4"),
    ],
)
def test_what_cannot_be_is_one_sentence(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        share_out(given(*sets))


@pytest.mark.parametrize(
    ("url", "reached"),
    [
        ("http://127.0.0.1:8000", False),  # of its own node, where there may be another server
        ("http://localhost:8000", False),
        ("http://[::1]:8000", False),
        ("http://127.0.1.1:8000", False),  # what a machine's own name leads to, on some
        ("http://10.0.0.7:8000", True),
    ],
)
def test_a_worker_elsewhere_does_not_ask_servers_at_its_own_loopback_address(url: str, reached: bool) -> None:
    assert NodeWorker.reaches(NodeWorker.__new__(NodeWorker), url) is reached
