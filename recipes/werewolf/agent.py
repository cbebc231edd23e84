"""Nine agents of AgentScope's play werewolf: a rollout is a game, and every player an agent of its own name.

task      {"seed": 17, "language": "en", "rules": {"days": 6}, "context": 4096, "seconds": 120.0}
agents    wolf-1 ... wolf-3, villager-1 ... villager-3, seer, witch, hunter; the prompts say Player 1 ... Player 9
returns   {"winner": "wolves", "days": 3, "players": {"wolf-1": {"won": True, "asked": 9, ...}, ...}}, for reward.py
events    all that happens, as play.py reads it; faults with player, what and why
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import openai
from game import VIOLATIONS, Ask, Notice, Outcome, Reply, Rules, Table, deal
from game import play as play_by_the_rules
from player import Player, Said
from reading import Reading, read
from words import Words

from strop import LLM, Task
from strop.net.client import ssl_context


@dataclass
class Tally:
    """What a player did, for its rewards."""

    asked: int = 0
    form: float = 0.0
    violations: int = 0
    votes: int = 0
    aimed: int = 0
    """Of its votes by day those for somebody who is no wolf."""
    words: list[str] = field(default_factory=list[str])
    outside: bool = False
    """Whether an outside model played it, as its answers say."""


async def play(task: Task, llm: LLM) -> dict[str, Any]:
    async with openai.DefaultAsyncHttpxClient(verify=ssl_context()) as http:
        return await Match(task, llm, http).run()


class Match:
    """One game at one table."""

    def __init__(self, task: Task, llm: LLM, http: Any) -> None:
        data = task.data
        self._llm, self._table, self._rules = llm, deal(data["seed"]), Rules(**data.get("rules", {}))
        self._language = data.get("language", "en")
        self._words = Words(self._language)
        self._tally = {seat: Tally() for seat in self._table.roles}
        self._turns: dict[int, str | None] = {}
        self._day = 0
        self._cuts: list[dict[str, Any]] = []
        self._players = {
            seat: Player(
                seat,
                self._words.brief(self._table, seat),
                llm.as_agent(agent),
                http,
                seconds=data.get("seconds", 120.0),
                context=data.get("context", 0),
                examples=self._words.examples(seat) if data.get("examples") else [],
                forgot=self._note_cut(seat),
            )
            for seat, agent in self._table.agents.items()
        }

    async def run(self) -> dict[str, Any]:
        await self._record({"scene": "cast", "language": self._language, **cast(self._table)})
        steps = play_by_the_rules(self._table, self._rules)
        step, outcome = next(steps), None
        while outcome is None:
            answers = None
            if isinstance(step, Notice):
                await self._notice(step)
            else:
                answers = list(await asyncio.gather(*map(self._ask, step)))
            try:
                step = steps.send(answers)
            except StopIteration as end:
                outcome = end.value
        return self._sum_up(outcome)

    async def _ask(self, question: Ask) -> Reply:
        said: Said = await self._players[question.seat].answer(self._words.ask(question, self._day))
        cuts, self._cuts = self._cuts, []  # other players may cut theirs meanwhile
        for one in cuts:
            await self._record(one)
        reading = read(said.text, question) if said.fault is None else Reading(Reply(fault=said.fault), 0.0)
        tally = self._tally[question.seat]
        tally.asked += 1
        tally.outside |= said.outside
        tally.form += reading.form
        tally.words += [reading.reply.words] if question.kind == "speak" else []
        self._turns[question.seat] = said.turn
        return reading.reply

    async def _notice(self, notice: Notice) -> None:
        self._day = notice.data["day"]
        for seat in notice.to:
            self._players[seat].hear(self._words.tell(notice))
        about: dict[str, Any] = {"scene": notice.scene, **notice.data}
        if "seat" in about:
            about |= {"player": self._table.agents[about["seat"]], "turn": self._turns.get(about["seat"])}
        if notice.scene == "vote":
            self._count_votes(about["ballots"])
        if notice.scene == "fault" and about["why"] in VIOLATIONS:
            self._tally[about["seat"]].violations += 1
        await self._record(about)

    def _count_votes(self, ballots: dict[int, int | None]) -> None:
        wolves = self._table.seats("wolf")
        for voter, choice in ballots.items():
            self._tally[voter].votes += 1
            self._tally[voter].aimed += choice is not None and choice not in wolves

    def _note_cut(self, seat: int) -> Any:
        def forgot(characters: int) -> None:
            player = self._table.agents[seat]
            self._cuts.append(
                {"scene": "cut", "day": self._day, "seat": seat, "player": player, "characters": characters}
            )

        return forgot

    async def _record(self, about: dict[str, Any]) -> None:
        await asyncio.to_thread(self._llm.event, "message", about)

    def _sum_up(self, outcome: Outcome) -> dict[str, Any]:
        players = {
            agent: {
                "seat": seat,
                "role": self._table.roles[seat],
                "won": outcome.won(self._table.roles[seat]),
                **vars(self._tally[seat]),
            }
            for seat, agent in self._table.agents.items()
        }
        return {"winner": outcome.winner, "days": outcome.days, "players": players}


def cast(table: Table) -> dict[str, Any]:
    return {"seed": table.seed, "players": {str(seat): agent for seat, agent in table.agents.items()}}
