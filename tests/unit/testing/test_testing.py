"""strop.testing: an agent against scripted answers, with the gateway, the store and the runner as in training."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import openai
import pytest

import strop
from strop import testing
from strop.demo import agent as calculator_agent
from strop.errors import AgentError, BadExclusion, ConfigError


def ask(task: strop.Task, llm: strop.LLM) -> float:
    asked = [{"role": "user", "content": task.data}]
    said = llm.client().chat.completions.create(model=llm.model, messages=asked)  # pyright: ignore[reportArgumentType]
    return float("12" in (said.choices[0].message.content or ""))


async def ask_async(task: strop.Task, llm: strop.LLM) -> dict[str, float]:
    async with llm.async_client() as client:
        asked: Any = [{"role": "user", "content": task.data}]
        said = await client.chat.completions.create(model=llm.model, messages=asked)
    llm.reward("style", 0.5, turn=said.id)
    return {"reward": 1.0, "length": 2.0}


def test_turns_and_rewards_come_back() -> None:
    done = testing.run(ask, "What is 3 * 4?", answers=["It is 12."])
    (turn,) = done.turns
    assert turn.answer["content"] == "It is 12."
    assert turn.messages == [{"role": "user", "content": "What is 3 * 4?"}]
    assert len(turn.logprobs) == len(turn.response_ids) > 0
    assert done.reward() == 1.0
    assert testing.run(ask, "What is 3 * 4?", answers=["It is 13."]).reward() == 0.0


def test_a_turn_that_an_agent_or_its_reward_function_excludes() -> None:
    """By the id of the answer, in every place where an agent may run."""

    def agent(task: strop.Task, llm: strop.LLM) -> str:
        message: Any = {"role": "user", "content": task.data}
        said = [llm.client().chat.completions.create(model=llm.model, messages=[message]) for _ in range(2)]
        llm.exclude(said[0].id, "title")
        with pytest.raises(BadExclusion, match=r"the reason 'a title' is not a word.*Fix: "):
            llm.exclude(said[0].id, "a title")
        return said[1].id

    def reward(task: strop.Task, answer: str, llm: strop.LLM) -> float:
        llm.exclude(answer, "probe")
        return 1.0

    done = testing.run(agent, "hm", answers=["one", "two"], reward=reward)
    first, second = done.turns
    assert done.rollout.excluded == {first.id: "title", second.id: "probe"}
    assert done.rewards == (strop.Reward(value=1.0),)


async def test_it_is_called_from_async_tests_too() -> None:
    done = testing.run(ask_async, strop.Task(id="a", data="?"), answers={"": "Yes."})
    assert {(one.name, one.value, one.turn) for one in done.rewards} == {
        ("reward", 1.0, None),
        ("length", 2.0, None),
        ("style", 0.5, done.turns[0].id),
    }


def test_an_agent_with_tools_takes_its_turns() -> None:
    answers = [testing.call("calculator", expression="3 * 4"), "It is 12."]
    done = testing.run(calculator_agent, {"question": "What is 3 * 4?", "answer": 12, "calls": ["3 * 4"]}, answers)
    assert [turn.branch for turn in done.turns] == [None, None]
    assert done.turns[1].parent == done.turns[0].id
    assert done.turns[0].answer["tool_calls"][0]["function"]["name"] == "calculator"
    assert done.reward() == 1.0


def test_a_reward_function_judges_what_the_agent_returns() -> None:
    def score(task: strop.Task, answer: str) -> float:
        return len(answer) / 10

    done = testing.run(lambda task, llm: "hello", None, answers=[], reward=score)
    assert (done.turns, done.reward()) == ([], 0.5)


def test_what_an_agent_raises_is_raised_with_its_traceback() -> None:
    def breaks(task: strop.Task, llm: strop.LLM) -> float:
        return 1 / task.data

    with pytest.raises(ZeroDivisionError) as raised:
        testing.run(breaks, 0, answers=[])
    assert "return 1 / task.data" in "".join(traceback.format_exception(raised.value))


def test_too_few_answers_say_which_one_is_missing() -> None:
    with pytest.raises(AgentError, match=r"there are 0\. Fix: add to `answers`.*What is 3 \* 4\?") as raised:
        testing.run(ask, "What is 3 * 4?", answers=[])
    assert isinstance(raised.value.__cause__, openai.APIError)


def test_one_text_is_not_a_list_of_answers() -> None:
    with pytest.raises(ConfigError, match=r"one text, 'yes'\. Fix: give a list of answers, \['yes'\]"):
        testing.run(ask, "hello", answers="yes")


def test_what_is_not_a_reward_is_refused() -> None:
    with pytest.raises(AgentError, match=r"bad_reward.*return a number"):
        testing.run(lambda task, llm: "12", None, answers=[])


def test_an_agent_that_takes_too_long_is_given_up() -> None:
    async def hangs(task: strop.Task, llm: strop.LLM) -> None:
        import asyncio

        await asyncio.sleep(3600)

    with pytest.raises(AgentError, match="timeout"):
        testing.run(hangs, None, answers=[], timeout=0.5)


def test_an_agent_with_a_name_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        "import os\nimport openai\n\n\ndef agent(task, llm):\n"
        "    said = openai.OpenAI().completions.create(model=llm.model, prompt='3 * 4 =')\n"
        "    return {'reward': said.choices[0].text == '12', 'process': os.getpid()}\n"
    )
    done = testing.run(f"{tmp_path}/named.py:agent", None, answers=["12"])
    assert done.reward() == 1.0
    assert done.reward("process") != os.getpid()
    with pytest.raises(ConfigError, match="Fix: name the reward function by a text"):
        testing.run(f"{tmp_path}/named.py:agent", None, answers=["12"], reward=ask)


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 is not a function"):
        testing.run(7, None, answers=[])  # pyright: ignore[reportArgumentType]


def test_agents_get_what_agents_in_threads_get() -> None:
    kinds: list[type] = []
    testing.run(lambda task, llm: kinds.append(type(llm)), None, answers=[])
    assert kinds == [strop.LLM]
