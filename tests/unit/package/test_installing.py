"""What people are told to install comes from where it says, and is what strop needs."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from strop.imports import PACKAGES, to_install

ROOT = Path(__file__).parents[3]
FILES = [
    *(ROOT / "src").rglob("*.py"),
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("recipes/*/*.md"),
    ROOT / "README.md",
]
BY_NAME = re.compile(r"""pip install[\s"'f`]*strop\b|strop==|strop\[\w""")
"""Also where a string goes on in the next line."""


def test_nobody_is_told_to_install_strop_by_its_name() -> None:
    """It is not on PyPI: whoever takes that name there could run what they like where our messages are followed."""
    assert BY_NAME.search("""pip install "\n            f"'strop[monitor]'""")
    assert BY_NAME.search("`pip install strop`")
    assert len(FILES) > 200
    found = {str(file.relative_to(ROOT)): told[0] for file in FILES if (told := BY_NAME.search(file.read_text()))}
    assert found == {}


@pytest.mark.parametrize("module", PACKAGES)
def test_what_is_to_be_installed_is_what_strop_needs(module: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pip, install, *wanted = shlex.split(to_install(module))
    assert (pip, install) == ("pip", "install")
    for one in wanted:
        assert any(needed.startswith(one) for extra in extras.values() for needed in extra), one
