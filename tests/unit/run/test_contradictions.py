"""Settings that each make sense, but not together."""

import pytest

from strop.algorithms import make
from strop.config import load
from strop.errors import ConfigError
from strop.run.prepare import refuse_contradictions


def refuse(**settings) -> None:
    config = load(**settings)
    refuse_contradictions(config, make(config.algorithm, config.learner))


def test_handles_of_weights_that_no_rank_has_as_a_whole() -> None:
    vllm = {"name": "vllm", "deterministic": False, "vllm": {"weights": "ipc"}}
    with pytest.raises(ConfigError, match=r"learner\.ranks is 2, .* Fix: set engine\.vllm\.weights to files or nccl"):
        refuse(learner={"ranks": 2}, engine=vllm)
    refuse(learner={"ranks": 2}, engine=vllm | {"vllm": {"weights": "nccl"}})
    refuse(learner={"ranks": 2, "lora": {"rank": 4}}, engine=vllm)
    refuse(learner={"ranks": 1}, engine=vllm)
