"""The store's interface: the only state that packages share. Every verb returns once what it did is durable.

Verbs are coroutines so that one process can hold a gateway, runners and a loop around one store. Every backend gives
the same answers; `tests/unit/store` runs against each of them. A verb that is said twice, because the answer to the
first time was lost, changes nothing the second time, so that clients may try again: leases carry a token for that,
turns and events an id. (`open_lineage` then uses up one more number, which harms nothing.)

Left out on purpose: the store knows nothing of tokens' meaning, of algorithms or of agents.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from strop.types import Attempt, Cause, Event, Lease, Mode, Policy, Reward, Rollout, Status, Step, TokenCounts, Turn

Ref = tuple[str, int]
"""A rollout's id and an attempt's number."""

ID = re.compile(r"[A-Za-z0-9._~-]{1,200}")
"""Ids of rollouts stand in addresses."""


class AttemptStore(Protocol):
    """What a gateway needs of a store; see `Store` for each of these."""

    async def get(self, rollout: str) -> Rollout: ...

    async def attempts(self, rollout: str) -> list[Attempt]: ...

    async def attempt(self, key: str) -> Attempt: ...

    async def turns(self, rollout: str, *, attempt: int | None = None) -> list[Turn]: ...

    async def add_turns(self, turns: Sequence[Turn]) -> None: ...

    async def add_events(self, events: Sequence[Event]) -> None: ...


class Store(ABC):
    """Rollouts in, leases out, turns and events recorded, steps committed."""

    # -- rollouts ------------------------------------------------------------------------------------------------

    @abstractmethod
    async def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Queue rollouts. An id that is already there is left as it is, so enqueueing again after a crash is safe.
        Returns how many were new."""

    @abstractmethod
    async def lease(
        self,
        runner: str,
        *,
        seconds: float,
        count: int = 1,
        wait: float = 0.0,
        token: str | None = None,
        rollout: str | None = None,
    ) -> list[Lease]:
        """Take up to `count` of the oldest queued rollouts that are due and open an attempt on each, with a fresh key;
        wait up to `wait` for the first. The same `token` again, while its attempts run, gives the same leases again.
        With `rollout` it is that one or none."""

    @abstractmethod
    async def begin(self, rollout: Rollout, runner: str, *, seconds: float) -> Lease:
        """Queue a rollout and lease it in one step: no other runner gets it. The same again, while it runs, gives the
        same lease; an id that is taken otherwise is refused."""

    @abstractmethod
    async def heartbeat(self, attempts: Sequence[Ref], *, seconds: float) -> list[Ref]:
        """Prolong leases by `seconds` from now. Returns those that are over or unknown: their runner can stop."""

    @abstractmethod
    async def finish(
        self,
        rollout: str,
        attempt: int,
        *,
        rewards: Sequence[Reward] = (),
        cause: Cause | None = None,
        detail: str | None = None,
    ) -> Rollout:
        """End an attempt. No cause: succeeded, with these rewards and those its events reported (same target: these
        win). With a cause: failed, or queued again as the rollout's `retries` say. `Fenced` if the attempt is over,
        unless this very end of it was recorded before."""

    @abstractmethod
    async def cancel(
        self, rollouts: Sequence[str], *, detail: str, cause: Literal["cancelled", "late"] = "cancelled"
    ) -> None:
        """End rollouts that are not wanted any more, or whose time ran out. Those already ended stay as they are."""

    @abstractmethod
    async def reclaim(self, *, everything: bool = False) -> list[str]:
        """End attempts whose lease has run out as `lost_runner`. Returns the rollouts concerned.

        `everything` is for a run that is opened again, when no runner of it can be alive: all that are running end as
        `interrupted`, and while no step was ever committed so are those that failed, since whatever was wrong with
        the agent may have been fixed."""

    # -- what happened in them -------------------------------------------------------------------------------------

    @abstractmethod
    async def add_turns(self, turns: Sequence[Turn]) -> None:
        """Record turns of running attempts. `Fenced` if an attempt is over, and then none of them is recorded. A turn
        that is there already, the same in every field, is left as it is; another one of the same id is refused."""

    @abstractmethod
    async def add_events(self, events: Sequence[Event]) -> None:
        """Record events of running attempts, each id once; rewards that are not finite numbers, or too large, are
        refused (`BadReward`), and exclusions that name no turn or no plain reason (`BadExclusion`)."""

    @abstractmethod
    async def add_rewards(self, rewards: Mapping[str, Sequence[Reward]]) -> None:
        """Give rewards to rollouts, by their ids, that have succeeded: those that are relative to a group, which has to
        end first. All of them or none; they are recorded as events of the last attempt, and of the same target they
        win over what it had. Given once they stay: the same again changes nothing, others are refused."""

    # -- reading ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def get(self, rollout: str) -> Rollout: ...

    @abstractmethod
    async def attempts(self, rollout: str) -> list[Attempt]: ...

    @abstractmethod
    async def attempt(self, key: str) -> Attempt:
        """The attempt that `key` opens, running or over. `UnknownId` if it opens none."""

    @abstractmethod
    async def turns(self, rollout: str, *, attempt: int | None = None) -> list[Turn]:
        """Turns of an attempt (default: the last) in the order their requests began."""

    async def turns_of(self, attempts: Sequence[Ref]) -> Sequence[list[Turn]]:
        """The turns of several attempts. A store may read them at once."""
        return [await self.turns(rollout, attempt=number) for rollout, number in attempts]

    @abstractmethod
    async def events(self, rollout: str, *, attempt: int | None = None) -> list[Event]:
        """Events of an attempt (default: the last) in the order they were recorded."""

    @abstractmethod
    async def list(
        self,
        *,
        group: str | None = None,
        status: Status | None = None,
        mode: Mode | None = None,
        after: str | None = None,
        limit: int = 1000,
        newest: bool = False,
    ) -> list[Rollout]:
        """Rollouts in the order they were enqueued, or the `newest` first; `after` is the id of the last one of the
        page before."""

    async def list_json(self, **which: Any) -> bytes:
        """What `list` finds as a JSON array, for who passes it on. A store may have it without making records."""
        return msgspec.json.encode(await self.list(**which))

    @abstractmethod
    async def wait(self, cursor: int, *, timeout: float) -> tuple[int, list[Rollout]]:
        """Rollouts whose status changed after `cursor` (0: from the beginning), and the new cursor. Waits up to
        `timeout` for the first one; an empty list says that the time ran out."""

    @abstractmethod
    async def stats(self) -> dict[str, int]:
        """Counts: one per status, and `turns`, `events`, `steps`."""

    @abstractmethod
    async def count_open(self) -> dict[str, int]:
        """How many rollouts are `queued` and how many `running`, as `stats` says, without looking at those that have
        ended."""

    # -- policies and steps ------------------------------------------------------------------------------------------

    @abstractmethod
    async def put_policy(self, policy: Policy) -> None: ...

    @abstractmethod
    async def policies(self) -> list[Policy]: ...

    @abstractmethod
    async def commit_step(self, step: Step, tokens: Mapping[str, TokenCounts] | None = None) -> None:
        """One transaction: the step, what it consumed, its metrics, what became of the tokens of each rollout
        (`Rollout.tokens`), and the new version of every policy. Refused if a step that is not superseded already has
        the number or consumed one of the rollouts; the same again is not."""

    @abstractmethod
    async def name_checkpoint(self, lineage: int, number: int, checkpoint: str) -> None:
        """Have a committed step name its checkpoint, which is whole and on the disk by now. Refused if the step is
        superseded or has another one; the same again is not."""

    @abstractmethod
    async def steps(self, *, superseded: bool = False) -> list[Step]:
        """The steps of the present line in order, or all that ever were."""

    @abstractmethod
    async def open_lineage(self, *, after: int) -> int:
        """Begin a new line after step number `after`, in one transaction: later steps become superseded, and
        every policy goes back to the version at that step. Returns the new lineage's number (the first is 1)."""

    @abstractmethod
    async def close(self) -> None: ...
