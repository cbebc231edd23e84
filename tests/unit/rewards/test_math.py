"""Mathematics: what is the same, what is not, and what nobody can tell in time."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from strop.errors import StropError
from strop.rewards import after_hashes, last_boxed, last_number, math_equal, worker
from strop.rewards.math import plain
from tests.limits import stretch

DATA = Path(__file__).parents[4] / "shared" / "data" / "math"
SAME = [
    ("0.5", r"\frac12"),
    ("1/2", r"\dfrac{1}{2}"),
    ("-.5", r"-\frac{1}{2}"),
    ("1,000", "1000"),
    (r"1{,}000.0", "1000"),
    (r"58\,500", "58,500"),
    (r"50\%", "0.5"),
    (r"50\%", "50"),
    ("0.333333", r"\frac{1}{3}"),
    ("1e3", 1000),
    (27, 27.0),
    ("(1, 2]", r"\left(1,2\right]"),
    (r"(3,4)\cup(1,2)", r"(1,2)\cup(3,4)"),
    (r"\{2, 1\}", r"\{1,2\}"),
    ("3,1,2", "1, 2, 3"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
    (r"5\text{ cm}", "5"),
    ("42 apples", "42"),
    ("5 dollars", "5"),
    ("12 345", "12345"),
    ("East", "east"),
    ("xy", "yx"),
    ("5 = 5", "5"),
    (r"5 = \sqrt{25}", "5"),
    ("1/2 = 2/4 = 0.5", "0.5"),
    (r"\$18", "18"),
    (r"10^\circ", "10"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{(B)}", "B"),
    ("x = 5", "5"),
    ("$5.$", "5"),
    (r"\(5\)", "5"),
    (r"\boxed{5}", "5"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("2 + 3x", "3x+2"),
    ("2^{10}", "1024"),
    (r"\pi", "3.14159265"),
    (r"3\frac12", "3.5"),
    ("\\sqrt{2}\n+ 1", r"1+\sqrt{2}"),
]
OTHER = [
    ("50", "0.5"),
    ("0.333", r"\frac13"),
    (r"\pi", "3.14"),
    ("1000000", "1000001"),
    ("1000000.5", "1000000"),
    ("0.0000001", "0.0000002"),
    ("-5", "5"),
    ("3 4", "34"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("1,2,3", "3"),
    ("1 00", "100"),
    ("5 million dollars", "5"),
    ("east", "seat"),
    ("5 = 7", "7"),
    ("5 or 6", "5"),
    ("4\n7", "7"),
    ("7\n7", "7"),
    ("x", "y"),
    ("A", "B"),
    (r"\infty", r"-\infty"),
    ("", "0"),
    ("", ""),
    (None, "0"),
    ("1/0", "0"),
    ("nan", "1"),
]
ENDLESS = [
    "9^{9^{9^{9}}}",
    "(10^{10^{10}})!",
    r"\sum_{n=1}^{10^{12}} \frac{1}{n}",
    "(" * 450,
]


@pytest.mark.parametrize(("answer", "golden"), SAME)
def test_the_same(answer: Any, golden: Any) -> None:
    assert math_equal(answer, golden, seconds=30)  # a machine may be busy


@pytest.mark.parametrize(("answer", "golden"), OTHER)
def test_not_the_same(answer: Any, golden: Any) -> None:
    assert not math_equal(answer, golden, seconds=30)


@pytest.mark.parametrize("endless", ENDLESS)
def test_what_takes_for_ever_is_wrong_and_harms_nobody(endless: str) -> None:
    worker.call("equal", ["1", "1"], 30)  # what follows is not the time that imports take
    began = time.monotonic()
    assert not math_equal(endless, "7", seconds=1)
    assert time.monotonic() - began < stretch(6)
    assert math_equal(r"\sqrt{4}", "2", seconds=30)


def test_what_is_too_long_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "call", lambda *_: pytest.fail("it was tried"))
    assert not math_equal("x^" * 1000, "x")
    assert not math_equal("9" * 100_000, "9" * 99_999)
    assert math_equal("x" * 2000, "x" * 2000)


def test_python_s_powers_are_no_way_in() -> None:
    began = time.monotonic()
    assert not math_equal("9**9**9**9", "7")
    assert not math_equal("__import__('os').abort()", "7")
    assert time.monotonic() - began < stretch(20)


def test_any_thread_may_ask_while_another_hangs() -> None:
    worker.call("equal", ["1", "1"], 30)
    with ThreadPoolExecutor(4) as threads:
        hung = threads.submit(math_equal, ENDLESS[0], "7", seconds=2)
        assert list(threads.map(lambda n: math_equal(rf"\sqrt{{{n * n}}}", n, seconds=30), range(2, 8))) == [True] * 6
        assert hung.result() is False


def test_a_process_that_was_killed_is_replaced() -> None:
    worker.call("equal", ["1", "1"], 30)
    for child in worker._idle:
        child.kill()
        child.wait()
    assert math_equal(r"\sqrt{4}", "2", seconds=30)
    (child, *_) = worker._idle
    threading.Timer(0.5, os.kill, (child.pid, signal.SIGTERM)).start()  # while it is at work
    with pytest.raises(TimeoutError):
        worker.call("equal", [ENDLESS[0], "7"], 20)
    assert math_equal(r"\sqrt{9}", "3", seconds=30)


def test_a_forked_process_has_children_of_its_own() -> None:
    """And the kept process ends with whoever started it, whoever else was forked meanwhile."""
    code = (
        "import os, sys\nfrom strop.rewards import math_equal, worker\n"
        "assert math_equal(r'\\sqrt{4}', 2, seconds=30)\n"
        "mine = worker._idle[0].pid\n"
        "if (pid := os.fork()) == 0:\n"
        "    fine = math_equal(r'\\sqrt{9}', 3, seconds=30) and worker._idle[0].pid != mine\n"
        "    os._exit(0 if fine else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert math_equal(r'\\sqrt{16}', 4, seconds=30) and worker._idle[0].pid == mine\n"
        "print(mine)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
    assert not done.stderr


def test_without_math_verify_it_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    code = (
        "import strop.rewards as r\nassert r.math_equal('1/2', '0.5')\n"
        "try: r.math_equal('x', 'y')\nexcept Exception as error: print(type(error).__name__, error)"
    )
    where = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": where}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == f"{StropError.__name__} math_equal needs math-verify: pip install math-verify"


def rows(name: str) -> list[dict[str, Any]]:
    if not (DATA / name).exists():
        pytest.skip("the data set is not there")
    return [json.loads(line) for line in (DATA / name).read_text().strip().split("\n")]


def test_gsm8k() -> None:
    answers = [row["answer"] for row in rows("gsm8k/test.jsonl")]
    golden = [str(after_hashes(text)) for text in answers]
    for text, wanted, before in zip(answers, golden, [golden[-1], *golden], strict=False):
        assert math_equal(wanted, wanted)
        assert math_equal(last_number(text), wanted)
        assert math_equal(wanted, before) == (plain(wanted) == plain(before))


def test_math_500() -> None:
    found = rows("math500.jsonl")
    for row in found:
        assert math_equal(last_boxed(row["solution"]), row["answer"]), row["answer"]
    golden = [row["answer"] for row in found if not plain(row["answer"]).isdigit()][:60]
    for one, other in pairwise(golden):
        assert worker.call("equal", [one, one], 30), one  # also when the cheap way is not taken
        assert not math_equal(one, other, seconds=30), (one, other)


@pytest.mark.parametrize("name", ["aime24", "aime25", "aime_1983_2023_deepscaler", "amc23"])
def test_aime(name: str) -> None:
    answers = [row["answer"] for row in rows(f"{name}.jsonl")]
    for one, other in pairwise(answers):
        assert math_equal(str(one), one)
        assert math_equal(f"{float(one):,.1f}", one)
        assert math_equal(one, other) == (float(one) == float(other))
