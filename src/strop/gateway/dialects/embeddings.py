"""OpenAI's embeddings: texts as vectors, which an outside model makes. The models that are trained here write text, and
refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from strop.gateway.dialects.base import AnswerInfo, ApiError, ChoiceDone, ModelRequest
from strop.gateway.dialects.openai import OpenAIDialect


class Embeddings(OpenAIDialect):
    path = "embeddings"

    def read(self, body: bytes) -> NoReturn:
        raise ApiError(
            "the model that answers here writes text and makes no embeddings. Fix: ask for a model that does, and have "
            "gateway.outside.NAME.models name it",
            status=404,
            param="model",
            code="model_not_found",
        )

    def write(self, answer: AnswerInfo, choices: Sequence[ChoiceDone], request: ModelRequest) -> NoReturn:
        raise AssertionError("nothing is sampled for embeddings")

    def stream(self, request: ModelRequest) -> NoReturn:
        raise AssertionError("nothing is sampled for embeddings")
