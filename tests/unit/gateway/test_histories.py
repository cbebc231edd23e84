"""Random histories: whatever agents do with a conversation, prompts are exact, or say why they could not be.

Agents here speak through the real call and recorder, with an engine that samples any tokens at all, and send answers
back as clients do: arguments in another order and spacing, ids renamed, thoughts dropped, nothing for empty text.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.engines.scripted import Scripted
from strop.engines.scripted import ScriptedRequest as Seen
from strop.gateway.contexts import Branch
from strop.gateway.conversation import canonicalize
from strop.gateway.dialects.base import Delta
from strop.gateway.dialects.chat import ChatCompletions
from strop.gateway.generate import ModelCall
from strop.gateway.jinja import BadTemplate
from strop.gateway.record import Recorder
from strop.gateway.route import PolicyRoute
from strop.gateway.session import Session
from strop.gateway.template import Renderer
from strop.types import Attempt, Rollout, Sampling, Task, Turn, stable_hash
from tests.chatml import TEMPLATE

Message = dict[str, Any]
ROLLOUT = Rollout(id="g1.0", group="g1", member=0, task=Task(id="t"), seed=7, created=0.0)
ATTEMPT = Attempt(rollout="g1.0", number=1, runner="w", key="k", started=0.0, lease_until=9e9)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
DATA = Path(__file__).parents[4] / "shared" / "data" / "chat_templates"
REASONS = set(get_args(Branch))

THINKING = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') if message.role == 'assistant' else message.content }}",
)
"""As Qwen3 does: thoughts are shown in the last answer only."""
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %} {{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Marks that are no tokens, contents trimmed."""


class Kept:
    """As much of a store as a recorder needs. Turns come back in the order in which they began."""

    def __init__(self, turns: Sequence[Turn] = ()) -> None:
        self.turns = list(turns)

    async def add_turns(self, turns: list[Turn]) -> None:
        self.turns += turns


class World:
    """One attempt. What the engine samples depends on what it sees and on the seed, and on nothing else."""

    def __init__(self, renderer: Renderer, turns: Sequence[Turn] = ()) -> None:
        self.renderer = renderer
        self.session = Session(ROLLOUT, ATTEMPT)
        self.session.restore(turns)
        self.store = Kept(turns)
        self._recorder = Recorder(self.store)  # type: ignore[arg-type]
        self.answers: list[Any] = ["ok"]
        self.engine = Scripted(self._say, renderer, context=1_000_000, chunk=3)

    def _say(self, seen: Seen) -> Any:
        return self.answers[stable_hash(seen.prompt_ids, seen.sampling.seed or 0) % len(self.answers)]

    def ask(
        self, messages: list[Message], answers: list[Any], *, agent: str = "main", policy: str = "p", **fields: Any
    ):
        """The turns of one request, one per choice."""
        self.answers = answers
        route = PolicyRoute(
            policy=policy, model="m", engine=self.engine, renderer=self.renderer,
            sampling_for=lambda rollout: Sampling(max_tokens=300),
        )  # fmt: skip
        body = json.dumps({"messages": messages, "tools": TOOLS, **fields})
        call = ModelCall(self.session, agent, route, ChatCompletions().read(body.encode()))
        before, played = len(self.store.turns), len(self.engine.calls)

        async def work() -> None:
            await call.run(quiet)
            await self._recorder.record_turns(call)

        asyncio.run(work())
        turns = self.store.turns[before:]
        assert len(turns) == fields.get("n", 1), "one turn for every choice of every request"
        seen = {call.asked.sampling.seed: call for call in self.engine.calls[played:]}
        assert len(seen) == len(turns), "choices have seeds of their own"
        for turn in turns:
            assert turn.prompt_ids == seen[turn.sampling.seed].asked.prompt_ids, "recorded is what the engine saw"
            assert turn.response_ids == seen[turn.sampling.seed].ids[: len(turn.response_ids)], "and what it sampled"
        self._check(turns)
        return turns

    def _check(self, turns: list[Turn]) -> None:
        known = {turn.id: turn for turn in self.store.turns}
        assert len(known) == len(self.store.turns), "ids are unique"
        for turn in turns:
            assert turn.branch is None or turn.branch in REASONS
            if turn.parent is None:
                assert turn.shared == 0
                continue
            parent = known[turn.parent]
            assert (parent.agent, parent.policy) == (turn.agent, turn.policy)
            assert 0 < turn.shared <= len(parent.ids)
            assert turn.prompt_ids[: turn.shared] == parent.ids[: turn.shared], "what is shared is really shared"
            if turn.branch is None:
                assert turn.shared == len(parent.ids)


async def quiet(delta: Delta) -> None: ...


