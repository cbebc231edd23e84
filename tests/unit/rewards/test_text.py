"""Answers as text, and the answer within what a model said."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from strop.rewards import after_hashes, contains, exact_match, f1, last_boxed, last_number, last_tag

DATA = Path(__file__).parents[4] / "shared" / "data" / "qa"


@pytest.mark.parametrize(
    ("answer", "golden", "exact", "overlap"),
    [
        ("The Beatles!", "beatles", 1.0, 1.0),
        ("  an   apple ", "apple", 1.0, 1.0),
        ("John Ronald Tolkien", "Tolkien", 0.0, 0.5),
        ("Paris, Paris", "Paris", 0.0, 2 / 3),  # a word counts as often as it is there
        ("yes it is", "yes", 0.0, 0.0),
        ("no", "yes", 0.0, 0.0),
        ("Yes.", "yes", 1.0, 1.0),
        ("", "Paris", 0.0, 0.0),
        (None, "Paris", 0.0, 0.0),
        ("1889", 1889, 1.0, 1.0),
        ("A", "the", 0.0, 0.0),  # nothing is left of both, and yet they differ
        ("A", "a", 1.0, 1.0),
        ("", "", 1.0, 1.0),
    ],
)
def test_exact_match_and_f1(answer: str | None, golden: str, exact: float, overlap: float) -> None:
    assert exact_match(answer, golden) == exact
    assert f1(answer, golden) == pytest.approx(overlap)


def test_of_several_golden_answers_the_best_counts() -> None:
    several = ["New York City", "NYC", "New York"]
    assert exact_match("nyc", several) == 1.0
    assert f1("York City", several) == pytest.approx(0.8)
    assert contains("It is in New York.", several) == 1.0
    assert exact_match("nyc", []) == f1("nyc", []) == 0.0


def test_contains_goes_by_words() -> None:
    assert contains("He was born in 1889, they say", "1889") == 1.0
    assert contains("He was born in 18890", "1889") == 0.0
    assert contains("born in the city of London", "City of London") == 1.0
    assert contains(None, "x") == contains("x", "") == 0.0


def test_golden_answers_of_hotpotqa_match_themselves() -> None:
    file = DATA / "hotpotqa_dev7405_qa_only.jsonl"
    if not file.exists():
        pytest.skip("the data set is not there")
    answers = [json.loads(line)["answer"] for line in file.read_text().strip().split("\n")][:1000]
    for one, other in pairwise(answers):
        assert exact_match(one, one) == f1(one, one) == contains(f"I say: {one}.", one) == 1.0, one
        assert exact_match(one, other) <= f1(one, other)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1}, or \boxed{\{1, \frac{2}{3}\}}!", r"\{1, \frac{2}{3}\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{1} and then \boxed{\frac{1}{2}", None),
        (r"\boxed{a\}b}", r"a\}b"),
        ("no box", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_box(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


def test_other_places_where_answers_stand() -> None:
    assert after_hashes("so #### 3\nno:\n#### 1,234 \nThat is it.") == "1,234"
    assert after_hashes("none") is after_hashes("####  ") is None
    assert last_tag("<answer>a</answer><answer>\nb\n</answer> <answer>") == "b"
    assert last_tag("</answer> <answer>x") is None
    assert last_boxed(None) is after_hashes(None) is last_tag(None) is last_number(None) is None
    assert last_tag("<sql>SELECT 1</sql>", "sql") == "SELECT 1"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It costs $1,234,567.89.", "1234567.89"),
        ("10-3", "3"),
        ("from 5 to -3", "-3"),
        ("x2 and v1.2", None),
        ("1,2345", "2345"),
        ("1, 2, 3", "3"),
        ("the 1889th, about .5e-3", ".5e-3"),
        ("6.", "6"),
        ("The answer is −5", "-5"),
        ("10−3", "3"),
        ("−1,500.5e−2", "-1500.5e-2"),
        ("", None),
    ],
)
def test_the_last_number(text: str, found: str | None) -> None:
    assert last_number(text) == found
