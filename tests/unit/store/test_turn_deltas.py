"""Rows hold what a turn adds, and readers get whole turns."""

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from strop.errors import StoreError
from strop.store import turn_writes
from strop.store.base import Store
from strop.store.sqlite import SqliteStore
from strop.store.turn_deltas import TurnDelta, grow, shrink
from strop.types import AnswerGrammar, Lease, Rollout, Sampling, Task, Turn
from tests.unit.store.conversations import say, talk, wander


async def begin(store: Store, id: str = "r") -> Lease:
    rollout = Rollout(id=id, group=id, member=0, task=Task(id="t"), created=0.0)
    return await store.begin(rollout, "w", seconds=600)


def in_order(turns: list[Turn]) -> list[Turn]:
    return sorted(turns, key=lambda turn: turn.started)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_every_turn_comes_back_as_it_was(store: Store, size: int):
    for seed in range(4):
        await begin(store, f"r{seed}")
        given = wander(f"r{seed}", 60, seed)
        for first in range(0, len(given), size):
            await store.add_turns(given[first : first + size])
        assert await store.turns(f"r{seed}") == in_order(given)
        await store.add_turns(given)  # said again, because the answer was lost
        assert await store.turns(f"r{seed}") == in_order(given)


async def test_another_turn_of_the_same_id_is_refused_wherever_it_differs(store: Store):
    await begin(store)
    first, second, third = talk("r", 3)
    await store.add_turns([first, second, third])
    edited = [say("system", "Be kind."), *third.messages[1:]]
    for other in (
        replace(third, prompt_ids=[9, *third.prompt_ids[1:]]),
        replace(third, messages=edited),
        replace(third, shared=third.shared - 1),
        replace(third, requested={"model": "n"}),
        replace(first, requested={"model": "m", "tools": [], "user": "u"}),
    ):
        with pytest.raises(StoreError, match="was recorded before"):
            await store.add_turns([other])
    assert await store.turns("r") == [first, second, third]


async def test_a_turn_may_go_on_from_one_that_is_said_again_with_it(store: Store):
    await begin(store)
    first, second, third = talk("r", 3)
    await store.add_turns([first, second])
    await store.add_turns([second, third])
    assert await store.turns("r") == [first, second, third]


def branch(k: int, *messages: dict[str, Any], parent: str | None = None, answer: str = "yes") -> Turn:
    """A turn that shares messages with others and says of no ids that they are another's."""
    (turn,) = talk("r", 1, seed=k)
    given = {"messages": list(messages), "answer": say("assistant", answer), "parent": parent, "shared": 0}
    return replace(turn, id=f"r/1/{k}", branch="edited", started=float(k), ended=k + 0.5, **given)


async def test_turns_that_are_said_again_do_not_lead_in_circles(store: Store):
    """The second time, the first turn could also be stored as what it adds to the third."""
    await begin(store)
    p, q, r, other = (say("user", word * 100) for word in "pqro")
    first, second, third = branch(0, p, q), branch(1, other), branch(2, p, r)
    await store.add_turns([first, second])
    await store.add_turns([third])
    await store.add_turns([first, second])
    assert await store.turns("r") == [first, second, third]


async def test_messages_that_python_takes_for_equal_are_not_shared(store: Store):
    await begin(store)
    first = branch(0, {"role": "user", "content": "x", "n": 1, "b": 2})
    second = branch(1, {"role": "user", "content": "x", "b": 2, "n": True}, say("user", "more"))
    await store.add_turns([first])
    await store.add_turns([second])
    found = await store.turns("r")
    assert msgspec.json.encode(found) == msgspec.json.encode([first, second])
    assert msgspec.json.encode(grow(shrink([first, second]))) == msgspec.json.encode([first, second])


async def test_turns_said_again_are_compared_with_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await begin(store)
    given = talk("r", 40)
    await store.add_turns(given)
    readings: list[str] = []
    read = turn_writes.read

    def counted(db: Any, rollout: str, attempt: int) -> Any:
        readings.append(rollout)
        return read(db, rollout, attempt)

    monkeypatch.setattr(turn_writes, "read", counted)
    await store.add_turns(given)
    assert readings == ["r"]
    await store.close()


