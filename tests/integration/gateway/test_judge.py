"""A judge behind the real gateway: an agent's key opens it, and what it says is a recorded turn."""

import pytest

from strop.rewards import Judge, Pairwise
from tests.integration.gateway.stand import Stand


async def test_a_judge_answers_through_the_gateway(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = await stand.attempt("g1.0")
    monkeypatch.setenv("JUDGE_KEY", attempt.key)
    judge = Judge("tiny", base_url=stand.url(attempt, "judge"), key_env="JUDGE_KEY", deadline=30.0)
    stand.script("It is hard to say", "yes")
    verdict = await judge.ask("Where?", "in Paris", "Paris")
    assert (verdict.value, verdict.why) == (1.0, "yes")
    assert judge.counts == {"calls": 2, "unreadable": 1}
    assert [turn.agent for turn in await stand.turns(attempt)] == ["judge", "judge"]


async def test_a_group_is_compared_through_the_gateway(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = await stand.attempt("g1.0")
    monkeypatch.setenv("JUDGE_KEY", attempt.key)
    compare = Pairwise("tiny", base_url=stand.url(attempt), key_env="JUDGE_KEY", deadline=30.0, at_once=1)
    stand.script("A", "B", "tie", "tie", "B", "A")  # 0 beats 1, 0 and 2 tie, 2 beats 1
    verdicts = await compare.ask("Which?", ["good", "bad", "fine"])
    assert [verdict.value for verdict in verdicts] == [0.75, 0.0, 0.75]
