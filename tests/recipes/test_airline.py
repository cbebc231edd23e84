"""The recipe `airline`: its tools and its reward on every task of tau2-bench's airline, conversations with a scripted
user, and a run of the laptop's configuration with the model in the box."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from strop.agent.toolbox import Tools, find_tools
from strop.errors import TaskError
from strop.imports import resolve
from tests.integration.agent.stand import Stand, call
from tests.recipes.trained import ROOT, train

RECIPE = ROOT / "recipes" / "airline"
DATA = ROOT / "../shared/data"
TAU2, RECORDS = DATA / "tau2", DATA / "tool_transcripts" / "tau_bench_gpt4o_airline.jsonl"


def of(file: str, name: str) -> Any:
    return resolve(f"{RECIPE / file}:{name}", "tasks")


tasks, load_world, make_rows = of("world.py", "tasks"), of("world.py", "load_world"), of("world.py", "make_rows")
Database, AirlineTools, CHANGES = (
    of("database.py", "Database"),
    of("airline_tools.py", "AirlineTools"),
    of("airline_tools.py", "CHANGES"),
)
score, expect, agent = of("outcome.py", "score"), of("outcome.py", "expect"), of("agent.py", "agent")
put_together = of("records.py", "main")


@pytest.fixture(scope="module")
def domain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tau2-bench's airline, its database put together from recorded conversations."""
    if not (TAU2.is_dir() and RECORDS.is_file()):
        pytest.skip(f"{TAU2} is not here")
    folder = tmp_path_factory.mktemp("domain")
    for name in ("airline_tasks.json", "airline_policy.md"):
        (folder / name).write_bytes((TAU2 / name).read_bytes())
    put_together(str(RECORDS), str(folder / "airline_tasks.json"), str(folder / "db.json"))
    return folder


# -- the reward --------------------------------------------------------------------------------------------------------


async def check_reward(rows: Any, given: list[Any]) -> Counter[str]:
    """Expected actions give 1, without one that changes something 0, and so does what the user was not told."""
    tried: Counter[str] = Counter()
    for task in (one.data for one in given):
        expected, told = task["expected"], task["communicate"]
        right = await expect(rows, expected)
        assert (await score(rows, task, right, told))["reward"] == 1
        for at, action in enumerate(expected):
            if action["name"].startswith(CHANGES):
                without = await expect(rows, expected[:at] + expected[at + 1 :])
                assert (await score(rows, task, without, told))["reward"] == 0, action
                tried[action["name"]] += 1
        for fact in told:
            others = [one for one in told if fact not in one]
            assert (await score(rows, task, right, others))["reward"] == 0, fact
            tried["fact"] += 1
        if not any(action["name"].startswith(CHANGES) for action in expected):
            tried["nothing"] += 1
            (reservation, *_) = rows["reservations"]
            touched = await expect(rows, [act("cancel_reservation", reservation_id=reservation)])
            assert (await score(rows, task, touched, told))["database"] == 0
    return tried


