"""What every test run says at its end: which tests were left out by the command's markers, and how many."""

from collections import Counter

import pytest

MARKERS = ("gpu", "postgres", "browser", "frameworks", "fault", "slow")
left_out: Counter[str] = Counter()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        left_out[", ".join(name for name in MARKERS if item.get_closest_marker(name)) or "not selected"] += 1


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(f"skipped: {skipped}" + (" (reasons above)" if skipped else ""))
    for names, count in left_out.most_common():
        terminalreporter.write_line(f"left out: {count} marked {names}")
