"""The pages as written: nothing is missing in the glossary, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from strop import config
from strop.config.renamed import RENAMED
from strop.monitor.metrics import NAMES

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
GLOSSARY = (DOCS / "glossary.md").read_text()


def test_the_glossary_has_every_metric() -> None:
    lines = [f"| `{name}` | {meaning} |" for name, meaning in NAMES.items()]
    assert [line for line in lines if line not in GLOSSARY] == []
    metrics = GLOSSARY[GLOSSARY.index("## Metrics") :]
    assert metrics.count("\n| `") == len(NAMES), "a metric that is not declared any more"


def test_the_glossary_has_every_group_of_settings() -> None:
    groups = {setting.key.rpartition(".")[0] for setting in config.settings()} - {""}
    groups = {group for group in groups if not group.startswith("runner.retries.")} | {"runner.retries"}
    assert [group for group in sorted(groups) if f"| `{group}` |" not in GLOSSARY] == []


def test_the_changelog_has_every_renamed_setting() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    lines = [f"| `{old}` | `{old.rpartition('.')[0]}.{new}` |" for old, new in RENAMED.items()]
    assert [line for line in lines if line not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for place in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in place:
            assert (page.parent / place).exists(), place


def test_every_guide_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = [page for page in DOCS.rglob("*.md") if page != DOCS / "README.md"]
    assert [str(page) for page in pages if f"({page.relative_to(DOCS)})" not in index] == []


def test_the_readme_fits_in_two_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
