"""What goes over the wire: the bodies of requests, the questions in addresses, the answers, the shape of refusals.

All of it is JSON. A field that a request has and its record has not is refused by name: it is likely misspelt. Records
travel as they are (`strop.types`), with three exceptions. New rollouts and events may leave out what can be made up for
them, and new rollouts say nothing of what is the store's to say. An attempt is shown without its key, which its lease
alone tells. Metrics of a step may be NaN, which JSON has not: null stands for it.
"""

from __future__ import annotations

import math
import re
import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from strop.errors import (
    BadExclusion,
    BadReward,
    ConfigError,
    Fenced,
    IllegalTransition,
    NewerStore,
    RunEnded,
    StoreError,
    StropError,
    TurnTaken,
    Unavailable,
    UnknownId,
)
from strop.types import (
    RETRIES,
    Attempt,
    Cause,
    Event,
    EventKind,
    Mode,
    Policy,
    Retry,
    Reward,
    Rollout,
    Status,
    Step,
    Task,
    TokenCounts,
    Turn,
)

MAX_WAIT = 60.0
"""Seconds one request may wait for something to happen; a client that wants to wait longer asks again."""
MAX_COUNT = 1000
"""Most things one answer holds, and most verbs of a batch."""
INT64 = 2**63 - 1

Seconds = Annotated[float, Meta(gt=0, le=3600, description="seconds a lease lasts from now, unless prolonged")]
Wait = Annotated[float, Meta(ge=0, le=MAX_WAIT, description="seconds to wait for the first")]
Limit = Annotated[int, Meta(ge=1, le=MAX_COUNT, description="at most so many")]
Whole = Annotated[int, Meta(ge=-INT64, le=INT64)]
Count = Annotated[int, Meta(ge=0, le=INT64)]
Nth = Annotated[int, Meta(ge=0, lt=2**53, description="counted from 1; 0 is before the first")]
AttemptNumber = Annotated[int, Meta(ge=0, le=2**31 - 1, description="an attempt's number; default: the last one")]


def check_key(key: str) -> str:
    """A key as it can stand in a header."""
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(
            "a key is made of printable ASCII characters without spaces, which this one is not. Fix: choose another"
        )
    return key


# -- records as they come in -------------------------------------------------------------------------------------------


class NewRollout(Struct, kw_only=True, forbid_unknown_fields=True):
    """A rollout to queue. An id and a task are enough: left to itself it is a group of its own, made now.

    >>> msgspec.json.decode(b'{"id": "q1", "task": {"id": "t"}}', type=NewRollout).rollout().group
    'q1'
    """

    id: str
    group: str = ""
    member: Whole = 0
    task: Task
    mode: Mode = "train"
    seed: Whole = 0
    retries: dict[Cause, Retry] = field(default_factory=lambda: dict(RETRIES))
    created: float = field(default_factory=time.time)
    prompts: dict[str, str] = {}

    def rollout(self) -> Rollout:
        fields = msgspec.structs.asdict(self)
        fields["group"] = self.group or self.id
        return Rollout(**fields)

    @classmethod
    def of(cls, rollout: Rollout) -> NewRollout:
        return cls(**{name: getattr(rollout, name) for name in cls.__struct_fields__})


