"""What runs where on a cluster, and the sentence when it cannot."""

import pytest

from strop.cluster.plan import ClusterNode, Demand, RankBundle, ServerDemand, make_plan
from strop.errors import PlaceError


def nodes(*cpus: float, gpus: float = 0.0) -> list[ClusterNode]:
    return [ClusterNode(id=f"n{k}", address=f"10.0.0.{k}", cpus=each, gpus=gpus) for k, each in enumerate(cpus)]


def test_ranks_are_on_few_nodes_and_pools_where_room_is_left() -> None:
    plan = make_plan(nodes(2, 8, 4), Demand(ranks=(4,), rank_cpus=2, runners=3))
    assert [node.id for node in plan.ranks[0]] == ["n1"] * 4
    assert [node.id for node in plan.runners] == ["n2", "n0", "n2"]


def test_ranks_are_on_the_smallest_node_that_holds_all() -> None:
    plan = make_plan(nodes(8, 4, 2), Demand(ranks=(4,), runners=2))
    assert {node.id for node in plan.ranks[0]} == {"n1"}


def test_it_says_everything_that_will_run() -> None:
    lines = make_plan(nodes(8, gpus=2), Demand(ranks=(1, 1), rank_gpus=1, agents=64)).describe()
    assert lines == [
        "rank 0 on 10.0.0.0: 1 CPU, 1 GPU",
        "rank 1 on 10.0.0.0: 1 CPU, 1 GPU",
        "runner pool 0 on 10.0.0.0: 1 CPU, 64 agents at once",
        "expected bottleneck while collecting: engines (64 agents at once, 32 sequences that engines answer at once)",
    ]


def test_gateways_are_apart_and_leave_room_for_pools() -> None:
    plan = make_plan(nodes(4, 3, 3), Demand(ranks=(2,), rank_cpus=2, gateways=2, runners=2, runner_cpus=2))
    assert [node.id for node in plan.ranks[0]] == ["n0"] * 2
    assert [node.id for node in plan.gateways] == [node.id for node in plan.runners] == ["n1", "n2"]
    assert plan.describe()[2:4] == ["gateway 0 on 10.0.0.1: 1 CPU", "gateway 1 on 10.0.0.2: 1 CPU"]


def test_servers_are_where_gpus_are_left_and_have_theirs_on_one_node() -> None:
    two = ServerDemand(count=2, cpus=2, gpus=2, sequences=64, engine="vllm", memory=0.9)
    plan = make_plan(
        [*nodes(16, 16, gpus=3), ClusterNode(id="head", address="10.0.0.9", cpus=8)],
        Demand(ranks=(1,), rank_gpus=1, agents=64, sequences=0, servers=(two,)),
    )
    assert [node.id for node in plan.ranks[0]] == ["n0"]
    assert sorted(node.id for node in plan.servers) == ["n0", "n1"]
    assert plan.describe() == [
        "rank 0 on 10.0.0.0: 1 CPU, 1 GPU",
        "engine server 0 (vllm) on 10.0.0.1: 2 CPUs, 90% of 2 GPUs",
        "engine server 1 (vllm) on 10.0.0.0: 2 CPUs, 90% of 2 GPUs",
        "runner pool 0 on 10.0.0.1: 1 CPU, 64 agents at once",
        "expected bottleneck while collecting: agents (64 agents at once, 128 sequences that engines answer at once)",
    ]


