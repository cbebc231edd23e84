"""What engines that are servers ask a cluster for, and what is refused."""

import pytest
from msgspec.structs import replace

from strop.cluster.plan import ServerDemand
from strop.cluster.servers import find_server_demand
from strop.config import EngineConfig, SglangConfig, VllmConfig
from strop.errors import ConfigError

VLLM = EngineConfig(name="vllm", replicas=2, vllm=VllmConfig(tensor_parallel=4, max_sequences=64))


def test_a_server_has_the_gpus_of_its_tensors_where_there_are_any() -> None:
    wanted = ServerDemand(count=6, cpus=3, gpus=4, sequences=64, engine="vllm")
    assert find_server_demand(VLLM, 3, cpus=3, gpus=True) == wanted
    assert find_server_demand(VLLM, 3, cpus=3, gpus=False) == replace(wanted, gpus=0)
    sglang = EngineConfig(name="sglang", sglang=SglangConfig(tensor_parallel=2, max_sequences=8))
    assert find_server_demand(sglang, 1, cpus=1, gpus=True) == ServerDemand(
        count=1, gpus=2, sequences=8, engine="sglang"
    )


def test_what_ranks_serve_or_somebody_else_has_started_takes_no_room() -> None:
    assert find_server_demand(EngineConfig(name="embedded"), 1, cpus=1, gpus=True) is None
    outside = EngineConfig(name="vllm", vllm=VllmConfig(url="http://10.0.0.4:8000"))
    assert find_server_demand(outside, 1, cpus=1, gpus=True) is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"weights": "ipc"}, r"weights=ipc reaches a server on the learner's GPU.* Fix: set it to files or nccl$"),
        ({"sleep": True}, r"engine.vllm.sleep .* Fix: set engine.vllm.sleep=false$"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, r"Ray gives each server its GPUs. Fix: leave it out$"),
    ],
)
def test_what_needs_the_learners_gpu_is_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        find_server_demand(replace(VLLM, vllm=VllmConfig(**settings)), 1, cpus=1, gpus=True)  # type: ignore[arg-type]
