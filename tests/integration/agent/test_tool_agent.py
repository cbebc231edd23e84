"""ToolAgent against the real gateway and store; the model's answers are a script."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.agent.episode import ExecutedCall
from strop.agent.mcp import Server
from strop.agent.tool import Observation
from strop.config import RunnerConfig
from strop.engines.scripted import Hangs
from strop.errors import ConfigError, TaskError
from strop.runners.pool import Pool
from strop.types import Rollout, Task
from tests.integration.agent.stand import Stand, call
from tests.limits import stretch


@strop.tool
def double(n: int) -> int:
    """Double it."""
    return 2 * n


def whole(task: strop.Task, episode: strop.Episode) -> strop.Episode:
    return episode


async def test_calls_are_run_and_the_reward_function_sees_everything(stand: Stand) -> None:
    async def score(task: strop.Task, episode: strop.Episode) -> dict[str, float]:
        seen.append(episode)
        return {"reward": 1.0, "short": 0.5}

    seen: list[strop.Episode] = []
    agent = strop.ToolAgent(tools=[double], reward=score, system="Be brief.")
    said = await stand.run(agent, call("double", n=6), "It is 12.", data={"question": "Twice 6?", "answer": 12})
    assert said == {"reward": 1.0, "short": 0.5}
    (episode,) = seen
    assert (episode.answer, episode.ended) == ("It is 12.", "answered")
    turns = await stand.turns()
    assert episode.turns == [turn.id for turn in turns]
    assert episode.tokens == sum(len(turn.response_ids) for turn in turns)
    (made,) = episode.calls
    assert (made.name, made.given, made.result, made.turn) == ("double", {"n": 6}, Observation("12"), turns[0].id)
    assert [m["role"] for m in episode.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert episode.messages[1]["content"] == "Twice 6?"
    assert (turns[1].parent, turns[1].branch) == (turns[0].id, None)  # the conversation went on exactly


async def test_calls_of_one_answer_run_at_once_and_each_has_its_result(stand: Stand) -> None:
    meeting = threading.Barrier(2, timeout=10)

    def meet(who: str) -> str:
        meeting.wait()
        return f"hello {who}"

    both = call("meet", who="a") + "\n" + call("meet", who="b")
    episode = await stand.run(strop.ToolAgent(tools=[meet], reward=whole), both, "Done.")
    assert [(c.given["who"], c.result.text) for c in episode.calls] == [("a", "hello a"), ("b", "hello b")]
    first, second = episode.messages[2:4]
    assert [first["tool_call_id"], second["tool_call_id"]] == [c.id for c in episode.calls]


async def test_what_goes_wrong_with_a_call_is_told_to_the_model(stand: Stand) -> None:
    @strop.tool(timeout=0.2, limit=40)
    def odd(how: str) -> Any:
        """Be odd."""
        if how == "hang":
            time.sleep(3)
        if how == "raise":
            raise OSError("disk full")
        return b"\x00" if how == "bytes" else "x" * 1000

    script = [call("odd", how=how) for how in ("hang", "raise", "bytes", "long")]
    script += [call("odd", what=1), call("nothing"), "I give up."]
    episode = await stand.run(strop.ToolAgent(tools=[odd], reward=whole), *script)
    assert [c.result.wrong for c in episode.calls] == ["timeout", "error", None, None, "arguments", "unknown"]
    assert [c.result.text for c in episode.calls][1:3] == [
        "error: OSError: disk full",
        "1 bytes of binary data, which cannot be shown as text",
    ]
    assert "960 of 1000 characters are missing" in stand.prompts()[4]
    assert episode.ended == "answered"


async def test_of_many_calls_some_wait_for_their_turn(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.agent.episode.AT_ONCE", 2)
    running, most = 0, 0

    @strop.tool
    async def pause() -> None:
        """Pause."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1

    episode = await stand.run(strop.ToolAgent(tools=[pause], reward=whole), "\n".join([call("pause")] * 5), "Done.")
    assert (len(episode.calls), most) == (5, 2)


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_every_limit_ends_an_episode_with_its_reason(stand: Stand) -> None:
    @strop.tool
    async def wait() -> None:
        """Wait."""
        await asyncio.sleep(60)

    def agent(**limits: Any) -> strop.ToolAgent:
        return strop.ToolAgent(tools=[double, wait], reward=whole, **limits)

    episode = await stand.run(agent(max_turns=2), *[call("double", n=1)] * 2)
    assert (episode.ended, len(episode.calls), episode.answer) == ("turns", 2, "")
    assert episode.messages[-1]["role"] == "tool"

    words = "one two three four five six seven eight nine ten"
    episode = await stand.run(agent(max_tokens=5), words)
    assert (episode.ended, episode.tokens) == ("tokens", 5)
    assert words.startswith(episode.answer)

    cost = len(stand.renderer.encode(call("double", n=1))) + 1
    episode = await stand.run(agent(max_tokens=cost), call("double", n=1))
    assert (episode.ended, episode.tokens, len(episode.calls)) == ("tokens", cost, 1)

    episode = await stand.run(agent(), "word " * 1000)
    assert (episode.ended, episode.tokens) == ("length", 200)

    began = time.monotonic()
    episode = await stand.run(agent(seconds=0.5), call("double", n=4) + "\n" + call("wait"))
    assert (episode.ended, [c.name for c in episode.calls]) == ("seconds", ["double", "wait"])
    assert [c.result.wrong for c in episode.calls] == [None, "timeout"]
    assert [m.get("tool_call_id") for m in episode.messages[2:]] == [c.id for c in episode.calls]
    episode = await stand.run(agent(seconds=0.5), Hangs("so"))
    assert (episode.ended, episode.turns) == ("seconds", [])
    assert time.monotonic() - began < stretch(10)

    @strop.tool(limit=100_000)
    def read() -> str:
        """Read a book."""
        return "word " * 10_000

    episode = await stand.run(strop.ToolAgent(tools=[read], reward=whole), call("read"))
    assert (episode.ended, len(episode.calls)) == ("context", 1)