def test_servers_beside_ranks_take_no_gpus_of_their_own() -> None:
    turns = ServerDemand(count=2, gpus=2, sequences=64, engine="vllm", memory=0.8, beside=1, sleep=True)
    demand = Demand(ranks=(1, 4), rank_gpus=1, sequences=0, servers=(turns,))
    assert demand.list_bundles(0) == [RankBundle(0, 1, 1, 1)]
    assert demand.list_bundles(1) == [RankBundle(0, 2, 3, 2), RankBundle(2, 2, 3, 2)]
    plan = make_plan(nodes(8, 4, gpus=3), demand)
    assert [[node.id for node in group] for group in plan.ranks] == [["n1"], ["n0", "n0", "n1", "n1"]]
    assert [node.id for node in plan.servers] == ["n0", "n1"]
    assert plan.describe()[5:7] == [
        "engine server 0 (vllm) on 10.0.0.0: 1 CPU, 80% of 2 GPUs of ranks 1, 2, by turns",
        "engine server 1 (vllm) on 10.0.0.1: 1 CPU, 80% of 2 GPUs of ranks 3, 4, by turns",
    ]
    assert [demand.find_taken(model) for model in (0, 1)] == [0, 0]


def test_servers_that_stay_awake_leave_less_of_a_rank_s_gpu() -> None:
    awake = ServerDemand(count=2, gpus=1, engine="vllm", memory=0.25, beside=0)
    demand = Demand(ranks=(1, 1), rank_gpus=1, servers=(awake,))
    assert [demand.list_bundles(model) for model in (0, 1)] == [[RankBundle(0, 1, 3, 1)], [RankBundle(0, 1, 1, 1)]]
    assert [demand.find_taken(model) for model in (0, 1)] == [0.5, 0]
    lines = make_plan(nodes(8, gpus=2), demand).describe()
    assert lines[2:4] == [
        f"engine server {k} (vllm) on 10.0.0.0: 1 CPU, 25% of 1 GPU of rank 0, at the same time" for k in (0, 1)
    ]


def test_a_run_that_learns_from_data_needs_no_pool() -> None:
    assert make_plan(nodes(1), Demand(ranks=(1,), runners=0)).runners == []


