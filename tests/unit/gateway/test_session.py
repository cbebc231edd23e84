"""The token law at the gateway: append-only conversations give append-only tokens, everything else says why not."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import Tokenizer, normalizers

from strop.engines.scripted import Scripted
from strop.errors import ContextOverflow
from strop.gateway import conversation, known_turns
from strop.gateway.contexts import Contexts, common_prefix
from strop.gateway.conversation import Conversation
from strop.gateway.dialects.base import Delta, ModelRequest
from strop.gateway.dialects.chat import ChatCompletions
from strop.gateway.dialects.chat_messages import LongMessages
from strop.gateway.generate import ModelCall, check_length
from strop.gateway.record import Recorder
from strop.gateway.route import PolicyRoute
from strop.gateway.session import Session
from strop.gateway.template import Renderer
from strop.types import Attempt, Rollout, Sampling, Task, Turn
from tests.chatml import TEMPLATE

ROLLOUT = Rollout(id="g1.0", group="g1", member=0, task=Task(id="t"), seed=7, created=0.0)
ATTEMPT = Attempt(rollout="g1.0", number=1, runner="w", key="k", started=0.0, lease_until=9e9)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


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

    def ask(self, messages: list[dict[str, Any]], answer: Any, *, agent: str = "main", **fields: Any) -> Turn:
        self.next = answer
        body = {"messages": messages, **fields}
        request = ChatCompletions().read(json.dumps(body).encode())
        call = ModelCall(self.session, agent, self.route, request)

        async def work() -> None:
            await call.run(quiet)
            await self.recorder.record_turns(call)

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
    shown = desk.renderer.decode_answer(stopped.response_ids)
    assert shown.endswith("two"), "up to the token that completed the stop string"
    for turn in (first, stopped):
        then = desk.ask([*turn.messages, said(turn), user("c")], "ok")
        assert then.prompt_ids[len(turn.ids)] == desk.renderer.end_of_turn
        assert then.parent == turn.id


def test_an_answer_cut_off_in_a_later_call_goes_on(desk: Desk) -> None:
    """Agents are shown the call that was cut off as text, which the template writes before the one that was not."""
    whole = '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>\n'
    cut = '<tool_call>\n{"name": "add", "arguments": {"numbers": [' + ", ".join(map(str, range(100, 130)))
    said_ids = desk.renderer.encode(whole + cut)
    first = desk.ask([user("a")], said_ids, tools=TOOLS, max_tokens=len(said_ids))
    assert (first.finish, len(first.answer["tool_calls"])) == ("length", 1)
    assert first.answer["content"] == cut
    result = {"role": "tool", "tool_call_id": first.answer["tool_calls"][0]["id"], "content": "3"}
    second = desk.ask([user("a"), said(first), result], "ok", tools=TOOLS)
    assert (second.parent, second.branch) == (first.id, None)
    new = desk.renderer.encode("<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")
    assert second.prompt_ids == first.ids + new


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
    assert desk.ask([system, user("a")], "ok").branch == "changed_tools", "the very same words, without tools"
    edited = desk.ask([*history[:2], {"role": "assistant", "content": "ONE"}, user("c")], "ok", tools=TOOLS)
    assert edited.branch == "edited_history"
    assert edited.parent is not None
    parent = next(turn for turn in desk.store.turns if turn.id == edited.parent)
    assert edited.shared >= len(first.prompt_ids)
    assert edited.prompt_ids[: edited.shared] == parent.ids[: edited.shared]
    windowed = desk.ask([user("b"), said(second), user("c")], "ok", tools=TOOLS)
    assert windowed.branch == "changed_system"
    clock = desk.ask([system | {"content": "now"}, *history[1:], user("c")], "ok", tools=TOOLS)
    assert clock.branch == "changed_system"
    other = desk.ask([system, user("something else")], "ok", tools=TOOLS)
    assert other.branch == "new_conversation"
    goes_on = desk.ask([system, user("something else"), said(other), user("d")], "ok", tools=TOOLS)
    assert (goes_on.parent, goes_on.branch) == (other.id, None)
    forked = desk.ask([system, user("something else"), said(other), user("e")], "ok", tools=TOOLS)
    assert (forked.parent, forked.shared, forked.branch) == (other.id, len(other.ids), "edited_history")


S1, S2, U1, U2, U3 = ("s", "one"), ("s", "two"), ("u", "1"), ("u", "2"), ("u", "3")
A1, A2, A3 = ("a", "x"), ("a", "y"), ("a", "z")
T1, T2 = ("t", "p"), ("t", "q")


@pytest.mark.parametrize(
    ("served", "now", "why"),
    [
        ([U1, A1], [U2], "new_conversation"),
        ([S1, U1, A1], [S1, U2], "new_conversation"),
        ([S1, U1, A1], [S2, U2], "new_conversation"),
        ([S1, U1, A1, U2, A2], [S2, U1, A1, U2, A2, U3], "changed_system"),
        ([S1, U1, A1], [U1, A1, U2], "changed_system"),
        ([U1, A1], [S1, U1, A1, U2], "changed_system"),
        ([S1, U1, A1], [S1, S2, U1, A1, U2], "changed_system"),
        ([U1, A1, U2, A2], [U2, A2, U3], "truncated"),
        ([S1, U1, A1, U2, A2], [S1, U2, A2, U3], "truncated"),
        ([U1, A1, T1, A2], [U1, A2, U2], "truncated"),
        ([U1, A1, T1, A1, T1, A2], [U1, A1, T1, A2, U2], "truncated"),
        ([U1, A1, T1, A1, T2, A1], [U1, A1, T2, A1, T1], "truncated"),
        ([U1, A1, U2, A2], [U2, A2, A3, U3], "edited_history"),
        ([U1, A1, T1, A2], [U1, A1, A2, U2], "dropped_tool_result"),
        ([U1, A1, T1, A2, T2, A3], [U1, A1, A2, T2, A3, U2], "dropped_tool_result"),
        ([U1, A1, T1, A2, T2, A3], [U1, A1, A2, A3, U2], "dropped_tool_result"),
        ([U1, A1, T1, A2], [U1, A1, T2, A2, U2], "edited_history"),
        ([U1, A1, U2, A2], [U1, A3, U2, A2, U3], "edited_history"),
        ([U1, A1, U2, A2], [U3, A1, U2, A2, U3], "edited_history"),
        ([U1, A1, U2, A2], [U2, A2, U1, A1, U3], "edited_history"),
        ([U1, A1, U2, A2], [U3, U2, A2, U1], "edited_history"),
        ([U1, A1, U2, A2], [U1, A1, U3], "edited_history"),
        ([U1, A1], [U1, A1, A2, U2], "edited_history"),
        ([U1, A1], [U1, U2], "edited_history"),
    ],
)
def test_why(renderer: Renderer, served: list[tuple[str, str]], now: list[tuple[str, str]], why: str) -> None:
    """A conversation was served, answer by answer; another comes: how does it differ?"""
    contexts = Contexts(b"")
    for n, (role, _) in enumerate(served):
        if role == "a":
            asked = Conversation.of(plain(served[:n]), None)
            prompt = contexts.prompt(renderer, asked)
            assert prompt.branch is None
            answer = plain(served[n : n + 1])[0]
            turn = turn_of(n, asked, prompt.ids, answer, prompt.parent, shared=prompt.shared)
            contexts.add(turn, asked)
    assert contexts.prompt(renderer, Conversation.of(plain(now), None)).branch == why


def plain(messages: list[tuple[str, str]]) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [
        {"role": roles[role], "content": text} | ({"tool_call_id": "c"} if role == "t" else {})
        for role, text in messages
    ]


def turn_of(
    n: int, asked: Conversation, ids: list[int], answer: dict[str, Any], parent: str | None = None, **more: Any
) -> Turn:
    return Turn(
        id=f"r/1/{n}", rollout="r", attempt=1, prompt_ids=ids, response_ids=[n], logprobs=[0.0], versions=[],
        finish="stop", parent=parent, messages=list(asked.messages), answer=answer, started=0.0, ended=0.0, **more,
    )  # fmt: skip


def test_an_edit_elsewhere_is_no_reason_here(desk: Desk) -> None:
    first = desk.ask([user("a")], "one")
    edited = desk.ask([user("b"), {"role": "assistant", "content": "two"}, user("c")], "three")
    assert (edited.parent, edited.branch) == (first.id, "new_conversation"), "shares only the template's first words"
    goes_on = desk.ask([user("a"), said(first), user("d")], "four")
    assert (goes_on.parent, goes_on.branch) == (first.id, None)


def test_policies_do_not_share_contexts(renderer: Renderer) -> None:
    """One agent may speak to several models, whose tokens are not each other's."""
    desk = Desk(renderer)
    first = desk.ask([user("a")], "one")
    desk.route = replace(desk.route, policy="other")
    other = desk.ask([user("a"), said(first), user("b")], "two")
    assert (other.policy, other.parent, other.shared, other.branch) == ("other", None, 0, None)
    assert other.prompt_ids == renderer.prompt(other.messages, None)
    again = Desk(renderer)
    again.session.restore(desk.store.turns)
    again.route = replace(again.route, policy="other")
    follow = [*other.messages, said(other), user("c")]
    assert again.ask(follow, "x").prompt_ids == desk.ask(follow, "x").prompt_ids


