"""The Ray cluster that a run is spread over."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from strop.config.describe import doc


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Ray cluster that a run is spread over: learner ranks, engines' servers, gateways and runners on its nodes."""

    address: Annotated[
        str, doc("Ray cluster: HOST:PORT of its head; auto: the one of this machine, started if there is none")
    ] = ""
    runners: Annotated[
        int, doc("runner pools on nodes, at least; each has runner.workers agents at once"), Meta(ge=1, le=10_000)
    ] = 1
    max_runners: Annotated[
        int,
        doc("autoscaling: runner pools at most, as many as queued rollouts need; 0: as many as cluster.runners"),
        Meta(ge=0, le=10_000),
    ] = 0
    gateways: Annotated[
        int,
        doc("gateway workers on nodes, which agents ask for the model; 0: all of them ask this command"),
        Meta(ge=0, le=1000),
    ] = 0
    rank_cpus: Annotated[int, doc("CPUs that Ray keeps for a learner rank"), Meta(ge=1)] = 1
    server_cpus: Annotated[int, doc("CPUs that Ray keeps for a vLLM or sglang server"), Meta(ge=1)] = 1
    runner_cpus: Annotated[int, doc("CPUs that Ray keeps for a runner pool"), Meta(ge=1)] = 1
    gateway_cpus: Annotated[int, doc("CPUs that Ray keeps for a gateway worker"), Meta(ge=1)] = 1
    port: Annotated[
        int,
        doc("port at which this command hears learner ranks and gateways; 0 picks a free one"),
        Meta(ge=0, le=65535),
    ] = 0
    timeout: Annotated[float, doc("seconds to wait for CPUs and GPUs that others use now"), Meta(gt=0)] = 120.0
    restarts: Annotated[
        int,
        doc("times in a row, without a step in between, that the learner is started again when it was lost"),
        Meta(ge=0),
    ] = 3