# -- rewards on the way ------------------------------------------------------------------------------------------------


async def test_what_calls_are_worth_reaches_their_turn(stand: Stand) -> None:
    def worth(task: strop.Task, made: ExecutedCall, result: Observation) -> float | None:
        return None if result.wrong else 0.25

    agent = strop.ToolAgent(tools=[double], reward=lambda task, episode: 1.0, on_call=worth)
    both = call("double", n=1) + "\n" + call("double", n=2)
    assert await stand.run(agent, both, call("nothing"), call("double", n=3), "6.") == 1.0
    turns = [turn.id for turn in await stand.turns()]
    assert [(r.name, r.value, r.turn) for r in await stand.rewards()] == [
        ("call", 0.5, turns[0]),
        ("call", 0.25, turns[2]),
    ]
    await stand.run(agent, "I will not call.")
    assert [(r.name, r.value, r.turn) for r in await stand.rewards()] == [("call", 0.0, None)]


# -- tools of a rollout's own ------------------------------------------------------------------------------------------


class Notes:
    """Tools with a state."""

    closed: list[list[str]] = []  # noqa: RUF012

    def __init__(self, task: strop.Task) -> None:
        self.notes = [task.data]

    @strop.tool
    def note(self, text: str) -> str:
        """Write something down."""
        self.notes.append(text)
        return ", ".join(self.notes)

    async def aclose(self) -> None:
        self.closed.append(self.notes)


async def test_tools_made_for_a_rollout_are_its_own_and_are_closed(stand: Stand) -> None:
    Notes.closed.clear()
    agent = strop.ToolAgent(tools=Notes, reward=whole)
    for data in ("first", "second"):
        episode = await stand.run(agent, call("note", text="a"), "Done.", data=data)
        assert episode.calls[0].result.text == f"{data}, a"
    assert Notes.closed == [["first", "a"], ["second", "a"]]

    def broken(task: strop.Task, episode: strop.Episode) -> float:
        raise ValueError("no")

    mixed = strop.ToolAgent(tools=lambda task: [double, Notes(task)], reward=broken)
    with pytest.raises(ValueError, match="no"):
        await stand.run(mixed, call("double", n=2), "Done.")
    assert len(Notes.closed) == 3


async def test_a_server_for_each_rollout(stand: Stand) -> None:
    command = [sys.executable, str(Path(__file__).with_name("server.py"))]
    agent = strop.ToolAgent(tools=lambda task: [double, Server(command, only=["add", "die"])], reward=whole)
    episode = await stand.run(agent, call("add", a=2, b=3), call("die"), call("double", n=1), "Done.")
    assert [c.result.text for c in episode.calls][::2] == ["5", "2"]
    assert episode.calls[1].result.wrong == "error"
    assert "it said last: a meteorite" in episode.calls[1].result.text


