"""The recipe sql: Spider's questions as tasks, and three steps of the LangGraph agent."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from statistics import mean, stdev

import pytest

from recipes.sql import data
from recipes.sql.worth import columns, worth
from strop import config
from strop.errors import TaskError
from strop.rewards import sql_match
from strop.types import Rollout, Turn
from tests.recipes.trained import ROOT, Trained, needs, train

SPIDER = Path(__file__).parents[2] / "../shared/data/spider"
spider = pytest.mark.skipif(not SPIDER.is_dir(), reason="Spider is not here")


@pytest.mark.parametrize("size", ["laptop", "gpu", "cluster"])
def test_configs_are_whole(size: str) -> None:
    found = config.load(toml=ROOT / "recipes" / "sql" / f"{size}.toml")
    assert found.policy.agents == ("writer", "rewriter")
    assert (ROOT / found.agent.partition(":")[0]).is_file()


def test_made_data() -> None:
    tasks = data.tasks("made", level="easy", examples=3, rewrites=1, test=4)
    assert Counter(task.split for task in tasks) == {"train": 27, "test": 4}
    seen = {split: {task.data["db_id"] for task in tasks if task.split == split} for split in ("train", "test")}
    assert seen == {"train": {"music", "library", "racing"}, "test": {"school"}}
    assert len({task.id for task in tasks}) == len(tasks)
    for task in data.tasks("made", examples=6):
        given = task.data
        queries = [given["query"], *(query for _, query in given["examples"])]
        assert {float(sql_match(query, query, given["database"])) for query in queries} == {1.0}
        assert len(queries) in (6, 7)
        assert given["query"].lower() not in [query.lower() for query in queries[1:]]  # it is not given away
    assert len(data.tasks("made")) == 40
    with pytest.raises(TaskError, match="no level"):
        data.tasks("made", level="hard")


@pytest.mark.parametrize("layout", ["spider", "lines"])
def test_layouts(layout: str, tmp_path: Path) -> None:
    """Spider's own files, and lines of JSON beside flat databases."""
    for name in ("a", "b"):
        path = tmp_path / "database" / (f"{name}/{name}.sqlite" if layout == "spider" else f"{name}.sqlite")
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path)) as db:
            db.execute('CREATE TABLE things (id INTEGER, "long name" TEXT, "order" TEXT)')
            db.execute("INSERT INTO things VALUES (1, 'x', 'it''s')")
            db.commit()
    rows = [{"db_id": "a", "question": "How many?", "query": "SELECT count(*) FROM things", "toks": ["How"]}]
    dev = [{"db_id": "b", "question": "Which?", "query": "SELECT id FROM things"}]
    if layout == "spider":
        (tmp_path / "train_spider.json").write_text(json.dumps(rows))
        (tmp_path / "train_others.json").write_text(json.dumps(rows))
        (tmp_path / "dev.json").write_text(json.dumps(dev))
    else:
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
        (tmp_path / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dev))
    tasks = data.tasks(str(tmp_path), examples=9)
    assert [(task.id, task.split) for task in tasks] == [
        ("spider-train-0", "train"),
        ("spider-train-1", "train"),
        ("spider-test-0", "test"),
    ]
    assert tasks[0].data["schema"] == "things(id, long name, order)"
    assert len(tasks[0].data["examples"]) == 2  # the third is what is asked for
    for _, query in (shown := tasks[2].data["examples"]):
        assert sql_match(query, query, tasks[2].data["database"]), query
    assert shown[2][1] == """SELECT "long name" FROM things WHERE "order" = 'it''s'"""
    with pytest.raises(TaskError, match="more columns"):
        data.tasks(str(tmp_path), columns=2)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="give --data FOLDER"):
        data.tasks(str(tmp_path))
    (tmp_path / "database").mkdir()
    (tmp_path / "train.jsonl").write_text('{"db_id": "none", "question": "?", "query": "SELECT 1"}\n')
    with pytest.raises(TaskError, match=r"no database/none/none\.sqlite"):
        data.tasks(str(tmp_path))


@spider
def test_spider() -> None:
    tasks = data.tasks(str(SPIDER), level="easy", columns=20, examples=6, test=94)
    train, test = ([task for task in tasks if task.split == split] for split in ("train", "test"))
    assert len(train) > 1000
    assert len(test) > 90
    assert not {task.data["db_id"] for task in train} & {task.data["db_id"] for task in test}
    for task in test:
        for _, query in task.data["examples"]:
            assert sql_match(query, query, task.data["database"]), query


