"""Repairs as tasks: a package with a bug, and what a user of it says. What is tested afterwards is not in them, since
an agent is given its task as a file: repairs.py has it, and reward.py asks there."""

from collections.abc import Sequence

from repairs import PACKAGES

import strop


def tasks(programs: Sequence[str] = ()) -> list[strop.Task]:
    """24 repairs, of which the last bug of each package is held out; with `programs` a set of them for each, by its
    name in the table `agents`."""
    return [
        strop.Task(
            id=f"{package.name}-{number}" + f"-{program}" * bool(program),
            split="test" if number == len(package.bugs) - 1 else "train",
            data={"package": package.name, "files": package.files(number), "issue": bug.issue},
            agent=program,
        )
        for program in programs or [None]
        for package in PACKAGES
        for number, bug in enumerate(package.bugs)
    ]