@pytest.fixture(scope="module", params=["chatml", "thinking", "no tokens", "Llama-3.1", "Mistral"])
def model(request: pytest.FixtureRequest, renderer: Renderer) -> Renderer:
    found = {"chatml": TEMPLATE, "thinking": THINKING, "no tokens": PLAIN}
    files = {
        "Llama-3.1": "llama.cpp/meta-llama-Llama-3.1-8B-Instruct.jinja",
        "Mistral": "vllm/tool_chat_template_mistral3.jinja",
    }
    if request.param in found:
        source = found[request.param]
    elif not (path := DATA / files[request.param]).exists():
        pytest.skip(f"{path} is not here")
    else:
        source = path.read_text()
    return Renderer(renderer.tokenizer, source, specials={"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"})


# -- what is said ------------------------------------------------------------------------------------------------------

ODD = [
    "e\u0301",
    "é",
    "你好",
    "👩‍👩‍👧",
    "\U0001f642",
    "\u200b",
    "\r\n",
    " ",
    "\n\n",
    "",
    "<|im",
    "</s",
    "\x00",
    "ﬁ",
    "Å",
]
WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(ODD)
NUMBERS = st.sampled_from([0, 1, -1, 1.0, 0.5, 1e300, 10**20, 2.0**60])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def answers(draw: st.DrawFn) -> Any:
    """Text, thoughts, calls, or any tokens at all: a model may sample what no tokenizer writes."""
    kind = draw(st.sampled_from(["text", "ids", "call", "calls", "thought"]))
    if kind == "ids":
        return draw(st.lists(st.integers(0, 399), min_size=1, max_size=8))
    if kind == "text":
        return draw(WORDS)
    if kind == "thought":
        return f"<think>\n{draw(WORDS)}\n</think>\n\n{draw(WORDS)}"
    calls = [
        json.dumps({"name": "add", "arguments": draw(st.dictionaries(WORDS, VALUES, max_size=2))})
        for _ in range(2 if kind == "calls" else 1)
    ]
    return draw(WORDS) + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)


@st.composite
def echoes(draw: st.DrawFn, turn: Turn) -> tuple[Message, list[Message]]:
    """An answer as some client might send it back, and the results of its calls."""
    text = turn.answer["content"]
    half = len(text) // 2
    parts = [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}]
    content = draw(st.sampled_from([text, parts, *([None, "", []] if not text else [])]))
    message: Message = {"role": "assistant", "content": content}
    message |= draw(st.sampled_from([{}, {"refusal": None, "annotations": []}, {"name": None}]))
    if (thought := turn.answer.get("reasoning_content")) and draw(st.booleans()):
        message[draw(st.sampled_from(["reasoning_content", "reasoning"]))] = draw(
            st.sampled_from([thought, f"{thought}\n"])
        )
    results: list[Message] = []
    rename = draw(st.sampled_from(["{}", "call_{}", "{}x"]))
    for call in turn.answer.get("tool_calls", ()):
        name, arguments = call["function"]["name"], _reserialised(draw, call["function"]["arguments"])
        id = rename.format(call["id"])
        made = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(made)
        results.append({"role": "tool", "tool_call_id": id, "content": draw(WORDS)})
    if "tool_calls" not in message and not text:
        message["content"] = draw(st.sampled_from(["", []]))
    return message, results


def _reserialised(draw: st.DrawFn, value: Any) -> str:
    indent, ascii_only = draw(st.sampled_from([None, 2])), draw(st.booleans())
    if draw(st.booleans()):
        value = dict(reversed(value.items()))
    if draw(st.booleans()):
        value = _floats(value)
    return json.dumps(value, indent=indent, ensure_ascii=ascii_only)