def test_worth(tmp_path: Path) -> None:
    """Right ones above those that read the right columns, those above the right table, those above any that run."""
    with closing(sqlite3.connect(path := tmp_path / "a.sqlite")) as db:
        db.executescript("CREATE TABLE singer (id, Name, age); CREATE TABLE song (id, title);")
        db.executescript("INSERT INTO singer VALUES (1, 'Ada', 30); INSERT INTO song VALUES (1, 'Low')")
    golden, place = "SELECT name, age FROM singer", str(path)
    assert columns(golden, place) == {("singer", ""), ("singer", "name"), ("singer", "age")}
    assert columns("SELECT count(*) FROM song", place) == {("song", "")}
    order = [
        "SELECT Age, Name FROM Singer",  # sql_match takes columns in any order
        "SELECT name, age FROM singer WHERE age > 50",
        "SELECT * FROM singer",
        "SELECT count(*) FROM singer",
        "SELECT title FROM song",
        "SELECT name FROM people",
    ]
    found = [worth(query, golden, place) for query in order]
    assert found == pytest.approx([1.0, 0.5, 0.1 + 0.4 * 6 / 7, 0.1 + 0.4 * 2 / 4, 0.1, 0.0])
    for broken in ("", "SELECT name FROM singer; DROP TABLE singer", "SELECT", "DELETE FROM singer"):
        assert worth(broken, golden, place) == 0.0
    assert worth("SELECT 1", golden, place) == 0.1


@needs("sql")
@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("data", ["made", pytest.param(str(SPIDER), marks=spider)], ids=["made", "spider"])
def test_three_steps(data: str, tmp_path: Path) -> None:
    given = {"data": data, "level": "easy", "columns": 12, "examples": 3, "rewrites": 2, "test": 2}
    sets = [f"tasks_args.{name}={value}" for name, value in given.items()]
    trained = train("sql", tmp_path, "loop.steps=3", "policy.context=768", *sets, timeout=800)
    branches = trained.check()
    assert len(trained.rollouts) == 3 * 2 * 6
    assert {rollout.status for rollout in trained.rollouts} == {"succeeded"}
    checks = {rollout.id: agents(trained, rollout)["checker"] for rollout in trained.rollouts}
    asked_again = sum(map(other_checks, map(trained.turns, trained.rollouts)))
    assert branches == Counter({None: branches[None], **({"new_conversation": asked_again} if asked_again else {})})
    for rollout in trained.rollouts:
        check_rollout(trained, rollout)
    for step in (1, 2, 3):
        check_credit(trained, step)
    assert any(agents(trained, rollout)["rewriter"] == 2 for rollout in trained.rollouts)
    assert any(checks.values())


def other_checks(turns: list[Turn]) -> int:
    """How often the checker was asked something that it had not been asked before: a rewriter may repeat the query."""
    return max(0, len({tuple(turn.prompt_ids) for turn in turns if turn.agent == "checker"}) - 1)


def agents(trained: Trained, rollout: Rollout) -> Counter[str]:
    return Counter(turn.agent for turn in trained.turns(rollout))


def check_rollout(trained: Trained, rollout: Rollout) -> None:
    """One writer; a rewriter that goes on from what it said; loss on the words of both, on none of the checker's."""
    turns = trained.turns(rollout)
    by = {name: [turn for turn in turns if turn.agent == name] for name in ("writer", "checker", "rewriter")}
    assert turns[0].agent == "writer"
    assert len(by["writer"]) == 1
    assert len(by["rewriter"]) <= 2
    assert all(len(turn.response_ids) <= 4 for turn in by["checker"])
    if by["rewriter"]:
        first, *again = by["rewriter"]
        assert first.parent is None
        assert first.messages[-1]["content"].startswith(f"{rollout.task.data['question']}\nThis query is wrong:\n")
        for turn in again:
            assert (turn.parent, turn.branch, turn.shared) == (first.id, None, len(first.ids))
            assert turn.prompt_ids[: turn.shared] == first.ids
    sampled = [(turn.agent, trained.renderer.decode(turn.response_ids)) for turn in turns if turn.agent != "checker"]
    assert set(trained.loss_text(rollout.id)) <= set(sampled)
    rewards = {(reward.name, reward.agent): reward.value for reward in rollout.rewards}
    assert rewards.keys() == {("reward", None), ("match", None), ("written", "writer")}
    assert all(value in (0.0, 1.0) or 0.1 <= value <= 0.5 for value in rewards.values())
    assert rewards["match", None] == float(rewards["reward", None] == 1.0)
    if not by["rewriter"]:  # then the first query is the last
        assert rewards["written", "writer"] == rewards["reward", None]


def check_credit(trained: Trained, step: int) -> None:
    """Writers are compared with the writers of their group by what both their query and the last one were worth,
    rewriters with rewriters by the last one. Where all are alike there is nothing to learn, and no loss."""
    batch = trained.batch(step)
    rollouts = {rollout.id: rollout for rollout in trained.rollouts}
    scores: dict[tuple[str, str], dict[str, float]] = {}
    for turn in batch.turns:
        rollout = rollouts[turn.rollout]
        got = sum(one.value for one in rollout.rewards if one.name != "match" and one.agent in (None, turn.agent))
        scores.setdefault((rollout.group, turn.agent), {})[rollout.id] = got
    for number, turn in enumerate(batch.turns):
        like = scores[rollouts[turn.rollout].group, turn.agent]
        learns = len(set(like.values())) > 1
        rows = batch.rows(number)
        assert (batch.skipped[number] is None and turn.rollout not in batch.dropped) == learns
        if learns:
            wanted = (like[turn.rollout] - mean(like.values())) / (stdev(like.values()) + 1e-6)
            assert batch.entries.advantage[rows] == pytest.approx(wanted, abs=1e-4)
