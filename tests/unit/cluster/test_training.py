from pathlib import Path
from typing import Any, cast

import pytest

from strop.cluster.placing import find_demand, find_servers, hold_weights
from strop.cluster.plan import ClusterNode
from strop.cluster.training import halve_micro_batches
from strop.config import Config, changed, load, resolve_policies
from strop.errors import PlaceError
from strop.run.prepare import PreparedPolicy, group_by_process


def prepare(config: Config) -> list[list[PreparedPolicy]]:
    policies = resolve_policies(config)
    prepared = [
        PreparedPolicy(name=name, config=own, model=Path(own.policy.model), renderer=cast("Any", None))
        for name, own in policies.items()
    ]
    return group_by_process(prepared, train=True)


def test_every_policy_has_servers_of_its_own_but_adapters_on_one_model_share_them() -> None:
    engine = {"name": "vllm", "replicas": 2, "vllm": {"tensor_parallel": 2, "max_sequences": 8}}
    names = {"one": {"agents": ["a"]}, "two": {"agents": ["b"]}, "judge": {"agents": ["c"], "frozen": True}}
    for rank, counts, trained in ((0, [2, 2, 2], 2), (8, [2], 1)):
        given: dict[str, Any] = {"engine": engine, "policies": names, "learner": {"lora": {"rank": rank}}}
        config = load(**given)
        groups = prepare(config)
        servers = find_servers(config, groups, gpus=True)
        assert [one.count for one in servers] == counts
        assert {one.gpus for one in servers} == {2}
        assert len(hold_weights(groups)) == trained, "what is frozen is held by its servers only"


def test_servers_are_beside_the_ranks_of_their_own_model() -> None:
    """Where these have GPUs."""
    names = {"judge": {"agents": ["c"], "frozen": True}, "one": {"agents": ["a"]}, "two": {"agents": ["b"]}}
    engine = {"name": "vllm", "vllm": {"sleep": True}}
    config = load(engine=engine, policies=names, learner={"ranks": 2})
    groups = prepare(config)
    nodes = [ClusterNode(id="n", address="h", cpus=64, gpus=5)]
    found = find_demand(config, groups, nodes)
    assert (found.ranks, found.rank_gpus) == ((2, 2), 1)
    assert [one.beside for one in found.servers] == [None, 0, 1], "a judge has a GPU of its own"
    fewer = find_demand(config, groups, [ClusterNode(id="n", address="h", cpus=64, gpus=3)])
    assert fewer.rank_gpus == 0
    assert [one.beside for one in fewer.servers] == [None, None, None]


def test_memory_of_gpus_that_ranks_do_not_have_is_not_read() -> None:
    config = load(engine={"name": "vllm", "vllm": {"weights": "ipc"}}, learner={"device": "cpu"})
    with pytest.raises(PlaceError, match=r"its 1 rank has none of the cluster's 2\. Fix: set learner\.device=cuda"):
        find_demand(config, prepare(config), [ClusterNode(id="n", address="h", cpus=64, gpus=2)])


def test_nobody_sleeps_where_there_is_no_gpu() -> None:
    config = load(engine={"name": "vllm", "vllm": {"sleep": True}})
    with pytest.raises(PlaceError, match=r"the cluster has no GPU\. Fix: set it to false"):
        find_demand(config, prepare(config), [ClusterNode(id="n", address="h", cpus=64)])


def halve(config: Config) -> Config:
    return changed(config, {key: less for key, (_, less) in halve_micro_batches(config).items()})


def test_ranks_that_ran_out_of_memory_begin_with_less_each_time() -> None:
    config = load(learner={"token_budget": 4096})
    assert halve_micro_batches(config) == {"learner.start_budget": (None, 2048)}
    halved = halve(config)
    assert halved.learner.start_budget == 2048
    assert halved.learner.token_budget == 4096  # which rollouts are trained on stays the same
    assert halve(halved).learner.start_budget == 1024


def test_policies_with_micro_batches_of_their_own_begin_with_less_as_well() -> None:
    small, given, plain = {"token_budget": 1024}, {"start_budget": 600}, {"optim": {"lr": 1e-5}}
    config = load(policies={"a": {"learner": small}, "b": {"learner": given}, "c": {"learner": plain}, "d": {}})
    sizes = {"a": 512, "b": 300, "c": 2048, "d": 2048}
    for _ in range(2):
        config = halve(config)
        assert {name: own.learner.start_budget for name, own in resolve_policies(config).items()} == sizes
        sizes = {name: size // 2 for name, size in sizes.items()}
    assert halve_micro_batches(config)["policies.a.learner.start_budget"] == (256, 128)
