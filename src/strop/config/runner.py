"""What runs agents."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from strop.config.container import ContainerConfig
from strop.config.describe import doc
from strop.types import RETRIES, Cause, Retry


class RetriesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Failures after which a rollout is tried again. A runner that was told to stop does not count as one."""

    agent_error: Annotated[Retry, doc("the agent raised, or its command failed")] = Retry(limit=0, wait=1.0)
    timeout: Annotated[Retry, doc("the agent took longer than runner.timeout")] = Retry(limit=0)
    lost_runner: Annotated[Retry, doc("the process that ran the agent died")] = RETRIES["lost_runner"]
    engine_error: Annotated[Retry, doc("the engine failed")] = RETRIES["engine_error"]

    def by_cause(self) -> dict[Cause, Retry]:
        """As a rollout carries them."""
        given: dict[Cause, Retry] = {
            "agent_error": self.agent_error,
            "timeout": self.timeout,
            "lost_runner": self.lost_runner,
            "engine_error": self.engine_error,
        }
        return {cause: retry for cause, retry in given.items() if retry.limit}


class RunnerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs agents."""

    workers: Annotated[
        int, doc("agents that run at the same time; 0: none here, with runner.remote"), Meta(ge=0, le=10_000)
    ] = 16
    remote: Annotated[
        bool,
        doc("runners on other machines may join (strop runner): the run's store is served at the gateway's address"),
    ] = False
    agents_in: Annotated[
        Literal["processes", "loops", "threads", "loop"],
        doc(
            "where Python agents run: a process each; event loops of a few processes (async only); a thread each; or "
            "all in the runner's own event loop (async only). In threads and loop they get everything through `llm`, "
            "no variables, and what they print is not kept"
        ),
    ] = "processes"
    loops: Annotated[
        int,
        doc('processes that agents_in = "loops" has; 0: one per core, at most one per 16 workers'),
        Meta(ge=0, le=1024),
    ] = 0
    preload: Annotated[
        bool,
        doc(
            "import the agent once, in the process that its own are forked from, where that is safe; off: each imports "
            "it for itself"
        ),
    ] = True
    python: Annotated[
        str, doc("the Python of another environment that runs Python agents, with strop in it; default: this one")
    ] = ""
    timeout: Annotated[float, doc("seconds an agent may take for one rollout"), Meta(gt=0)] = 300.0
    lease: Annotated[
        float, doc("seconds without a heartbeat after which a runner counts as lost"), Meta(gt=0, le=3600)
    ] = 30.0
    drain: Annotated[float, doc("graceful shutdown: seconds that running agents get to end"), Meta(ge=0)] = 30.0
    retries: Annotated[RetriesConfig, doc("failures after which a rollout is tried again")] = RetriesConfig()
    container: Annotated[ContainerConfig, doc("what agents that are commands run in")] = ContainerConfig()
