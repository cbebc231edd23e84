"""An airline's service agent, and a user that a model plays.

    user    Hi, I would like to cancel a booking.          (a model, the agent `user`, that was told a scenario)
    agent   Which one? And may I have your user id?        (the policy, the agent `main`)
    user    K1NW8N. I am mohamed_silva_9265.
    agent   get_reservation_details(K1NW8N)                tools act on a database of this conversation's own
    ...
    user    ###STOP###

The user is whoever answers the agent `user`: a frozen policy, or a model of a provider (README). Its turns carry no
loss. What the conversation was worth is in `reward`.
"""

from __future__ import annotations

from typing import Any

from airline_tools import AirlineTools
from database import Database
from outcome import score
from world import World, load_world

import strop
from strop.agent.episode import Action
from strop.agent.tool import Tool

USER = "user"
STOP, TRANSFERRED = "###STOP###", "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT"
GREETING = "Hi! How can I help you today?"
PERSONA = """You are a customer talking to an airline. Your situation:

{scenario}

Say one short thing at a time. Tell only what you were told above, when it is needed. When you are done, or it is \
clear that you cannot be helped, reply with ###STOP### and nothing else."""


async def agent(task: strop.Task, llm: strop.LLM) -> dict[str, float]:
    talk = Conversation(task.data, llm)
    limit = task.data["max_turns"]
    plays = strop.EnvironmentAgent(lambda: talk, system=talk.world.policy, max_turns=limit, reward=talk.judge)
    return await plays(task, llm)


class Conversation(strop.Environment, AirlineTools):
    """The other side of the agent: the user, and the database behind its tools."""

    def __init__(self, data: dict[str, Any], llm: strop.LLM) -> None:
        self.world: World = load_world(data["folder"])
        AirlineTools.__init__(self, Database(self.world.rows))
        self._data, self._user = data, llm.as_agent(USER)
        self._heard = [
            {"role": "system", "content": PERSONA.format(scenario=data["scenario"])},
            {"role": "user", "content": GREETING},
        ]
        self._said: list[str] = []

    def list_tools(self) -> list[Tool]:
        return [tool for tool in super().list_tools() if tool.name in self.world.tools or not self.world.tools]

    async def reset(self, task: strop.Task) -> list[dict[str, Any]]:
        opened = await self._ask()
        return [{"role": "assistant", "content": GREETING}, {"role": "user", "content": opened}]

    async def step(self, action: Action) -> strop.Transition:
        if action.text:
            self._said.append(action.text)
        if action.calls:
            return strop.Transition()
        if TRANSFERRED in action.text:
            return strop.Transition(done=True)
        self._heard.append({"role": "user", "content": action.text or "..."})
        answer = await self._ask()
        return strop.Transition(observation=answer, done=STOP in answer)

    async def _ask(self) -> str:
        async with self._user.async_client() as client:
            said = await client.chat.completions.create(model=self._user.model, messages=self._heard)
        text = said.choices[0].message.content or ""
        self._heard.append({"role": "assistant", "content": text})  # as it was said: its next prompt goes on from there
        return text.strip() or "..."

    async def judge(self, task: strop.Task, episode: strop.Episode) -> dict[str, float]:
        calls = [(call.name, call.given) for call in episode.calls]
        return await score(self.world.rows, self._data, self.database.changes(), self._said, calls)
