"""The token law at the gateway: append-only conversations give append-only tokens, everything else says why not."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.engines.scripted import Asked, Scripted
from strop.gateway.dialects import chat
from strop.gateway.dialects.base import Delta, Request
from strop.gateway.record import Recorder
from strop.gateway.render import Renderer
from strop.gateway.sample import Call, PolicyRoute
from strop.gateway.session import Session, canonical, common_prefix
from strop.types import Attempt, Rollout, Sampling, Task, Turn
from tests.chatml import TEMPLATE

ROLLOUT = Rollout(id="g1.0", group="g1", member=0, task=Task(id="t"), seed=7, created=0.0)
ATTEMPT = Attempt(rollout="g1.0", number=1, runner="w", key="k", started=0.0, lease_until=9e9)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
END = "<|im_end|>"


class Kept:
    """As much of a store as a recorder needs."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    async def add_turns(self, turns: list[Turn]) -> None:
        self.turns += turns


class Desk:
    """A session with an engine that says what it is told to."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.session = Session(ROLLOUT, ATTEMPT)
        self.store = Kept()
        self.recorder = Recorder(self.store)  # type: ignore[arg-type]
        self.next: Any = "ok"
        self.engine = Scripted(lambda asked: self.next, renderer, context=100_000, chunk=1)
        self.route = PolicyRoute(
            policy="main",
            model="m",
            engine=self.engine,
            renderer=renderer,
            sampling_for=lambda rollout: Sampling(max_tokens=500),
        )

    def ask(self, messages: list[dict[str, Any]], answer: Any, **fields: Any) -> Turn:
        self.next = answer
        body = {"messages": messages, **fields}
        request = chat.read(json.dumps(body).encode())
        call = Call(self.session, "main", self.route, request)

        async def work() -> None:
            await call.run(quiet)
            await self.recorder.turns(call)

        asyncio.run(work())
        turn = self.store.turns[-1]
        played = self.engine.calls[-1]
        assert turn.prompt_ids == played.asked.prompt_ids, "recorded prompt ids are the ids the engine saw"
        assert turn.response_ids == played.ids, "recorded response ids are the ids it sampled"
        return turn


async def quiet(delta: Delta) -> None: ...


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(turn: Turn) -> dict[str, Any]:
    """The answer as a client echoes it."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.answer["content"]}
    if calls := turn.answer.get("tool_calls"):
        message["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return message


@pytest.fixture
def desk(renderer: Renderer) -> Desk:
    return Desk(renderer)


def test_second_turn_extends_the_first(desk: Desk) -> None:
    # Spelled letter by letter: no tokenizer would write it so, and the ids must survive.
    odd = [desk.renderer.encode(letter)[0] for letter in "It is"] + [desk.renderer.end_of_turn]
    first = desk.ask([user("3 * 4?")], odd)
    assert (first.parent, first.shared, first.branch) == (None, 0, None)
    second = desk.ask([user("3 * 4?"), said(first), user("sure?")], "yes")
    new = desk.renderer.encode("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")
    assert second.prompt_ids == first.prompt_ids + odd + new
    assert (second.parent, second.shared, second.branch) == (first.id, len(first.ids), None)
    assert first.id == "g1.0/1/0"
    assert second.id == "g1.0/1/1"


def test_cut_off_answers_are_closed(desk: Desk) -> None:
    first = desk.ask([user("a")], "one two three", max_tokens=2)
    assert first.finish == "length"
    stopped = desk.ask([user("b")], "one two three", stop=["two"])
    assert stopped.answer["content"] == "one "
    assert desk.renderer.spoken(stopped.response_ids).endswith("two"), "up to the token that completed the stop string"
    for turn in (first, stopped):
        then = desk.ask([*turn.messages, said(turn), user("c")], "ok")
        assert then.prompt_ids[len(turn.ids)] == desk.renderer.end_of_turn
        assert then.parent == turn.id


def test_retries_get_the_same_prompt_and_another_seed(desk: Desk) -> None:
    first = desk.ask([user("a")], "1")
    again = desk.ask([user("a")], "2")
    assert (again.prompt_ids, again.parent, again.branch) == (first.prompt_ids, None, None)
    assert again.sampling.seed != first.sampling.seed
    follow = [user("a"), said(again), user("b")]
    one, two = desk.ask(follow, "x"), desk.ask(follow, "y")
    assert one.parent == two.parent == again.id
    assert one.prompt_ids == two.prompt_ids
    assert one.shared == two.shared == len(again.ids)
    forked = desk.ask([user("a"), said(first), user("c")], "z")
    assert forked.parent == first.id, "every answer that was given can be gone on from"


def test_seeds_are_reproduced(renderer: Renderer) -> None:
    seeds = [[desk.ask([user("a")], "1").sampling.seed for _ in range(3)] for desk in (Desk(renderer), Desk(renderer))]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


def test_branches_say_why(desk: Desk) -> None:
    system = {"role": "system", "content": "s"}
    first = desk.ask([system, user("a")], "one", tools=TOOLS)
    second = desk.ask([system, user("a"), said(first), user("b")], "two", tools=TOOLS)
    history = [system, user("a"), said(first), user("b"), said(second)]

    changed = desk.ask([*history, user("c")], "ok")
    assert changed.branch == "changed_tools"
    edited = desk.ask([*history[:2], {"role": "assistant", "content": "ONE"}, user("c")], "ok", tools=TOOLS)
    assert edited.branch == "edited_history"
    assert edited.parent is not None
    parent = next(turn for turn in desk.store.turns if turn.id == edited.parent)
    assert edited.shared >= len(first.prompt_ids)
    assert edited.prompt_ids[: edited.shared] == parent.ids[: edited.shared]
    windowed = desk.ask([user("b"), said(second), user("c")], "ok", tools=TOOLS)
    assert windowed.branch == "edited_history"
    clock = desk.ask([system | {"content": "now"}, *history[1:], user("c")], "ok", tools=TOOLS)
    assert clock.branch == "edited_history"
    other = desk.ask([system, user("something else")], "ok", tools=TOOLS)
    assert other.branch == "new_conversation"
    goes_on = desk.ask([system, user("something else"), said(other), user("d")], "ok", tools=TOOLS)
    assert (goes_on.parent, goes_on.branch) == (other.id, None)


def test_rewriting_templates_branch(renderer: Renderer) -> None:
    rewriting = TEMPLATE.replace("{{ message.content }}", "{{ message.content if loop.last else 'gone' }}")
    desk = Desk(Renderer(renderer.tokenizer, rewriting))
    first = desk.ask([user("a")], "one")
    second = desk.ask([user("a"), said(first), user("b")], "two")
    assert second.branch == "template_rewrote"
    assert second.prompt_ids == desk.renderer.prompt([user("a"), said(first), user("b")], None)


def test_undelivered_turns_are_not_extended(desk: Desk) -> None:
    request = Request(messages=[user("a")])
    call = Call(desk.session, "main", desk.route, request)

    async def work() -> None:
        await call.run(quiet)
        await desk.recorder.turns(call, "abandoned")

    desk.next = "ok"
    asyncio.run(work())
    again = desk.ask([user("a"), {"role": "assistant", "content": "ok"}, user("b")], "x")
    assert again.branch == "edited_history"
    assert again.parent == desk.store.turns[0].id


def test_a_session_is_rebuilt_from_its_turns(renderer: Renderer) -> None:
    desk = Desk(renderer)
    first = desk.ask([user("a")], "one", tools=TOOLS)
    second = desk.ask([user("a"), said(first), user("b")], "two", tools=TOOLS)
    assert "tools" in first.requested
    assert "tools" not in second.requested, "an exact extension has its parent's tools"
    other = Desk(renderer)
    other.session.restore(desk.store.turns)
    follow = [user("a"), said(first), user("b"), said(second), user("c")]
    here, there = desk.ask(follow, "x", tools=TOOLS), other.ask(follow, "x", tools=TOOLS)
    for field in ("id", "prompt_ids", "parent", "shared", "branch", "sampling", "answer"):
        assert getattr(here, field) == getattr(there, field)
    assert desk.ask([user("a")], "z", tools=TOOLS).sampling == other.ask([user("a")], "z", tools=TOOLS).sampling


@given(a=st.lists(st.integers(0, 2)), b=st.lists(st.integers(0, 2)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


# -- random histories --------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(-1e6, 1e6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def answers(draw: st.DrawFn) -> Any:
    """Text, any tokens at all (a model may sample what no tokenizer writes), or a call."""
    kind = draw(st.sampled_from(["text", "ids", "call"]))
    if kind == "text":
        return draw(WORDS)
    if kind == "ids":
        return draw(st.lists(st.integers(0, 399), max_size=8))
    call = json.dumps({"name": "add", "arguments": draw(st.dictionaries(WORDS, VALUES, max_size=2))})
    return f"{draw(WORDS)}\n<tool_call>\n{call}\n</tool_call>"


@st.composite
def echoes(draw: st.DrawFn, turn: Turn) -> dict[str, Any]:
    """An answer as some client might send it back."""
    message = said(turn)
    text = message["content"]
    half = len(text) // 2
    parts = [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}]
    message["content"] = draw(st.sampled_from([text, parts] + ([None, "", []] if not text else [])))
    for call in message.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        indent, ascii_only, sort = draw(st.sampled_from([None, 2])), draw(st.booleans()), draw(st.booleans())
        call["function"]["arguments"] = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only, sort_keys=sort)
    return message | draw(st.sampled_from([{}, {"refusal": None, "annotations": []}, {"x-framework": {"id": 3}}]))


def plain(message: dict[str, Any]) -> str:
    """The ChatML of a message that is not the assistant's, written by hand."""
    return f"<|im_start|>{message['role']}\n{message['content']}{END}\n"


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_append_only_histories_have_append_only_tokens(renderer: Renderer, data: st.DataObject) -> None:
    desk = Desk(renderer)
    paths: list[tuple[list[dict[str, Any]], Turn]] = []  # each turn with the messages of its context, as last sent
    for _ in range(data.draw(st.integers(1, 7))):
        move = data.draw(st.sampled_from(["new", "go on", "go on", "go on", "retry", "edit"])) if paths else "new"
        new: list[dict[str, Any]] = [user(data.draw(WORDS))]
        past: list[dict[str, Any]] = []
        origin: Turn | None = None
        if move == "retry":
            origin = data.draw(st.sampled_from([turn for _, turn in paths]))
            past, new = next(messages for messages, turn in paths if turn is origin), []
        elif move != "new":  # from any turn so far: the last one, or a fork
            messages, origin = data.draw(st.sampled_from(paths))
            past = [*messages, data.draw(echoes(origin))]
            if move == "edit":
                past[data.draw(st.integers(0, len(past) - 1))] = user(data.draw(WORDS))
                past = [message for message in past if message["role"] != "tool"]
            elif calls := past[-1].get("tool_calls"):
                new = [{"role": "tool", "tool_call_id": call["id"], "content": data.draw(WORDS)} for call in calls]
        limit = data.draw(st.sampled_from([1, 3, 400]))
        turn = desk.ask([*past, *new], data.draw(answers()), tools=TOOLS, max_tokens=limit)
        if move == "retry":
            assert origin is not None
            assert (turn.prompt_ids, turn.parent, turn.shared, turn.branch) == (
                origin.prompt_ids, origin.parent, origin.shared, origin.branch,
            )  # fmt: skip
        elif move == "go on":
            assert turn.branch is None
            parent = next(known for _, known in paths if known.id == turn.parent)
            assert [canonical(m) for m in parent.messages] == [canonical(m) for m in origin.messages]  # type: ignore[union-attr]
            assert canonical(parent.answer) == canonical(origin.answer)  # type: ignore[union-attr]
            closed = parent.response_ids[-1:] == [renderer.end_of_turn]
            text = END + "\n" + "".join(plain(message) for message in new) + "<|im_start|>assistant\n"
            tail = renderer.encode(text)
            assert turn.prompt_ids == parent.prompt_ids + parent.response_ids + (tail[1:] if closed else tail)
            assert turn.shared == len(parent.ids)
        elif turn.branch is not None:
            assert turn.prompt_ids == renderer.prompt(turn.messages, TOOLS)
            if turn.parent:
                parent = next(known for _, known in paths if known.id == turn.parent)
                assert turn.prompt_ids[: turn.shared] == parent.ids[: turn.shared]
        paths.append(([*past, *new], turn))


def test_asked_shows_the_prompt_as_text(desk: Desk) -> None:
    desk.ask([user("a")], "1")
    asked: Asked = desk.engine.calls[0].asked
    assert asked.prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
