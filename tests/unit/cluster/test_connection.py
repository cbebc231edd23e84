"""Joining a cluster: what is said where that cannot be."""

import socket
import sys

import pytest

from strop.cluster.connection import import_ray, refuse, refuse_unreachable
from strop.config import load
from strop.errors import ConfigError, PlaceError


def test_without_ray_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray, .* Fix: pip install 'ray>=2\.50', or leave --cluster out"):
        import_ray()


def test_an_address_where_nobody_is_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PlaceError, match=rf"nothing answers at 127\.0\.0\.1:{port}, .* Fix: check the address"):
        refuse_unreachable(f"127.0.0.1:{port}")


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.address is 'head'. Fix: give HOST:PORT"):
        refuse_unreachable("head")


def test_other_versions_are_one_sentence() -> None:
    error = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.12.1")
    assert str(refuse("h:1", error)) == (
        "the Ray cluster at h:1 has another version of Ray or Python than this machine (Version mismatch: The cluster "
        "was started with: Ray: 2.50.0 Python: 3.12.1). Fix: use the same ones everywhere"
    )


def test_nothing_of_ray_is_imported_for_a_run_without_a_cluster() -> None:
    import subprocess

    code = (
        "import sys, strop.cluster.training; assert not {name for name in sys.modules if name.split('.')[0] == 'ray'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert load().cluster.address == ""
