"""Rollouts in Agent Lightning's words: how its clients queue, read and change them."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal, cast

from msgspec import Struct, field

from strop.types import Attempt, Rollout, Status, Task, stable_hash

Json = dict[str, Any]
RUNNER = "agentlightning"
"""Who runs a rollout that a client takes without naming a job."""
TIMEOUT = 3600.0
"""Seconds that a rollout is leased for where it does not say."""
KEPT = "agentlightning"
"""The field of a task's data for what only its clients read: config and metadata."""

ForeignState = Literal["queuing", "running", "succeeded", "failed"]
STATES: dict[Status, ForeignState] = {
    "queued": "queuing",
    "running": "running",
    "succeeded": "succeeded",
    "failed": "failed",
    "cancelled": "failed",
}
VERSIONS = {"queuing": 1, "running": 2, "succeeded": 3, "failed": 3}


class ForeignRollout(Struct, kw_only=True):
    """A rollout as its clients queue it.

    >>> ForeignRollout(input={"question": "1 + 1"}, rollout_id="a", metadata={"batch_idx": 1}).rollout().task.data
    {'question': '1 + 1', 'agentlightning': {'metadata': {'batch_idx': 1}}}
    """

    input: Any
    is_train: bool = True
    config: Json | None = None
    metadata: Json | None = None
    rollout_id: str | None = None

    def rollout(self) -> Rollout:
        """The input is the task's data, so that any agent finds it there. One that fails is not tried again."""
        data = self.input
        if more := {name: kept for name in ("config", "metadata") if (kept := getattr(self, name))}:
            data = {**(data if isinstance(data, dict) else {"input": data}), KEPT: more}
        id = self.rollout_id or secrets.token_hex(16)
        return Rollout(
            id=id,
            group=id,
            member=0,
            task=Task(id=find_data_id(self.input) or id, split="train" if self.is_train else "test", data=data),
            mode="train" if self.is_train else "eval",
            seed=stable_hash(id),
            retries={},
            created=time.time(),
        )


class StatusPatch(Struct, kw_only=True, forbid_unknown_fields=True):
    """What may change of a rollout. Its attempt's number is the store's, whatever a client says."""

    state: ForeignState | None = None
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None


class RolloutPatch(Struct, kw_only=True, forbid_unknown_fields=True):
    status: StatusPatch = field(default_factory=StatusPatch)


def find_data_id(given: Any) -> str:
    if not isinstance(given, dict):
        return ""
    fields = cast("Json", given)
    return str(fields.get("data_id") or fields.get("instance_id") or "")


def read_timeout(rollout: Rollout) -> float:
    """Seconds that its client may take for it."""
    _, config, _ = _split_data(rollout)
    seconds = config.get("timeout_seconds")
    return float(seconds) if isinstance(seconds, (int, float)) and 0 < seconds < 10**9 else TIMEOUT


def describe_rollout(rollout: Rollout, attempts: list[Attempt]) -> Json:
    """`attempts` may be left out where nobody asks who runs it."""
    given, config, metadata = _split_data(rollout)
    state, last = STATES[rollout.status], attempts[-1] if attempts else None
    job = last.runner if last is not None and last.runner != RUNNER else None
    return {
        "rollout_id": rollout.id,
        "input": given,
        "is_train": rollout.mode == "train",
        "config": {"timeout_seconds": int(TIMEOUT), "local": None, "k8s": None} | config,
        "metadata": {"batch_idx": None, "sample_idx_in_batch": None} | metadata,
        "status": {
            "state": state,
            "k8s_job_name": job,
            "last_attempt_id": str(rollout.attempts - 1) if rollout.attempts else None,
            "error_message": rollout.detail,
            "version": VERSIONS[state],
            "created_at": rollout.created,
            "updated_at": rollout.ended or (last.started if last is not None else rollout.created),
        },
    }


def describe_ended(rollout: Rollout) -> Json:
    """What the log of ended rollouts has of one."""
    given, _, _ = _split_data(rollout)
    state, train = STATES[rollout.status], rollout.mode == "train"
    return {"rollout_id": rollout.id, "state": state, "data_id": find_data_id(given), "is_train": train}


def _split_data(rollout: Rollout) -> tuple[Any, Json, Json]:
    """The input as it was given, the config and the metadata."""
    data: Any = rollout.task.data
    rest = dict(cast("Json", data)) if isinstance(data, dict) else {}
    if not isinstance(rest.get(KEPT), dict):
        return rollout.task.data, {}, {}
    kept: Json = rest.pop(KEPT)
    given = rest["input"] if rest.keys() == {"input"} else rest
    return given, kept.get("config") or {}, kept.get("metadata") or {}
