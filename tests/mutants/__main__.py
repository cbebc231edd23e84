"""Change the source in one small way at a time and see that the tests notice: `make mutants`, or

    python -m tests.mutants [--only NAME ...] [--killed FILE] [--json]

Changes are made in a temporary copy of src, never here. The tests named by a mutant must pass without it and fail with
it. With `--killed FILE` those that the file names are not tried again, and others are added to it as they are killed: a
run that was stopped goes on. The exit code is 1 if a mutant lives, if it cannot be applied any more, or if its tests
fail by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.known import MUTANTS, SOURCE, Mutant

ROOT = SOURCE.parent
LIMIT = 900.0
"""Seconds after which tests of a mutant count as failed: it made them hang."""
FAILED = 1
"""Pytest's exit code where tests ran and failed; others mean that they did not run."""


@dataclass(frozen=True)
class Result:
    """`how` is killed, LIVES or BROKEN; `why` is the test that noticed, or what is to be done."""

    name: str
    how: str
    seconds: float
    why: str = ""


def try_out(mutant: Mutant) -> Result:
    """Whether its tests notice the mutant."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="strop-mutant-") as place:
        source = copied(Path(place))
        try:
            mutant.apply(source)
        except ValueError as error:
            return Result(mutant.name, "BROKEN", 0.0, str(error))
        code, said = tested(source, [mutant.tests])
    seconds = time.monotonic() - began
    if code in (None, FAILED):
        noticed = re.search(r"^FAILED (\S+)", said, re.MULTILINE)
        return Result(mutant.name, "killed", seconds, noticed[1] if noticed else "its tests did not come to an end")
    if code == 0:
        return Result(mutant.name, "LIVES", seconds, f"it passed {mutant.tests}: write the test that notices")
    return Result(mutant.name, "BROKEN", seconds, f"mutant {mutant.name!r}: its tests did not run: {said}")


def copied(place: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    return Path(shutil.copytree(SOURCE, place / "src", ignore=ignored))


def tested(source: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """Pytest's exit code with the package in `source`, None where it took too long, and what it said last."""
    words = [word for one in tests for word in shlex.split(one)]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    command += ["-m", "not slow and not fault and not gpu and not postgres"]
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    where = subprocess.run(
        [sys.executable, "-c", "from importlib.util import find_spec; print(find_spec('strop').origin)"],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(source), f"{where.stdout} is tested, not the copy"
    try:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])


def sound(mutants: Sequence[Mutant]) -> str:
    """What is wrong with the tests by themselves, if anything: then that they fail says nothing about a mutant."""
    with tempfile.TemporaryDirectory(prefix="strop-mutant-") as place:
        source = copied(Path(place))
        for tests in sorted({mutant.tests for mutant in mutants}):
            code, said = tested(source, [tests])
            if code != 0:
                return f"{tests} fails without any mutant: repair that first\n{said}"
    return ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="mutants whose name has this in it")
    parser.add_argument("--json", action="store_true", help="the results as one JSON list")
    parser.add_argument("--killed", type=Path, metavar="FILE", help="names mutants that were killed before")
    given = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not given.only or any(part in m.name for part in given.only)]
    if not chosen:
        parser.error(f"no mutant is called {given.only[0]!r}: names are in tests/mutants/known.py")
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    if given.killed and given.killed.exists():
        before = set(given.killed.read_text().splitlines())
        chosen = [mutant for mutant in chosen if mutant.name not in before]
    say(f"{len(chosen)} mutants; first their tests without them")
    if why := sound(chosen):
        say(why)
        return 1
    results: list[Result] = []
    for n, mutant in enumerate(chosen, 1):
        results.append(result := try_out(mutant))
        say(f"{n:3}/{len(chosen)}  {result.how:7} {result.seconds:5.1f} s  {mutant.name}")
        if result.why:
            say(f"         {result.why}")
        if given.killed and result.how == "killed":
            with given.killed.open("a") as file:
                file.write(f"{mutant.name}\n")
    if given.json:
        print(json.dumps([asdict(result) for result in results]))
    left = [result for result in results if result.how != "killed"]
    say(f"{len(results) - len(left)} of {len(results)} killed" + (f", {len(left)} are not" if left else ""))
    return bool(left)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
