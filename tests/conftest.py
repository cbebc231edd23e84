"""What every test run says at its end: which tests were left out by the command's markers, and how many. Of several
worker processes (`make test`: one per core) each leaves out the same ones, and the first tells of them.

`--passed FILE` leaves out what the file names and adds to it what passes: `make evidence` goes on where it was stopped.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A busy machine is no failure: pytest's own limits end what hangs.
hypothesis.settings.register_profile("strop", deadline=None)
hypothesis.settings.load_profile("strop")

MARKERS = ("gpu", "postgres", "browser", "frameworks", "fault", "slow")
left_out: Counter[str] = Counter()
_passed: Path | None = None

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers are as many as the cores: more threads of torch's would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, metavar="FILE", help="names what has passed before, and is left out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file: Path | None = config.getoption("passed")
    if file is not None and file.exists():
        before = set(file.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
        items[:] = [item for item in items if item.nodeid not in before]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and _passed is not None:
        with _passed.open("a") as file:
            file.write(f"{report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    global _passed
    if not hasattr(config, "workerinput"):  # reports of workers come here
        _passed = config.getoption("passed")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker process has ended."""
    if not left_out:
        left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        left_out[", ".join(name for name in MARKERS if item.get_closest_marker(name)) or "not selected"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told["left_out"] = dict(left_out)


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(f"skipped: {skipped}" + (" (reasons above)" if skipped else ""))
    for names, count in left_out.most_common():
        terminalreporter.write_line(f"left out: {count} marked {names}")
