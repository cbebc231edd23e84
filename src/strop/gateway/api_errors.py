"""What an agent is told when its request cannot be answered, as errors that every dialect can write."""

from __future__ import annotations

import logging

from strop.errors import ContextOverflow, EngineError, Fenced, StoreError, TurnTaken
from strop.gateway.dialects.base import ApiError
from strop.gateway.jinja import BadTemplate

STALE = "stale_session"
"""The code of an answer that was not recorded, since what this gateway knows of the attempt is not all there is."""
ANSWERED_ELSEWHERE = (
    "another gateway has answered this attempt meanwhile, and this answer is not kept. Fix: ask again, and have all "
    "calls of a rollout go to one gateway"
)
LOG = logging.getLogger("strop.gateway")


def to_api_error(error: Exception) -> ApiError:
    """What an agent is told about any error. Of one that is the gateway's own the log has the rest."""
    match error:
        case ApiError():
            return error
        case BadTemplate():
            return ApiError(str(error), param="messages")
        case ContextOverflow():
            return ApiError(str(error), param="messages", code="context_length_exceeded")
        case RecursionError():
            return ApiError("the JSON of this request is nested too deeply. Fix: use fewer levels")
        case EngineError():
            return ApiError(str(error), status=503, kind="server_error", code="engine_error")
        case Fenced():
            return ApiError(str(error), status=409, kind="conflict_error", code="attempt_over")
        case TurnTaken():
            return ApiError(ANSWERED_ELSEWHERE, status=503, kind="server_error", code=STALE)
        case StoreError():
            return ApiError(str(error), status=503, kind="server_error", code="store_error")
        case _:
            LOG.error("a request failed", exc_info=error)
            message = "the gateway ran into an error of its own. Fix: see its log"
            return ApiError(message, status=500, kind="server_error", code="server_error")


def deadline_exceeded(seconds: float, what: str) -> ApiError:
    message = f"{what} took longer than {seconds:g} s. Fix: ask for less at once, or raise gateway.deadline"
    return ApiError(message, status=504, kind="server_error", code="deadline_exceeded")
