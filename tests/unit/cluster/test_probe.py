"""What is asked of a node, and what is said of one that cannot be used."""

import platform
import socket
import sys
from pathlib import Path

import pytest

from strop.cluster.plan import ClusterNode
from strop.cluster.probe import ProbeAnswer, explain_trouble, listen_at, make_question, write_marker
from strop.errors import PlaceError
from strop.version import __version__

NODE = ClusterNode(id="a1b2c3d4", address="10.0.0.7", cpus=1)
PORTS = {"cluster.port": ("10.0.0.1", 4000), "gateway.port": ("10.0.0.1", 5000)}
FINE = {"strop": __version__, "python": platform.python_version()}


def explain(**answer) -> str:
    return explain_trouble(NODE, ProbeAnswer(**(FINE | answer)), Path("/runs/mine"), PORTS)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({}, ""),
        (
            {"strop": "0.0.1"},
            f"node 10.0.0.7 has strop 0.0.1, and this machine has {__version__}. Fix: install the same version on "
            "every node",
        ),
        (
            {"strop": ""},
            f"node 10.0.0.7 has no strop in the Python that Ray runs, and this machine has {__version__}. Fix: install "
            "the same version on every node",
        ),
        (
            {"sees": False},
            "node 10.0.0.7 does not see /runs/mine. Fix: give --folder on a file system that every node has under the "
            "same path",
        ),
        (
            {"missing": "/models/m"},
            "node 10.0.0.7 does not have the model at /models/m. Fix: put it there, or where every node sees it, and "
            "name that place with policy.model",
        ),
        (
            {"reach": {"cluster.port": "timed out"}},
            "node 10.0.0.7 cannot reach this command at 10.0.0.1:4000 (timed out). Fix: open a port between them, and "
            "name it with cluster.port",
        ),
        (
            {"reach": {"gateway.port": "timed out"}},
            "node 10.0.0.7 cannot reach this command at 10.0.0.1:5000 (timed out). Fix: open a port between them, and "
            "name it with gateway.port",
        ),
        (
            {"store": False},
            "the object store of node 10.0.0.7 is full. Fix: end what fills it (`ray memory`), or start Ray there with "
            "more --object-store-memory",
        ),
        (
            {"failed": "it broke"},
            "node 10.0.0.7 cannot run anything (it broke). Fix: see `ray status`, or take it out",
        ),
    ],
)
def test_what_is_wrong_with_a_node_is_one_sentence(answer, said) -> None:
    assert explain(**answer) == said


def test_another_python_is_refused() -> None:
    assert "node 10.0.0.7 has Python 3.9, and this machine has 3." in explain(python="3.9.1")


def test_a_node_that_does_not_answer_is_refused() -> None:
    assert "did not answer within 60 s" in explain_trouble(NODE, None, Path("/runs/mine"), PORTS)


class Store:
    """Ray's object store has room, and is not asked."""

    put = staticmethod(len)


def test_a_closed_port_and_what_a_node_does_not_see_are_noticed(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", Store)
    look = make_question()
    with write_marker(tmp_path / "runs" / "mine") as (mark, said), socket.create_server(("127.0.0.1", 0)) as server:
        ports = {"cluster.port": server.getsockname()}
        assert Path(mark).parent == tmp_path
        found = ProbeAnswer(**look({mark: said}, [str(tmp_path)], ports))
        assert explain_trouble(NODE, found, tmp_path, ports) == ""
    assert not Path(mark).exists()
    found = ProbeAnswer(**look({mark: said}, [str(tmp_path / "none")], ports))
    assert not found.sees
    assert found.missing == str(tmp_path / "none")
    assert "refused" in found.reach["cluster.port"]


def test_a_folder_that_cannot_be_written_into_is_said(tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    said = r"cannot write into .* \(Permission denied\)\. Fix: give another --folder$"
    with pytest.raises(PlaceError, match=said), write_marker(tmp_path / "runs"):
        pass


def test_the_gateway_s_port_is_tried_before_the_gateway_is_there(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", Store)
    with listen_at(("127.0.0.1", 9), None) as ports:
        assert ports == {"cluster.port": ("127.0.0.1", 9)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()
        with pytest.raises(PlaceError, match=r"is in use; gateway\.port=0 picks a free one"), listen_at(taken, taken):
            pass
    with listen_at(("127.0.0.1", 9), taken) as ports:
        assert ports == {"cluster.port": ("127.0.0.1", 9), "gateway.port": taken}
        assert list(make_question()({}, [], ports)["reach"]) == ["cluster.port"]
    with socket.create_server(taken):
        pass
