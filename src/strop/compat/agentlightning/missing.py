"""Names of Agent Lightning that files import and that are not here: importing one is no error, using it is."""

from __future__ import annotations

from typing import Any

from strop.errors import AgentError

RUN = "run the agent with `strop train`, or try it out with strop.testing"
LOOK = "look at what happened with `strop rollouts`"
INSTEAD = {
    **dict.fromkeys(("LitAgentRunner", "Runner", "DevTaskLoader"), RUN),
    **dict.fromkeys(("OtelTracer", "AgentOpsTracer", "Tracer", "TraceToMessages", "LlmProxyTraceToTriplet"), LOOK),
    **dict.fromkeys(("find_final_reward", "find_reward_spans", "Span", "Hook", "operation"), LOOK),
    **dict.fromkeys(("LightningStore", "InMemoryLightningStore", "LightningStoreClient"), "use strop.open_store"),
    **dict.fromkeys(("APO", "algo", "FastAlgorithm", "Algorithm"), "use strop.train with an algorithm of ours"),
}


class _Missing(type):
    def __call__(cls, *args: Any, **values: Any) -> Any:
        raise AgentError(f"Agent Lightning's {cls.__name__} is not here. Fix: {INSTEAD[cls.__name__]}")

    def __getitem__(cls, item: Any) -> Any:
        return cls


def find_missing(name: str) -> Any:
    """What stands for that name until it is used."""
    if name not in INSTEAD:
        raise AttributeError(f"strop.compat.agentlightning has no {name!r}")
    return _Missing(name, (), {})