def test_the_order_of_recording_does_not_matter(renderer: Renderer) -> None:
    """Requests overlap: turns are recorded as they end, and come back from the store as they began."""
    asked = Conversation.of([user("a")], None)
    ids = renderer.prompt([user("a")], None)
    answer = {"role": "assistant", "content": "one"}
    turns = [turn_of(n, asked, ids, answer) for n in range(3)]
    turns.append(turn_of(3, asked, ids, answer | {"content": "two"}, choices=2))
    turns.append(turn_of(4, asked, ids, answer | {"content": "two"}, choice=1, choices=2))
    sessions = [Session(ROLLOUT, ATTEMPT) for _ in range(3)]
    sessions[0].restore(turns)
    sessions[1].restore(turns[::-1])
    for turn in (turns[4], turns[1], turns[3], turns[0], turns[2]):
        sessions[2].add(turn, asked)
    for content, parent in (("one", "r/1/2"), ("two", "r/1/3")):
        follow = Conversation.of([user("a"), answer | {"content": content}, user("b")], None)
        prompts = [session.contexts("main", "main").prompt(renderer, follow) for session in sessions]
        assert [prompt.parent for prompt in prompts] == [parent] * 3
    edited = Conversation.of([user("a"), {"role": "assistant", "content": "?"}, user("b")], None)
    prompts = [session.contexts("main", "main").prompt(renderer, edited) for session in sessions]
    assert [prompt.parent for prompt in prompts] == ["r/1/0"] * 3


