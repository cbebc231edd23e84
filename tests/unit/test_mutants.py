"""The mutants of `make mutants` still fit the source: what cannot be applied any more guards nothing."""

import ast
import shutil
from pathlib import Path

import pytest

from tests.mutants.__main__ import try_out
from tests.mutants.known import MUTANTS, SOURCE, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_is_python(mutant: Mutant, tmp_path: Path) -> None:
    for file, *_ in mutant.changes:
        place = tmp_path / "strop" / file
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SOURCE / "strop" / file, place)
    mutant.apply(tmp_path)
    for file, *_ in mutant.changes:
        ast.parse((tmp_path / "strop" / file).read_text())
    for word in mutant.tests.split():
        assert not word.startswith("tests/") or (SOURCE.parent / word).exists(), f"{word} is not there"


def test_mutants_are_told_apart() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_what_does_not_occur_once_is_named(tmp_path: Path) -> None:
    (tmp_path / "strop").mkdir()
    (tmp_path / "strop" / "a.py").write_text("x = 1\nx = 1\n")
    for old, count in (("x = 1", 2), ("y", 0)):
        with pytest.raises(ValueError, match=rf"mutant 'm': .* occurs {count} times in src/strop/a.py: write it anew"):
            Mutant("m", (("a.py", old, "z"),), "").apply(tmp_path)


@pytest.mark.parametrize(
    ("instead", "how"),
    [('f"{lineage}.{step}"  # harmless', "LIVES"), ('f"{step}.{lineage}"', "killed"), ("1 +", "BROKEN")],
)
def test_a_mutant_is_tried_out_in_a_copy(tmp_path: Path, instead: str, how: str) -> None:
    test = tmp_path / "test_version.py"
    test.write_text("def test_it():\n    from strop.types import version\n    assert version(1, 2) == '1.2'\n")
    if how == "BROKEN":  # what cannot even be imported shows nothing
        test.write_text("from strop.types import version\n" + test.read_text())
    before = (SOURCE / "strop" / "types.py").read_text()
    result = try_out(Mutant("m", (("types.py", 'f"{lineage}.{step}"', instead),), str(test)))
    assert result.how == how, result
    assert (SOURCE / "strop" / "types.py").read_text() == before
