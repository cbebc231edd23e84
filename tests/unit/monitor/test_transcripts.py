"""Which rollouts are shown, and what of them."""

from typing import Any

from msgspec.structs import replace

from strop.monitor.transcripts import choose_extremes, find_new_messages, render_rollout
from strop.types import Cause, Reward, Rollout, Sampling, Task, Turn


def rollout(id: str, value: float | None, cause: Cause | None = None) -> Rollout:
    rewards = () if value is None else (Reward(value=value),)
    status = "failed" if cause else "succeeded"
    return Rollout(
        id=id,
        group=id.partition(".")[0],
        member=0,
        task=Task(id="t", data={"question": "```why```"}),
        status=status,
        cause=cause,
        detail="it fell\nover" if cause else None,
        rewards=rewards,
        created=0.0,
    )


def turn(number: int, messages: list[dict[str, Any]], answer: str, agent: str = "main", **more: Any) -> Turn:
    return Turn(
        id=f"g.0/1/{number}",
        rollout="g.0",
        attempt=1,
        agent=agent,
        prompt_ids=[1],
        response_ids=[2, 3],
        logprobs=[-1.0, -1.0],
        versions=[],
        finish="stop",
        messages=messages,
        answer={"role": "assistant", "content": answer},
        started=0.0,
        ended=0.0,
        **more,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_the_best_and_the_worst_are_of_different_groups_and_none_is_in_both() -> None:
    found = [rollout("a.0", 1.0), rollout("a.1", 1.0), rollout("b.0", 0.5), rollout("c.0", None, "timeout")]
    best, worst = choose_extremes(found, {"reward": 1.0}, few=2)
    assert [r.id for r in best] == ["a.1", "b.0"]  # of equals the later one
    assert [r.id for r in worst] == ["c.0", "a.0"]  # no reward is worse than any
    assert choose_extremes([rollout("a.0", 1.0)], {"reward": 1.0}) == ([rollout("a.0", 1.0)], [])
    assert choose_extremes([], {"reward": 1.0}) == ([], [])


def test_only_what_is_new_is_shown_whoever_speaks_in_between() -> None:
    first = turn(0, [user("hello")], "hi")
    helper = turn(1, [user("add 1 and 2")], "3", agent="helper")
    again = turn(2, [user("hello"), answer("hi"), user("more")], "no")
    unanswered = turn(3, [user("hello"), answer("hi"), user("more"), user("please")], "yes")
    edited = turn(4, [user("in short"), user("go on")], "done")
    shown = [[m["content"] for m in new] for new, _ in find_new_messages([first, helper, again, unanswered, edited])]
    assert shown == [["hello"], ["add 1 and 2"], ["more"], ["please"], ["in short", "go on"]]


def test_a_page_says_what_was_trained_and_why_it_ended() -> None:
    turns = [
        turn(0, [user("x" * 5000)], "hi"),
        turn(1, [user("psst")], "yes", agent="helper"),
        turn(2, [user("again")], "hm", sampling=Sampling(temperature=0.0)),
    ]
    tokens = {"g.0/1/0": {"trained": 2}, "g.0/1/1": {"untrained": 2}, "g.0/1/2": {"greedy": 2}}
    text = render_rollout(replace(rollout("g.0", None, "agent_error"), tokens=tokens), turns, None)
    assert "6 tokens sampled, 2 trained, 2 greedy, 2 untrained" in text
    assert "[... 3,000 characters ...]" in text
    assert "failed (agent_error)" in text
    assert "it fell\nover" in text
    assert '````\n{\n  "question": "```why```"' in text
    assert "· 6 tokens sampled\n" in render_rollout(rollout("g.0", 1.0), turns, 1.0)  # no step learnt from it


def test_a_page_has_the_tools_once() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}}
    first = turn(0, [user("a")], "b", requested={"tools": [tool]})
    second = turn(1, [user("a"), answer("b"), user("c")], "d", parent=first.id, shared=3)
    other = turn(2, [user("e")], "f", branch="new_conversation", requested={"tools": [tool, tool]})
    text = render_rollout(rollout("g.0", 1.0), [first, second, other], 1.0)
    assert text.count("**tools**") == 2
    assert "**tools**\n\n```\nadd(a, b)\n```" in text
    assert text.index("**tools**") < text.index("**user**")
