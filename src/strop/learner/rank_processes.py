"""The processes of all ranks as one, seen from the run.

    LearnerRanks   ──every verb──▶  rank 0 (answers)   rank 1   rank 2   ...
                   ──load, requests for tokens──▶  each by itself: it has an engine of its own

Ranks do a verb together, and each waits for the others in the middle of it. One that fails, dies or hangs ends the
verb, and with it the run: the others would wait for it, and are killed when the run is closed.
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from strop.errors import StropError
from strop.learner.launcher import HERE, Launcher, StartedChild
from strop.learner.process import LearnerProcess, PolicyClient
from strop.learner.verbs import LearnerSettings, LearnerVerbs

BY_ITSELF = frozenset({LearnerVerbs.load.__name__, LearnerVerbs.score_answers.__name__})
"""Verbs that are asked of each rank by the engine that it serves."""
NOTICE = 2.0
"""Seconds in which the death of a rank is noticed, once another one has failed for want of it."""


class LearnerRanks(LearnerProcess):
    """A handle on all ranks, itself that of the first. They meet in the folder `meeting`, which is then deleted."""

    def __init__(self, logs: Sequence[Path], children: Sequence[StartedChild], meeting: Path) -> None:
        super().__init__(logs[0], children[0], name="rank 0")
        beside = zip(logs[1:], children[1:], strict=True)
        rest = [LearnerProcess(*one, name=f"rank {number}") for number, one in enumerate(beside, 1)]
        self._ranks: list[LearnerProcess] = [self, *rest]
        self._meeting = meeting

    @classmethod
    async def launch(cls, log: Path, count: int, launcher: Launcher = HERE) -> LearnerRanks:
        """The logs of the others lie beside that of the first."""
        logs = [log, *(log.with_name(f"{log.stem}-{number}{log.suffix}") for number in range(1, count))]
        meeting = Path(tempfile.mkdtemp(prefix="strop-ranks-"))
        try:
            return cls(logs, await launcher.start(logs, meeting=meeting), meeting)
        except BaseException:
            shutil.rmtree(meeting, ignore_errors=True)
            raise

    async def start(self, *settings: LearnerSettings) -> None:
        await self._together(lambda one: LearnerProcess.start(one, *settings))

    def links(self, policy: str) -> list[PolicyClient]:
        return [one.of(policy) for one in self._ranks]

    async def call(self, policy: str | None, verb: str, args: tuple[Any, ...]) -> Any:
        if verb in BY_ITSELF:
            return await super().call(policy, verb, args)
        pickled = pickle.dumps(args)  # once for all
        return await self._together(lambda one: LearnerProcess.send_call(one, policy, verb, pickled))

    async def _together(self, verb: Callable[[LearnerProcess], Awaitable[Any]]) -> Any:
        """What the first rank answers, once all have."""
        calls = [asyncio.ensure_future(verb(one)) for one in self._ranks]
        try:
            return (await asyncio.gather(*calls))[0]
        except StropError as error:
            raise await self._find_cause(error) from None
        finally:
            for call in calls:
                call.cancel()

    async def _find_cause(self, error: StropError) -> BaseException:
        """A rank that is gone, rather than what its absence did to another."""
        await asyncio.wait([one.died for one in self._ranks], timeout=NOTICE, return_when=asyncio.FIRST_COMPLETED)
        if ended := [one.died for one in self._ranks if one.ended]:
            await asyncio.wait(ended)
        dead = sorted((one for one in self._ranks if one.died.done()), key=lambda one: not one.hung)
        return (dead[0].died.exception() if dead else None) or error

    async def watch(self) -> None:
        died = [asyncio.ensure_future(LearnerProcess.watch(one)) for one in self._ranks]
        try:
            await asyncio.gather(*died)
        finally:
            for each in died:
                each.cancel()

    async def close(self) -> None:
        await asyncio.gather(*(LearnerProcess.close(one) for one in self._ranks))
        shutil.rmtree(self._meeting, ignore_errors=True)
