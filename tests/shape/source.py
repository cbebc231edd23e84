"""The package as its source shows it: classes, imports and their order."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "strop"
LOOP = "run/loop.py"

ORDER = (
    ("types", "errors", "config", "files", "imports", "printable", "version"),
    ("net",),
    ("tasks", "store", "models", "demo"),
    ("agent", "rewards", "tools"),
    ("runners", "engines"),
    ("gateway",),
    ("trajectory",),
    ("algorithms",),
    ("learner",),
    ("weights",),
    ("monitor",),
    ("run",),
    ("cluster", "compat", "testing"),
    ("cli",),
)
"""A package imports what stands in the lines before its own, and of its own line only what does not import it."""
PUBLIC = "run"
"""Where `strop` itself stands when one of our modules imports it: it imports all that is public, up to here."""

PLACE = {name: place for place, names in enumerate(ORDER) for name in names}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


def part_of(file: Path) -> str:
    """The package, or the module beside the packages, that a file belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def classes() -> Counter[str]:
    """How often each public class name is defined, at the top of a module."""
    trees = (ast.parse(file.read_text()) for file in files())
    found = (node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return Counter(name for name in found if not name.startswith("_"))


def imports(file: Path) -> set[str]:
    """The parts of strop that a file imports, wherever it does: at its top, in a function, or for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            module = node.module or ""
            found |= {f"strop.{alias.name}" for alias in node.names} if module == "strop" else {module}
    ours = [name.split(".") for name in found if name == "strop" or name.startswith("strop.")]
    return {parts[1] if parts[1:] and parts[1] in PLACE else PUBLIC for parts in ours} - {part_of(file)}


def against_order() -> set[tuple[str, str]]:
    """Every (file, part) where the part stands after the file's own."""
    inner = [file for file in files() if file != PACKAGE / "__init__.py"]
    return {(name_of(file), part) for file in inner for part in imports(file) if PLACE[part] > PLACE[part_of(file)]}


def beside() -> Iterator[tuple[str, str]]:
    """Imports between parts of one line of the order."""
    for file in files():
        if file != PACKAGE / "__init__.py":
            mine = part_of(file)
            yield from ((mine, part) for part in imports(file) if PLACE[part] == PLACE[mine])


def imports_torch(file: Path) -> bool:
    return any(
        name == "torch" or name.startswith("torch.")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    )
