"""Which engine serves, by what is configured."""

import pytest

from strop.config import EngineConfig, VllmConfig
from strop.engines.base import Engine
from strop.engines.registry import ENGINES, engine_class, engine_name
from strop.errors import ConfigError


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


def test_every_engine_can_be_imported_and_made() -> None:
    for name in ENGINES:
        assert engine_class(EngineConfig(name=name)).make.__func__ is not Engine.make.__func__, name
    assert engine_class(EngineConfig(name="embedded")).shares_weights


def test_what_is_not_an_engine_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"engine.name is 'vlm', which is not an engine. Fix: auto, embedded, vllm"):
        engine_name(EngineConfig(name="vlm"))
