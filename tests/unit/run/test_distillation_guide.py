"""The guide as written: its settings are settings, and those it names are the algorithm's own."""

import re
from pathlib import Path

from strop import config
from strop.algorithms.distill import Distill
from strop.algorithms.grpo import GRPO
from strop.algorithms.registry import own_settings
from strop.config import AlgorithmConfig, field_types

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "distillation.md"
TEXT = PAGE.read_text()


def test_settings_are_settings(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 2
    for text in blocks:
        (tmp_path / "run.toml").write_text(text)
        made = config.load(toml=tmp_path / "run.toml")
        assert list(own_settings(made.algorithm))


def test_the_table_has_every_setting_of_its_own() -> None:
    own = set(field_types(Distill)) - set(field_types(GRPO))
    assert own == {"teacher", "teacher_prompt", "kl_discount", "reward_coef"}
    defaults = {
        setting.key.rpartition(".")[2]: setting.value for setting in own_settings(AlgorithmConfig(name="distill"))
    }
    for name in own - {"teacher", "teacher_prompt"}:
        assert f"| `{name}` | {defaults[name]:g} |" in TEXT
