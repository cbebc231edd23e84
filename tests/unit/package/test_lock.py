"""The locks hold everything that strop needs, each with hashes, and the list of licences holds everything they do."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"requirements.lock": ("train",), "requirements-dev.lock": ("train", "postgres", "dev")}
LINE = re.compile(r"([a-z0-9-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)")


def locked(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text()
    body = text[text.index("\n", text.rindex("\n#") + 1) + 1 :]
    assert LINE.sub("", body) == ""  # nothing without a version and a hash
    return {name: version for name, version, _ in LINE.findall(body)}


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("name", EXTRAS)
def test_what_pyproject_asks_for_is_locked_in_a_version_that_fits(name: str) -> None:
    there = locked(name)
    for need in wanted(EXTRAS[name]):
        if need.name not in ("torch", "strop"):
            assert need.specifier.contains(there[canonicalize_name(need.name)]), need


@pytest.mark.parametrize("name", EXTRAS)
def test_what_that_needs_in_its_turn_is_locked_too(name: str) -> None:
    there = locked(name)
    todo = [(need.name, extra) for need in wanted(EXTRAS[name]) for extra in ("", *need.extras)]
    seen: set[tuple[str, str]] = set()
    while todo:
        package, extra = todo.pop()
        if (package, extra) in seen:
            continue
        seen.add((package, extra))
        if package != "torch":
            assert package in there, f"{package} is not in {name}: make lock"
        try:
            lines = requires(package) or []
        except PackageNotFoundError:
            continue  # not installed here: its own needs are not known
        for need in map(Requirement, lines):
            if (need.marker is None or need.marker.evaluate({"extra": extra})) and not _of_torch(need.name):
                todo += [(canonicalize_name(need.name), one) for one in ("", *need.extras)]


def _of_torch(name: str) -> bool:
    return name.startswith(("nvidia-", "cuda-", "triton"))


def test_all_that_is_locked_has_a_licence_in_the_list() -> None:
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", (ROOT / "docs" / "licences.md").read_text(), re.M)
    listed = {name: version for name, version, licence in rows if licence.strip()}
    assert listed.keys() >= {"torch"}
    assert {name: listed.get(name) for name in locked("requirements-dev.lock")} == locked("requirements-dev.lock")


def test_runs_are_locked_to_what_tests_are_run_with() -> None:
    assert locked("requirements.lock").items() <= locked("requirements-dev.lock").items()