def test_calls_may_get_new_ids_with_every_request(desk: Desk) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    first = desk.ask([user("a")], f"{call}\n{call}", tools=TOOLS)
    parent, rest = first, list[dict[str, Any]]()

    def sent(number: int, order: tuple[int, int] = (0, 1)) -> list[dict[str, Any]]:
        answer = said(first)
        for n, one in enumerate(answer["tool_calls"]):
            one["id"] = f"request{number}call{n}"
        results = [{"role": "tool", "tool_call_id": f"request{number}call{n}", "content": "1"} for n in order]
        return [user("a"), answer, *results, *rest]

    for number in range(3):
        now = desk.ask(sent(number), "ok", tools=TOOLS)
        assert (now.parent, now.branch) == (parent.id, None)
        parent, rest = now, [*rest, said(now), user("more")]
    assert desk.ask(sent(3, (1, 0)), "ok", tools=TOOLS).branch == "edited_history", "results answer other calls"


@pytest.mark.parametrize("same", [False, True])
def test_an_agent_that_forgets_its_oldest_rounds(desk: Desk, same: bool) -> None:
    """Windows over rounds of tools: the rest is as it was, whatever ids and places its calls have."""
    rounds: list[list[dict[str, Any]]] = []
    for n in range(4):
        kept = [message for round in rounds[-2:] for message in round]
        call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {0 if same else n}}}}}\n</tool_call>'
        turn = desk.ask([user("go"), *kept], f"{call}\n{call}", tools=TOOLS)
        assert turn.branch == (None if n < 3 else "truncated")
        ids = [call["id"] for call in turn.answer["tool_calls"]]
        results = [{"role": "tool", "tool_call_id": id, "content": f"{n}"} for id in ids]
        rounds.append([said(turn), *results])


