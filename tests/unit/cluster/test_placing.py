"""Where hosts came to be, and what GPUs servers may read."""

import pytest
from msgspec.structs import replace

from strop.cluster.hosts import HostPlace
from strop.cluster.placing import NodeJoined, find_gateway, find_nodes
from strop.cluster.plan import ClusterNode
from strop.config import Config, GatewayConfig, load
from strop.net.server import name_from_elsewhere

NODES = [ClusterNode(id=f"n{k}", address=f"10.0.0.{k}") for k in range(2)]


def test_a_node_that_nobody_asked_what_it_is_like_is_noticed() -> None:
    places = [HostPlace(f"n{k}", f"10.0.0.{k}", 1) for k in (1, 0, 2)]
    assert [node.id for node in find_nodes(NODES, places[:2])] == ["n1", "n0"]
    with pytest.raises(NodeJoined, match=r"node 10.0.0.2/n2 joined the cluster"):
        find_nodes(NODES, places)


@pytest.mark.parametrize(
    ("host", "known"),
    [("127.0.0.1", "10.0.0.9"), ("0.0.0.0", "10.0.0.9"), ("::", "10.0.0.9"), ("192.168.0.3", "192.168.0.3")],
)
def test_pools_ask_a_gateway_where_nodes_reach_it(host: str, known: str) -> None:
    config: Config = replace(load(agent="a.py:agent"), gateway=GatewayConfig(host=host, port=4000))
    assert find_gateway(config, ("10.0.0.9", 1)) == (known, 4000)
    assert find_gateway(replace(config, gateway=GatewayConfig(host=host)), ("10.0.0.9", 1)) is None


def test_a_server_that_listens_everywhere_is_named_by_the_address_that_nodes_reach() -> None:
    assert name_from_elsewhere("http://127.0.0.1:4000", "0.0.0.0", "10.0.0.9") == "http://10.0.0.9:4000"
    assert name_from_elsewhere("http://[::1]:4000", "::", "fd00::9") == "http://[fd00::9]:4000"
    assert name_from_elsewhere("http://10.0.0.9:4000", "10.0.0.9", "10.0.0.8") == "http://10.0.0.9:4000"
