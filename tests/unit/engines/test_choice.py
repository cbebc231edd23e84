"""Which engine serves, by what is configured."""

import pytest

from strop.config import EngineConfig, VllmConfig
from strop.errors import ConfigError
from strop.run.runtime import engine_name


def test_what_is_named_is_taken() -> None:
    assert [engine_name(EngineConfig(name=name)) for name in ("embedded", "vllm", "sglang")] == [
        "embedded",
        "vllm",
        "sglang",
    ]


def test_auto() -> None:
    there = VllmConfig(url="http://127.0.0.1:1")
    assert engine_name(EngineConfig(vllm=there)) == "vllm", "somebody runs one"
    assert engine_name(EngineConfig(vllm=there, deterministic=True)) == "embedded"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_only_the_embedded_one_is_deterministic(name: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.name is {name}"):
        engine_name(EngineConfig(name=name, deterministic=True))  # type: ignore[arg-type]
