"""Which of several turns with the same words a conversation goes on from, and what becomes of it later."""

from typing import Any

import pytest
from msgspec.structs import replace

from strop.gateway.contexts import History
from strop.gateway.template import Renderer
from strop.types import Turn
from tests.chatml import TEMPLATE
from tests.unit.gateway.test_session import TOOLS, Desk, said, user

SHOWN = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}",
)
"""Shows all thoughts that it is given."""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def desk(renderer: Renderer) -> Desk:
    return Desk(Renderer(renderer.tokenizer, SHOWN))


def thought(turn: Turn, thought: str | None = None) -> dict[str, Any]:
    return said(turn) | {"reasoning_content": thought or turn.answer["reasoning_content"]}


def again(desk: Desk) -> Desk:
    """The same after a restart."""
    other = Desk(desk.renderer)
    other.session.restore(desk.store.turns)
    other.store.turns = list(desk.store.turns)
    other.route = replace(desk.route, engine=other.engine)
    return other


@pytest.mark.parametrize("history", ["sampled", "template"])
@pytest.mark.parametrize("restart", [False, True])
def test_edited_thoughts_are_gone_on_from(desk: Desk, restart: bool, history: History) -> None:
    """An agent that writes other thoughts into an answer gets a branch once, and goes on from there: the model saw the
    thoughts that were written."""
    desk.route = replace(desk.route, history=history)
    first = desk.ask([user("a")], "<think>this</think>one")
    edited = desk.ask([user("a"), thought(first, "other"), user("b")], "two")
    assert (edited.parent, edited.branch) == (first.id, "edited_history")
    assert "<think>other</think>one" in desk.renderer.decode(edited.prompt_ids)
    plain = desk.ask([user("a"), thought(first), user("b")], "two")
    assert (plain.parent, plain.branch, plain.shared) == (first.id, None, len(first.ids))
    desk = again(desk) if restart else desk
    for turn, of in ((edited, "other"), (plain, "this")):
        history_ = [user("a"), thought(first, of), user("b"), said(turn), user("c")]
        then = desk.ask(history_, "three")
        assert (then.parent, then.branch, then.shared) == (turn.id, None, len(turn.ids))
        assert desk.ask(history_, "three").prompt_ids == then.prompt_ids, "asked again"
    if history == "template":
        return  # without thoughts it writes something else
    latest = desk.ask([user("a"), said(first), user("b"), said(plain), user("c")], "three")
    assert latest.parent == plain.id, "where nothing tells them apart, it is the latest"


def test_late_edits_share_what_came_before(desk: Desk) -> None:
    first = desk.ask([user("a")], "<think>this</think>one")
    second = desk.ask([user("a"), thought(first), user("b")], "<think>that</think>two")
    edited = desk.ask([user("a"), thought(first), user("b"), thought(second, "other"), user("c")], "ok")
    assert (edited.parent, edited.shared, edited.branch) == (first.id, len(first.ids), "edited_history")
    assert "<think>other</think>two" in desk.renderer.decode(edited.prompt_ids)


def test_white_space_in_thoughts(desk: Desk) -> None:
    first = desk.ask([user("a")], "<think>\nthis, so\nthat\n</think>\n\none")
    second = desk.ask([user("a"), thought(first, "\n\nthis,\r\nso that "), user("b")], "ok")
    assert (second.parent, second.branch) == (first.id, None)
    other = desk.ask([user("a")], "<think>this, so that</think>one")
    for turn in (first, other):
        again = desk.ask([user("a"), thought(turn), user("c")], "ok")
        assert again.parent == turn.id, "but it may be all that tells them apart"


def test_calls_of_one_turn_under_the_name_of_another(desk: Desk) -> None:
    """Arguments that were changed to what another turn said are still no words of that turn."""
    first = desk.ask([user("a")], CALL, tools=TOOLS)
    other = desk.ask([user("a")], CALL.replace("1", "2"), tools=TOOLS)
    edited = said(first) | {"tool_calls": said(other)["tool_calls"]}
    edited["tool_calls"][0]["id"] = id = said(first)["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": id, "content": "3"}
    assert desk.ask([user("a"), edited, result], "ok", tools=TOOLS).branch == "edited_history"
    edited["tool_calls"][0]["id"] = result["tool_call_id"] = "renamed"
    renamed = desk.ask([user("a"), edited, result], "ok", tools=TOOLS)
    assert (renamed.parent, renamed.branch) == (other.id, None)


def test_another_agents_turn_is_not_ones_own(desk: Desk) -> None:
    """Two agents in the same place said the same: one that is handed the other's call was not the one who made it."""
    mine, theirs = (desk.ask([user("a")], CALL, agent=agent, tools=TOOLS) for agent in ("main", "other"))
    for turn, branch in ((theirs, "edited_history"), (mine, None)):
        result = {"role": "tool", "tool_call_id": said(turn)["tool_calls"][0]["id"], "content": "3"}
        assert desk.ask([user("a"), said(turn), result], "ok", tools=TOOLS).branch == branch


def test_thoughts_of_long_conversations_are_told_apart(desk: Desk) -> None:
    """Ten rounds on two paths that differ in the first thought only; each goes on from its own."""
    paths: list[list[Any]] = [[user("a")], [user("a")]]
    last: list[Turn | None] = [None, None]
    for n in range(10):
        for i, path in enumerate(paths):
            turn = desk.ask(path, f"<think>{'this' if i and not n else 'that'}</think>one")
            before = last[i]
            assert turn.parent == (before.id if before else None)
            assert turn.branch is None
            path += [thought(turn), user("b")]
            last[i] = turn


def test_names_are_not_shown_to_the_model(renderer: Renderer) -> None:
    whole = TEMPLATE.replace("{{ message.content }}", "{{ message | tojson }}")
    said_ = {"role": "assistant", "content": "one", "turn": "g1.0/1/0"}
    shown = Renderer(renderer.tokenizer, whole).text([user("a"), said_, user("b")], None, generate=True)
    assert '"one"' in shown
    assert "g1.0/1/0" not in shown
