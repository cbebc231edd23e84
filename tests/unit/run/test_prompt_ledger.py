"""What is spent is on disk before it is sent, and stays spent."""

import json
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.run.prompts.ledger import CallLedger, CallRecord


def reserve(ledger: CallLedger, call: int, key: str = "k", tokens: int = 100) -> int:
    return ledger.reserve(call, key, tokens=tokens, cost=0.5, time=0.0)


def answer(ledger: CallLedger, call: int, attempt: int, text: str = "yes", tokens: int = 10) -> None:
    ledger.settle(CallRecord(call=call, attempt=attempt, answer=text, tokens=tokens, cost=0.25))


def test_a_reservation_is_on_disk_before_anything_is_sent(tmp_path: Path) -> None:
    with CallLedger(tmp_path / "calls.jsonl") as ledger:
        assert reserve(ledger, 0) == 1
        (line,) = (tmp_path / "calls.jsonl").read_text().splitlines()
        assert json.loads(line) == {"call": 0, "attempt": 1, "key": "k", "tokens": 100, "cost": 0.5, "time": 0.0}
        assert (ledger.spent.calls, ledger.spent.tokens, ledger.spent.cost) == (1, 100, 0.5)


def test_what_is_settled_counts_as_what_it_came_to(tmp_path: Path) -> None:
    with CallLedger(tmp_path / "calls.jsonl") as ledger:
        answer(ledger, 0, reserve(ledger, 0))
        assert (ledger.spent.calls, ledger.spent.tokens, ledger.spent.cost) == (1, 10, 0.25)
        assert ledger.find(0, "k") == "yes"
    with CallLedger(tmp_path / "calls.jsonl") as again:
        assert (again.spent, again.lost, again.find(0, "k")) == (ledger.spent, 0, "yes")


def test_what_was_lost_stays_spent(tmp_path: Path) -> None:
    """As a kill leaves it: the second of two calls was never settled. It is asked again as another attempt."""
    with CallLedger(tmp_path / "calls.jsonl") as ledger:
        answer(ledger, 0, reserve(ledger, 0))
        reserve(ledger, 1)
    with CallLedger(tmp_path / "calls.jsonl") as again:
        assert (again.spent.calls, again.spent.tokens, again.spent.cost, again.lost) == (2, 110, 0.75, 1)
        assert again.find(1, "k") is None
        assert reserve(again, 1) == 2
        answer(again, 1, 2)
        assert (again.spent.calls, again.spent.tokens) == (3, 120)


@pytest.mark.parametrize("cut", [1, 20])
def test_a_line_that_was_cut_off(tmp_path: Path, cut: int) -> None:
    """Of an answer: the call stays spent. The next line is not written into the middle of it."""
    with CallLedger(tmp_path / "calls.jsonl") as ledger:
        answer(ledger, 0, reserve(ledger, 0))
    whole = (tmp_path / "calls.jsonl").read_bytes()
    (tmp_path / "calls.jsonl").write_bytes(whole[:-cut])
    with CallLedger(tmp_path / "calls.jsonl") as again:
        assert (again.spent.calls, again.spent.tokens, again.find(0, "k")) == (1, 100, None)
        reserve(again, 0)
    with CallLedger(tmp_path / "calls.jsonl") as last:
        assert last.spent.calls == 2


def test_another_question_under_the_same_number(tmp_path: Path) -> None:
    with CallLedger(tmp_path / "calls.jsonl") as ledger:
        answer(ledger, 0, reserve(ledger, 0, key="one"))
        with pytest.raises(StoreError, match="has another question as call 0"):
            ledger.find(0, "other")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").write_text("nonsense\n")
    with pytest.raises(StoreError, match="nobody knows what was spent"):
        CallLedger(tmp_path / "calls.jsonl")
