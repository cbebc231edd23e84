"""The recipe `werewolf` without its framework: words, how answers are read, rewards, credit by role, and the player by
rule of thumb. test_werewolf_rules.py has the rules, test_werewolf_games.py whole games."""

from __future__ import annotations

import doctest
import json
import re
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from fnmatch import fnmatchcase
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from strop import algorithms
from strop.algorithms.credit import parse_role
from strop.config import load, resolve_policies, trained_policies
from strop.errors import TaskError
from strop.types import Reward, Task
from tests.recipes.trained import ROOT
from tests.recipes.werewolf_files import (
    NAMES,
    RECIPE,
    ROLES,
    TABLE,
    Ask,
    Reply,
    Rules,
    credit,
    game,
    of,
    opponent,
    plays,
    reading,
    score,
    scripted,
    tasks,
    words,
)
from tests.unit.algorithms.rollouts import by_turn, sample, turn
from tests.unit.rewards.judging import endpoint

PROMPTS = ROOT / "../shared/data/werewolf/agentscope_agent_configs.json"


@pytest.mark.parametrize("module", [game, words, reading, scripted, plays])
def test_examples_in_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


# -- words, and how answers are read -----------------------------------------------------------------------------------


def test_both_languages_say_the_same_things() -> None:
    def holes(text: str) -> set[str | None]:
        return {name for _, name, _, _ in Formatter().parse(text) if name is not None}

    assert words.EN.keys() == words.ZH.keys()
    assert {key: holes(text) for key, text in words.EN.items()} == {key: holes(text) for key, text in words.ZH.items()}
    assert not re.search(r"[A-Za-z]", "".join(re.sub(r"\{\w*\}", "", text) for text in words.ZH.values()))
    with pytest.raises(ValueError, match="Fix: take one of en, zh"):
        words.Words("fr")


@pytest.mark.parametrize(("language", "wolf"), [("en", "You are a werewolf"), ("zh", "你的身份是狼人")])
def test_a_brief_tells_nobody_else_s_role(language: str, wolf: str) -> None:
    said = words.Words(language)
    briefs = {seat: said.brief(TABLE, seat) for seat in ROLES}
    assert [seat for seat, brief in briefs.items() if wolf in brief] == [1, 2, 3]
    hidden = {seat: brief.replace(said.names(ROLES), "") for seat, brief in briefs.items()}
    for seat, brief in hidden.items():
        assert not any(name in brief for name in NAMES.values() if "-" in name)
        named = {one for one in ROLES if said.name(one) in brief}
        assert named <= {seat, 3, *({1, 2, 3} if seat < 4 else ())}  # 3 stands in the example of a choice
        pack = words.TEXTS[language]["hint wolf"].format(pack=said.names({1, 2, 3} - {seat}))
        assert (pack in brief) == (seat < 4)


@pytest.mark.skipif(not PROMPTS.exists(), reason="the prompts of others are not here")
def test_briefs_cover_what_others_tell_their_players_in_words_of_our_own() -> None:
    theirs = " ".join(one["args"]["sys_prompt"] for one in json.loads(PROMPTS.read_text()))
    ours = " ".join(words.Words("en").brief(TABLE, seat) for seat in ROLES)
    for about in ("werewol", "villager", "seer", "witch", "night", "vote", "win", "You are"):
        assert about in theirs
        assert about in ours

    def runs(text: str) -> set[tuple[str, ...]]:
        said = re.findall(r"\w+", text.lower())
        return {tuple(said[n : n + 7]) for n in range(len(said) - 6)}

    assert not runs(theirs) & runs(re.sub(r"Player \d(, Player \d)*", "", ours))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_examples_show_the_form(language: str) -> None:
    said = words.Words(language)
    for seat in ROLES:
        for question, answer in said.examples(seat):
            options = question.partition(words.TEXTS[language]["form"].partition("{")[0])[2]
            assert said.name(seat) not in question + answer
            if options:
                assert answer.partition(" ")[2] in options
                assert reading.read(answer, Ask("vote", seat, (1,))).form == 1.0
            else:
                assert reading.read(answer, Ask("speak", seat)) == reading.Reading(Reply(answer), 1.0)


VOTE, SPEAK = Ask("vote", 1, (2, 5)), Ask("speak", 1)


