"""The store over HTTP as one table: every verb with its address, what it takes and what it gives.

    remote.HttpStore.lease(...) ──POST /v1/lease {...}──▶ server.handlers.lease ──▶ SqliteStore or PostgresStore

The routes of a server, the requests of a client and the OpenAPI description are all made from it. A new verb takes an
entry here, a method of the same name in `server/handlers.py`, and one in `remote.py`. `BATCH` is several of them in one
request (`server/batch.py`, `batching.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import Meta, Struct

from strop.store import wire
from strop.store.turn_deltas import TurnDelta
from strop.types import Event, Lease, Policy, Rollout, Turn

G = TypeVar("G")


class Verb(Struct, Generic[G], frozen=True):
    """`takes` is the body, or of a GET what stands in the query. `about` is what people read in the description."""

    name: str
    method: Literal["GET", "POST", "PUT"]
    path: str
    takes: Any
    gives: type[G]
    about: str


# -- rollouts ----------------------------------------------------------------------------------------------------------

FINISH = Verb(
    "finish",
    "POST",
    "/v1/rollouts/{id}/attempts/{n}/finish",
    wire.FinishBody,
    Rollout,
    "End an attempt. Without a cause it succeeded; with one its rollout fails, or is queued again as its retries say. "
    "409 if the attempt is over, unless this very end of it was recorded before.",
)
ENQUEUE = Verb(
    "enqueue",
    "POST",
    "/v1/rollouts",
    list[wire.NewRollout],
    wire.Queued,
    "Queue rollouts. An id that is already there is left as it is.",
)
LEASE = Verb(
    "lease",
    "POST",
    "/v1/lease",
    wire.LeaseBody,
    list[Lease],
    "Take up to `count` of the oldest queued rollouts that are due, and open an attempt on each, with its key.",
)
BEGIN = Verb(
    "begin",
    "POST",
    "/v1/begin",
    wire.BeginBody,
    Lease,
    "Queue a rollout and open an attempt on it at once, with its key: no other runner gets it.",
)
HEARTBEAT = Verb(
    "heartbeat",
    "POST",
    "/v1/heartbeat",
    wire.HeartbeatBody,
    wire.EndedAttempts,
    "Prolong leases. Tells which of them are over or unknown.",
)
CANCEL = Verb(
    "cancel",
    "POST",
    "/v1/cancel",
    wire.CancelBody,
    wire.Done,
    "End rollouts that are not wanted any more. Those already ended stay as they are.",
)
RECLAIM = Verb(
    "reclaim",
    "POST",
    "/v1/reclaim",
    wire.ReclaimBody,
    wire.Reclaimed,
    "End attempts whose lease has run out, or all that are running.",
)

# -- what happened in them ---------------------------------------------------------------------------------------------

ADD_TURNS = Verb(
    "add_turns",
    "POST",
    "/v1/turns",
    list[wire.NewTurn],
    wire.RecordedCount,
    "Record turns of running attempts: all of them or, if one is refused, none.",
)
ADD_EVENTS = Verb(
    "add_events",
    "POST",
    "/v1/events",
    list[wire.NewEvent],
    wire.RecordedCount,
    "Record events of running attempts, each id once.",
)
ADD_REWARDS = Verb(
    "add_rewards",
    "POST",
    "/v1/rewards",
    wire.RewardsBody,
    wire.Done,
    "Give rewards to rollouts that have succeeded: all of them or, if one is refused, none.",
)

# -- reading -----------------------------------------------------------------------------------------------------------

ROLLOUTS = Verb(
    "rollouts",
    "GET",
    "/v1/rollouts",
    wire.Which,
    list[Rollout],
    "Rollouts in the order they were enqueued, a page at a time.",
)
GET = Verb("get", "GET", "/v1/rollouts/{id}", wire.Nothing, Rollout, "One rollout.")
ATTEMPTS = Verb(
    "attempts",
    "GET",
    "/v1/rollouts/{id}/attempts",
    wire.Nothing,
    list[wire.AttemptShown],
    "A rollout's attempts, without their keys.",
)
ATTEMPT = Verb(
    "attempt",
    "POST",
    "/v1/attempt",
    wire.KeyBody,
    wire.AttemptShown,
    "The attempt that a key opens. The key is in the body: addresses are written down in many places.",
)
TURNS = Verb(
    "turns",
    "GET",
    "/v1/rollouts/{id}/turns",
    wire.OfAttempt,
    list[Turn],
    "Turns of one attempt of a rollout, in the order their requests began.",
)
TURN_DELTAS = Verb(
    "turn_deltas",
    "GET",
    "/v1/rollouts/{id}/turns/deltas",
    wire.OfAttempt,
    list[TurnDelta],
    "The same turns, each as what it adds to one before it.",
)
EVENTS = Verb(
    "events",
    "GET",
    "/v1/rollouts/{id}/events",
    wire.OfAttempt,
    list[Event],
    "Events of one attempt of a rollout, in the order they were recorded.",
)
CHANGES = Verb(
    "changes",
    "GET",
    "/v1/changes",
    wire.Since,
    wire.Changes,
    "Rollouts whose status changed after `cursor`, waiting for the first if there is none yet.",
)
STATS = Verb(
    "stats",
    "GET",
    "/v1/stats",
    wire.Nothing,
    dict[str, int],
    "Counts: one per status, and turns, events, steps.",
)
COUNT_OPEN = Verb(
    "count_open",
    "GET",
    "/v1/open",
    wire.Nothing,
    dict[str, int],
    "How many rollouts are queued and how many run, at a cost that does not grow with those that have ended.",
)

# -- policies and steps ------------------------------------------------------------------------------------------------

POLICIES = Verb("policies", "GET", "/v1/policies", wire.Nothing, list[Policy], "The policies, by name.")
PUT_POLICY = Verb(
    "put_policy",
    "PUT",
    "/v1/policies",
    wire.NewPolicy,
    wire.Done,
    "Put a policy. One of the same name is replaced.",
)
STEPS = Verb(
    "steps",
    "GET",
    "/v1/steps",
    wire.WhichSteps,
    list[wire.StepRecord],
    "The steps of the present line, or all that ever were.",
)
COMMIT_STEP = Verb(
    "commit_step",
    "POST",
    "/v1/steps",
    wire.StepBody,
    wire.Done,
    "Commit a step: what it consumed, its metrics and the new version of every policy, all at once.",
)
NAME_CHECKPOINT = Verb(
    "name_checkpoint",
    "PUT",
    "/v1/checkpoints",
    wire.CheckpointBody,
    wire.Done,
    "Have a committed step name its checkpoint, once that is whole.",
)
OPEN_LINEAGE = Verb(
    "open_lineage",
    "POST",
    "/v1/lineages",
    wire.LineageBody,
    wire.Lineage,
    "Begin a new line after a step; later steps become superseded.",
)

# -- several at once ---------------------------------------------------------------------------------------------------

BATCH = Verb(
    "batch",
    "POST",
    "/v1/batch",
    Annotated[list[wire.VerbCall], Meta(min_length=1, max_length=wire.MAX_COUNT)],
    list[wire.VerbAnswer],
    "Several verbs that change something, none of which waits, in one request. Each is done or refused as it would be "
    "alone, in any order, and is answered at its place once it is durable.",
)

VERBS: tuple[Verb[Any], ...] = (
    FINISH,  # first, since of the addresses that have to be matched it is the one asked for most
    ENQUEUE,
    LEASE,
    BEGIN,
    HEARTBEAT,
    CANCEL,
    RECLAIM,
    ADD_TURNS,
    ADD_EVENTS,
    ADD_REWARDS,
    ROLLOUTS,
    GET,
    ATTEMPTS,
    ATTEMPT,
    TURNS,
    TURN_DELTAS,
    EVENTS,
    CHANGES,
    STATS,
    COUNT_OPEN,
    POLICIES,
    PUT_POLICY,
    STEPS,
    COMMIT_STEP,
    NAME_CHECKPOINT,
    OPEN_LINEAGE,
    BATCH,
)
