"""Judges: what they are asked, what is made of what they say, and what happens when they say nothing."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strop.errors import PlaceError, StropError
from strop.rewards import Judge, Pairwise, Verdict, exact_match, judge_client, read_grade
from strop.rewards.pairwise import choose_pairs
from tests.limits import stretch
from tests.unit.rewards.judging import Endpoint, endpoint


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_client, "PAUSES", (0.01, 0.05))


@pytest.fixture
def place() -> Iterator[Endpoint]:
    with endpoint(lambda _: "yes") as place:
        yield place


def judge(place: Endpoint, **settings: Any) -> Judge:
    return Judge("m", base_url=place.url, **({"deadline": 20.0} | settings))


def plays(place: Endpoint, *said: str | bytes | int | None) -> None:
    left = iter(said)
    place.say = lambda _: next(left)


def test_what_it_is_asked_and_what_it_says(place: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    verdict = judge(place, key_env="JUDGE_KEY")("Where? {golden}", 'in {"a": 1}', "Paris")
    assert (verdict.value, verdict.why) == (1.0, "yes")
    (prompt,) = place.prompts
    assert "Where? {golden}" in prompt  # what is filled in is not filled in again
    assert 'in {"a": 1}' in prompt
    assert place.keys == ["Bearer secret"]
    assert (place.asked[0]["model"], place.asked[0]["temperature"]) == ("m", 0)


def test_prompt_scale_and_options_are_the_user_s(place: Endpoint) -> None:
    plays(place, "The answer is good.\n**Score: 8/10**")
    reads = partial(read_grade, low=0, high=10)
    verdict = judge(place, prompt='{"q": {question}}', reads=reads, options={"max_tokens": 5})("1 + 1", "2")
    assert verdict.value == 0.8
    assert place.prompts == ['{"q": 1 + 1}']
    assert place.asked[0]["max_tokens"] == 5
    assert "temperature" not in place.asked[0]


def test_the_rule_comes_first(place: Endpoint) -> None:
    def rule(question: str, answer: str, golden: str) -> float | None:
        return 1.0 if exact_match(answer, golden) else 0.0 if not answer else None

    ask = judge(place, rule=rule)
    assert [float(ask("?", answer, "Paris")) for answer in ("paris", "")] == [1.0, 0.0]
    assert not place.asked
    assert float(ask("?", "the capital of France", "Paris")) == 1.0
    assert ask.counts == {"by_rule": 2, "calls": 1}
    assert ask("?", None, "Paris") == Verdict(0.0, "there is no answer")
    assert judge(place, rule=lambda *_: Verdict(0.25, "so"))("?", "a", "b") == Verdict(0.25, "so")


def test_what_cannot_be_read_is_asked_once_more(place: Endpoint) -> None:
    plays(place, "Well, yes and no", "No.")
    ask = judge(place)
    assert ask("?", "a", "b").value == 0.0
    assert [message["role"] for message in place.asked[1]["messages"]] == ["user", "assistant", "user"]
    plays(place, "7", "")
    verdict = ask("?", "other", "b")
    assert verdict.value is None
    assert "cannot be read" in verdict.why
    assert ask.counts["unreadable"] == 3
    plays(place, "yes")
    assert ask("?", "other", "b").value == 1.0  # it was not remembered


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("Yes", 1.0), (" no. ", 0.0), ("0.25", 0.25), ("1", 1.0), ("`0.5`", 0.5), ("**Verdict:** yes", 1.0),
        ("<think>no, no\nno</think>\nyes", 1.0), ("Because of that.\nFinal answer: no", 0.0), ("Grade = 1.0", 1.0),
        ("yes, because", None), ("not no", None), ("1.5", None), ("-0.1", None), ("nan", None), ("inf", None),
        ("", None), ("<think>yes", None), ("1/2", None), ("1/1", 1.0), ("yes\nno reason", None),
    ],
)  # fmt: skip
def test_a_judge_is_not_guessed_at(said: str, value: float | None) -> None:
    assert read_grade(said) == value


@pytest.mark.parametrize("trouble", [429, 500, 503, None])
def test_a_busy_judge_is_asked_again(place: Endpoint, trouble: int | None) -> None:
    plays(place, trouble, trouble, "yes")
    ask = judge(place)
    assert ask("?", "a", "b").value == 1.0
    assert ask.counts == {"calls": 3, "failed": 2}


GARBLED = {
    "a web page": ("text/html", b"<html>Sign in</html>"),
    "a web page that says it is JSON": ("application/json", b"<html>Sign in</html>"),
    "half an answer": ("application/json", b'{"choices": [{"message": {"cont'),
    "no text": ("application/json", b"\xff\xfe\x00"),
    "a list": ("application/json", b"[1]"),
    "no message": ("application/json", b'{"choices": [{}]}'),
    "no list of choices": ("application/json", b'{"choices": 3}'),
    "content that is no text": ("application/json", b'{"choices": [{"message": {"content": {"a": 1}}}]}'),
}


@pytest.mark.parametrize("name", GARBLED)
def test_what_is_no_answer_is_asked_for_again(place: Endpoint, name: str) -> None:
    place.kind, body = GARBLED[name]

    def say(_: str) -> str | bytes:
        if len(place.asked) < 3:
            return body
        place.kind = "application/json"
        return "yes"

    place.say = say
    ask = judge(place)
    assert ask("?", "a", "b").value == 1.0
    assert ask.counts == {"calls": 3, "failed": 2}


def test_a_judge_that_never_answers_as_one_is_no_verdict(place: Endpoint) -> None:
    place.kind, place.say = "text/html", lambda _: b"<html>Sign in</html>"
    verdict = judge(place, calls=3)("?", "a", "b")
    assert (verdict.value, "budget" in verdict.why) == (None, True)
    verdict = judge(place, deadline=1.5)("?", "a", "b")
    assert verdict.value is None
    assert "'<html>Sign in</html>'). Fix: check its base_url" in verdict.why


def test_halves_of_letters(place: Endpoint, tmp_path: Path) -> None:
    plays(place, "\ud83d\nyes", "\ud83d", "no")
    ask = judge(place, cache=tmp_path / "judge.sqlite")
    assert ask("?", "a", "b") == Verdict(1.0, "?\nyes")
    assert ask("?", "half \ud83d", "b").value == 0.0
    assert "half ?" in place.prompts[1]


def test_it_waits_as_long_as_it_is_asked_to(place: Endpoint) -> None:
    plays(place, 429, "yes")
    place.retry_after = "0.4"
    began = time.monotonic()
    assert judge(place)("?", "a", "b").value == 1.0
    assert time.monotonic() - began > 0.4


def test_past_the_deadline_there_is_no_verdict(place: Endpoint) -> None:
    place.say = lambda _: 503
    assert judge(place, deadline=30.0, calls=1)("?", "a", "b").value is None  # the first request of a process is slow
    ask = judge(place, deadline=1.5)
    verdict = ask("?", "a", "b")
    assert verdict.value is None
    assert "1.5 s" in verdict.why
    assert "503" in verdict.why
    place.say, place.slow = lambda _: "yes", 5.0
    began = time.monotonic()
    assert ask("?", "a", "b").value is None
    assert time.monotonic() - began < stretch(4.5)
    assert ask.counts["unanswered"] == 2


def test_an_endpoint_that_is_not_there_is_no_verdict() -> None:
    ask = Judge("m", base_url="http://127.0.0.1:9/v1", deadline=0.3)
    assert "Connection error" in ask("?", "a", "b").why


def test_what_can_never_work_is_an_error(place: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(StropError, match=r"set \$JUDGE_KEY"):
        judge(place, key_env="JUDGE_KEY")("?", "a", "b")
    for status in (401, 404):
        plays(place, status)
        with pytest.raises(StropError, match="check its base_url"):
            judge(place)("?", "a", "b")
    plays(place, 400)  # this prompt is refused; the next one may not be
    assert "refused the prompt" in judge(place)("?", "a", "b").why
    with pytest.raises(PlaceError, match="cache"):
        judge(place, cache="/nowhere/at/all.sqlite")("?", "a", "b")


def test_the_budget_holds(place: Endpoint, tmp_path: Path) -> None:
    for cache in (None, tmp_path / "judge.sqlite"):
        ask = judge(place, calls=2, cache=cache)
        assert [ask("?", answer, "b").value for answer in ("1", "2", "3")] == [1.0, 1.0, None]
        assert "budget of 2 calls" in ask("?", "4", "b").why
        assert ask("?", "1", "b").value == 1.0  # what was said before costs nothing
    assert judge(place, calls=2, cache=tmp_path / "judge.sqlite")("?", "5", "b").value is None  # counted in the file
    assert len(place.asked) == 4


def test_answers_are_remembered_by_all_that_they_depend_on(place: Endpoint, tmp_path: Path) -> None:
    cache = tmp_path / "judge.sqlite"
    first = judge(place, cache=cache)
    assert first("?", "a", "b").value == judge(place, cache=cache)("?", "a", "b").value == 1.0
    assert len(place.asked) == 1
    plays(place, "no", "no", "no", "0.5")
    assert judge(place, cache=cache)("?", "a", "c").value == 0.0
    assert judge(place, cache=cache, options={"seed": 1})("?", "a", "b").value == 0.0
    assert Judge("other", base_url=place.url, cache=cache)("?", "a", "b").value == 0.0
    assert judge(place, cache=cache, prompt="{question}")("?", "a", "b").value == 0.5
    with endpoint(lambda _: "0.75") as elsewhere:  # the same name of a model
        assert judge(elsewhere, cache=cache)("?", "a", "b").value == 0.75
    assert Judge("m", base_url=f"{place.url}/", cache=cache)("?", "a", "b").value == 1.0


def test_many_processes_share_the_cache_and_the_budget(place: Endpoint, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom strop.rewards import Judge\n"
        f"judge = Judge('m', base_url={place.url!r}, cache={str(tmp_path / 'judge.sqlite')!r}, calls=25)\n"
        "print(sum(judge('?', f'{n}', 'b').value == 1.0 for n in range(10)))\n"
        "print(sum(judge('?', f'{n} {sys.argv[1]}', 'b').value == 1.0 for n in range(10)))\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(n)], stdout=subprocess.PIPE, text=True) for n in range(3)
    ]
    said = [process.communicate(timeout=100)[0].split() for process in started]
    assert sum(int(shared) + int(own) for shared, own in said) >= 25
    assert len(place.asked) == 25


async def test_async_callers_ask_at_once_but_not_all(place: Endpoint) -> None:
    place.slow = 0.05
    ask = judge(place, at_once=3)
    verdicts = await asyncio.gather(*(ask.ask("?", str(n), "b") for n in range(9)))
    assert [verdict.value for verdict in verdicts] == [1.0] * 9
    assert 1 < place.busiest <= 3


# -- groups ------------------------------------------------------------------------------------------------------------


def longer(prompt: str) -> str:
    """A fair judge: the longer answer wins."""
    first, second = (part.partition(">>>")[0].strip() for part in prompt.split("<<<")[1:])
    return "A" if len(first) > len(second) else "B" if len(second) > len(first) else "tie"


def compare(place: Endpoint, **settings: Any) -> Pairwise:
    return Pairwise("m", base_url=place.url, deadline=20.0, **settings)


def test_members_are_worth_how_often_they_win(place: Endpoint) -> None:
    place.say = longer
    verdicts = compare(place)("?", ["aa", "aaaa", "a", "bb"])
    assert [verdict.value for verdict in verdicts] == [0.5, 1.0, 0.0, 0.5]
    assert verdicts[0].why == "won 1.5 of 3 comparisons"
    assert len(place.asked) == 12  # six pairs, each in both orders


def test_a_judge_that_likes_a_position_tells_nothing(place: Endpoint) -> None:
    for always in ("A", "B"):
        place.say = lambda _, always=always: always
        assert [verdict.value for verdict in compare(place)("?", ["a", "b", "c"])] == [0.5] * 3


def test_what_needs_no_judge(place: Endpoint) -> None:
    verdicts = compare(place)("?", ["same", " same ", None, None])
    assert [verdict.value for verdict in verdicts] == [5 / 6, 5 / 6, 1 / 6, 1 / 6]
    assert not place.asked
    assert compare(place)("?", ["alone"])[0].value == 0.5
    assert compare(place)("?", []) == []


def test_comparisons_that_stay_open_are_left_out(place: Endpoint) -> None:
    place.say = lambda prompt: 400 if "mute" in prompt else longer(prompt)
    verdicts = compare(place)("?", ["aa", "a", "mute"])
    assert [verdict.value for verdict in verdicts] == [1.0, 0.0, 0.5]
    assert verdicts[0].why == "won 1 of 1 comparisons, 1 left open"


def test_a_bounded_number_of_pairs_is_spread_evenly() -> None:
    assert len(choose_pairs(8)) == 28
    for most in (8, 12, 16):
        for seed in range(5):
            chosen = choose_pairs(8, most, seed)
            assert chosen == choose_pairs(8, most, seed)
            assert len(set(chosen)) == most
            met = [sum(member in pair for pair in chosen) for member in range(8)]
            assert max(met) - min(met) <= 2
    assert len({tuple(choose_pairs(8, 8, seed)) for seed in range(5)}) > 1


async def test_a_group_is_judged_while_a_loop_runs(place: Endpoint) -> None:
    place.say = longer
    verdicts = await compare(place, comparisons=2).ask("?", ["a", "aa", "aaa"])
    assert len(place.asked) == 4
    assert sum("of 0" not in verdict.why for verdict in verdicts) == 3
