"""The shape of the package: one thing has one name, packages look one way only, and the loop is read in one sitting."""

import tomllib
from graphlib import TopologicalSorter

from tests.shape import source


def test_one_public_class_name_is_one_thing() -> None:
    twice = [name for name, count in source.classes().items() if count > 1]
    assert not twice, "defined more often than once: rename one"


def test_packages_import_only_what_stands_before_them() -> None:
    assert not source.against_order(), "imports against source.ORDER"


def test_every_part_has_its_place() -> None:
    parts = {source.part_of(file) for file in source.files()} - {"__init__"}
    assert parts <= source.PLACE.keys()


def test_packages_of_one_line_do_not_import_each_other_both_ways() -> None:
    graph: dict[str, set[str]] = {}
    for mine, other in source.beside():
        graph.setdefault(mine, set()).add(other)
    TopologicalSorter(graph).prepare()


def test_the_loop_is_read_in_one_sitting() -> None:
    lines = len((source.PACKAGE / source.LOOP).read_text().splitlines())
    assert lines < 200, f"{source.LOOP} has {lines} lines"


def test_types_are_strict_but_where_torch_is_imported() -> None:
    project = tomllib.loads((source.PACKAGE.parents[1] / "pyproject.toml").read_text())
    strict = project["tool"]["pyright"]["strict"]
    root = source.PACKAGE.parents[1]
    covered = {file for pattern in strict for path in root.glob(pattern) for file in (path, *path.rglob("*.py"))}
    lax = [source.name_of(file) for file in source.files() if file not in covered]
    assert [name for name in lax if not source.imports_torch(source.PACKAGE / name)] == []
