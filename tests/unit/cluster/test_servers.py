"""What engines that are servers ask a cluster for, and what is refused."""

import re
from typing import Any

import pytest
from msgspec.structs import replace

from strop.cluster.plan import ServerDemand
from strop.cluster.servers import find_server_demand
from strop.config import EngineConfig, SglangConfig, VllmConfig
from strop.errors import ConfigError

VLLM = EngineConfig(name="vllm", replicas=2, vllm=VllmConfig(tensor_parallel=4, max_sequences=64))


def test_a_server_has_the_gpus_of_its_tensors_where_there_are_any() -> None:
    wanted = ServerDemand(count=6, cpus=3, gpus=4, sequences=64, engine="vllm", memory=0.9)
    assert find_server_demand(VLLM, 3, cpus=3, gpus=True) == wanted
    assert find_server_demand(VLLM, 3, cpus=3, gpus=False) == replace(wanted, gpus=0)
    sglang = EngineConfig(name="sglang", sglang=SglangConfig(tensor_parallel=2, max_sequences=8))
    assert find_server_demand(sglang, 1, cpus=1, gpus=True) == ServerDemand(
        count=1, gpus=2, sequences=8, engine="sglang", memory=0.8
    )


def test_what_ranks_serve_or_somebody_else_has_started_takes_no_room() -> None:
    assert find_server_demand(EngineConfig(name="embedded"), 1, cpus=1, gpus=True) is None
    outside = EngineConfig(name="vllm", vllm=VllmConfig(url="http://10.0.0.4:8000"))
    assert find_server_demand(outside, 1, cpus=1, gpus=True) is None


@pytest.mark.parametrize("settings", [{"sleep": True}, {"weights": "ipc"}])
def test_what_shares_gpus_is_beside_the_ranks_of_its_model(settings: dict[str, Any]) -> None:
    config = EngineConfig(name="vllm", vllm=VllmConfig(max_sequences=8, **settings))
    found = find_server_demand(config, 1, cpus=1, gpus=True, model=2, ranks=1)
    assert found == ServerDemand(
        count=1, gpus=1, sequences=8, engine="vllm", memory=0.9, beside=2, sleep="sleep" in settings
    )
    alone = find_server_demand(config, 1, cpus=1, gpus=True)  # nobody trains what it serves
    assert alone is not None
    assert alone.beside is None


@pytest.mark.parametrize(
    ("settings", "ranks", "why"),
    [
        (
            {"sleep": True, "tensor_parallel": 2},
            3,
            "engine.vllm.sleep has vLLM on the GPUs of the learner, and 4 for 2 servers are more than its 3. Fix: set "
            "learner.ranks=4, or engine.replicas or engine.vllm.tensor_parallel lower",
        ),
        ({"weights": "ipc", "tensor_parallel": 2}, 1, "tensor_parallel is 2. Fix: set it to 1, or"),
        (
            {"weights": "ipc"},
            1,
            "2 vLLM servers on one GPU of the learner take 90% of its memory each. Fix: set "
            "engine.vllm.gpu_memory to at most 0.4",
        ),
        ({"sleep": True, "weights": "nccl"}, 2, "engine.vllm.weights=nccl needs others. Fix: set it to files"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, 2, "Ray gives each server its GPUs. Fix: leave it out"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], ranks: int, why: str) -> None:
    config = replace(VLLM, vllm=VllmConfig(**settings))
    with pytest.raises(ConfigError, match=re.escape(why)):
        find_server_demand(config, 1, cpus=1, gpus=True, model=0, ranks=ranks)


def test_several_servers_read_one_learner_s_memory() -> None:
    config = replace(VLLM, vllm=VllmConfig(weights="ipc", gpu_memory=0.4))
    found = find_server_demand(config, 1, cpus=1, gpus=True, model=0, ranks=1)
    assert found is not None
    assert [found.find_ranks(number, ranks=1) for number in range(2)] == [[0], [0]]