@pytest.mark.parametrize(
    ("there", "demand", "said"),
    [
        (
            nodes(2, 2),
            Demand(ranks=(5,)),
            "5 learner ranks of 1 CPU each cannot be placed: the cluster has 4 CPUs and 0 GPUs on 2 nodes, which is "
            "room for 4. Fix: set learner.ranks=3, or add nodes",
        ),
        (
            nodes(2, 2),
            Demand(ranks=(1,), rank_cpus=3),
            "1 learner rank of 3 CPUs each cannot be placed: the cluster has 4 CPUs and 0 GPUs on 2 nodes, which is "
            "room for 0. Fix: set cluster.rank_cpus lower, or add nodes",
        ),
        (
            nodes(8, gpus=1),
            Demand(ranks=(2,), rank_gpus=1),
            "2 learner ranks of 1 CPU and 1 GPU each cannot be placed: the cluster has 8 CPUs and 1 GPU on 1 node, "
            "which is room for 1. Fix: set learner.ranks=1, or add nodes",
        ),
        (
            nodes(8),
            Demand(ranks=(2,), rank_gpus=1),
            "learner.device is cuda, and no node of the cluster has a GPU (8 CPUs and 0 GPUs on 1 node). Fix: add "
            "nodes with GPUs, or set learner.device=cpu",
        ),
        (
            nodes(2),
            Demand(ranks=(1,), runners=2),
            "2 runner pools of 1 CPU each cannot be placed: the cluster has 2 CPUs and 0 GPUs on 1 node, and beside "
            "the ranks there is room for 1. Fix: set cluster.runners=1, or add nodes",
        ),
        (
            nodes(2),
            Demand(ranks=(2,)),
            "1 runner pool of 1 CPU each cannot be placed: the cluster has 2 CPUs and 0 GPUs on 1 node, and beside the "
            "ranks there is room for 0. Fix: set learner.ranks=1, or add nodes",
        ),
        (
            nodes(4),
            Demand(ranks=(1,), servers=(ServerDemand(count=1, cpus=4, engine="vllm"),)),
            "1 vllm server of 4 CPUs each cannot be placed: the cluster has 4 CPUs and 0 GPUs on 1 node, and beside "
            "the ranks there is room for 0. Fix: set cluster.server_cpus lower, or add nodes",
        ),
        (
            nodes(1),
            Demand(ranks=(1,)),
            "1 runner pool of 1 CPU each cannot be placed: the cluster has 1 CPU and 0 GPUs on 1 node, and beside the "
            "ranks there is room for 0. Fix: start Ray with more CPUs than there are (--num-cpus), or add nodes",
        ),
        (
            nodes(12),
            Demand(ranks=(1,), gateways=64, runners=2),
            "64 gateways of 1 CPU each cannot be placed: the cluster has 12 CPUs and 0 GPUs on 1 node, and beside the "
            "ranks there is room for 11. Fix: set cluster.gateways=9, or add nodes",
        ),
        (
            nodes(3),
            Demand(ranks=(1,), gateways=3, runners=0),
            "3 gateways of 1 CPU each cannot be placed: the cluster has 3 CPUs and 0 GPUs on 1 node, and beside the "
            "ranks there is room for 2. Fix: set cluster.gateways=2, or add nodes",
        ),
        (
            nodes(8, 8, gpus=3),
            Demand(ranks=(2,), rank_gpus=1, servers=(ServerDemand(count=3, gpus=2, engine="vllm"),)),
            "3 vllm servers of 1 CPU and 2 GPUs each cannot be placed: the cluster has 16 CPUs and 6 GPUs on 2 nodes, "
            "and beside the ranks there is room for 1. Fix: set engine.replicas=1, or add nodes",
        ),
        (
            nodes(8, 8, gpus=2),
            Demand(ranks=(1,), servers=(ServerDemand(count=1, gpus=4, engine="sglang"),)),
            "1 sglang server of 1 CPU and 4 GPUs each cannot be placed: the cluster has 16 CPUs and 4 GPUs on 2 nodes, "
            "and beside the ranks there is room for 0. Fix: set engine.sglang.tensor_parallel lower, or add nodes",
        ),
        (
            nodes(4),
            Demand(ranks=(1,), servers=(ServerDemand(count=1, cpus=2, engine="vllm"),), runners=2),
            "2 runner pools of 1 CPU each cannot be placed: the cluster has 4 CPUs and 0 GPUs on 1 node, and beside "
            "the ranks and servers there is room for 1. Fix: set cluster.runners=1, or add nodes",
        ),
        (
            nodes(8, 8, gpus=3),
            Demand(
                ranks=(6,), rank_gpus=1, servers=(ServerDemand(count=3, gpus=2, engine="vllm", beside=0, sleep=True),)
            ),
            "6 learner ranks of 1 CPU and 1 GPU each, with 1 CPU for servers beside 2 of them cannot be placed: the "
            "cluster has 16 CPUs and 6 GPUs on 2 nodes, which is room for 4. Fix: set engine.replicas and "
            "learner.ranks lower, or add nodes",
        ),
        (
            nodes(2, gpus=1),
            Demand(ranks=(1,), rank_gpus=1, rank_cpus=2, servers=(ServerDemand(count=1, gpus=1, beside=0),)),
            "1 learner rank of 2 CPUs and 1 GPU each, with 1 CPU for servers beside 1 of them cannot be placed: the "
            "cluster has 2 CPUs and 1 GPU on 1 node, which is room for 0. Fix: set cluster.rank_cpus lower, or add "
            "nodes",
        ),
        (
            nodes(0),
            Demand(ranks=(1,)),
            "no node of the cluster has CPUs to give. Fix: add one with `ray start --address=HEAD:PORT`",
        ),
        (
            [ClusterNode(id="a", address="h", cpus=1, trouble="node h is odd. Fix: end it")],
            Demand(ranks=(1,)),
            "node h is odd. Fix: end it",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(there, demand, said) -> None:
    with pytest.raises(PlaceError) as refused:
        make_plan(there, demand)
    assert str(refused.value) == said
