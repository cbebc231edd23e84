"""A ToolAgent around the demo's calculator, trained for two steps: which turns get what, and what carries loss."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import strop
from strop import demo
from strop.gateway.template import Renderer
from strop.models.names import SHIPPED
from strop.run import api
from strop.runners.worker import load_agent
from strop.trajectory import Sample, assemble
from strop.trajectory.token_tree import pack
from tests import runs

TASKS = [
    {"id": question, "split": split, "data": demo.calc("Use the calculator: {x}.", a, b, random.Random(a))}
    for question, split, a, b in [("a", "train", 12, 30), ("b", "train", 25, 31), ("c", "test", 14, 22)]
]
HALF = 0.5


def score(task: strop.Task, episode: strop.Episode) -> dict[str, float]:
    expressions = [str(call.given.get("expression", "")) for call in episode.calls]
    return demo.score(task.data, expressions, episode.answer) | {"answered": float(episode.ended == "answered")}


def test_an_agent_made_of_tools_is_trained(tmp_path: Path) -> None:
    """It is made here, so it is sent to the processes that run it."""
    agent = strop.ToolAgent(
        tools=[demo.calculator],
        reward=score,
        max_turns=3,
        max_tokens=100,
        seconds=30,
        on_call=lambda task, call, result: HALF if result.ok else 0.0,
    )
    summary = strop.train(
        agent,
        TASKS,
        model="strop/nano",
        folder=tmp_path / "run",
        algorithm=strop.GRPO(rewards={"reward": 1.0, "call": 0.1}),
        loop={"steps": 2, "groups": 2, "group_size": 4, "eval_splits": []},
        runner={"workers": 4},
        learner={"optim": {"lr": 2e-4}},
        policy={"train": {"max_tokens": 48}, "context": 192},
        quiet=True,
    )
    assert summary.steps == 2
    told = runs.story(tmp_path / "run")
    rollouts = [rollout for rollout in told.rollouts if rollout.mode == "train"]
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * 16
    called = 0
    for rollout in rollouts:
        turns = told.turns[rollout.id]
        given = {(r.turn, r.value) for r in rollout.rewards if r.name == "call"}
        calling = {turn.id: len(turn.answer.get("tool_calls") or ()) for turn in turns}
        wanted = {(id, HALF * count) for id, count in calling.items() if count}
        assert given == (wanted or {(None, 0.0)})
        assert {"reward", "right_call", "answered"} <= {r.name for r in rollout.rewards if r.turn is None}
        called += bool(wanted) and len(turns) > 1
        _check_masks(rollout, turns)
    assert called >= 4  # or nothing was tested
    assert not any(reason == "no_reward" for step in told.steps for reason in step.dropped.values())


@dataclass
class Pair:
    left: int
    right: int


def add(pair: Pair) -> int:
    return pair.left + pair.right


AGENT = strop.ToolAgent(tools=[add], reward=score)


def test_one_at_the_top_of_a_file_is_found_there_by_other_processes(tmp_path: Path) -> None:
    """By its name, since a class that its hints name could not be sent to them."""
    assert api._named(AGENT, tmp_path, "agent") == f"{__file__}:AGENT"
    assert isinstance(load_agent(f"{__file__}:AGENT"), strop.ToolAgent)


def _check_masks(rollout: strop.Rollout, turns: list[strop.Turn]) -> None:
    """Loss is on what was sampled, and on nothing that a tool wrote."""
    renderer = Renderer.from_folder(SHIPPED["strop/nano"])
    batch = assemble([Sample(rollout, turns)], agents={"main"}, budget=4096)
    (piece,) = pack(batch, 4096)
    trained = {int(piece.pos[at]) + 1 for at in piece.at}  # one conversation, so a position is a token
    sampled = {p for turn in turns for p in range(len(turn.prompt_ids), len(turn.ids))}
    assert trained == sampled
    for before, turn in pairwise(turns):
        assert (turn.parent, turn.branch) == (before.id, None)
        written = range(len(before.ids), len(turn.prompt_ids))
        result = turn.messages[-1]["content"]
        assert turn.messages[-1]["role"] == "tool"
        assert result in renderer.decode([turn.prompt_ids[p] for p in written])
        assert not trained & set(written)
