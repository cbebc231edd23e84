"""Environments against the real gateway and store; the model's answers are a script."""

from __future__ import annotations

from typing import Any

import pytest

import strop
from strop.agent.environment import Gym
from strop.agent.episode import Action
from strop.errors import AgentError
from tests.integration.agent.stand import Stand, call


class Guess(strop.Environment):
    closed = 0

    def reset(self, task: strop.Task) -> str:
        self.number = task.data
        return "I think of a number from 1 to 9. Which one?"

    def step(self, action: Action) -> strop.Transition:
        right = action.text.strip() == str(self.number)
        return strop.Transition(observation="No. Which one?", reward=1.0 if right else -0.25, done=right)

    def close(self) -> None:
        Guess.closed += 1


async def test_text_actions_and_a_reward_for_every_turn(stand: Stand) -> None:
    closed = Guess.closed
    agent = strop.EnvironmentAgent(Guess, system="Guess.", max_turns=4)
    assert await stand.run(agent, "3", "5", "7", data=7) == 0.5
    turns = [turn.id for turn in await stand.turns()]
    assert [(r.name, r.turn, r.value) for r in await stand.rewards()] == [
        ("step", turns[0], -0.25),
        ("step", turns[1], -0.25),
        ("step", turns[2], 1.0),
    ]
    assert stand.prompts()[-1].count("No. Which one?") == 2
    assert Guess.closed == closed + 1
    assert await stand.run(agent, *"1234", data=7) == -1.0  # out of turns


class Shop(strop.Environment):
    """Tools say what happened, `step` what it means."""

    async def reset(self, task: strop.Task) -> list[dict[str, Any]]:
        self.basket: list[str] = []
        return [{"role": "user", "content": "Buy bread."}]

    @strop.tool
    def put(self, thing: str) -> str:
        """Put something into the basket."""
        self.basket.append(thing)
        return f"there are {len(self.basket)} things in the basket"

    async def step(self, action: Action) -> strop.Transition:
        if not action.calls:
            return strop.Transition(reward=None)
        good = "bread" in self.basket
        hint = None if good else "That is no bread."
        return strop.Transition(observation=hint, reward=float(good), done=len(self.basket) > 2)


async def test_tool_calls_are_run_before_the_environment_judges_them(stand: Stand) -> None:
    def seen(task: strop.Task, episode: strop.Episode) -> strop.Episode:
        return episode

    agent = strop.EnvironmentAgent(Shop, reward=seen)
    episode = await stand.run(agent, call("put", thing="milk"), call("put", thing="bread"), "Done.")
    assert episode.ended == "answered"
    roles = [message["role"] for message in episode.messages]
    assert roles == ["user", "assistant", "tool", "user", "assistant", "tool", "assistant"]
    assert list(episode.rewards.values()) == [0.0, 1.0]
    assert [r.turn for r in await stand.rewards()] == episode.turns[:2]
    many = "\n".join(call("put", thing="bread") for _ in range(3))
    assert (await stand.run(agent, many)).ended == "done"
    silent = strop.EnvironmentAgent(Shop)
    assert await stand.run(silent, "No.") == 0.0
    assert [(r.name, r.turn) for r in await stand.rewards()] == [("step", None)]


class Lake:
    """A world in Gymnasium's manner: walk to 2."""

    def reset(self) -> tuple[int, dict[str, Any]]:
        self.at = 0
        return self.at, {}

    def step(self, by: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at += by
        return self.at, float(self.at == 2), self.at == 2, False, {}

    def close(self) -> None: ...


async def test_a_gymnasium_environment(stand: Stand) -> None:
    agent = strop.EnvironmentAgent(lambda: Gym(lambda task: Lake(), act=int, show=lambda at: f"You are at {at}."))
    assert await stand.run(agent, "1", "left", "1") == 1.0
    assert "You are at 0." in stand.prompts()[0]
    assert "error: ValueError: invalid literal" in stand.prompts()[2]
    assert [r.value for r in await stand.rewards()] == [0.0, 0.0, 1.0]


class Steps:
    """A space of actions in Gymnasium's manner."""

    def contains(self, action: object) -> bool:
        if action == 7:
            raise OverflowError("too far")
        return action in (1, 2)

    def __repr__(self) -> str:
        return "Steps(1, 2)"


class Pond(Lake):
    action_space = Steps()

    def step(self, by: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        assert by in (1, 2)
        return super().step(by)


async def test_what_is_no_action_of_its_world_costs_a_turn(stand: Stand) -> None:
    agent = strop.EnvironmentAgent(lambda: Gym(lambda task: Pond(), act=int))
    assert await stand.run(agent, "9", "7", "2") == 1.0
    assert "error: 9 is not in Steps(1, 2)" in stand.prompts()[1]
    assert "error: OverflowError: too far" in stand.prompts()[2]
    assert [r.value for r in await stand.rewards()] == [0.0, 0.0, 1.0]


async def test_a_step_has_to_return_what_it_led_to(stand: Stand) -> None:
    class Silent(strop.Environment):
        def reset(self, task: strop.Task) -> str:
            return "Well?"

        def step(self, action: Action) -> Any:
            return None

    with pytest.raises(AgentError, match=r"step returned NoneType\. Fix: return strop.Transition"):
        await stand.run(strop.EnvironmentAgent(Silent), "So.")


def test_it_has_to_be_whole() -> None:
    with pytest.raises(TypeError, match="step"):
        type("Half", (strop.Environment,), {"reset": lambda self, task: ""})()


class Seeded(Lake):
    def reset(self, seed: int | None = None) -> tuple[int, dict[str, Any]]:
        self.at = -(seed or 0)
        return self.at, {}


async def test_a_task_says_the_seed(stand: Stand) -> None:
    agent = strop.EnvironmentAgent(lambda: Gym(lambda task: Seeded(), act=int, show=lambda at: f"You are at {at}."))
    assert await stand.run(agent, "2", "5", data={"seed": 5}) == 1.0
    assert "You are at -5." in stand.prompts()[0]
