"""The table of clients in docs/guides/clients.md: what clients were seen to do, and what was recorded of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.metadata import distributions
from typing import Any

from msgspec import Struct

from strop.types import Turn
from tests.frameworks import environments
from tests.frameworks.clients import Client
from tests.frameworks.model import TYPED
from tests.frameworks.place import Ended

GUIDE = environments.ROOT / "docs/guides/clients.md"
BEGIN, END = "<!-- made by tests/frameworks/test_clients.py -->", "<!-- end -->"
COLUMNS = ("client", "version", "API", "works", "exact", "structured output")
HOW = ("response_format", "text", "output_config", "guided_json", "tool_choice")
"""The parameters by which clients ask for an answer of a type."""


class Row(Struct, frozen=True):
    client: str
    version: str
    api: str
    works: str
    exact: str
    structured: str

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(getattr(self, field) for field in self.__struct_fields__)


def describe(client: Client, ended: Ended) -> Row:
    typed = [turn for turn in ended.turns if _asks(turn.messages)]
    talk = [turn for turn in ended.turns if not _asks(turn.messages)]
    return Row(
        client=client.name,
        version=find_version(client),
        api=_name_api(ended.bodies),
        works=_works(client, ended),
        exact=_tell_branches(talk),
        structured=_tell_structured(ended, typed),
    )


def find_version(client: Client) -> str:
    folder = environments.PLACE / client.environment
    if client.environment in environments.NODE:
        return json.loads((folder / "node_modules" / client.package / "package.json").read_text())["version"]
    (packages,) = folder.glob("lib/python3*/site-packages")
    return next(d.version for d in distributions(name=client.package, path=[str(packages)]))


def _name_api(bodies: list[dict[str, Any]]) -> str:
    asked = [body for body in bodies if "messages" in body or "input" in body]
    paths = Counter(re.sub(r"^.*/v1/", "", body["path"]) for body in asked)
    streamed = sum(body.get("stream") is True for body in asked)
    how = "" if not streamed else ", streamed" if streamed == len(asked) else ", partly streamed"
    return ", ".join(path for path, _ in paths.most_common()) + how


def _works(client: Client, ended: Ended) -> str:
    said = [answer.endswith(end) for answer, end in zip(ended.answers, client.answers, strict=False)]
    if ended.status or said != [True] * len(client.answers) or len(ended.answers) != len(said):
        lines = [line for line in ended.output.splitlines() if line.strip()] or ["nothing was said"]
        return _cell(f"no: {lines[-1]}")
    refused = sorted({str(event.data["param"]) for event in ended.events if event.kind == "error"})
    return f"yes, after {', '.join(refused)} was refused" if refused and ended.said("typed: ") else "yes"


def _tell_branches(turns: list[Turn]) -> str:
    """Whether every turn but the first goes on from an earlier one token for token, and why others do not."""
    later = turns[1:]
    if not later:
        return "one turn"
    reasons = Counter(turn.branch for turn in later if turn.branch is not None)
    if not reasons:
        return f"exact, {len(later)} of {len(later)}"
    told = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    return f"{len(later) - reasons.total()} of {len(later)}; {told}"


def _tell_structured(ended: Ended, typed: list[Turn]) -> str:
    how = sorted({name for turn in typed for name in HOW if _is_typed(turn.requested.get(name))})
    tools = "a tool" if any(turn.requested.get("tools") for turn in typed) else "in words"
    held = sum(turn.sampling.grammar is not None for turn in typed)
    if failed := ended.said("refused: "):
        return _cell(f"no: {failed[0]}")
    if not typed:
        return "not asked"
    assert ended.said("typed: "), "a typed answer was asked for and not printed"
    return f"held ({', '.join(how)})" if held else f"not held ({', '.join(how) or tools})"


def _is_typed(value: Any) -> bool:
    """Whether a parameter asks for a type: these say other things as well."""
    return value not in (None, "auto", {"type": "auto"}) and not (
        isinstance(value, dict) and {*value} <= {"effort", "verbosity"}
    )


def _asks(messages: list[dict[str, Any]]) -> bool:
    return any(TYPED in json.dumps(message, ensure_ascii=False) for message in messages)


def _cell(text: str) -> str:
    """Text as one cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "/")[:200]


# -- the guide ---------------------------------------------------------------------------------------------------------


def read_rows() -> list[Row]:
    _, _, rest = GUIDE.read_text().partition(BEGIN)
    table, _, _ = rest.partition(END)
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines[2:]]


def write_rows(rows: list[Row]) -> None:
    before, _, rest = GUIDE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells for row in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    GUIDE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
