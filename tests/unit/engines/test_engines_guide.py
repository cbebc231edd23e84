"""The engines' guide as written: its programs run, its settings are settings, its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

from strop import config

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "engines.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_programs_run(tmp_path: Path) -> None:
    programs = blocks("python")
    assert programs
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_settings_are_settings(tmp_path: Path) -> None:
    for text in blocks("toml"):
        (tmp_path / "run.toml").write_text(text)
        config.load(toml=tmp_path / "run.toml")


def test_links_lead_somewhere() -> None:
    for place, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", TEXT)):
        linked = (PAGE.parent / place).read_text()
        titles = [line.lstrip("# ").lower().replace(" ", "-") for line in linked.splitlines() if line.startswith("#")]
        assert not heading or heading in titles
