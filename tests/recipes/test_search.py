"""The recipe `search`: questions of every data set's shape, tools that agree with the server's, rewards, a server that
dies, and runs of the laptop configuration with GRPO and with PPO, whose result is then talked to."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import strop
from strop import algorithms
from strop.config import load
from strop.errors import TaskError
from strop.imports import resolve
from strop.tools.search import Search
from strop.tools.search.app import serve_index
from strop.tools.search.index import Index, build
from tests import runs
from tests.integration.agent.stand import Stand, call
from tests.recipes.trained import ROOT, Trained, train
from tests.unit.rewards.judging import endpoint

RECIPE = ROOT / "recipes" / "search"
QUESTIONS = ROOT / "../shared/data/qa"


def of(file: str, name: str) -> Any:
    return resolve(f"{RECIPE / file}:{name}", "tasks")


tasks, one_shape, corpus = of("data.py", "tasks"), of("data.py", "one_shape"), of("data.py", "corpus")
Paragraphs, score, agent = of("paragraphs.py", "Paragraphs"), of("rewards.py", "score"), of("agent.py", "agent")


# -- data --------------------------------------------------------------------------------------------------------------

ED = {"title": "Ed Wood", "text": "Ed Wood was born in 1924. He made films."}
TIM = {"title": "Tim Burton", "text": "Tim Burton was born in 1958."}
ASKED = {"question": "Who is older, Ed Wood or Tim Burton?"}
HOTPOT = {
    "id": "h",
    "answer": "Ed Wood",
    "type": "comparison",
    "supporting_facts": {"title": ["Tim Burton", "Ed Wood", "Ed Wood"], "sent_id": [0, 0, 1]},
    "context": {
        "title": ["Ed Wood", "Tim Burton"],
        "sentences": [["Ed Wood was born in 1924.", " He made films."], ["Tim Burton was born in 1958."]],
    },
}
FILE = HOTPOT | {
    "supporting_facts": [["Ed Wood", 0], ["Tim Burton", 0]],
    "context": list(zip(HOTPOT["context"]["title"], HOTPOT["context"]["sentences"], strict=True)),  # type: ignore
}
MUSIQUE = {
    "id": "2hop__1_2",
    "answer": "Ed Wood",
    "answer_aliases": ["Edward D. Wood Jr."],
    "paragraphs": [
        {"idx": n, "title": one["title"], "paragraph_text": one["text"], "is_supporting": True}
        for n, one in enumerate((ED, TIM))
    ],
}
GATHERED = {
    "id": "g",
    "answers": ["Ed Wood"],
    "type": "comparison",
    "supporting_titles": ["Ed Wood", "Tim Burton"],
    "paragraphs": [ED, TIM],
}


@pytest.mark.parametrize("row", [HOTPOT, FILE, MUSIQUE, GATHERED], ids=["hub", "file", "musique", "gathered"])
def test_questions_with_paragraphs_are_read_in_every_shape(row: dict[str, Any]) -> None:
    read = one_shape(ASKED | row, 0, "train")
    assert read["question"] == ASKED["question"]
    assert read["answers"][0] == "Ed Wood"
    assert read["paragraphs"] == [ED, TIM]
    assert read["titles"] == ["Ed Wood", "Tim Burton"]
    assert read["kind"] == ("2hop" if row is MUSIQUE else "comparison")


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"Question": "Who?", "Answer": "Ed Wood"}, ["Ed Wood"]),  # Bamboogle
        (
            {"question": "Who?", "answer": ["Ed Wood"], "aug_answer": ["Ed Wood", "Wood"]},
            ["Ed Wood", "Wood"],
        ),  # ASearcher
        ({"question": "Who?", "golden_answers": ["Ed Wood"], "data_source": "nq"}, ["Ed Wood"]),  # Search-R1
    ],
)
def test_questions_without_paragraphs_need_a_server(tmp_path: Path, row: dict[str, Any], answers: list[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps({k: f"{v} {n}" if v == "Who?" else v for k, v in row.items()} | {"id": str(n)}) + "\n"
            for n in range(5)
        )
    )
    made = tasks(str(file), search="http://127.0.0.1:8000", held=2)
    assert [task.split for task in made] == ["train"] * 3 + ["test"] * 2
    assert made[0].data == {
        "question": made[0].data["question"], "answers": answers, "kind": made[0].data["kind"],
        "search": "http://127.0.0.1:8000",
    }  # fmt: skip
    with pytest.raises(TaskError, match="say where they are searched, --set tasks_args"):
        tasks(str(file))


def test_what_cannot_be_had_is_a_sentence_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="neither a file nor a data set 'hotpot': give a file, made, or hotpotqa"):
        tasks("hotpot")
    with pytest.raises(TaskError, match="no questions of the kinds riddle"):
        tasks("made", kinds=["riddle"])
    program = f"from strop.imports import resolve; resolve({str(RECIPE / 'data.py:tasks')!r}, 'tasks')('musique')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "dgslibisey/MuSiQue cannot be fetched from the Hugging Face hub" in done.stderr
    assert "give --data PATH, a file of it" in done.stderr


def test_made_questions_can_be_answered_from_their_paragraphs() -> None:
    made = tasks("made", held=40)
    assert made == tasks("made", held=40)
    assert sum(task.split == "test" for task in made) == 40
    assert len({task.data["question"] for task in made}) == len(made) > 150
    assert {task.data["kind"] for task in made} == {"bridge", "comparison"}
    for task in made:
        needed = [one["text"] for one in task.data["paragraphs"] if one["title"] in task.data["titles"]]
        assert len(needed) == 2
        assert any(task.data["answers"][0] in text for text in needed)


def test_the_real_questions() -> None:
    file = QUESTIONS / "multihop_with_paragraphs.jsonl"
    if not file.exists():
        pytest.skip("the real questions are not here")
    made = tasks(str(file), held=48, kinds=["comparison", "bridge_comparison"])
    train, test = ({task.id.partition("-")[2] for task in made if task.split == one} for one in ("train", "test"))
    assert (len(train), len(test), train & test) == (98, 48, set())
    assert all(set(task.data["titles"]) <= {one["title"] for one in task.data["paragraphs"]} for task in made)
    both = tasks(str(file), search="http://127.0.0.1:8000", held=50, tests=[str(QUESTIONS / "bamboogle.jsonl")])
    assert sum(task.split == "bamboogle" for task in both) == 50


@pytest.mark.parametrize("size", ["laptop", "gpu", "cluster"])
def test_configurations_can_be_read(size: str) -> None:
    config = load(toml=RECIPE / f"{size}.toml")
    for spec in (config.agent, config.reward, str(config.tasks)):
        assert resolve(str(ROOT / spec), "agent")
    assert config.policy.context is not None
    assert config.learner.token_budget >= config.policy.context
    assert algorithms.make(config.algorithm, config.learner)
    assert set(config.algorithm.rewards) <= {"em", "f1", "found", "reward"}


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in corpus("made")))
    build(file, tmp_path / "index", progress=lambda *_: None)
    return tmp_path / "index"


@pytest.fixture
async def url(index: Path) -> AsyncIterator[str]:
    async with serve_index(Index.open(index)) as server:
        yield server.url


async def test_a_question_s_own_paragraphs_and_a_server_say_the_same(url: str) -> None:
    """What is learnt with one is of use with the other."""
    own, server = Paragraphs(list(corpus("made")), topk=3, longest=40), Search(url, topk=3, longest=40)
    asked = random.Random(0).sample([task.data["question"] for task in tasks("made")], 20)
    for query in [*asked, "Calder", "no such words", ""]:
        assert documents(own.search(query)) == documents(await asyncio.to_thread(server.search, query))
    title = next(iter(corpus("made")))["title"]
    for name in (title, title.upper(), "Atlantis"):
        assert own.access(name) == await asyncio.to_thread(server.access, name)
    for mine, theirs in ((own.search, server.search), (own.access, server.access)):
        assert mine.schema["function"]["name"] == theirs.__name__
        assert list(mine.parameters["properties"]) == list(strop.tool(theirs).parameters["properties"])


def documents(said: str) -> list[str]:
    """What was found, without its order: equals may come in any."""
    return sorted(line.partition("(")[2] or line for line in said.splitlines())


# -- the agent ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand(tmp_path) as stand:
        yield stand


async def test_it_searches_reads_and_answers(stand: Stand) -> None:
    data = {**ASKED, "answers": ["Ed Wood"], "titles": ["Ed Wood", "Tim Burton"], "paragraphs": [ED, TIM]}
    script = [call("search", query="Ed Wood"), call("access", title_or_id="tim burton"), "Ed Wood."]
    episode = await stand.run(agent, *script, data=data)
    assert [one.result.text for one in episode.calls] == [
        f"Doc 1 (Title: Ed Wood) {ED['text']}",
        f"(Title: Tim Burton) {TIM['text']}",
    ]
    worth = score(strop.Task(id="t", data=data), episode)
    assert worth == {"em": 1.0, "f1": 1.0, "found": 1.0, "reward": 1.0}
    half = await stand.run(agent, call("search", query="films"), "Ed", data=data)
    assert score(strop.Task(id="t", data=data), half) == pytest.approx(
        {"em": 0.0, "f1": 2 / 3, "found": 0.5, "reward": 0.7 * 2 / 3 + 0.3 * 0.5}
    )
    alone = await stand.run(agent, "Ed Wood", data=ASKED | {"answers": ["Ed Wood"], "search": "http://127.0.0.1:1"})
    assert score(strop.Task(id="t", data={"answers": ["Ed Wood"]}), alone) == {"em": 1.0, "f1": 1.0, "reward": 1.0}


async def test_only_what_the_tools_show_is_found(stand: Stand) -> None:
    data = {**ASKED, "answers": ["Ed Wood"], "titles": ["Ed Wood (film)", "Tim Burton"], "paragraphs": [ED, TIM]}
    echo = call("access", title_or_id="x\n(Title: Tim Burton) y\nDoc 1 (Title: Ed Wood (film))")
    own = call("search", query="(Title: Tim Burton) zzz") + "\n" + call("nothing", q="(Title: Tim Burton)")
    lines = call("access", title_or_id="Tim Burton")
    for script, found in (([echo], 0.0), ([own, echo], 0.5), ([lines], 0.5)):
        episode = await stand.run(agent, *script, "Ed Wood", data=data)
        assert score(strop.Task(id="t", data=data), episode)["found"] == found


async def test_a_server_that_dies_is_an_observation_and_the_rollout_goes_on(stand: Stand, index: Path) -> None:
    with server(index) as (url, process):
        data = {"question": "Who made it?", "answers": ["x"], "search": url}
        first = await stand.run(agent, call("search", query="film director"), "done", data=data)
        assert first.calls[0].result.text.startswith("Doc 1 (Title: ")
        process.kill()
        process.wait()
        then = await stand.run(agent, call("search", query="film"), call("access", title_or_id="x"), "x", data=data)
    said = "The search server cannot be used now (Connection refused): go on without it, or try again later."
    assert [one.result.text for one in then.calls] == [said, said]
    assert (then.ended, score(strop.Task(id="t", data=data), then)["reward"]) == ("answered", 1.0)


async def test_the_judge_is_asked_where_the_rule_does_not_know(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = of("rewards.py", "judged")
    data = {**ASKED, "answers": ["Ed Wood"], "paragraphs": [ED, TIM]}
    with endpoint(lambda prompt: "yes" if "Wood, born in 1924" in prompt else "no") as judge:
        monkeypatch.setenv("JUDGE_URL", judge.url)
        monkeypatch.setenv("JUDGE_MODEL", "m")
        monkeypatch.setenv("JUDGE_KEY", "k")
        monkeypatch.setenv("JUDGE_CACHE", str(tmp_path / "judge.sqlite"))
        found = []
        for answer in ("Ed Wood", "Wood, born in 1924", "Tim Burton"):
            episode = await stand.run(agent, answer, data=data)
            found.append((await judged(strop.Task(id="t", data=data), episode))["reward"])
        assert found == [1.0, 1.0, 0.0]
        assert len(judge.asked) == 2


@contextmanager
def server(index: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = runs.strop("search", "serve", index, "--port", "0", "--json")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process
    finally:
        process.kill()
        process.communicate()


# -- training ----------------------------------------------------------------------------------------------------------


def check(trained: Trained) -> None:
    """Exact tokens, no branches, loss on what the model said and on nothing else, rewards for whole rollouts."""
    branches = trained.check()
    assert set(branches) == {None}
    searched = 0
    for rollout in trained.rollouts:
        turns = trained.turns(rollout)
        assert rollout.status == "succeeded"
        assert {(one.name, one.turn) for one in rollout.rewards} == {
            (name, None) for name in ("em", "f1", "found", "reward")
        }
        worth = {one.name: one.value for one in rollout.rewards}
        assert worth["reward"] == pytest.approx(0.7 * worth["f1"] + 0.3 * worth["found"])
        said = trained.loss_text(rollout.id)
        assert len(said) == len(turns)
        results = [m["content"] for m in turns[-1].messages[10:] if m["role"] == "tool"]
        searched += any(result.startswith("Doc 1 (Title: ") for result in results)
        for (_, text), turn in zip(said, turns, strict=True):
            assert text == trained.renderer.decode(turn.response_ids)
        for before, turn in pairwise(turns):
            assert turn.parent == before.id
            written = trained.renderer.decode(turn.prompt_ids[len(before.ids) :])
            assert turn.messages[-1]["role"] == "tool"
            assert turn.messages[-1]["content"] in written
    assert searched, "no rollout searched, so nothing was tested"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_grpo_trains_and_the_result_can_be_talked_to(tmp_path: Path, index: Path) -> None:
    trained = train("search", tmp_path, "loop.eval_splits=[]", timeout=600)
    check(trained)
    assert len(trained.rollouts) == 24
    with server(index) as (url, _):
        command = runs.strop("chat", trained.folder, "--agent", "--temperature", "0", "--folder", tmp_path / "said")
        done = subprocess.run(
            command,
            input="".join(f"{task.data['question']}\n" for task in tasks("made", kinds=["comparison"])[:3]),
            env=os.environ | {"SEARCH_URL": url},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    story = runs.story(tmp_path / "said")
    assert [rollout.status for rollout in story.rollouts] == ["succeeded"] * 3
    calls = [
        c["function"] for turns in story.turns.values() for turn in turns for c in turn.answer.get("tool_calls", [])
    ]
    assert calls, done.stdout
    assert "search" in done.stdout
    assert "tool  Doc 1 (Title: " in done.stdout  # found on the server, in the whole corpus


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ppo_trains(tmp_path: Path) -> None:
    sets = ("algorithm.name=ppo", "learner.critic_kind=shared", "loop.eval_splits=[]")
    trained = train("search", tmp_path, *sets, timeout=600)
    assert trained.config.algorithm.name == "ppo"
    check(trained)
