"""How turns lie in the store: a row holds what its turn adds to an earlier one of its attempt; readers get whole turns.

    turn   ids_from  ids_shared  prompt_ids  response_ids    messages_from  messages_shared  messages     answer
    r/1/0                     0  1 5 2       7 8                                          0  [user]       assistant
    r/1/1  r/1/0              5  4 6 2       9               r/1/0                        2  [tool]       assistant
    r/1/2  r/1/1              9  4 4 2       9               r/1/1                        4  [user]       assistant

A turn's path is what it was given and then its answer: ids, and messages. `ids_shared` leading ids of the prompt are
those of the path of turn `ids_from`, `prompt_ids` has the rest; messages have a turn and a count of their own, since
branches share ids but not always messages, and turns of outside models have no ids. A long message that goes on from
the one in its place (a raw prompt does) begins with `messages_cut` bytes of that one's JSON; the rest of its JSON
stands in `messages` as a string. Lists of tools are stored once, by hash: in `requested` null stands for them.

What is shared is compared before it is left out, without reading the conversation: the row of the earlier turn has its
own part, and the hash of all before that. What does not agree is stored whole.

A new column of a turn takes two files:
1. `types.py`: the field of `Turn`, with a default, and a line about it in the docstring.
2. Here: a line in `ADDED` with the next version of the store, and what older rows have in it. Stores get the column
   when they are opened; reading, writing, the HTTP interface and its description follow from the field's type.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import msgspec
from msgspec import Raw, Struct

from strop.errors import StoreError
from strop.store import rows
from strop.store.transitions import Db
from strop.store.written import HashedBytes, WrittenTurn, WrittenTurns
from strop.types import Turn

MIN_CUT = 256
"""Bytes from which on the beginning of a message is worth leaving out."""
RECENT = 8
"""How many earlier turns of its agent are looked at for the messages of a turn that names no parent."""
MANY = 500
"""Most parameters of one statement."""


class AddedColumn(Struct, frozen=True):
    """A column that was added to turns: the store's version that has it first, and what older rows have in it, as an
    SQL literal."""

    version: int
    default: str


ADDED: dict[str, AddedColumn] = {
    # "latency": AddedColumn(5, "0"),
}

FIRST = 4
"""The store's version that has turns as told above."""
VERSION = max([FIRST, *(column.version for column in ADDED.values())])