def test_rewriting_templates_branch(renderer: Renderer) -> None:
    rewriting = TEMPLATE.replace("{{ message.content }}", "{{ message.content if loop.last else 'gone' }}")
    desk = Desk(Renderer(renderer.tokenizer, rewriting))
    first = desk.ask([user("a")], "one")
    second = desk.ask([user("a"), said(first), user("b")], "two")
    assert second.branch == "template_rewrote"
    assert second.prompt_ids == desk.renderer.prompt([user("a"), said(first), user("b")], None)


def test_undelivered_turns_are_not_extended(desk: Desk) -> None:
    request = ModelRequest(messages=[user("a")])
    call = ModelCall(desk.session, "main", desk.route, request)

    async def work() -> None:
        await call.run(quiet)
        await desk.recorder.record_turns(call, "abandoned")

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


def test_asked_shows_the_prompt_as_text(desk: Desk) -> None:
    desk.ask([user("a")], "1")
    asked = desk.engine.calls[0].asked
    assert asked.prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_composed_and_decomposed_letters_are_no_rewriting(renderer: Renderer) -> None:
    """Some tokenizers give text back as another; with `history = "template"` that is no reason to branch."""
    tokenizer = Tokenizer.from_str(renderer.tokenizer.to_str())
    tokenizer.normalizer = normalizers.NFC()
    desk = Desk(Renderer(tokenizer, TEMPLATE, specials={"eos_token": "<|im_end|>"}))
    desk.route = replace(desk.route, history="template")
    first = desk.ask([user("e\u0301")], "o\u0308k")
    second = desk.ask([user("e\u0301"), said(first), user("a\u0308")], "ok")
    assert (second.parent, second.shared, second.branch) == (first.id, len(first.ids), None)


def test_no_text_is_taken_for_a_mark(desk: Desk) -> None:
    from strop.gateway.template_style import MARK

    first = desk.ask([user("hi")], "ok")
    second = desk.ask([user("hi"), said(first), user(f'{MARK} = "{MARK}" and more')], "yes")
    new = f'\n<|im_start|>user\n{MARK} = "{MARK}" and more<|im_end|>\n<|im_start|>assistant\n'
    assert second.prompt_ids == first.ids + desk.renderer.encode(new)


def test_sessions_are_restored_whatever_clocks_say(desk: Desk) -> None:
    first = desk.ask([user("hi")], "ok", tools=TOOLS)
    second = desk.ask([user("hi"), said(first), user("more")], "yes", tools=TOOLS)
    restored = Session(ROLLOUT, ATTEMPT)
    restored.restore([second, first])
    assert restored.next_turn() == "g1.0/1/2"


def test_a_request_that_is_refused_uses_nothing_up(desk: Desk) -> None:
    desk.engine._context = 50
    with pytest.raises(ContextOverflow):
        ModelCall(desk.session, "main", desk.route, ModelRequest(prompts=["a", "b " * 100]))
    assert desk.session.next_turn() == "g1.0/1/0"


