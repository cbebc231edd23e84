"""`strop rollouts` without an id: the newest first, those of training unless others are asked for."""

from __future__ import annotations

import argparse
import operator
import re
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from strop.cli.output import find_last_line, format_status, hide_password, make_console, print_json
from strop.config import weigh_rewards
from strop.errors import StropError
from strop.monitor import console as views
from strop.monitor.metrics import weigh
from strop.run.folder import RunFolder
from strop.store.base import Store
from strop.types import Mode, Reward, Rollout, Status

PAGE = 1000
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    **{">=": operator.ge, "<=": operator.le, "!=": operator.ne, "==": operator.eq},
    **{">": operator.gt, "<": operator.lt, "=": operator.eq, "": operator.eq},
}


class Bound(Struct, frozen=True):
    """What a reward must be. Without a name it is the total of the rewards that count."""

    name: str
    holds: Callable[[float, float], bool]
    value: float

    @classmethod
    def read(cls, text: str) -> Bound:
        """
        >>> Bound.read("style>=0.5").name, Bound.read("<0").value
        ('style', 0.0)
        """
        found = re.fullmatch(r"\s*([^<>=!]*?)\s*(>=|<=|!=|==|>|<|=)\s*(\S+)\s*", text)
        name, sign, value = found.groups() if found else ("", "", text)
        try:
            return cls(name, _COMPARED[sign], float(value))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a bound. Fix: write '>0.5', '<=0', '1' or 'NAME>0.5'"
            ) from None

    def fits(self, rollout: Rollout, weights: Mapping[str, float]) -> bool:
        given = {r.name: r.value for r in rollout.rewards if r.target == (r.name, None, None)}
        value = given.get(self.name) if self.name else weigh(given, weights)
        return value is not None and self.holds(value, self.value)


def add(rollouts: argparse.ArgumentParser) -> None:
    modes = [*get_args(Mode), "all"]
    rollouts.add_argument(
        "--mode", choices=modes, help="those that sampled this way (default: train; all where nothing was trained)"
    )
    rollouts.add_argument("--status", choices=get_args(Status), help="only those with this status")
    rollouts.add_argument("--step", type=int, metavar="N", help="only what step N took, or an evaluation after it")
    rollouts.add_argument(
        "--reward", type=Bound.read, metavar="BOUND", help="only those within it: '>0.5', '<=0', 'NAME=1'"
    )
    rollouts.add_argument("--group", help="only those of this group")
    rollouts.add_argument("--after", metavar="ID", help="continue after this rollout, with older ones")


async def show(store: Store, arguments: argparse.Namespace) -> None:
    mode, chosen = arguments.mode, False
    if mode is None and await store.list(mode="train", limit=1):
        mode, chosen = "train", True
    mode = None if mode == "all" else mode
    found: list[Rollout] = []
    async for rollout in _fitting(store, arguments, mode):
        found.append(rollout)
        if arguments.json:
            print_json(rollout)
        if len(found) == arguments.limit:
            break
    if arguments.json:
        return
    make_console().print(_table(found) if found else "no rollouts" + " like that" * _narrowed(arguments))
    if len(found) == arguments.limit:
        print(f"older ones: --after {found[-1].id} (or a higher --limit)", file=sys.stderr)
    if chosen and await store.list(mode="eval", limit=1):
        print("evaluations: --mode eval, greedy or all", file=sys.stderr)


async def _fitting(store: Store, arguments: argparse.Namespace, mode: Mode | None) -> AsyncGenerator[Rollout]:
    """Newest first."""
    folder, bound = Path(arguments.run), arguments.reward
    weights = weigh_rewards(RunFolder.config(folder)) if (folder / "config.json").exists() else {"reward": 1.0}
    of_step = await _of_step(store, arguments.step) if arguments.step is not None else None
    after, size = arguments.after, PAGE if bound or of_step else min(arguments.limit, PAGE)
    while page := await store.list(
        group=arguments.group, status=arguments.status, mode=mode, after=after, limit=size, newest=True
    ):
        for rollout in page:
            if (of_step is None or of_step(rollout)) and (bound is None or bound.fits(rollout, weights)):
                yield rollout
        after = page[-1].id


async def _of_step(store: Store, number: int) -> Callable[[Rollout], bool]:
    """Whether a rollout is of that step: the step took it, or evaluated its weights."""
    steps = await store.steps()
    if not 0 <= number <= len(steps):
        raise StropError(f"there is no step {number}: {len(steps)} were made so far (0 is the evaluation before them)")
    taken = set(steps[number - 1].rollouts) if number else set[str]()
    evaluated = re.compile(rf"e\d+\.{number}-")
    return lambda rollout: rollout.id in taken or bool(evaluated.match(rollout.id))


def _narrowed(arguments: argparse.Namespace) -> bool:
    given = (arguments.group, arguments.status, arguments.mode, arguments.after, arguments.step, arguments.reward)
    return any(one is not None for one in given)


def _table(found: Sequence[Rollout]) -> Table:
    """Columns that say the same of all are left out."""
    columns = ["rollout", "task", "mode", "status", "attempts", "rewards", "why"]
    if all(rollout.mode == "train" for rollout in found):
        columns.remove("mode")
    if all(rollout.attempts <= 1 for rollout in found):
        columns.remove("attempts")
    if not any(rollout.cause for rollout in found):
        columns.remove("why")
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("rollout", "mode", "status"))
    for rollout in found:
        cells = _cells(rollout)
        table.add_row(*(cells[column] for column in columns))
    return table


def name_reward(reward: Reward) -> str:
    """
    >>> name_reward(Reward(name="score", value=1.0, agent="left")), name_reward(Reward(value=1.0))
    ('left/score', 'reward')
    """
    return f"{reward.agent}/{reward.name}" if reward.agent else reward.name


def _cells(r: Rollout) -> dict[str, Text]:
    rewards = "  ".join(f"{name_reward(reward)} {views.format_figure(reward.value)}" for reward in r.rewards)
    why = f"{r.cause}: {find_last_line(r.detail)}" if r.cause else ""
    return {
        "rollout": Text(r.id),
        "task": Text(r.task.id),
        "mode": Text(r.mode),
        "status": format_status(r),
        "attempts": Text(str(r.attempts)),
        "rewards": Text(rewards),
        "why": Text(why),
    }


async def follow(store: Store, arguments: argparse.Namespace) -> None:
    """A line per change of status, from now on."""
    if arguments.step is not None or arguments.reward is not None or arguments.after is not None:
        raise StropError("--follow shows what happens from now on. Fix: leave out --step, --reward and --after")
    cursor, page = await store.wait(0, timeout=0)
    while page:
        cursor, page = await store.wait(cursor, timeout=0)
    if not arguments.json:
        print(f"following {hide_password(arguments.run)}; Ctrl-C ends it", file=sys.stderr)
    mode = None if arguments.mode == "all" else arguments.mode
    while True:
        cursor, changed = await store.wait(cursor, timeout=1.0)
        for rollout in changed:
            wanted = {"group": arguments.group, "status": arguments.status, "mode": mode}
            if any(value and getattr(rollout, name) != value for name, value in wanted.items()):
                continue
            if arguments.json:
                print_json(rollout)
            else:
                make_console().print(Text("  ").join(_cells(rollout).values()))