def _floats(value: Any) -> Any:
    """Languages with one kind of number write 1 as 1.0, and the other way round."""
    if isinstance(value, dict):
        return {key: _floats(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_floats(inner) for inner in value]
    return float(value) if type(value) is int and abs(value) < 2**53 else value


# -- what must hold ----------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_conversations_that_only_grow_never_branch(model: Renderer, data: st.DataObject) -> None:
    """Several conversations of several agents, interleaved; answers sent back in many ways; requests asked again."""
    world = World(model)
    open_: list[tuple[str, str, list[Message], Turn | None]] = [
        (agent, policy, [{"role": "user", "content": f"{agent}{policy}{i}"}], None)
        for i, (agent, policy) in enumerate([("main", "p"), ("main", "p"), ("main", "q"), ("sub", "p")])
    ]
    asked = 0
    for _ in range(data.draw(st.integers(2, 7))):
        at = data.draw(st.integers(0, len(open_) - 1))
        agent, policy, messages, last = open_[at]
        n, limit = data.draw(st.sampled_from([1, 1, 2])), data.draw(st.sampled_from([1, 3, 300]))
        stop = data.draw(st.sampled_from([[], [], ["e"]]))
        said = data.draw(st.lists(answers(), min_size=1, max_size=2))
        fields = {"agent": agent, "policy": policy, "n": n, "max_tokens": limit, **({"stop": stop} if stop else {})}
        try:
            turns = world.ask(messages, said, **fields)
        except BadTemplate:  # some take one call at a time only
            assert sum(len(message.get("tool_calls", ())) > 1 for message in messages)
            continue
        asked += n
        for turn in turns:
            if last is None:
                assert turn.branch in (None, "new_conversation")
            else:
                parent = next(known for known in world.store.turns if known.id == turn.parent)
                assert turn.branch is None, "a conversation that was only added to is one branch"
                assert canonicalize(parent.answer) == canonicalize(last.answer)
                sent = next(message for message in reversed(turn.messages) if message["role"] == "assistant")
                if _ids(sent) == _ids(last.answer) != []:
                    assert parent.id == last.id, "the ids of calls name it"
                if "reasoning_content" in sent:
                    assert parent.answer["reasoning_content"] == last.answer["reasoning_content"]
                assert turn.prompt_ids[: len(parent.ids)] == parent.ids
        if data.draw(st.booleans()):  # a client that tries again
            again = world.ask(messages, said, **fields)
            asked += n
            assert all(turn.prompt_ids == turns[0].prompt_ids for turn in again)
            assert (again[0].parent, again[0].branch) == (turns[0].parent, turns[0].branch)
            turns += again
        chosen = data.draw(st.sampled_from(turns))
        echo, results = data.draw(echoes(chosen))
        new = results or [{"role": "user", "content": data.draw(WORDS)}]
        open_[at] = (agent, policy, [*messages, echo, *new], chosen)
    assert len(world.store.turns) == asked, "nothing is deduplicated away"


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_done_to_a_history(model: Renderer, data: st.DataObject) -> None:
    """Edits, forks and cuts give what the template writes, or an exact extension; and every branch has a reason. A
    session taken up in the middle by another gateway goes on with the same prompts, seeds, ids and answers."""
    world, other = World(model), None
    paths: list[tuple[list[Message], Turn]] = []
    for _ in range(data.draw(st.integers(2, 7))):
        past: list[Message] = []
        new: list[Message] = [{"role": "user", "content": data.draw(WORDS)}]
        move = data.draw(st.sampled_from(["new", "on", "edit", "cut", "mouth"])) if paths else "new"
        if move != "new":
            before, turn = data.draw(st.sampled_from(paths))
            echo, results = data.draw(echoes(turn))
            past, new = [*before, echo], results or new
        if move in ("edit", "cut"):
            at = data.draw(st.integers(0, len(past) - 1))
            past[at : at + 1] = [{"role": "user", "content": data.draw(WORDS)}] if move == "edit" else []
            ids = {call["id"] for message in past for call in message.get("tool_calls", ())}
            past = [message for message in past if message.get("tool_call_id", "") in ids | {""}]
            new = [{"role": "user", "content": data.draw(WORDS)}]
        elif move == "mouth":
            new = [*new, {"role": "assistant", "content": data.draw(WORDS)}, {"role": "user", "content": "?"}]
        fields: dict[str, Any] = {"n": data.draw(st.sampled_from([1, 2])), "temperature": 1.0}
        if data.draw(st.integers(0, 4)) == 0:
            fields["tools"] = []
        said = data.draw(st.lists(answers(), min_size=1, max_size=2))
        try:
            turns = world.ask([*past, *new], said, **fields)
        except BadTemplate:  # some want roles to alternate
            continue
        if other is not None:
            assert [_facts(turn) for turn in other.ask([*past, *new], said, **fields)] == [*map(_facts, turns)]
        elif data.draw(st.booleans()):
            other = World(model, world.store.turns)
        for turn in turns:
            if turn.shared < len(turn.prompt_ids) and not _extends(world, turn):
                assert turn.prompt_ids == model.prompt(turn.messages, fields.get("tools", TOOLS))
        paths += [([*past, *new], turn) for turn in turns]


def _ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls", ())]


def _extends(world: World, turn: Turn) -> bool:
    parent = next((known for known in world.store.turns if known.id == turn.parent), None)
    return parent is not None and turn.shared == len(parent.ids)


def _facts(turn: Turn) -> dict[str, Any]:
    names = "id prompt_ids response_ids sampling finish parent shared branch choice choices answer requested"
    return {name: getattr(turn, name) for name in names.split()}