@pytest.mark.parametrize("where", ["content", "arguments", "name", "tools", "kwargs", "reasoning"])
def test_what_is_far_too_long_is_refused_by_its_beginning(desk: Desk, where: str, monkeypatch: Any) -> None:
    """Nobody else is answered while text is tokenised."""
    desk.engine._context = 500
    much, tokenised = "x y " * 250_000, []
    encode = desk.renderer.encode
    monkeypatch.setattr(desk.renderer, "encode", lambda text: tokenised.append(len(text)) or encode(text))
    call = {"name": much if where == "name" else "add", "arguments": {"a": much if where == "arguments" else ""}}
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": call}]}
    answer |= {"reasoning_content": much} if where == "reasoning" else {}
    tools = [{"type": "function", "function": {"name": "add", "description": much}}] if where == "tools" else None
    messages = [user(much if where == "content" else "hi"), answer, user("more")]
    asked = Conversation.of(messages, tools, variables={"x": much} if where == "kwargs" else {})
    with pytest.raises(ContextOverflow):
        check_length(asked, desk.route)
    assert 0 < sum(tokenised) < 10_000


def test_long_text_of_few_tokens_is_not_refused(desk: Desk) -> None:
    desk.engine._context = 500
    word = max(desk.renderer.tokenizer.get_vocab(), key=len).replace("Ġ", " ")
    text = word * 400
    assert len(desk.renderer.encode(text)) <= 500
    check_length(Conversation.of([user(text)], None), desk.route)


def test_what_was_only_counted_is_not_remembered(desk: Desk) -> None:
    contexts = desk.session.contexts("main", "main")
    asked = Conversation.of([user("hi")], None)
    contexts.prompt(desk.renderer, asked, remember=False)
    assert not contexts._prompts


@pytest.mark.parametrize("length", [1, 5000])
def test_a_turn_costs_what_it_adds(desk: Desk, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """What is known of a conversation is not found out again: not its messages, nor whose its answers are."""
    looked: Counter[str] = Counter()
    for module, name in ((conversation, "_known_of"), (conversation, "canonicalize"), (conversation, "step")):
        original = getattr(module, name)

        def counted(*given: Any, name: str = name, original: Any = original) -> Any:
            looked[name] += 1
            return original(*given)

        monkeypatch.setattr(module, name, counted)
    agrees = known_turns.KnownAnswer.agrees

    def agreeing(self: known_turns.KnownAnswer, *given: Any) -> int | None:
        looked["agrees"] += 1
        return agrees(self, *given)

    monkeypatch.setattr(known_turns.KnownAnswer, "agrees", agreeing)
    messages = [user("a" * length)]
    costs: list[Counter[str]] = []
    for n in range(20):
        looked.clear()
        turn = desk.ask(messages, f"b{n}")
        assert turn.branch is None
        assert turn.parent == (desk.store.turns[-2].id if n else None)
        costs.append(looked.copy())
        messages += [said(turn), user(f"c{n}")]
    assert costs[2] == costs[-1], "the same for the last as for the third"
    assert costs[-1]["_known_of"] == 2, "an answer, and what followed it"


def test_only_the_very_same_messages_are_known_again() -> None:
    """To Python 1 is True, and 1.0 too; a model is shown the difference."""
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": True}}}
    asked = Conversation.of([user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}], None)
    other = call | {"function": {"name": "f", "arguments": {"a": 1}}}
    later = [asked.messages[0], {"role": "assistant", "content": "", "tool_calls": [other]}, user("b")]
    assert asked.messages == later[:2]
    assert Conversation.of(later, None, earlier=[asked]).keys == Conversation.of(later, None).keys
    assert Conversation.of(later, None, earlier=[asked]).keys[1] != asked.keys[1]
    longer = [*asked.messages, {"role": "tool", "tool_call_id": "c", "content": "d"}]
    for tools, begun in ((None, [asked]), ([{"type": "function", "function": {"name": "f"}}], [asked])):
        assert Conversation.of(longer, tools, earlier=begun) == Conversation.of(longer, tools)


def test_long_messages_are_forgotten_in_time() -> None:
    long = LongMessages(limit=100)
    first, second = (json.dumps(user(letter * 30)).encode() for letter in "ab")
    kept = long.read(first)
    assert long.read(bytes(bytearray(first))) is kept
    long.read(second)
    assert long.num_bytes == len(second) <= 100
    assert long.read(first) is not kept
