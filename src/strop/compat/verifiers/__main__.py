"""The rows of an environment as a file of tasks, written where verifiers is installed:

env/bin/python -m strop.compat.verifiers wordle tasks.jsonl --args '{"num_train_examples": 100}'
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec

from strop.compat.verifiers import tasks
from strop.errors import StropError


def main() -> None:
    parser = argparse.ArgumentParser("python -m strop.compat.verifiers")
    parser.add_argument("environment", help="the name of an installed environment or taskset")
    parser.add_argument("file", type=Path, help="where the tasks are written, as .jsonl")
    parser.add_argument("--args", type=json.loads, default={}, help="what it is loaded with, as JSON")
    parser.add_argument("--held", type=int, default=0, help="rows for the split test")
    parser.add_argument("--limit", type=int, help="how many rows at most")
    given = parser.parse_args()
    sys.path.insert(0, "")
    made = tasks(given.environment, given.args, given.held, given.limit)
    given.file.write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in made))


if __name__ == "__main__":
    try:
        main()
    except StropError as error:
        sys.exit(str(error))
