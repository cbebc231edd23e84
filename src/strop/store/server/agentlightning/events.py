"""Events in Agent Lightning's words, {"event_type": "reward", "data": {"value": 1.0}}, and turns as its model_request.

reward                  our reward of the same value, called `reward` unless data has a `name`
any other event_type    a span, which keeps type and data as they are; also `model_request`: what is trained is what
                        the gateway recorded, never what somebody says was sampled
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from strop.errors import BadReward
from strop.types import Event, EventKind, Turn

Json = dict[str, Any]
MODEL_REQUEST = "model_request"


class TypedEvent(Struct, kw_only=True, forbid_unknown_fields=True):
    """An event as its agents post it, about the attempt in the address."""

    event_type: str
    data: Json = {}

    def read(self) -> tuple[EventKind, Json]:
        """Its kind and data as they are recorded.

        >>> TypedEvent(event_type="reward", data={"value": 0.5, "source": "agent"}).read()
        ('reward', {'name': 'reward', 'value': 0.5, 'source': 'agent'})
        >>> TypedEvent(event_type="note", data={"text": "hm"}).read()
        ('span', {'event_type': 'note', 'data': {'text': 'hm'}})
        """
        if self.event_type != "reward":
            return "span", {"event_type": self.event_type, "data": self.data}
        if "value" not in self.data:
            raise BadReward("a reward event has no value. Fix: write it as data = {'value': 1.0}")
        return "reward", {"name": "reward", **self.data}


def describe(event_type: str, data: Json, *, rollout: str, attempt: int, time: float) -> Json:
    return {
        "event_type": event_type,
        "rollout_id": rollout,
        "attempt_id": str(attempt - 1),
        "timestamp": time,
        "data": data,
    }


def describe_event(event: Event, *, triplet: bool = False) -> Json:
    """A recorded event as its clients read it. With `triplet` a reward is its value, and what the agent said of it."""
    kind, data = _type_and_data(event)
    if triplet and kind == "reward":
        data = {name: data[name] for name in ("value", "source", "reason") if name in data}
    if triplet and kind == MODEL_REQUEST and event.kind == "error":
        nothing: Json = {"prompt_token_ids": [], "response_token_ids": [], "response_log_probs": None}
        data = nothing | data
    return describe(kind, data, rollout=event.rollout, attempt=event.attempt, time=event.time)


def _type_and_data(event: Event) -> tuple[str, Json]:
    data = event.data
    if event.kind == "span" and "event_type" in data:
        return str(data["event_type"]), data.get("data", {})
    if event.kind == "reward" and data.get("name") == "reward":
        return "reward", {name: value for name, value in data.items() if name != "name"}
    if event.kind == "error" and data.get("source") == "gateway":  # a model call that was refused: there is no turn
        error = {"message": data.get("message"), "code": data.get("code")}
        return MODEL_REQUEST, {"http_status": data.get("status"), "status": "error", "error": error}
    return event.kind, data


def describe_turn(turn: Turn, *, triplet: bool = False) -> Json:
    """A turn as its `model_request`; with `triplet` only tokens and logprobs. A version is ours: LINEAGE.STEP."""
    server = {"model": turn.policy, "version": turn.versions[-1][1] if turn.versions else None}
    status = {"http_status": 200, "status": "error" if turn.abandoned else "ok"}
    if triplet:
        tokens = {"prompt_token_ids": turn.prompt_ids, "response_token_ids": turn.response_ids}
        data: Json = {**tokens, "response_log_probs": turn.logprobs, "server": server, **status}
    else:
        choice = {
            "index": turn.choice,
            "message": turn.answer,
            "token_ids": turn.response_ids,
            "logprobs": {"content": [{"logprob": logprob} for logprob in turn.logprobs]},
            "finish_reason": turn.finish,
        }
        response = {"id": turn.id, "prompt_token_ids": turn.prompt_ids, "choices": [choice]}
        request = {**turn.requested, "messages": turn.messages}
        data = {"model": turn.policy, "request": request, "response": response, "server": server, **status}
    return describe(MODEL_REQUEST, data, rollout=turn.rollout, attempt=turn.attempt, time=turn.ended)
