"""The rules of the recipe `werewolf`, by scripted players: every end, every odd case, and whatever players may do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from strop.algorithms.credit import parse_role
from tests.recipes.werewolf_files import NAMES, ROLES, TABLE, Reply, Rules, game


@dataclass
class Played:
    """A game that was played: what was asked on which day, and what happened."""

    outcome: Any = None
    asked: list[tuple[int, Any]] = field(default_factory=list[Any])
    notices: list[Any] = field(default_factory=list[Any])

    def of(self, scene: str) -> list[dict[str, Any]]:
        return [notice.data for notice in self.notices if notice.scene == scene]

    def kinds(self, *kinds: str, day: int | None = None) -> list[tuple[str, int]]:
        return [(ask.kind, ask.seat) for on, ask in self.asked if ask.kind in kinds and day in (None, on)]

    @property
    def faults(self) -> list[tuple[int, str, str]]:
        return [(one["seat"], one["what"], one["why"]) for one in self.of("fault")]


Chooser = Callable[[Any, int], Any]
SIX_DAYS = Rules()


def play(choose: Chooser, rules: Any = SIX_DAYS, table: Any = TABLE) -> Played:
    """Play by `choose`: a seat, None for nobody, or a whole Reply."""
    played, day = Played(), 1
    steps = game.play(table, rules)
    step = next(steps)
    try:
        while True:
            if isinstance(step, game.Notice):
                day = step.data["day"]
                played.notices.append(step)
                step = steps.send(None)
                continue
            replies = []
            for ask in step:
                played.asked.append((day, ask))
                chosen = choose(ask, day)
                replies.append(chosen if isinstance(chosen, Reply) else Reply("hm", chosen))
            step = steps.send(replies)
    except StopIteration as end:
        played.outcome = end.value
    return played


def script(hunt: list[int], vote: list[int | None] = [], **more: int | None) -> Chooser:  # noqa: B006
    """The prey by night and who is voted for by day; `heal_1=4` is another choice, on that day."""

    def choose(ask: Any, day: int) -> int | None:
        if (own := more.get(f"{ask.kind}_{day}")) is not None:
            return own
        if ask.kind in ("plan", "hunt"):
            return hunt[day - 1]
        if ask.kind == "vote" and day <= len(vote):
            return vote[day - 1] if vote[day - 1] != ask.seat else None
        return None

    return choose


def test_a_deal_is_the_seed_s() -> None:
    assert game.deal(5) == game.deal(5)
    deals = [game.deal(seed) for seed in range(200)]
    assert all(Counter(deal.roles.values()) == Counter(ROLES.values()) for deal in deals)
    assert all(sorted(deal.agents.values()) == sorted(NAMES.values()) for deal in deals)
    assert all(parse_role(deal.agents[seat]) == role for deal in deals for seat, role in deal.roles.items())
    assert len({tuple(deal.roles.values()) for deal in deals}) > 150
    assert {deal.seats("seer")[0] for deal in deals} == {*range(1, 10)}
    assert {deal.order({2, 5, 7}, 1)[0] for deal in deals} == {2, 5, 7}
    assert all(sorted(deal.order({2, 5, 7}, 1)) == [2, 5, 7] for deal in deals)


def test_the_village_wins_when_no_wolf_is_left() -> None:
    played = play(script([4, 5, 7], [1, 2, 3]))
    assert (played.outcome.winner, played.outcome.days, played.outcome.living) == ("village", 3, (6, 8, 9))
    assert played.outcome.won("seer")
    assert not played.outcome.won("wolf")
    assert not played.faults


@pytest.mark.parametrize("hunt", [[4, 5, 6], [7, 8, 9]])
def test_the_wolves_win_when_villagers_or_special_roles_are_gone(hunt: list[int]) -> None:
    played = play(script(hunt))
    assert (played.outcome.winner, played.outcome.days) == ("wolves", 3)
    assert not played.kinds("speak", "vote", day=3)  # it is over at dawn


def test_where_both_ends_come_at_once_the_village_has_won() -> None:
    played = play(script([7, 8, 9], [2, 3], shoot_3=1))
    assert played.of("shoot")[0] | {"seat": 9, "choice": 1} == played.of("shoot")[0]
    assert (played.outcome.winner, played.outcome.living) == ("village", (4, 5, 6))


def test_after_the_last_day_nobody_has_won() -> None:
    played = play(script([4, 5, 7], [1]), Rules(days=2))
    assert (played.outcome.winner, played.outcome.days) == (None, 2)
    assert not any(played.outcome.won(role) for role in ("wolf", "villager"))
    assert played.of("end") == [{"day": 2, "winner": None}]


def test_a_hunter_shoots_when_bitten_or_voted_out() -> None:
    bitten = play(script([9, 4], shoot_1=2), Rules(days=1))
    assert bitten.kinds("shoot") == [("shoot", 9)]
    assert bitten.outcome.living == (1, 3, 4, 5, 6, 7, 8)
    voted = play(script([4], [9], shoot_1=2), Rules(days=1))
    assert voted.outcome.living == (1, 3, 5, 6, 7, 8)
    kept = play(script([9]), Rules(days=1))
    assert (len(kept.kinds("shoot")), kept.of("shoot"), kept.faults) == (1, [], [])


def test_a_poisoned_hunter_does_not_shoot() -> None:
    for hunt in (4, 9):  # also where the wolves bit him too
        played = play(script([hunt], poison_1=9, shoot_1=2), Rules(days=1))
        assert 9 not in played.outcome.living
        assert not played.kinds("shoot")


def test_the_hunter_s_prey_does_not_shoot_back_nor_vote() -> None:
    played = play(script([9], [2], shoot_1=1), Rules(days=1))
    assert ("vote", 1) not in played.kinds("vote")
    assert all(1 not in ask.options for _, ask in played.asked if ask.kind == "vote")


def test_each_potion_once_and_one_a_night() -> None:
    played = play(script([4, 4, 5], heal_1=4, poison_2=1), Rules(days=3))
    assert played.kinds("heal", "poison") == [("heal", 8), ("poison", 8)]
    assert [one["dead"] for one in played.of("dawn")] == [[], [1, 4], [5]]
    both = play(script([4, 5], poison_1=1), Rules(days=2))
    assert both.kinds("heal", "poison") == [("heal", 8), ("poison", 8), ("heal", 8)]


def test_the_witch_cures_herself_in_the_first_night_only() -> None:
    first = play(script([8], heal_1=8), Rules(days=1))
    assert 8 in first.outcome.living
    second = play(script([4, 8], heal_2=8), Rules(days=2))
    assert 8 not in second.outcome.living
    assert second.kinds("heal", day=2) == []
    assert second.kinds("poison", day=2) == [("poison", 8)]


def test_ties_are_voted_on_once_more_among_the_tied() -> None:
    def choose(ask: Any, day: int) -> int | None:
        if ask.kind == "vote":
            rounds[ask.seat] += 1
            return {1: 5, 2: 5, 3: 6, 5: 6}.get(ask.seat) if rounds[ask.seat] == 1 else second.get(ask.seat)
        return 4 if ask.kind in ("plan", "hunt") else None

    rounds: Counter[int] = Counter()
    second: dict[int, int] = {1: 6, 7: 6, 8: 5}
    played = play(choose, Rules(days=1))
    assert played.of("tie") == [{"day": 1, "seats": (5, 6)}]
    again = [ask for _, ask in played.asked if ask.kind == "vote"][8:]
    assert {ask.options for ask in again} == {(5, 6), (5,), (6,)}
    assert played.of("verdict")[0]["dead"] == [6]
    rounds, second = Counter(), {1: 6, 8: 5}
    played = play(choose, Rules(days=1))
    assert played.of("verdict")[0]["dead"] == []
    assert max(rounds.values()) == 2


def test_where_nobody_votes_nobody_goes_and_there_is_no_second_vote() -> None:
    played = play(script([4]), Rules(days=1))
    assert len(played.kinds("vote")) == 8
    assert (played.of("tie"), played.of("verdict")[0]["dead"]) == ([], [])


def test_wolves_that_agree_at_once_do_not_vote() -> None:
    played = play(script([4]), Rules(days=1))
    assert len(played.kinds("plan")) == 3
    assert played.kinds("hunt") == []


def test_wolves_that_do_not_agree_vote_and_a_tie_is_drawn_by_the_seed() -> None:
    most = play(lambda ask, _: {1: 4, 2: 5, 3: 5}.get(ask.seat) if ask.kind in ("plan", "hunt") else None)
    assert len(most.kinds("plan", day=1)) == 6
    assert len(most.kinds("hunt", day=1)) == 3
    assert most.of("hunt")[0]["choice"] == 5
    drawn = set()
    for seed in range(30):
        table = game.Table(seed, ROLES, NAMES)
        three = [
            play(lambda ask, _: ask.seat + 3 if ask.kind in ("plan", "hunt") else None, Rules(days=1), table)
            for _ in range(2)
        ]
        assert three[0].notices == three[1].notices
        drawn.add(three[0].of("hunt")[0]["choice"])
    assert drawn == {4, 5, 6}


def test_a_wolf_alone_has_nobody_to_talk_to() -> None:
    played = play(script([4, 5, 7], [1, 2]), Rules(days=3))
    assert played.kinds("plan", "hunt", day=3) == [("hunt", 3)]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply("", 4), "dead_target"),
        (Reply("", 1), "illegal_target"),
        (Reply("", 12), "illegal_target"),
        (Reply(fault="timeout"), "timeout"),
        (Reply(fault="nothing"), "nothing"),
    ],
)
def test_a_vote_that_cannot_be_is_an_abstention(reply: Any, why: str) -> None:
    played = play(
        lambda ask, day: reply if (ask.kind, ask.seat) == ("vote", 1) else script([4])(ask, day), Rules(days=1)
    )
    assert played.faults == [(1, "vote", why)]
    assert played.of("vote")[0]["ballots"][1] is None
    assert (why in game.VIOLATIONS) == ("target" in why)


def test_who_must_choose_gets_a_choice_of_the_seed_s() -> None:
    def lost(others: int | None) -> Played:
        return play(
            lambda ask, _: (None if ask.seat == 2 else others) if ask.kind in ("plan", "hunt") else None, Rules(days=1)
        )

    one, two = lost(4), lost(None)
    assert one.faults == [(2, "hunt", "must_choose")]
    assert len(two.faults) == 3
    stands_in = [{fault["seat"]: fault["instead"] for fault in played.of("fault")} for played in (one, two)]
    assert stands_in[0][2] == stands_in[1][2], "what others do wrong changes nothing"
    assert set(stands_in[1].values()) <= {4, 5, 6, 7, 8, 9}


def test_whatever_players_do_games_end_and_secrets_are_kept() -> None:
    """Replies at random, many of them against the rules."""
    winners: Counter[str | None] = Counter()
    for seed in range(300):
        numbers, table = random.Random(seed), game.deal(seed)

        def choose(ask: Any, day: int, numbers: random.Random = numbers) -> Any:
            fault = numbers.choice([None, None, None, "timeout", "unreadable"])
            return Reply("", None, fault) if fault else numbers.choice([None, *range(0, 11), *ask.options * 3])

        played = play(choose, Rules(days=4, pack_rounds=1), table)
        winners[played.outcome.winner] += 1
        living, wolves = set(table.roles), set(table.seats("wolf"))
        for notice in played.notices:
            living -= {*notice.data.get("dead", ()), *([notice.data["choice"]] if notice.scene == "shoot" else [])}
            assert set(notice.to) <= living, "the dead hear nothing"
            if notice.scene in ("plan", "hunt"):
                assert set(notice.to) <= wolves
            if notice.scene in ("check", "heal", "poison", "fault"):
                assert set(notice.to) <= ({notice.data["seat"]} if notice.scene == "check" else set())
        assert tuple(sorted(living)) == played.outcome.living
        assert all(ask.may_pass or ask.options for _, ask in played.asked)
    assert set(winners) == {"wolves", "village", None}