@pytest.mark.parametrize(
    ("ask", "text", "said", "choice", "fault", "form"),
    [
        (VOTE, "He lied.\nCHOICE: Player 5", "He lied.", 5, None, 1.0),
        (VOTE, "choice : **player 5**.", "", 5, None, 1.0),
        (VOTE, "CHOICE: 5", "", 5, None, 1.0),
        (VOTE, "他说谎。\n选择：5号玩家", "他说谎。", 5, None, 1.0),
        (VOTE, "选择： 无人", "", None, None, 1.0),
        (VOTE, "CHOICE: nobody", "", None, None, 1.0),
        (VOTE, "CHOICE: Player 2\nNo, wait.\nCHOICE: Player 5", "No, wait.", 5, None, 1.0),
        (VOTE, "CHOICE: Player 17", "", 17, None, 1.0),
        (VOTE, "CHOICE: Player 0", "", -1, None, 1.0),
        (VOTE, "I say Player 5.", "I say Player 5.", 5, None, 0.5),
        (VOTE, "Player 2 or Player 5", "Player 2 or Player 5", None, "unreadable", 0.0),
        (VOTE, "CHOICE: whoever is guilty", "", None, "unreadable", 0.0),
        (VOTE, "<think>Player 2?</think>CHOICE: Player 5", "", 5, None, 1.0),
        (VOTE, "Hm.\nPlayer 5: I confess.\nCHOICE: Player 5", "Hm.", None, "out_of_turn", 0.0),
        (VOTE, "", "", None, "nothing", 0.0),
        (VOTE, "<think>CHOICE: Player 5", "", None, "nothing", 0.0),
        (SPEAK, "Good\n\n morning.", "Good morning.", None, None, 1.0),
        (SPEAK, "Player 1: Good morning.", "Good morning.", None, None, 1.0),
        (SPEAK, "Hello.\n**Player 4**: I did it.", "Hello.", None, "out_of_turn", 1.0),
        (SPEAK, "大家好。\n主持人：天黑了。", "大家好。", None, "out_of_turn", 1.0),
        (SPEAK, "As a wolf I say</think> Hello.", "Hello.", None, None, 1.0),
        (SPEAK, " \n", "", None, "nothing", 0.0),
        (SPEAK, "I heard Player 4: he snores.", "I heard Player 4: he snores.", None, None, 1.0),
    ],
)  # fmt: skip
def test_answers_are_read(ask: Any, text: str, said: str, choice: int | None, fault: str | None, form: float) -> None:
    assert reading.read(text, ask) == reading.Reading(Reply(said, choice, fault), form)


# -- tasks, rewards and credit -----------------------------------------------------------------------------------------


def test_tasks_are_seeds() -> None:
    made = tasks(games=40, test=10, language="zh", days=3)
    assert Counter(task.split for task in made) == {"train": 40, "test": 10}
    assert len({task.data["seed"] for task in made}) == 50
    assert {task.data["language"] for task in made} == {"zh"}
    with pytest.raises(TaskError, match="Fix: take one of en, zh"):
        tasks(language="fr")
    with pytest.raises(TaskError, match="only seeds"):
        tasks("games.jsonl")


@pytest.mark.parametrize("size", ["laptop", "gpu", "cluster"])
def test_configurations_can_be_read(size: str) -> None:
    config = load(toml=RECIPE / f"{size}.toml")
    assert config.runner.python == ".recipes/werewolf/bin/python"
    answers = {
        name: [policy for policy, own in resolve_policies(config).items() if any_matches(name, own.policy.agents)]
        for name in NAMES.values()
    }
    assert all(len(policies) == 1 for policies in answers.values()), answers
    if size == "gpu":
        assert {name for name, (policy,) in answers.items() if policy in trained_policies(config)} == {
            "wolf-1", "wolf-2", "wolf-3",
        }  # fmt: skip
    assert config.policy.context is not None
    assert config.learner.token_budget >= config.policy.context
    algorithm = algorithms.make(config.algorithm, config.learner, config.policy)
    assert (algorithm.baseline, algorithm.max_turns) == ("role", 64)  # type: ignore[attr-defined]
    made = tasks(**config.tasks_args)
    assert {task.data["context"] for task in made} == {config.policy.context}
    given = {one.name for one in score(made[0], ended("wolves", {"wolf-1": (2, 1.0, 0)}))}
    assert set(config.algorithm.rewards) == given - ({"aim"} if size != "gpu" else set())
    assert config.algorithm.rewards["reward"] == 0, "a village that is paid for the wolves' victory learns to lose"
    assert all(algorithm_weight >= 0 for algorithm_weight in config.algorithm.rewards.values())


