"""The rules of werewolf for nine players, and nothing else: no models, no words, no network.

    table = deal(seed)                      who sits where, and as what
    steps = play(table, Rules())            a generator: what happens, and what is asked
    step = next(steps)
    step = steps.send(None)                 after a Notice: something happened, and `to` learn of it
    step = steps.send([Reply(...), ...])    after a tuple of Asks: one reply each, in that order
    ...                                     StopIteration.value is the Outcome

Asks that come together do not know of each other, so they may be answered at the same time: votes are. Whatever a reply
is, the game goes on: what is not allowed is noted as a fault, and an abstention stands in for it, or a choice drawn by
the seed where one must be made.

    night   wolves talk and name a prey, `pack_rounds` times at most; if they do not agree they vote, most votes win and
            a tie is drawn. The witch hears who it is while she has her cure; she has a cure and a poison, each once,
            one of them a night; herself she may cure in the first night only. The seer learns of one player whether it
            is a wolf.
    day     who died is said, not what they were. All speak in turn, `speeches` times, and then vote at once and openly.
            A tie is voted on once more, among those tied; after a second tie nobody goes.
    hunter  bitten or voted out he may shoot somebody; poisoned he may not. Nobody else is shown for what they are.
    end     no wolves are left: the village wins, also where both ends come at once. No villagers, or neither seer nor
            witch nor hunter, are left: the wolves win. After `days` days nobody has won.

Left out: last words, a sheriff, wolves that bite wolves, wolves that give themselves up.
"""

import random
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["wolf", "villager", "seer", "witch", "hunter"]
Kind = Literal["plan", "hunt", "heal", "poison", "check", "speak", "vote", "shoot"]
Side = Literal["wolves", "village"]

ROLES: tuple[Role, ...] = ("wolf", "wolf", "wolf", "villager", "villager", "villager", "seer", "witch", "hunter")
SPECIAL: frozenset[Role] = frozenset({"seer", "witch", "hunter"})
VIOLATIONS = frozenset({"dead_target", "illegal_target", "must_choose", "out_of_turn"})
"""Faults that break a rule. The others are answers that could not be read, or that never came."""


@dataclass(frozen=True)
class Rules:
    """What may differ from game to game."""

    days: int = 6
    speeches: int = 1
    pack_rounds: int = 2


@dataclass(frozen=True)
class Table:
    """Who sits where. Seats are numbered from 1; `agents` are names that tell the role, for the gateway only.

    >>> table = deal(7)
    >>> table.roles[1], table.agents[1], table.seats("seer")
    ('villager', 'villager-3', (6,))
    """

    seed: int
    roles: dict[int, Role]
    agents: dict[int, str]

    def seats(self, *roles: Role) -> tuple[int, ...]:
        return tuple(seat for seat, role in self.roles.items() if role in roles)

    def draw(self, options: Sequence[int], *what: object) -> int:
        """One of `options`, by the seed and by what it is for, whatever else was drawn before."""
        return random.Random(f"{self.seed} {what}").choice(sorted(options))

    def order(self, seats: Iterable[int], *what: object) -> list[int]:
        """Seats in turn, beginning at one that the seed draws."""
        there = sorted(seats)
        first = there.index(self.draw(there, "order", *what))
        return there[first:] + there[:first]


def deal(seed: int) -> Table:
    """Seats and roles by the seed alone."""
    roles = list(ROLES)
    random.Random(f"{seed} deal").shuffle(roles)
    by_seat = dict(enumerate(roles, 1))
    agents: dict[int, str] = {}
    for role in dict.fromkeys(ROLES):
        seats = [seat for seat in by_seat if by_seat[seat] == role]
        random.Random(f"{seed} {role}").shuffle(seats)
        agents |= {seat: f"{role}-{n}" if len(seats) > 1 else role for n, seat in enumerate(seats, 1)}
    return Table(seed, by_seat, dict(sorted(agents.items())))