def act(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


async def test_every_task_of_tau2(domain: Path) -> None:
    given = tasks(str(domain))
    assert (len(given), sum(task.split == "test" for task in given)) == (50, 10)
    assert await check_reward(load_world(str(domain)).rows, given) == {
        "update_reservation_flights": 20,
        "cancel_reservation": 11,
        "book_reservation": 10,
        "update_reservation_baggages": 5,
        "update_reservation_passengers": 3,
        "fact": 10,
        "nothing": 24,
    }


async def test_every_task_that_is_made() -> None:
    given = tasks("made")
    assert len(given) == len({task.id for task in given}) == 144
    assert await check_reward(make_rows(), given) == {
        "cancel_reservation": 24,
        "update_reservation_baggages": 48,
        "update_reservation_passengers": 48,
        "nothing": 24,
    }


def test_no_more_tasks_are_kept_aside_than_there_are() -> None:
    assert {task.split for task in tasks("made", held=144)} == {"test"}
    with pytest.raises(TaskError, match=r"held is 145, of 144 tasks\. Fix: set it to a number from 0 to 144"):
        tasks("made", held=145)


async def test_the_share_of_the_actions_that_were_taken() -> None:
    task = next(task.data for task in tasks("made") if task.id == "bag-R001")
    look, bag = [(one["name"], one["arguments"]) for one in task["expected"]]
    for calls, share in (([], 0), ([look], 0.5), ([bag, look, bag], 1)):
        assert (await score(make_rows(), task, {}, [], calls))["actions"] == share


async def test_a_task_that_does_not_fit_its_database() -> None:
    with pytest.raises(TaskError, match=r"which a task expects, cannot be done: .*no reservation X"):
        await expect(make_rows(), [act("cancel_reservation", reservation_id="X")])


# -- the tools ---------------------------------------------------------------------------------------------------------


async def run(rows: Any, name: str, **arguments: Any) -> tuple[str, Any]:
    database = Database(rows)
    said = await Tools(find_tools(AirlineTools(database))).run(name, json.dumps(arguments))
    return said.text, database.changes()


async def test_what_cannot_be_done_changes_nothing(domain: Path) -> None:
    rows = load_world(str(domain)).rows
    book = next(
        action["arguments"]
        for task in tasks(str(domain))
        for action in task.data["expected"]
        if action["name"] == "book_reservation" and len(action["arguments"]["payment_methods"]) > 1
    )
    cheaper = [{**book["payment_methods"][0], "amount": book["payment_methods"][0]["amount"] - 1}]
    for wrong, why in [
        ({"payment_methods": cheaper + book["payment_methods"][1:]}, "would be paid"),
        ({"user_id": "nobody"}, "there is no user nobody"),
        ({"flights": [{"flight_number": "HAT999", "date": "2024-05-20"}]}, "there is no flight HAT999"),
        ({"flights": [{**book["flights"][0], "date": "2023-01-01"}]}, "does not fly on 2023-01-01"),
        ({"cabin": "first"}, "do not fit"),
        ({"passengers": book["passengers"] * 30}, "has not"),
    ]:
        said, changes = await run(rows, "book_reservation", **(book | wrong))
        assert said.startswith("error: ")
        assert why in said, said
        assert changes == {}


async def test_two_calls_of_one_answer_are_done_one_after_the_other() -> None:
    database = Database(make_rows())
    tools = Tools(find_tools(AirlineTools(database)))
    bags = {"reservation_id": "R001", "payment_id": "credit_card_1001"}
    await asyncio.gather(
        *(
            tools.run("update_reservation_baggages", json.dumps({**bags, "total_baggages": n, "nonfree_baggages": n}))
            for n in (2, 3)
        )
    )
    after = database.reservation("R001")
    assert after["nonfree_baggages"] == 3
    assert [one["amount"] for one in after["payment_history"]][1:] == [100, 50]


async def test_search_and_sums(domain: Path) -> None:
    rows = load_world(str(domain)).rows
    said, changes = await run(rows, "search_onestop_flight", origin="JFK", destination="SEA", date="2024-05-20")
    for first, second in json.loads(said):
        assert (first["origin"], first["destination"], second["destination"]) == ("JFK", second["origin"], "SEA")
    assert {(first["flight_number"], second["flight_number"]) for first, second in json.loads(said)} >= {
        ("HAT136", "HAT039")
    }
    assert changes == {}
    assert (await run(rows, "calculate", expression="(3 + 4.5) * 2 - -1"))[0] == "16"
    assert (await run(rows, "calculate", expression="__import__('os')"))[0].startswith("error: ")


# -- a conversation ----------------------------------------------------------------------------------------------------


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand(tmp_path) as stand:
        yield stand


async def test_a_conversation(stand: Stand) -> None:
    """The user is another agent of the rollout: it sees what the agent says to it, and no tools or results."""
    task = next(task.data for task in tasks("made") if task.id == "cancel-R001")
    look = call("get_reservation_details", reservation_id="R001")
    cancel = call("cancel_reservation", reservation_id="R001")
    script = ["Cancel R001, please.", look, "Shall I cancel it?", "Yes.", cancel, "Done.", "###STOP###"]
    given = await stand.run(agent, *script, data=task)
    assert given == {"reward": 1.0, "database": 1.0, "told": 1.0, "actions": 1.0}
    turns = await stand.turns()
    assert [turn.agent for turn in turns] == ["user", "main", "main", "user", "main", "main", "user"]
    assert [turn.branch for turn in turns] == [None] * 7
    heard = [message["content"] for message in turns[-1].messages if message["role"] == "user"]
    assert heard == ["Hi! How can I help you today?", "Shall I cancel it?", "Done."]
    assert "user_id" not in json.dumps(turns[-1].messages[1:])


async def test_a_conversation_that_comes_to_nothing(stand: Stand) -> None:
    task = next(task.data for task in tasks("made") if task.id == "cancel-R001")
    given = await stand.run(agent, "Cancel R001, please.", "No.", "###STOP###", data=task)
    assert given == {"reward": 0.0, "database": 0.0, "told": 1.0, "actions": 0.0}


async def test_being_handed_over_ends_it(stand: Stand) -> None:
    task = next(task.data for task in tasks("made") if task.id == "cancel-R000")  # economy: to be refused
    handed = "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON."
    given = await stand.run(agent, "Cancel R000, please.", handed, data=task)
    assert (given["reward"], given["actions"]) == (1.0, 0.0)


def test_a_folder_without_a_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"has no tasks.json. Fix: give the folder data/tau2/domains/airline"):
        tasks(str(tmp_path))
    for name in ("tasks.json", "policy.md"):
        (tmp_path / name).write_text("[]")
    with pytest.raises(TaskError, match=r"has no db.json\. Fix: .*records.py"):
        tasks(str(tmp_path))


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    """The laptop's configuration with the model in the box, which never does anything right: what carries loss is the
    agent's, and the user goes on, token for token, from what it said."""
    small = ("policy.model=strop/nano", 'policy.template=""', "policy.train.max_tokens=16", "tasks_args.max_turns=2")
    trained = train("airline", tmp_path, *small)
    assert len(trained.story.steps) == 3
    for rollout in trained.rollouts:
        assert rollout.status == "succeeded", rollout.detail
        turns = {turn.id: turn for turn in trained.turns(rollout)}
        assert {turn.agent for turn in turns.values()} == {"main", "user"}
        for turn in turns.values():
            assert turn.branch is None
            if turn.parent is not None:
                assert turn.prompt_ids[: turn.shared] == turns[turn.parent].ids
    for step in trained.story.steps:
        tokens = sum(
            len(turn.response_ids) for id in step.rollouts for turn in trained.story.turns[id] if turn.agent == "main"
        )
        assert step.metrics["training/rollout_logprobs_checked"] == tokens
        assert step.metrics["training/rollout_logprobs_diff_max"] < 1e-4
