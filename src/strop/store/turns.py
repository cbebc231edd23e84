"""How turns lie in the store: a row holds what its turn adds to an earlier one of its attempt; readers get whole turns.

    turn   ids_from  ids_shared  prompt_ids  response_ids    messages_from  messages_shared  messages     answer
    r/1/0                     0  1 5 2       7 8                                          0  [user]       assistant
    r/1/1  r/1/0              5  4 6 2       9               r/1/0                        2  [tool]       assistant
    r/1/2  r/1/1              9  4 4 2       9               r/1/1                        4  [user]       assistant

A turn's path is what it was given and then its answer: ids, and messages. `ids_shared` leading ids of the prompt are
those of the path of turn `ids_from`, `prompt_ids` has the rest; messages have a turn and a count of their own, since
branches share ids but not always messages, and turns of outside models have no ids. A long message that goes on from
the one in its place (a raw prompt does) begins with `messages_cut` bytes of that one's JSON; the rest of its JSON
stands in `messages` as a string. Lists of tools are stored once, by hash: in `requested` null stands for them. So are
the texts of grammars, in the same table: in `sampling` their hash stands for them.

What is shared is compared before it is left out, without reading the conversation: the row of the earlier turn has its
own part, and the hash of all before that. What does not agree is stored whole.

A new column of a turn takes two files:
1. `types.py`: the field of `Turn`, with a default, and a line about it in the docstring.
2. Here: a line in `ADDED` with the next version of the store, and what older rows have in it. Stores get the column
   when they are opened; reading, writing, the HTTP interface and its description follow from the field's type.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from strop.errors import StoreError
from strop.store import rows
from strop.store.transitions import Db, find
from strop.types import Turn

MANY = 500
"""Most parameters of one statement."""


class AddedColumn(Struct, frozen=True):
    """A column that was added to turns: the store's version that has it first, and what older rows have in it, as an
    SQL literal."""

    version: int
    default: str


ADDED: dict[str, AddedColumn] = {
    # "latency": AddedColumn(7, "0"),
}

FIRST = 4
"""The store's version that has turns as told above."""
VERSION = max([FIRST, *(column.version for column in ADDED.values())])

OWN = {
    "ids_from": "TEXT",
    "ids_shared": "BIGINT NOT NULL",
    "ids_hash": "BLOB",
    "messages_from": "TEXT",
    "messages_shared": "BIGINT NOT NULL",
    "messages_cut": "BIGINT NOT NULL",
    "messages_hash": "BLOB",
    "tools": "TEXT",
}
"""What a row has beside the fields of its turn. The hashes are of all that is left out."""

GRAMMAR = "blake2b:"
"""Begins what stands in `sampling` for the text of a grammar. Older rows have the text itself."""

FIELDS = Turn.__struct_fields__
_SAMPLING = FIELDS.index("sampling")
COLUMNS = ", ".join((*FIELDS, *OWN))


def _ddl(name: str) -> str:
    kind = rows.kinds(Turn)[name].sql
    return f"{name} {kind}" + (" UNIQUE" if name == "id" else "")


TABLES = f"""
CREATE TABLE turns (
    seq SERIAL_KEY,
    {", ".join(_ddl(name) for name in FIELDS)},
    {", ".join(f"{name} {kind}" for name, kind in OWN.items())}
);
CREATE INDEX turns_of_attempt ON turns (rollout, attempt);
CREATE TABLE tool_lists (
    hash TEXT PRIMARY KEY,
    tools TEXT NOT NULL  -- a list of tools as JSON, or the text of a grammar
);
"""


def added(version: int) -> list[str]:
    """What gives a store the columns that its `version` has first."""
    return [
        f"ALTER TABLE turns ADD COLUMN {_ddl(name)} DEFAULT {column.default}"
        for name, column in ADDED.items()
        if column.version == version
    ]


