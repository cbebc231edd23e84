"""The mutants of `make mutants` still fit the source: what cannot be applied any more guards nothing."""

import ast
import shutil
from pathlib import Path

import pytest

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