@dataclass(frozen=True)
class Ask:
    """One player is wanted. `options` are the seats it may choose; with `may_pass` it may choose nobody."""

    kind: Kind
    seat: int
    options: tuple[int, ...] = ()
    may_pass: bool = True


@dataclass(frozen=True)
class Reply:
    """What a player said and chose. `fault` says why there is nothing to go by, or what is wrong with it."""

    words: str = ""
    choice: int | None = None
    fault: str | None = None


@dataclass(frozen=True)
class Notice:
    """Something happened. `to` learn of it; the rest of the record is for those who read it afterwards."""

    scene: str
    to: tuple[int, ...] = ()
    data: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Outcome:
    winner: Side | None
    days: int
    living: tuple[int, ...]

    def won(self, role: Role) -> bool:
        return self.winner == ("wolves" if role == "wolf" else "village")


Play = Generator[Notice | tuple[Ask, ...], list[Reply] | None, Outcome]


def play(table: Table, rules: Rules) -> Play:
    """A whole game."""
    return _Game(table, rules).run()


class _Game:
    def __init__(self, table: Table, rules: Rules) -> None:
        self.table, self.rules = table, rules
        self.living = set(table.roles)
        self.day = 0
        self.cure = self.poison = True

    def run(self) -> Play:
        winner: Side | None = None
        while winner is None and self.day < self.rules.days:
            self.day += 1
            yield from self._night()
            if (winner := self._winner()) is None:
                yield from self._daytime()
                winner = self._winner()
        yield self._note("end", self.living, winner=winner)
        return Outcome(winner, self.day, tuple(sorted(self.living)))

    def _winner(self) -> Side | None:
        left = {self.table.roles[seat] for seat in self.living}
        if "wolf" not in left:
            return "village"
        return "wolves" if "villager" not in left or not left & SPECIAL else None

    # -- night ---------------------------------------------------------------------------------------------------------

    def _night(self) -> Generator[Any, Any, None]:
        yield self._note("night", self.living)
        prey = yield from self._hunt()
        cured, poisoned = yield from self._brew(prey)
        yield from self._check()
        dead = {} if cured else {prey: "bitten"}
        if poisoned is not None:
            dead[poisoned] = "poisoned"  # of one who was bitten as well too: the hunter may not shoot then
        yield from self._bury("dawn", dead)

    def _hunt(self) -> Generator[Any, Any, int]:
        wolves = self._those("wolf")
        prey = tuple(sorted(self.living - set(wolves)))
        if len(wolves) > 1:
            for number in range(self.rules.pack_rounds):
                named: list[int | None] = []
                for wolf in self.table.order(wolves, "pack", self.day, number):
                    choice, words = yield from self._ask(Ask("plan", wolf, prey))
                    named.append(choice)
                    others = [one for one in wolves if one != wolf]
                    yield self._note("plan", others, seat=wolf, words=words, choice=choice)
                if named[0] is not None and len(set(named)) == 1:
                    yield self._note("hunt", wolves, choice=named[0], ballots={})
                    return named[0]
        ballots = yield from self._ballot([Ask("hunt", wolf, prey, may_pass=False) for wolf in wolves])
        choice = self.table.draw(_most(ballots), "hunt", self.day)
        yield self._note("hunt", wolves, choice=choice, ballots=ballots)
        return choice

    def _brew(self, prey: int) -> Generator[Any, Any, tuple[bool, int | None]]:
        for witch in self._those("witch"):
            if self.cure and (prey != witch or self.day == 1):
                cured, _ = yield from self._ask(Ask("heal", witch, (prey,)))
                if cured is not None:
                    self.cure = False
                    yield self._note("heal", seat=witch, choice=prey)
                    return True, None
            if self.poison:
                poisoned, _ = yield from self._ask(Ask("poison", witch, self._others(witch)))
                if poisoned is not None:
                    self.poison = False
                    yield self._note("poison", seat=witch, choice=poisoned)
                    return False, poisoned
        return False, None

    def _check(self) -> Generator[Any, Any, None]:
        for seer in self._those("seer"):
            seen, _ = yield from self._ask(Ask("check", seer, self._others(seer)))
            if seen is not None:
                yield self._note("check", [seer], seat=seer, choice=seen, wolf=self.table.roles[seen] == "wolf")

    # -- day -----------------------------------------------------------------------------------------------------------

    def _daytime(self) -> Generator[Any, Any, None]:
        for number in range(self.rules.speeches):
            for seat in self.table.order(self.living, "speak", self.day, number):
                _, words = yield from self._ask(Ask("speak", seat))
                yield self._note("speak", self._others(seat), seat=seat, words=words)
        tied = yield from self._vote(tuple(sorted(self.living)))
        if len(tied) > 1:
            yield self._note("tie", self.living, seats=tied)
            tied = yield from self._vote(tied)
        yield from self._bury("verdict", {tied[0]: "voted out"} if len(tied) == 1 else {})

    def _vote(self, candidates: tuple[int, ...]) -> Generator[Any, Any, tuple[int, ...]]:
        """Those with most votes; none if nobody voted."""
        asks = [Ask("vote", voter, tuple(one for one in candidates if one != voter)) for voter in sorted(self.living)]
        ballots = yield from self._ballot(asks)
        yield self._note("vote", self.living, ballots=ballots)
        return _most(ballots)

    def _bury(self, scene: str, dead: dict[int, str]) -> Generator[Any, Any, None]:
        self.living -= set(dead)
        yield self._note(scene, self.living, dead=sorted(dead), how={seat: dead[seat] for seat in sorted(dead)})
        for seat, how in dead.items():
            if self.table.roles[seat] == "hunter" and how != "poisoned":
                target, _ = yield from self._ask(Ask("shoot", seat, tuple(sorted(self.living))))
                if target is not None:
                    self.living.discard(target)
                    yield self._note("shoot", self.living, seat=seat, choice=target)

    # -- questions -----------------------------------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> Generator[Any, Any, tuple[int | None, str]]:
        """What is chosen, or stands in for it, and what is said."""
        (reply,) = yield (ask,)
        choice = yield from self._settle(ask, reply)
        return choice, reply.words

    def _ballot(self, asks: list[Ask]) -> Generator[Any, Any, dict[int, int | None]]:
        replies = yield tuple(asks)
        ballots: dict[int, int | None] = {}
        for ask, reply in zip(asks, replies, strict=True):
            ballots[ask.seat] = yield from self._settle(ask, reply)
        return ballots

    def _settle(self, ask: Ask, reply: Reply) -> Generator[Notice, None, int | None]:
        choice, why = reply.choice, reply.fault
        if choice is not None and choice not in ask.options:
            dead = choice in self.table.roles and choice not in self.living
            choice, why = None, "dead_target" if dead else "illegal_target"
        elif choice is None and not ask.may_pass and why is None:
            why = "must_choose"
        if choice is None and not ask.may_pass:
            choice = self.table.draw(ask.options, ask.kind, self.day, ask.seat)
        if why is not None:
            yield self._note("fault", seat=ask.seat, what=ask.kind, why=why, said=reply.choice, instead=choice)
        return choice

    def _note(self, scene: str, to: Iterable[int] = (), **data: Any) -> Notice:
        return Notice(scene, tuple(sorted(to)), {"day": self.day, **data})

    def _those(self, role: Role) -> tuple[int, ...]:
        return tuple(seat for seat in self.table.seats(role) if seat in self.living)

    def _others(self, seat: int) -> tuple[int, ...]:
        return tuple(sorted(self.living - {seat}))


def _most(ballots: dict[int, int | None]) -> tuple[int, ...]:
    """
    >>> _most({1: 4, 2: 4, 3: 1, 4: 1, 5: None}), _most({1: None})
    ((1, 4), ())
    """
    counts = Counter(choice for choice in ballots.values() if choice is not None)
    return tuple(sorted(seat for seat, count in counts.items() if count == max(counts.values())))