async def test_without_a_reward_function_the_episode_is_the_answer(stand: Stand) -> None:
    agent = strop.ToolAgent(prompt=lambda task: [{"role": "user", "content": f"Say {task.data['word']}."}])
    episode = await stand.run(agent, "hi", data={"word": "hi", "other": "x"})
    assert (episode.answer, episode.messages[0]["content"]) == ("hi", "Say hi.")


async def test_what_is_given_wrongly_is_said(stand: Stand) -> None:
    with pytest.raises(ConfigError, match=r"Server has to be made for each rollout\. Fix: write tools=lambda task"):
        strop.ToolAgent(tools=[Server("x")])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="max_turns is 0"):
        strop.ToolAgent(max_turns=0)
    with pytest.raises(ConfigError, match="two are called double"):
        strop.ToolAgent(tools=[double, double])
    with pytest.raises(TaskError, match="task t has no text that is clearly its question"):
        await stand.run(strop.ToolAgent(), "x", data={"a": 1})


# -- where it runs -----------------------------------------------------------------------------------------------------

AGENT = """
import strop

@strop.tool
def double(n: int) -> int:
    return 2 * n

agent = strop.ToolAgent([double], lambda task, episode: float(episode.answer == "12"), on_call=lambda *_: 0.5)
"""


@pytest.mark.parametrize("agents_in", ["processes", "threads", "loop"])
async def test_it_is_the_same_wherever_it_runs(stand: Stand, tmp_path: Path, agents_in: Any) -> None:
    (tmp_path / f"agent_{agents_in}.py").write_text(AGENT)
    ended = await ran(stand, f"{tmp_path}/agent_{agents_in}.py:agent", agents_in)
    first, _ = await stand.store.turns("g.0")
    assert {(r.name, r.value, r.turn) for r in ended.rewards} == {("reward", 1.0, None), ("call", 0.5, first.id)}


PLACES = """
import asyncio, pathlib, threading
import strop

def note(what, value=None):
    try:
        asyncio.get_running_loop()
        place = "main" if threading.current_thread() is threading.main_thread() else "thread"
    except RuntimeError:
        place = "aside"
    with pathlib.Path(__file__).with_name("seen").open("a") as file:
        print(what, place, threading.get_ident(), file=file)
    return value

class Held:
    def __init__(self, task): ...

    @strop.tool
    def double(self, n: int) -> int:
        return 2 * n

    def __enter__(self):
        return note("enter", self)

    def __exit__(self, *_):
        note("close")

class World(strop.Environment):
    def reset(self, task):
        return note("reset", task.data)

    def step(self, action):
        return note("step", strop.Transition(done=True))

    def close(self):
        note("close")

score = lambda task, episode: note("reward", 1.0)
tools = strop.ToolAgent(Held, score, prompt=lambda task: note("prompt", task.data), on_call=lambda *_: note("on_call"))
world = strop.EnvironmentAgent(World, reward=score)
"""


@pytest.mark.parametrize(
    ("agent", "called"),
    [("tools", ["prompt", "enter", "on_call", "reward", "close"]), ("world", ["reset", "step", "close", "reward"])],
)
@pytest.mark.parametrize(("agents_in", "place"), [("processes", "main"), ("loop", "aside")])
async def test_plain_functions_hold_up_nobody(
    stand: Stand, tmp_path: Path, agents_in: Any, place: str, agent: str, called: list[str]
) -> None:
    """In a loop that many share they run beside it, in one thread. In a process they keep its main thread, where they
    may use signals."""
    (tmp_path / "places.py").write_text(PLACES)
    await ran(stand, f"{tmp_path}/places.py:{agent}", agents_in)
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert list(dict.fromkeys(what for what, _, _ in seen)) == called
    assert {where for _, where, _ in seen} == {place}
    assert len({thread for _, _, thread in seen}) == 1


async def ran(stand: Stand, spec: str, agents_in: Any) -> Rollout:
    """What became of a rollout of the agent, in a pool."""
    stand.engine._script = {"Twice": call("double", n=6), "12": "12"}
    settings = RunnerConfig(workers=2, agents_in=agents_in)
    pool = Pool(stand.store, {None: spec}, settings, gateway_url=stand.server.url, model="m")
    await pool.start()
    pool.work()
    try:
        rollout = Rollout(id="g.0", group="g", member=0, task=Task(id="t", data="Twice 6?"), created=0.0)
        await stand.store.enqueue([rollout])
        async with asyncio.timeout(60):
            cursor = 0
            while not (ended := await stand.store.get("g.0")).ended:
                cursor, _ = await stand.store.wait(cursor, timeout=5.0)
        assert ended.status == "succeeded", ended.detail
        return ended
    finally:
        await pool.close()
