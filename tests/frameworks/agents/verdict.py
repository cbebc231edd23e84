"""The question whose answer has a type, for clients that can ask for one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel

QUESTION = "Name the bigger of Rome and Oslo, and say whether you are sure."


class Verdict(BaseModel):
    """Which of two cities is bigger."""

    bigger: Literal["Rome", "Oslo"]
    sure: bool


SCHEMA: dict[str, Any] = Verdict.model_json_schema() | {"additionalProperties": False}


@contextmanager
def typed(how: str = "") -> Iterator[None]:
    """What is asked within may be refused: why is printed."""
    try:
        yield
    except Exception as error:
        print(f"refused: {how} {type(error).__name__}: {error}".replace("\n", " ")[:600], flush=True)


def show(verdict: object) -> None:
    """Print an answer, which must be of the type."""
    if not isinstance(verdict, Verdict):
        verdict = Verdict.model_validate_json(verdict) if isinstance(verdict, str) else Verdict.model_validate(verdict)
    print("typed:", verdict.model_dump_json(), flush=True)