async def test_a_turn_that_was_damaged_is_named(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await begin(store)
    await store.add_turns(talk("r", 2))
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        db.execute("UPDATE turns SET sampling = '{' WHERE id = 'r/1/1'")
    with pytest.raises(StoreError, match="turn 'r/1/1' cannot be read"):
        await store.turns("r")
    await store.close()


async def test_a_parent_of_another_attempt_is_not_gone_on_from(store: Store):
    await begin(store)
    old = talk("r", 2)
    await store.add_turns(old)
    await store.finish("r", 1, cause="interrupted")
    await store.lease("w", seconds=600)
    new = replace(talk("r", 3)[2], id="r/2/0", attempt=2)  # its parent is r/1/1
    await store.add_turns([new])
    assert await store.turns("r") == [new]
    assert await store.turns("r", attempt=1) == old


# -- what lies in the rows ---------------------------------------------------------------------------------------------


async def stored(tmp_path: Path, turns: list[Turn], *, at_once: bool = False) -> list[dict[str, Any]]:
    """The rows after turns were recorded one by one, which come back whole."""
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await begin(store)
    for some in [turns] if at_once else [[turn] for turn in turns]:
        await store.add_turns(some)
    assert await store.turns("r") == in_order(turns)
    await store.close()
    db = sqlite3.connect(tmp_path / "store.sqlite")
    db.row_factory = sqlite3.Row
    found = [dict(row) for row in db.execute("SELECT * FROM turns ORDER BY seq")]
    db.close()
    return found


def size(row: dict[str, Any]) -> int:
    return sum(len(value) for value in row.values() if isinstance(value, str | bytes))


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_row_holds_what_its_turn_adds(tmp_path: Path, at_once: bool):
    turns = talk("r", 4)
    rows = await stored(tmp_path, turns, at_once=at_once)
    assert [len(row["prompt_ids"]) // 4 for row in rows] == [40, 40, 40, 40]
    assert [row["ids_from"] for row in rows] == [None, "r/1/0", "r/1/1", "r/1/2"]
    assert [row["ids_shared"] for row in rows] == [turn.shared for turn in turns]
    assert [row["messages_shared"] for row in rows] == [0, 3, 5, 7]
    assert all(row["messages"].count("role") == 1 for row in rows[1:])  # the answer before it is that turn's


async def test_bytes_of_a_rollout_grow_with_its_turns_and_not_with_their_square(tmp_path: Path):
    sizes = {}
    for count in (10, 60, 200):
        rows = await stored(tmp_path / str(count), talk("r", count))
        sizes[count] = sum(map(size, rows)) / count
    assert sizes[200] < 1.1 * sizes[60] < 1.2 * sizes[10]


def outside(turns: list[Turn]) -> list[Turn]:
    """The same conversation as an outside model's: no tokens, no parents, the tools with every request."""
    tools = turns[0].requested["tools"]
    none: dict[str, Any] = {"prompt_ids": [], "response_ids": [], "logprobs": [], "versions": [], "parent": None}
    return [replace(turn, **none, shared=0, requested={"model": "m", "tools": tools}) for turn in turns]


async def test_outside_models_turns_share_messages_and_tools(tmp_path: Path):
    rows = await stored(tmp_path, outside(talk("r", 40)))
    assert size(rows[39]) < 1.2 * size(rows[1]) < 2000
    assert [row["messages_from"] for row in rows[:3]] == [None, "r/1/0", "r/1/1"]
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        assert db.execute("SELECT count(*) FROM tool_lists").fetchone() == (1,)
        assert "Sums." not in str([dict(row) for row in rows])
    db.close()


async def test_conversations_of_one_agent_that_take_turns_stay_apart(tmp_path: Path):
    one, two = outside(talk("r", 20)), outside(talk("r", 20, seed=1))
    for turn in two:
        turn.messages[0] = say("system", "Another.")
    both = [turn for pair in zip(one, two, strict=True) for turn in pair]
    both = [replace(turn, id=f"r/1/{k}", started=float(k)) for k, turn in enumerate(both)]
    rows = await stored(tmp_path, both)
    assert size(rows[39]) < 1.2 * size(rows[3])


async def test_branches_share_what_they_can(tmp_path: Path):
    """A template that strips thoughts: every prompt goes on from within the one before."""
    turns = talk("r", 30)
    for k in range(1, 30):
        last = turns[k - 1]
        prompt = [*last.prompt_ids, *range(50)]
        turns[k] = replace(turns[k], prompt_ids=prompt, shared=len(last.prompt_ids), branch="template_rewrote")
    rows = await stored(tmp_path, turns)
    assert all(len(row["prompt_ids"]) == 4 * 50 for row in rows[1:])
    early = replace(turns[29], id="r/1/30", prompt_ids=[*turns[0].ids[:35], 7], shared=35, started=99.0)
    rows = await stored(tmp_path / "early", [*turns, early])
    assert (rows[30]["ids_from"], rows[30]["ids_shared"], len(rows[30]["prompt_ids"])) == ("r/1/0", 35, 4)


@pytest.mark.parametrize("shared", [-1, 0, 61, 10**6])
async def test_what_a_turn_does_not_share_is_stored_whole(tmp_path: Path, shared: int):
    first, second = talk("r", 2)
    rows = await stored(tmp_path, [first, replace(second, shared=shared)])
    assert (rows[1]["ids_from"], len(rows[1]["prompt_ids"])) == (None, 400)


async def test_ids_that_differ_from_the_parents_are_stored_whole(tmp_path: Path):
    first, second, third = talk("r", 3)
    for place in (0, 70, 119):  # before the parent's own part, in its prompt, in its answer
        ids = list(third.prompt_ids)
        ids[place] += 1
        rows = await stored(tmp_path / str(place), [first, second, replace(third, prompt_ids=ids)])
        assert (rows[2]["ids_from"], len(rows[2]["prompt_ids"])) == (None, 4 * 160)


async def test_choices_of_a_request_share_their_prompt(tmp_path: Path):
    (first,) = talk("r", 1)
    turns = [replace(first, id=f"r/1/{k}", choice=k, choices=4, response_ids=[k] * 20) for k in range(4)]
    rows = await stored(tmp_path, turns, at_once=True)
    assert [len(row["prompt_ids"]) for row in rows] == [160, 0, 0, 0]
    assert [row["messages"] for row in rows[1:]] == ["[]"] * 3


async def test_raw_prompts_share_their_text(tmp_path: Path):
    turns, text = talk("r", 30), ""
    for k, turn in enumerate(turns):
        text += f"caf\u00e9 {k}: " * 30
        turns[k] = replace(turn, messages=[say("prompt", text)], answer=say("assistant", "yes"))
        text += "yes"
    rows = await stored(tmp_path, turns)
    assert len(rows[29]["messages"]) < 1.2 * len(rows[5]["messages"]) < 1000


async def test_one_changed_message_costs_what_follows_it(tmp_path: Path):
    """Agents mark their last message, or change an early one."""
    turns = talk("r", 20)
    for turn in turns:
        turn.messages[-1] = {**turn.messages[-1], "mark": True}
    rows = await stored(tmp_path, turns)
    assert size(rows[19]) < 1.2 * size(rows[2])
    edited = replace(turns[19], id="r/1/20", messages=[*turns[19].messages[:3], say("user", "x"), say("user", "y")])
    rows = await stored(tmp_path / "edited", [*turns, replace(edited, started=99.0)])
    assert (rows[20]["messages_from"], rows[20]["messages_shared"]) == ("r/1/2", 3)


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_turns_shrink_and_grow(seed: int):
    turns = in_order(wander("r", 80, seed))
    sent = msgspec.json.encode(shrink(turns))
    assert grow(msgspec.json.decode(sent, type=list[TurnDelta])) == turns


def test_an_answer_grows_with_its_turns_and_not_with_their_square():
    sizes = {count: len(msgspec.json.encode(shrink(talk("r", count)))) / count for count in (10, 60, 200)}
    assert sizes[200] < 1.1 * sizes[60] < 1.2 * sizes[10]
    outer = {count: len(msgspec.json.encode(shrink(outside(talk("r", count))))) / count for count in (10, 200)}
    assert outer[200] < 1.1 * outer[10]


def test_what_two_turns_do_not_share_is_sent_whole():
    first, second = talk("r", 2)
    (_, sent) = shrink([first, replace(second, prompt_ids=[second.prompt_ids[0] + 1, *second.prompt_ids[1:]])])
    assert (sent.ids_from, len(sent.prompt_ids)) == (None, 100)
    (_, sent) = shrink([first, second])
    assert (sent.ids_from, len(sent.prompt_ids), sent.messages_shared) == ("r/1/0", 40, 3)


async def test_a_grammar_is_stored_once(tmp_path: Path):
    def held(text: str) -> Sampling:
        return Sampling(grammar=AnswerGrammar(text=text, ends=(2,), version="llguidance@1"))

    long = "start: " + '"é\\n" ' * 500
    turns = [replace(turn, sampling=held(long if k % 3 else "start: x")) for k, turn in enumerate(talk("r", 9))]
    rows = await stored(tmp_path, turns)
    assert max(len(row["sampling"]) for row in rows) < 400
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        assert db.execute("SELECT count(*) FROM tool_lists WHERE length(tools) > 2000").fetchone() == (1,)
        assert db.execute("SELECT count(*) FROM tool_lists").fetchone() == (3,), "two grammars and the tools"
    db.close()


async def test_rows_of_older_stores_have_the_text_of_their_grammar(tmp_path: Path):
    turn = replace(talk("r", 1)[0], sampling=Sampling(grammar=AnswerGrammar(text="start: x", ends=(2,), version="v")))
    await stored(tmp_path, [turn])
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        db.execute("UPDATE turns SET sampling = ?", (msgspec.json.encode(turn.sampling).decode(),))
    db.close()
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    (read,) = await store.turns("r")
    await store.close()
    assert read.sampling == turn.sampling
