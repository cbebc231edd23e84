"""The engines' guide as written: its settings are settings, its links lead somewhere."""

import re
from pathlib import Path

from strop import config

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "engines.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_settings_are_settings(tmp_path: Path) -> None:
    for text in blocks("toml"):
        (tmp_path / "run.toml").write_text(text)
        config.load(toml=tmp_path / "run.toml")


def test_links_lead_somewhere() -> None:
    for place, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", TEXT)):
        linked = (PAGE.parent / place).read_text()
        titles = [line.lstrip("# ").lower().replace(" ", "-") for line in linked.splitlines() if line.startswith("#")]
        assert not heading or heading in titles