class NewTurn(Turn, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model call to record."""

    attempt: Count
    shared: Whole = 0
    choice: Whole = 0
    choices: Whole = 1


class NewEvent(Event, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event to record. The id makes sure that one sent twice is recorded once."""

    attempt: Count
    time: float = field(default_factory=time.time)


class NewPolicy(Policy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy; one of the same name is replaced."""


class AgentEvent(Struct, kw_only=True, forbid_unknown_fields=True):
    """An event as agents write it, about the attempt in the address."""

    kind: EventKind
    data: dict[str, Any] = {}
    id: str | None = None


# -- bodies of verbs ---------------------------------------------------------------------------------------------------


class LeaseBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Who asks, for how many and how long. The same token again, while its attempts run, gives the same leases.
    With a rollout's id it is that one or none."""

    runner: str
    seconds: Seconds
    count: Limit = 1
    wait: Wait = 0.0
    token: str | None = None
    rollout: str | None = None


class BeginBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A rollout of one's own, who runs it, and for how long."""

    rollout: NewRollout
    runner: str
    seconds: Seconds


class HeartbeatBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The attempts that are alive, each as [rollout, number]."""

    attempts: list[tuple[str, Count]]
    seconds: Seconds


class FinishBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """How an attempt ended: without a cause it succeeded."""

    rewards: list[Reward] = []
    cause: Cause | None = None
    detail: str | None = None


class RewardsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Rewards for rollouts that have succeeded, by their ids."""

    rewards: dict[str, list[Reward]]


class CancelBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The rollouts that are not wanted any more, and why."""

    rollouts: list[str]
    detail: str
    cause: Literal["cancelled", "late"] = "cancelled"


class ReclaimBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """`everything`: no runner can be alive, so whatever is running is interrupted."""

    everything: bool = False


class KeyBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """An attempt's key."""

    key: str


class StepRecord(Struct, kw_only=True, forbid_unknown_fields=True):
    """A step. Metrics may be null, which stands for NaN."""

    lineage: Nth
    number: Nth
    rollouts: list[str]
    dropped: dict[str, str] = {}
    metrics: dict[str, float | None]
    checkpoint: str | None = None
    digest: str | None = None
    superseded: bool = False
    time: float

    def step(self) -> Step:
        fields = msgspec.structs.asdict(self)
        fields["metrics"] = {name: math.nan if value is None else value for name, value in self.metrics.items()}
        return Step(**fields)

    @classmethod
    def of(cls, step: Step) -> StepRecord:
        return cls(**msgspec.structs.asdict(step))  # msgspec writes NaN as null


class StepBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A step to commit, which made a version of every policy, and what became of the tokens of its rollouts."""

    step: StepRecord
    tokens: dict[str, TokenCounts] = {}


class CheckpointBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint of a committed step, which is whole."""

    lineage: Nth
    number: Nth
    checkpoint: str


class LineageBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The number of the step to go on from; 0 is the beginning."""

    after: Nth


class VerbCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """One verb of a batch: its name, what its address names, and its body."""

    verb: str
    at: dict[str, str] = {}
    body: msgspec.Raw


# -- questions ---------------------------------------------------------------------------------------------------------


class Which(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which rollouts are listed."""

    group: Annotated[str | UnsetType, Meta(description="only those of this group")] = UNSET
    status: Annotated[Status | UnsetType, Meta(description="only those of this status")] = UNSET
    mode: Annotated[Mode | UnsetType, Meta(description="only those of this mode")] = UNSET
    after: Annotated[str | UnsetType, Meta(description="the id of the last one of the page before")] = UNSET
    limit: Limit = MAX_COUNT
    newest: Annotated[bool, Meta(description="the newest first, and `after` leads to older ones")] = False


class OfAttempt(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whose turns or events."""

    attempt: AttemptNumber | UnsetType = UNSET


class Since(Struct, kw_only=True, forbid_unknown_fields=True):
    """From where on changes are told."""

    cursor: Annotated[int, Meta(ge=0, le=INT64, description="as the answer before told it; 0: from the beginning")] = 0
    timeout: Wait = 0.0


class WhichSteps(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which steps are listed."""

    superseded: Annotated[bool, Meta(description="all that ever were, not only the present line")] = False


class Nothing(Struct, kw_only=True, forbid_unknown_fields=True):
    """There is nothing to ask."""


# -- answers -----------------------------------------------------------------------------------------------------------


class RecordedCount(Struct):
    """How many were sent and are durable now, also those that had been before."""

    recorded: int


class Queued(Struct):
    """How many of the rollouts are new, and how many are there now."""

    queued: int
    recorded: int


class EndedAttempts(Struct):
    """Attempts that are over or unknown, as [rollout, number]: their runner can stop."""

    over: list[tuple[str, int]]


class Reclaimed(Struct):
    """The rollouts that were taken back."""

    rollouts: list[str]


class Changes(Struct):
    """Rollouts whose status changed, and where to go on from. None means that the time ran out."""

    cursor: int
    rollouts: list[Rollout]


class Done(Struct):
    """Done, and durable."""

    ok: bool = True


class Lineage(Struct):
    """The number of the new line."""

    lineage: int


class VerbAnswer(Struct):
    """What a verb of a batch came to: the status and the body that it would have been answered with alone."""

    status: int
    body: Any


class Health(Struct):
    """It answers."""

    status: str
    strop: str


class AttemptShown(Struct):
    """An attempt without its key."""

    rollout: str
    number: int
    runner: str
    started: float
    lease_until: float
    ended: float | None
    cause: Cause | None
    detail: str | None

    @classmethod
    def of(cls, attempt: Attempt) -> AttemptShown:
        return cls(**{name: getattr(attempt, name) for name in cls.__struct_fields__})

    def attempt(self) -> Attempt:
        return Attempt(key="", **msgspec.structs.asdict(self))


# -- refusals ----------------------------------------------------------------------------------------------------------


ERRORS: dict[str, type[StropError]] = {
    error.__name__: error
    for error in (
        BadExclusion,
        BadReward,
        UnknownId,
        Fenced,
        IllegalTransition,
        NewerStore,
        RunEnded,
        StoreError,
        TurnTaken,
        Unavailable,
    )
}
"""Errors that are the same on both sides, by the `type` they travel under."""