def are_any(db: Db, rollout: str, attempt: int | None) -> bool:
    """Whether an attempt has turns, the last one of its rollout unless it is named. Raises `UnknownId`."""
    some = "SELECT 1 FROM turns WHERE turns.rollout = rollouts.id AND turns.attempt = COALESCE(?, rollouts.attempts)"
    row = db.execute(f"SELECT EXISTS ({some}) FROM rollouts WHERE id = ?", (attempt, rows.text(rollout))).fetchone()
    return bool(row[0] if row else find(db, rollout))


def read(db: Db, rollout: str, attempt: int) -> tuple[list[rows.Row], dict[str, str]]:
    """The rows of an attempt in the order they were recorded, and what they name by its hash, for `rebuild`."""
    query = f"SELECT {COLUMNS} FROM turns WHERE rollout = ? AND attempt = ? ORDER BY seq"
    found = db.execute(query, (rollout, attempt)).fetchall()
    hashes = list({row[-1] for row in found if row[-1] is not None} | {*filter(None, map(_find_grammar, found))})
    named: dict[str, str] = {}
    for first in range(0, len(hashes), MANY):
        some = hashes[first : first + MANY]
        those = f"SELECT hash, tools FROM tool_lists WHERE hash IN ({', '.join('?' * len(some))})"
        named |= dict(db.execute(those, some).fetchall())
    return found, named


def _find_grammar(row: rows.Row) -> str | None:
    """The hash of its grammar's text."""
    _, named, rest = row[_SAMPLING].partition(f'"text":"{GRAMMAR}')
    return rest.partition('"')[0] if named else None


def rebuild(found: Iterable[rows.Row], tools: dict[str, str]) -> list[Turn]:
    """Whole turns in the order their requests began. What several have in common they share: do not change it."""
    offered = {hash: msgspec.json.decode(listed) for hash, listed in tools.items()}
    whole: dict[str, Turn] = {}
    for row in found:
        try:
            turn = _rebuild(dict(zip((*FIELDS, *OWN), row, strict=True)), whole, offered)
        except rows.UNREADABLE as error:
            raise StoreError(
                f"turn {row[0]!r} cannot be read ({error}): the store is damaged. Fix: put a copy back"
            ) from None
        whole[turn.id] = turn
    return sorted(whole.values(), key=lambda turn: turn.started)


def _rebuild(row: dict[str, Any], whole: dict[str, Turn], tools: dict[str, Any]) -> Turn:
    fields = {
        name: row[name] if kind.read is None else kind.read(row[name])
        for name, kind in _KINDS.items()
        if name != "messages"
    }
    own = msgspec.json.decode(row["messages"])
    try:
        if row["tools"] is not None:
            fields["requested"]["tools"] = tools[row["tools"]]
        grammar = fields["sampling"].grammar
        if grammar is not None and grammar.text.startswith(GRAMMAR):
            whole_text = replace(grammar, text=tools[grammar.text.removeprefix(GRAMMAR)])
            fields["sampling"] = replace(fields["sampling"], grammar=whole_text)
        if row["ids_from"] is not None:
            base, count = whole[row["ids_from"]], row["ids_shared"]
            rest = base.response_ids[: max(count - len(base.prompt_ids), 0)]
            fields["prompt_ids"] = base.prompt_ids[:count] + rest + fields["prompt_ids"]
        if row["messages_from"] is not None:
            base, count = whole[row["messages_from"]], row["messages_shared"]
            path = [*base.messages, base.answer]
            if row["messages_cut"]:
                begun = msgspec.json.encode(path[count])[: row["messages_cut"]]
                own[0] = msgspec.json.decode(begun + own[0].encode())
            own = path[:count] + own
    except KeyError as missing:
        raise lost(missing.args[0]) from None
    return Turn(**fields, messages=own)


_KINDS = rows.kinds(Turn)


def lost(id: str | None) -> StoreError:
    return StoreError(f"turns go on from {id!r}, which is not there: the store is damaged. Fix: put a copy back")