def any_matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def ended(
    winner: str | None, players: dict[str, tuple[int, float, int]], outside: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What the agent returns: asked, readable answers and violations by player."""
    return {
        "winner": winner,
        "days": 2,
        "players": {
            name: {
                "won": winner == ("wolves" if name.startswith("wolf") else "village"), "role": parse_role(name),
                "asked": asked, "form": form, "violations": violations, "outside": name in outside,
                "votes": asked, "aimed": min(asked, 1), "words": [f"I am {name}"],
            }
            for name, (asked, form, violations) in players.items()
        },
    }  # fmt: skip


def test_rewards_of_players_and_of_the_game() -> None:
    players = {"wolf-1": (4, 3.0, 1), "seer": (2, 2.0, 0), "villager-1": (0, 0.0, 0), "witch": (5, 5.0, 0)}
    given = score(Task(id="t"), ended("village", players, outside=("witch",)))
    assert {(one.agent, one.name): one.value for one in given} == {
        (None, "reward"): 0.0,
        (None, "readable"): 5 / 6,
        ("wolf-1", "win"): 0.0,
        ("wolf-1", "format"): 0.75,
        ("wolf-1", "violations"): -0.25,
        ("wolf-1", "aim"): 0.25,
        ("seer", "win"): 1.0,
        ("seer", "format"): 1.0,
        ("seer", "violations"): 0.0,
    }
    nothing = score(Task(id="t"), ended(None, {"seer": (1, 0.0, 0), "wolf-1": (1, 0.0, 0)}))
    assert {one.name: one.value for one in nothing if one.value} == {"aim": 1.0}


async def test_a_judge_may_be_asked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = of("reward.py", "judged")
    with endpoint(lambda prompt: "0.8" if "I am seer" in prompt and "seer, won" in prompt else "0.1") as judge:
        for name, value in {
            "URL": judge.url,
            "MODEL": "m",
            "KEY": "k",
            "CACHE": str(tmp_path / "judge.sqlite"),
        }.items():
            monkeypatch.setenv(f"JUDGE_{name}", value)
        given = await judged(Task(id="t"), ended("village", {"seer": (2, 2.0, 0), "wolf-1": (1, 1.0, 0)}))
    assert {one.agent: one.value for one in given if one.name == "judge"} == {"seer": 0.8, "wolf-1": 0.1}


def test_credit_by_role_is_a_table_worked_out_by_hand() -> None:
    """Two games of one deal. What a player comes to is win + format / 2 + violations / 2; it is compared with the mean
    of its role, over games, each of which counts once however many play it there."""
    lost = {  # the wolves win
        "wolf-1": (2, 2.0, 0), "wolf-2": (2, 1.0, 0), "wolf-3": (2, 2.0, 1),           # 1.5  1.25  1.25
        "villager-1": (2, 2.0, 0), "villager-2": (0, 0.0, 0), "villager-3": (2, 0.0, 0),  # 0.5  -  0
        "seer": (1, 1.0, 0), "witch": (2, 0.0, 2), "hunter": (1, 1.0, 0),              # 0.5  -0.5  0.5
    }  # fmt: skip
    won = {  # the village wins; wolf-3 is an outside model, the hunter dies before he is asked anything
        "wolf-1": (2, 2.0, 0), "wolf-2": (2, 2.0, 0), "wolf-3": (2, 2.0, 0),           # 0.5  0.5  -
        "villager-1": (2, 2.0, 0), "villager-2": (2, 2.0, 0), "villager-3": (2, 1.0, 0),  # 1.5  1.5  1.25
        "seer": (1, 1.0, 0), "witch": (2, 2.0, 0), "hunter": (0, 0.0, 0),              # 1.5  1.5  -
    }  # fmt: skip
    games = [ended("wolves", lost), ended("village", won, outside=("wolf-3",))]
    samples, spoke = [], []
    for number, one in enumerate(games):
        names = [name for name, player in one["players"].items() if player["asked"] and not player["outside"]]
        spoke += [f"{name} {number}" for name in names]
        samples.append(sample(number, None, *(turn(agent=name) for name in names), rewards=score(Task(id="t"), one)))
    batch = credit(*samples, normalize_std=False)
    table = dict(zip(spoke, (12 * value for value in by_turn(batch).values()), strict=True))
    assert table == pytest.approx({
        "wolf-1 0": 7, "wolf-2 0": 4, "wolf-3 0": 4,          # beside (4/3 + 1/2) / 2
        "wolf-1 1": -5, "wolf-2 1": -5,
        "villager-1 0": -4, "villager-3 0": -10,              # beside (1/4 + 17/12) / 2
        "villager-1 1": 8, "villager-2 1": 8, "villager-3 1": 5,
        "seer 0": -6, "seer 1": 6, "witch 0": -12, "witch 1": 12,
        "hunter 0": 0,                                        # nobody to compare with
    })  # fmt: skip
    skipped = {name: why for name, why in zip(spoke, batch.skipped, strict=True) if why}
    assert skipped == {"hunter 0": "group_of_one"}


def test_at_most_64_turns_of_a_game_are_trained_and_which_is_the_game_s() -> None:
    long = [turn(agent=f"wolf-{n % 3 + 1}") for n in range(90)]
    games = [
        sample(
            member, None, *long, rewards=[Reward(name="win", value=float(member), agent=f"wolf-{n}") for n in (1, 2, 3)]
        )
        for member in range(2)
    ]
    kept = [[why is None for why in credit(*games).skipped] for _ in range(2)]
    assert kept[0] == kept[1]
    assert [sum(kept[0][:90]), sum(kept[0][90:])] == [64, 64]
    assert kept[0][:90] != kept[0][90:], "another game, other turns"
    assert not all(kept[0][:64]), "not the first ones"


# -- the player by rule of thumb ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["en", "zh"])
def test_it_plays_by_the_rules(language: str) -> None:
    winners: Counter[str] = Counter()
    for seed in range(60):
        table, said = game.deal(seed), words.Words(language)
        talk = {seat: [{"role": "system", "content": said.brief(table, seat)}] for seat in table.roles}
        heard: dict[int, list[str]] = defaultdict(list)
        steps, faults, day = game.play(table, Rules()), [], 0
        step = next(steps)
        while True:
            replies = None
            if isinstance(step, game.Notice):
                day = step.data["day"]
                faults += [step.data] if step.scene == "fault" else []
                for seat in step.to:
                    heard[seat].append(said.tell(step))
            else:
                replies = []
                for ask in step:
                    asked = "\n".join([*heard.pop(ask.seat, []), said.ask(ask, day)])
                    talk[ask.seat].append({"role": "user", "content": [{"type": "text", "text": asked}]})
                    answer = scripted.answer(talk[ask.seat])
                    talk[ask.seat].append({"role": "assistant", "content": answer})
                    replies.append(reading.read(answer, ask).reply)
                    pack = table.seats("wolf")
                    assert not (ask.kind == "vote" and ask.seat in pack and replies[-1].choice in pack)
            try:
                step = steps.send(replies)
            except StopIteration as end:
                winners[end.value.winner] += 1
                break
        assert faults == []
    assert set(winners) == {"wolves", "village"}


def test_its_server_speaks_chat_completions() -> None:
    said = words.Words("en")
    talk = [said.brief(TABLE, 7), "You see that Player 3 is a werewolf.\n" + said.ask(Ask("speak", 7), 1)]
    messages = [{"role": role, "content": text} for role, text in zip(("system", "user"), talk, strict=True)]
    with opponent() as url:

        def post(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
            try:
                with urllib.request.urlopen(request) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.load(error)

        status, body = post({"model": "scripted", "messages": messages})
        assert (status, body["choices"][0]["message"]["content"]) == (200, "I am the seer: Player 3 is a werewolf.")
        assert post({"messages": messages, "stream": True})[0] == 400
        assert post({"messages": [{"role": "user", "content": "Hello"}]})[0] == 400