_OWN = {
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

_FIELDS = Turn.__struct_fields__
_COLUMNS = ", ".join((*_FIELDS, *_OWN))


def _ddl(name: str) -> str:
    kind = rows.kinds(Turn)[name].sql
    return f"{name} {kind}" + (" UNIQUE" if name == "id" else "")


TABLES = f"""
CREATE TABLE turns (
    seq SERIAL_KEY,
    {", ".join(_ddl(name) for name in _FIELDS)},
    {", ".join(f"{name} {kind}" for name, kind in _OWN.items())}
);
CREATE INDEX turns_of_attempt ON turns (rollout, attempt);
CREATE TABLE tool_lists (hash TEXT PRIMARY KEY, tools TEXT NOT NULL);
"""


def added(version: int) -> list[str]:
    """What gives a store the columns that its `version` has first."""
    return [
        f"ALTER TABLE turns ADD COLUMN {_ddl(name)} DEFAULT {column.default}"
        for name, column in ADDED.items()
        if column.version == version
    ]


# -- writing -----------------------------------------------------------------------------------------------------------


class TurnDraft:
    """A turn on its way into the store: all of its columns, whole."""

    __slots__ = ("base", "columns", "ends", "ids", "messages", "row", "text", "tools", "tools_hash", "turn")

    def __init__(self, turn: Turn, written: WrittenTurns | None = None) -> None:
        """`written` are the turns before it: if its parent is among them, only what it adds is packed and hashed."""
        self.turn = turn
        self.row: EarlierTurn | None = None  # once it is written
        self.base = base = written.find(turn.parent) if written and turn.parent is not None else None
        self.messages: list[bytes] = _encode("messages", turn.messages) if turn.messages else []
        self.tools, self.tools_hash = "", None
        replaced: dict[str, Any] = {}
        if isinstance(tools := turn.requested.get("tools"), list):
            self.tools = _encode("tools", tools)
            self.tools_hash = _hash(self.tools.encode()).hex()
            replaced["requested"] = {**turn.requested, "tools": None}  # it keeps its place
        packed = _packed(turn.prompt_ids, base) if base is not None else None
        if packed:
            replaced["prompt_ids"] = []
        self.columns = _columns(turn, replaced)
        if packed:
            self.columns["prompt_ids"] = packed.data
        self.ids = packed or HashedBytes(self.columns["prompt_ids"])
        # Where each of its messages begins in their JSON, which has a comma behind each.
        self.ends = list(accumulate([len(message) + 1 for message in self.messages], initial=0))
        text = b",".join([*self.messages, b""]) if self.messages else b""
        self.text = HashedBytes(text, base.text if base is not None else None)

    def is_same(self, other: TurnDraft) -> bool:
        """Whether they are the same in every field."""
        mine, others = (self.columns, self.messages, self.tools), (other.columns, other.messages, other.tools)
        return mine == others

    @property
    def id(self) -> str:
        return self.columns["id"]

    @property
    def begins_anew(self) -> bool:
        """Whether there can be no turn that it goes on from."""
        turn = self.turn
        return turn.parent is None and turn.choice == 0 and turn.branch is None and not turn.outside

    @property
    def written(self) -> WrittenTurn | None:
        """What later turns may go on from, if this is the one that was written under its id."""
        return self.row and WrittenTurn(self.row, self.turn.prompt_ids.copy(), self.ids, self.text)

    def delta(self, bases: EarlierTurns) -> tuple[list[Any], EarlierTurn]:
        """What it adds, as a row and as what later turns may go on from."""
        ids, count, told, shared, cut = None, 0, None, 0, 0
        if not self.begins_anew:
            ids, count = bases.ids_of(self)
            told, shared, cut = bases.messages_of(self)
        own = self.messages[shared:] if shared else self.messages
        if cut:
            own = [msgspec.json.encode(own[0][cut:].decode()), *own[1:]]
        columns = self.columns.copy()
        columns["messages"] = messages = f"[{b','.join(own).decode()}]"
        if count:
            columns["prompt_ids"] = self.ids.data[4 * count :]
        earlier = EarlierTurn(
            columns["id"],
            columns["rollout"],
            columns["attempt"],
            ids.id if ids else None,
            count,
            self.ids.hash(4 * count) if ids else None,
            columns["prompt_ids"],
            columns["response_ids"],
            told.id if told else None,
            shared,
            cut,
            self.text.hash(self.ends[shared] + cut) if told else None,
            messages,
            columns["answer"],
        )
        extra = (
            earlier.ids_from,
            count,
            earlier.ids_hash,
            earlier.messages_from,
            shared,
            cut,
            earlier.messages_hash,
            self.tools_hash,
        )
        return [*columns.values(), *extra], earlier


class EarlierTurn(Struct, frozen=True, gc=False):
    """The row of a turn that another may go on from."""

    id: str
    rollout: str
    attempt: int
    ids_from: str | None
    ids_shared: int
    ids_hash: bytes | None
    prompt_ids: bytes
    response_ids: bytes
    messages_from: str | None
    messages_shared: int
    messages_cut: int
    messages_hash: bytes | None
    messages: str
    answer: str

    def has_ids(self, ids: HashedBytes, count: int) -> bool:
        """Whether the first `count` ids are a beginning of its path. They reach into its own part."""
        start = 4 * self.ids_shared
        if start and ids.hash(start) != self.ids_hash:
            return False
        return (self.prompt_ids + self.response_ids).startswith(ids.data[start : 4 * count])

    def start(self, draft: TurnDraft) -> int | None:
        """Where its own part would begin in the messages of a draft; None if those before differ."""
        if self.messages_shared >= len(draft.ends):
            return None
        start = draft.ends[self.messages_shared] + self.messages_cut
        same = not start or draft.text.hash(start) == self.messages_hash
        return start if same else None

    @property
    def text(self) -> bytes:
        """Its own part of the JSON of its messages and its answer, each with a comma behind it."""
        own = self.messages[1:-1]
        if self.messages_cut:
            first, *others = msgspec.json.decode(self.messages, type=list[Raw])
            own = ",".join([msgspec.json.decode(first, type=str), *(bytes(one).decode() for one in others)])
        return f"{own}{',' * bool(own)}{self.answer},".encode()


_BASE = ", ".join(EarlierTurn.__struct_fields__)


class EarlierTurns:
    """The turns that those of one write may go on from: parents, earlier ones of the agent, and each other."""

    def __init__(self, db: Db, drafts: Sequence[TurnDraft]) -> None:
        self._db = db
        self._known = {draft.base.row.id: draft.base.row for draft in drafts if draft.base}
        named = {draft.columns["parent"] for draft in drafts if draft.turn.parent is not None}
        parents = list(named - self._known.keys())
        for first in range(0, len(parents), MANY):
            some = parents[first : first + MANY]
            query = f"SELECT {_BASE} FROM turns WHERE id IN ({', '.join('?' * len(some))})"
            for row in db.execute(query, some).fetchall():
                self._known[row[0]] = EarlierTurn(*row)
        self._sibling: tuple[TurnDraft, EarlierTurn] | None = (
            None  # the last turn's, if this is another choice of its request
        )

    def add(self, draft: TurnDraft, base: EarlierTurn) -> None:
        self._known.setdefault(base.id, base)
        if draft.turn.choice == 0 or self._sibling is None:
            self._sibling = draft, base

    def ids_of(self, draft: TurnDraft) -> tuple[EarlierTurn | None, int]:
        """The turn whose path the prompt begins with, and how many ids that are."""
        count, base = draft.turn.shared, self._parent(draft)
        if sibling := self._sibling_of(draft):
            count, base = len(draft.ids.data) // 4, sibling
        if base is None or not 0 < count <= len(draft.ids.data) // 4:
            return None, 0
        while count < base.ids_shared:
            base = self._find(base.ids_from)
        return (base, count) if base.has_ids(draft.ids, count) else (None, 0)

    def messages_of(self, draft: TurnDraft) -> tuple[EarlierTurn | None, int, int]:
        """The turn whose path the messages begin with, how many messages that are, and how many bytes of the next."""
        base, turn = self._sibling_of(draft) or self._parent(draft), draft.turn
        candidates = [base] if base else self._recent(draft) if turn.outside or turn.branch else []
        if not candidates:
            return None, 0, 0
        end, base = max((self._agreement(draft, one) for one in candidates), key=lambda found: found[0])
        shared = bisect_right(draft.ends, end) - 1
        cut = _cut(draft.messages[shared], end - draft.ends[shared]) if shared < len(draft.messages) else 0
        return (base, shared, cut) if shared or cut else (None, 0, 0)

    def _agreement(self, draft: TurnDraft, base: EarlierTurn) -> tuple[int, EarlierTurn]:
        """Up to where the messages are those of a turn's path, and the turn that has that place in its own part."""
        while (start := base.start(draft)) is None:
            base = self._find(base.messages_from)
        return start + common_prefix(draft.text.data[start:], base.text), base

    def _sibling_of(self, draft: TurnDraft) -> EarlierTurn | None:
        """Another choice of the same request, in this write."""
        if self._sibling is None or draft.turn.choice == 0:
            return None
        other, base = self._sibling
        mine = (draft.turn.rollout, draft.turn.attempt) == (other.turn.rollout, other.turn.attempt)
        return base if mine and other.ids.data == draft.ids.data else None

    def _parent(self, draft: TurnDraft) -> EarlierTurn | None:
        base = self._known.get(draft.columns["parent"])
        mine = (draft.columns["rollout"], draft.columns["attempt"])
        return base if base and (base.rollout, base.attempt) == mine and base.id != draft.id else None

    def _recent(self, draft: TurnDraft) -> list[EarlierTurn]:
        """The last turns of the same agent. Those of this write are among them once they are in the table."""
        query = f"SELECT {_BASE} FROM turns WHERE rollout = ? AND attempt = ? AND agent = ? ORDER BY seq DESC LIMIT ?"
        mine = [draft.columns[name] for name in ("rollout", "attempt", "agent")]
        found = [EarlierTurn(*row) for row in self._db.execute(query, (*mine, RECENT)).fetchall()]
        return [base for base in found if base.id != draft.id]

    def _find(self, id: str | None) -> EarlierTurn:
        if id not in self._known:
            row = self._db.execute(f"SELECT {_BASE} FROM turns WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise _lost(id)
            self._known[row[0]] = EarlierTurn(*row)
        return self._known[id or ""]


def insert(db: Db, drafts: Sequence[TurnDraft]) -> int:
    """Put turns into the table but for those whose id is there; returns how many are new."""
    bases = EarlierTurns(db, drafts)
    encoded: list[list[Any]] = []
    written: list[EarlierTurn] = []
    for draft in drafts:
        row, base = draft.delta(bases)
        bases.add(draft, base)
        written.append(base)
        encoded.append(row)
    tools = sorted({(draft.tools_hash, draft.tools) for draft in drafts if draft.tools_hash})
    if tools:
        db.executemany("INSERT INTO tool_lists (hash, tools) VALUES (?, ?) ON CONFLICT (hash) DO NOTHING", tools)
    num_new = db.executemany(_INSERT, encoded).rowcount
    for draft, base in zip(drafts, written, strict=True) if num_new == len(drafts) else ():
        draft.row = base
    return num_new


_INSERT = f"INSERT INTO turns ({_COLUMNS}) VALUES ({rows.placeholders(_COLUMNS)}) ON CONFLICT (id) DO NOTHING"
_EMPTY: dict[str, Any] = dict.fromkeys(_FIELDS)
_WRITERS = [(name, kind.write) for name, kind in rows.kinds(Turn).items() if name != "messages"]


def _columns(turn: Turn, replaced: dict[str, Any]) -> dict[str, Any]:
    """A turn's columns but for its messages, with some fields replaced."""
    columns, name = _EMPTY.copy(), ""
    try:
        for name, write in _WRITERS:
            value = replaced[name] if name in replaced else getattr(turn, name)
            columns[name] = value if write is None else write(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StoreError(f"{name!r} of a turn cannot be stored: {error}") from None
    return columns


def _packed(prompt_ids: list[int], base: WrittenTurn) -> HashedBytes | None:
    """The ids of a prompt that begins with its parent's, packed from where that ends."""
    begin = base.prompt_ids
    if prompt_ids[: len(begin)] != begin:
        return None
    return HashedBytes(base.ids.data + _encode("prompt_ids", prompt_ids[len(begin) :]), base.ids)


def _encode(name: str, value: Any) -> Any:
    try:
        if name == "messages":
            return [msgspec.json.encode(message) for message in value]
        return rows.to_json(value) if name == "tools" else rows.to_blob("i", value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StoreError(f"{name!r} of a turn cannot be stored: {error}") from None


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _cut(message: bytes, end: int) -> int:
    """Where a message that shares `end` bytes with another is cut: not within a character, and only where it pays and
    its JSON comes back as it was."""
    end = min(end, len(message) - 1)
    while end > 0 and message[end] & 0xC0 == 0x80:
        end -= 1
    return end if end >= MIN_CUT and msgspec.json.encode(msgspec.json.decode(message)) == message else 0


def common_prefix(a: bytes, b: bytes) -> int:
    """The number of leading bytes two texts share.

    >>> common_prefix(b"abcd", b"abx")
    2
    """
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # by halves: slices are compared much faster than bytes in a loop
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# -- reading -----------------------------------------------------------------------------------------------------------


def read(db: Db, rollout: str, attempt: int) -> tuple[list[rows.Row], dict[str, str]]:
    """The rows of an attempt in the order they were recorded, and the lists of tools they name, for `rebuild`."""
    query = f"SELECT {_COLUMNS} FROM turns WHERE rollout = ? AND attempt = ? ORDER BY seq"
    found = db.execute(query, (rollout, attempt)).fetchall()
    hashes = list({row[-1] for row in found if row[-1] is not None})
    tools: dict[str, str] = {}
    for first in range(0, len(hashes), MANY):
        some = hashes[first : first + MANY]
        named = f"SELECT hash, tools FROM tool_lists WHERE hash IN ({', '.join('?' * len(some))})"
        tools |= dict(db.execute(named, some).fetchall())
    return found, tools


def rebuild(found: Iterable[rows.Row], tools: dict[str, str]) -> list[Turn]:
    """Whole turns in the order their requests began. What several have in common they share: do not change it."""
    offered = {hash: msgspec.json.decode(listed) for hash, listed in tools.items()}
    whole: dict[str, Turn] = {}
    for row in found:
        turn = _rebuild(dict(zip((*_FIELDS, *_OWN), row, strict=True)), whole, offered)
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
        raise _lost(missing.args[0]) from None
    return Turn(**fields, messages=own)


_KINDS = rows.kinds(Turn)


def find(db: Db, id: str) -> Turn | None:
    """A turn by its id, whole."""
    where = db.execute("SELECT rollout, attempt FROM turns WHERE id = ?", (id,)).fetchone()
    if where is None:
        return None
    return next(turn for turn in rebuild(*read(db, *where)) if turn.id == id)


def is_recorded(db: Db, draft: TurnDraft) -> bool:
    """Whether it is there, the same in every field. Another one of the same id is refused."""
    found = find(db, draft.id)
    if found is not None and not draft.is_same(TurnDraft(found)):
        raise StoreError(f"turn {draft.id!r} was recorded before: give each turn an id of its own")
    return found is not None


def _lost(id: str | None) -> StoreError:
    return StoreError(f"turns go on from {id!r}, which is not there: the store is damaged, put a copy back")
