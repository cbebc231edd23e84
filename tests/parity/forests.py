"""Rollouts of every shape: turns that go on, turns that branch off an edited history, requests asked again, sub-agents
with contexts of their own, several choices for one request, turns that may not train.

    samples = forest([[(1.0, [Move()]), (0.0, [Move(kind="again")])]])       groups of (reward, moves)
    @given(FORESTS)                                                          any of them, by Hypothesis
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Literal

from hypothesis import strategies as st

from strop.trajectory import Sample
from strop.types import Finish, Reward, Rollout, Sampling, Task, Turn

VOCAB = 20
AGENTS = ("helper", "main")
"""Those that are trained; `judge` only speaks."""

PLAIN = Sampling()


@dataclass(frozen=True)
class Move:
    """One request of an agent, and what came of it.

    extend   goes on with what the agent was told last, and what the environment said then
    again    asks with the same prompt once more
    branch   edits history: goes on from the first `keep` tokens of the last context
    fresh    begins a context of its own, as a sub-agent does

    Each of `responses` is a choice; the first one is what the agent goes on with.
    """

    kind: Literal["extend", "again", "branch", "fresh"] = "extend"
    responses: tuple[tuple[int, ...], ...] = ((1, 2),)
    environment: tuple[int, ...] = (9,)
    keep: int = 3
    agent: str = "main"
    finish: Finish = "stop"
    sampling: Sampling = PLAIN


Group = list[tuple[float, list[Move]]]


def forest(groups: list[Group]) -> list[Sample]:
    """Members of a group begin with one prompt; all groups begin with the same system prompt."""
    return [
        _sample(f"g{g}", m, [7, 7, 8, 10 + g % 5, g % 3], reward, moves)
        for g, members in enumerate(groups)
        for m, (reward, moves) in enumerate(members)
    ]


def _sample(group: str, member: int, start: list[int], reward: float, moves: list[Move]) -> Sample:
    id, numbers = f"{group}.{member}", count()
    prompts: dict[str, list[int]] = {}
    contexts: dict[str, list[int]] = {}
    turns: list[Turn] = []
    for k, move in enumerate(moves):
        context = contexts.get(move.agent, start)
        match move.kind:
            case "extend":
                prompt = context
            case "again":
                prompt = prompts.get(move.agent, start)
            case "branch":
                prompt = [*context[: move.keep], *move.environment] or [4]
            case "fresh":
                prompt = [11, *move.environment]
        for choice, response in enumerate(move.responses):
            turns.append(
                Turn(
                    id=f"{id}/1/{next(numbers)}",
                    rollout=id,
                    attempt=1,
                    agent=move.agent,
                    prompt_ids=prompt,
                    response_ids=list(response),
                    logprobs=[-1.0] * len(response),
                    versions=[(0, "1.0")],
                    sampling=move.sampling,
                    finish=move.finish,
                    choice=choice,
                    choices=len(move.responses),
                    started=float(k),
                    ended=k + 0.5,
                )
            )
        prompts[move.agent] = prompt
        contexts[move.agent] = [*prompt, *move.responses[0], *move.environment]
    rollout = Rollout(
        id=id, group=group, member=member, task=Task(id="t"), status="succeeded", created=0.0,
        rewards=(Reward(value=reward),),
    )  # fmt: skip
    return Sample(rollout, turns)


EXAMPLE = forest(
    [
        [
            (1.0, [Move(responses=((1, 2, 0),)), Move(responses=((3, 1), (3, 2), (3, 1, 0))), Move(responses=((5,),))]),
            (0.0, [Move(responses=((1, 2, 0),)), Move(responses=((3, 1, 4, 6),))]),  # samples what the first one did
            (0.3, [Move(responses=((2, 2),)), Move(kind="branch", keep=6, responses=((1, 0),))]),
            (0.6, [Move(kind="fresh", agent="helper", environment=(12, 13), responses=((14, 3), (14, 1))), Move()]),
        ],
        [
            (0.0, [Move(responses=((1,),)), Move(agent="judge", responses=((6, 6),)), Move(kind="again")]),
            (2.0, [Move(sampling=Sampling(temperature=0.7)), Move(finish="abandoned", responses=((3, 3, 3),)), Move()]),
            (1.0, [Move(sampling=Sampling(temperature=1.3)), Move(sampling=Sampling(temperature=0.0)), Move()]),
        ],
        [(1.0, [Move()]), (1.0, [Move(responses=((2, 5, 2),))])],  # nothing to compare
        [(0.5, [Move()])],  # nobody to compare with
    ]
)
"""One of everything."""


_ids = st.integers(0, 3)  # few, so that rollouts often sample the same tokens in the same context
_moves = st.builds(
    Move,
    kind=st.sampled_from(["extend", "extend", "extend", "again", "branch", "fresh"]),
    responses=st.lists(st.lists(_ids, min_size=1, max_size=4).map(tuple), min_size=1, max_size=3).map(tuple),
    environment=st.lists(st.integers(9, VOCAB - 1), max_size=3).map(tuple),
    keep=st.integers(1, 12),
    agent=st.sampled_from(["main", "main", "main", "helper", "judge"]),
    finish=st.sampled_from(["stop", "stop", "tool_calls", "length", "abandoned"]),
    sampling=st.sampled_from([1.0, 1.0, 0.7, 1.3, 0.0]).map(lambda t: Sampling(temperature=t))
    | st.just(Sampling(top_p=0.9)),
)
_first = st.builds(
    Move,
    responses=st.lists(st.lists(_ids, min_size=1, max_size=4).map(tuple), min_size=1, max_size=2).map(tuple),
)


@st.composite
def _groups(draw: st.DrawFn) -> list[Group]:
    rest = st.lists(_moves, max_size=3)
    teaches = [(value, [draw(_first), *draw(rest)]) for value in (1.0, 0.0)]  # what any algorithm learns from
    members = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.lists(_moves, max_size=3))
    return [
        teaches + draw(st.lists(members, max_size=2)),
        *draw(st.lists(st.lists(members, min_size=1, max_size=3), max_size=2)),
    ]


FORESTS = _groups().map(forest)
