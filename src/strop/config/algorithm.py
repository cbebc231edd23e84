"""How rewards become a loss: the settings that every algorithm has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from strop.config.describe import doc
from strop.types import FAILURES, Cause, Failure

Weight = Annotated[float, Meta(ge=-1e6, le=1e6)]


class FailuresConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a failed rollout counts as in its group: exclude (it does not), zero (0, or the group's lowest total where
    that is below 0), lowest (the group's lowest total), or a number."""

    agent_error: Annotated[
        Failure, doc("the agent raised: exclude, zero (or the group's lowest if below), lowest, or a number")
    ] = FAILURES["agent_error"]
    timeout: Annotated[Failure, doc("the agent took longer than runner.timeout")] = FAILURES["timeout"]
    bad_reward: Annotated[Failure, doc("its reward could not be computed")] = FAILURES["bad_reward"]
    lost_runner: Annotated[Failure, doc("the process that ran the agent died")] = FAILURES["lost_runner"]
    engine_error: Annotated[Failure, doc("the engine failed")] = FAILURES["engine_error"]
    cancelled: Annotated[Failure, doc("it was cancelled")] = FAILURES["cancelled"]
    late: Annotated[Failure, doc("it had not ended by loop.group_deadline")] = FAILURES["late"]

    def by_cause(self) -> dict[Cause, Failure]:
        return {cause: getattr(self, cause) for cause in FAILURES}


class AlgorithmConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rewards become a loss. An algorithm's own settings are the fields of its class."""

    name: Annotated[str, doc("which algorithm: a file of strop/algorithms, or FILE.py:Class for one of your own")] = (
        "grpo"
    )
    rewards: Annotated[dict[str, Weight], doc("weight of each named reward in a rollout's total")] = field(
        default_factory=lambda: {"reward": 1.0}
    )
    improves: Annotated[
        Literal["weights", "prompts"], doc("what it improves; follows from the algorithm when a run begins")
    ] = "weights"
    failures: Annotated[FailuresConfig, doc("what failed rollouts count as")] = FailuresConfig()
    settings: Annotated[dict[str, Any], doc("the algorithm's own settings")] = {}
