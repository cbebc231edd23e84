"""Algorithms of one's own that are broken: what is wrong is said before anything is trained on it."""

from pathlib import Path

import pytest

from strop.algorithms.registry import make
from strop.config import AlgorithmConfig, LearnerConfig
from strop.errors import ConfigError
from strop.monitor.metrics import refuse_undeclared

BEGIN = "from dataclasses import dataclass\nfrom strop import GRPO\n@dataclass(kw_only=True)\nclass Mine(GRPO):\n"


@pytest.mark.parametrize("body", ["    x: int", "    bad: 'Nope' = 1", "    def __init__(self): ..."])
def test_a_class_that_cannot_be_made_is_refused_with_a_fix(tmp_path: Path, body: str) -> None:
    (tmp_path / "mine.py").write_text(f"{BEGIN}{body}\n")
    with pytest.raises(ConfigError, match=r"mine.py:Mine cannot be made .*Fix: let it take `rewards`"):
        make(AlgorithmConfig(name=f"{tmp_path}/mine.py:Mine"), LearnerConfig())


def test_metrics_of_an_algorithm_have_its_prefix_and_are_numbers() -> None:
    refuse_undeclared({"actor/pg_loss": 0.1, "algorithm/mine": 2})
    with pytest.raises(ConfigError, match="Fix: call it 'algorithm/x'"):
        refuse_undeclared({"x": 3.0})
    with pytest.raises(ConfigError, match="not a number"):
        refuse_undeclared({"algorithm/x": "much"})
