"""Writing turns: what a turn shares with an earlier one is found and compared, and the row holds the rest (`turns.py`).

    Turn ──TurnDraft──▶ columns, whole ──links──▶ what it goes on from ──encode──▶ its row ──insert──▶ the table

Most turns begin a conversation or go on from the turn before, which was just written (`written.py`): their links show
without a look into the store. The others are compared with the rows of the turns that they may go on from.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, cast

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import astuple, replace

from strop.errors import StoreError, TurnTaken
from strop.store import rows
from strop.store.transitions import Db
from strop.store.turns import COLUMNS, FIELDS, GRAMMAR, MANY, OWN, lost, read, rebuild
from strop.store.written import HashedBytes, WrittenTurn, WrittenTurns
from strop.types import Turn

MIN_CUT = 256
"""Bytes from which on the beginning of a message is worth leaving out."""
RECENT = 8
"""How many earlier turns of its agent are looked at for the messages of a turn that names no parent."""

_ID, _ROLLOUT, _ATTEMPT, _AGENT, _PARENT, _PROMPT_IDS, _RESPONSE_IDS, _REQUESTED, _MESSAGES, _ANSWER = map(
    FIELDS.index,
    ["id", "rollout", "attempt", "agent", "parent", "prompt_ids", "response_ids", "requested", "messages", "answer"],
)
_SAMPLING = FIELDS.index("sampling")
_IDS_SHARED = len(FIELDS) + list(OWN).index("ids_shared")

Links = tuple[str | None, int, str | None, int, int]
"""What a turn goes on from: `ids_from`, `ids_shared`, `messages_from`, `messages_shared` and `messages_cut`."""


def refuse_infinite(turns: Sequence[Turn]) -> None:
    """Raises `StoreError` for logprobs that are not finite."""
    for turn in turns:
        # One sum tells of all that they are finite, but for sums too large for a float.
        if not math.isfinite(sum(turn.logprobs)) and not all(map(math.isfinite, turn.logprobs)):
            raise StoreError(f"turn {turn.id!r} has logprobs that are not finite. Fix: check the engine they are from")


class TurnDraft:
    """A turn on its way into the store: all of its columns, whole."""

    __slots__ = ("_prompt_ids", "columns", "ends", "ids", "links", "named", "row", "text", "tools_hash", "turn")

    def __init__(self, turn: Turn, written: WrittenTurns | None = None) -> None:
        """`written` are the turns before it: if its parent is among them, only what it adds is hashed."""
        base = written.find(turn.rollout, turn.parent) if written and turn.parent is not None else None
        self.turn = turn
        self.row: list[Any] | None = None  # once it is written
        self.columns = columns = list(astuple(turn))
        self.named: dict[str, str] = {}  # the JSON, by its hash, of what is stored once
        self.tools_hash, place = None, _REQUESTED
        try:
            if isinstance(tools := turn.requested.get("tools"), list):
                self.tools_hash = self._name(tools)
                columns[_REQUESTED] = {**turn.requested, "tools": None}  # it keeps its place
            if (grammar := turn.sampling.grammar) is not None:
                named = replace(grammar, text=GRAMMAR + self._name(grammar.text))
                columns[_SAMPLING] = replace(turn.sampling, grammar=named)
            for place, write in _WRITERS:
                columns[place] = write(columns[place])
            place = _PROMPT_IDS
            self._prompt_ids = list(turn.prompt_ids)  # the turn's is the caller's
            self.ids = _pack(self._prompt_ids, base)
            place = _MESSAGES
            self.text, self.ends = _encode_messages(turn.messages, base)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            what = f"{FIELDS[place]!r} of a turn"
            raise StoreError(f"{what} cannot be stored: {error}. Fix: use plain JSON types") from None
        columns[_PROMPT_IDS], columns[_MESSAGES] = self.ids.data, None
        self.links = self._find_links(base)

    def _name(self, value: Any) -> str:
        text = rows.to_json(value)
        hash = blake2b(text.encode(), digest_size=16).hexdigest()
        self.named[hash] = text
        return hash

    def _find_links(self, base: WrittenTurn | None) -> Links | None:
        """What it goes on from where that shows without looking into the store."""
        turn = self.turn
        if turn.parent is None and turn.choice == 0 and turn.branch is None and not turn.outside:
            return None, 0, None, 0, 0  # nothing
        if base is None or turn.choice or base.row[_ATTEMPT] != turn.attempt:
            return None
        row, ids, end = base.row, self.ids.data, 4 * turn.shared
        path = base.ids.data + row[_RESPONSE_IDS]
        begins = base.text.data + row[_ANSWER].encode() + b","
        if not max(row[_IDS_SHARED], 1) <= turn.shared <= len(ids) // 4 or end > len(path):
            return None
        if ids[:end] != path[:end] or not self.text.data.startswith(begins):
            return None
        return row[_ID], turn.shared, row[_ID], len(base.ends), 0

    def is_same(self, other: TurnDraft) -> bool:
        """Whether they are the same in every field."""
        mine, others = (self.columns, self.text.data, self.named), (other.columns, other.text.data, other.named)
        return mine == others

    @property
    def id(self) -> str:
        return self.columns[_ID]

    @property
    def written(self) -> WrittenTurn | None:
        """What later turns may go on from, if this is the one that was written under its id."""
        if self.row is None:
            return None
        return WrittenTurn(tuple(self.row), self._prompt_ids, self.ids, self.text, tuple(self.ends))

    def encode(self, links: Links) -> list[Any]:
        """Its row: all but what it shares with the turns it goes on from."""
        ids_from, count, messages_from, shared, cut = links
        start = self.ends[shared]
        own = self.text.data[start:-1]
        if cut:
            first, rest = own[cut : self.ends[shared + 1] - start - 1], own[self.ends[shared + 1] - start - 1 :]
            own = msgspec.json.encode(first.decode()) + rest
        row = [
            *self.columns,
            ids_from,
            count,
            self.ids.hash(4 * count) if count else None,
            messages_from,
            shared,
            cut,
            self.text.hash(start + cut) if messages_from is not None else None,
            self.tools_hash,
        ]
        row[_MESSAGES] = f"[{own.decode()}]"
        if count:
            row[_PROMPT_IDS] = self.ids.data[4 * count :]
        return row


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

    @classmethod
    def of(cls, row: rows.Row) -> EarlierTurn:
        return cls(*(row[place] for place in _BASE_PLACES))

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
        if start > len(draft.text.data):
            return None
        same = not start or draft.text.hash(start) == self.messages_hash
        return start if same else None

    @property
    def text(self) -> bytes:
        """Its own part of the JSON of its messages and its answer, each with a comma after it."""
        own = self.messages[1:-1]
        if self.messages_cut:
            first, *others = msgspec.json.decode(self.messages, type=list[Raw])
            own = ",".join([msgspec.json.decode(first, type=str), *(bytes(one).decode() for one in others)])
        return f"{own}{',' * bool(own)}{self.answer},".encode()


_BASE = ", ".join(EarlierTurn.__struct_fields__)
_BASE_PLACES = [(*FIELDS, *OWN).index(name) for name in EarlierTurn.__struct_fields__]


class EarlierTurns:
    """The turns that those of one write may go on from: parents, earlier ones of the agent, and each other."""

    def __init__(self, db: Db, drafts: Sequence[TurnDraft]) -> None:
        self._db = db
        self._known: dict[str, EarlierTurn] = {}
        self._rows: dict[str, list[Any]] = {}  # of this write
        parents = list({draft.columns[_PARENT] for draft in drafts if draft.links is None and draft.turn.parent})
        for first in range(0, len(parents), MANY):
            some = parents[first : first + MANY]
            query = f"SELECT {_BASE} FROM turns WHERE id IN ({', '.join('?' * len(some))})"
            for row in db.execute(query, some).fetchall():
                self._known[row[0]] = EarlierTurn(*row)
        # The last turn's row, if this is another choice of its request.
        self._sibling: tuple[TurnDraft, list[Any]] | None = None

    def add(self, draft: TurnDraft, row: list[Any]) -> None:
        self._rows.setdefault(draft.id, row)
        if draft.turn.choice == 0 or self._sibling is None:
            self._sibling = draft, row

    def links_of(self, draft: TurnDraft) -> Links:
        """What a turn goes on from."""
        ids, count = self.ids_of(draft)
        told, shared, cut = self.messages_of(draft)
        return ids and ids.id, count, told and told.id, shared, cut

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
        start, *rest = draft.ends[shared : shared + 2]
        cut = _cut(draft.text.data[start : rest[0] - 1], end - start) if rest else 0
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
        other, row = self._sibling
        mine = (draft.turn.rollout, draft.turn.attempt) == (other.turn.rollout, other.turn.attempt)
        return EarlierTurn.of(row) if mine and other.ids.data == draft.ids.data else None

    def _parent(self, draft: TurnDraft) -> EarlierTurn | None:
        base = self._look_up(draft.columns[_PARENT])
        mine = (draft.columns[_ROLLOUT], draft.columns[_ATTEMPT])
        return base if base and (base.rollout, base.attempt) == mine and base.id != draft.id else None

    def _recent(self, draft: TurnDraft) -> list[EarlierTurn]:
        """The last turns of the same agent. Those of this write are among them once they are in the table."""
        query = f"SELECT {_BASE} FROM turns WHERE rollout = ? AND attempt = ? AND agent = ? ORDER BY seq DESC LIMIT ?"
        mine = [draft.columns[place] for place in (_ROLLOUT, _ATTEMPT, _AGENT)]
        found = [EarlierTurn(*row) for row in self._db.execute(query, (*mine, RECENT)).fetchall()]
        return [base for base in found if base.id != draft.id]

    def _find(self, id: str | None) -> EarlierTurn:
        """A turn as the table has it, or else this write: one that is written again may be linked another way now."""
        if id is not None and id not in self._known:
            row = self._db.execute(f"SELECT {_BASE} FROM turns WHERE id = ?", (id,)).fetchone()
            if row is not None:
                self._known[id] = EarlierTurn(*row)
        if (found := self._look_up(id)) is None:
            raise lost(id)
        return found

    def _look_up(self, id: str | None) -> EarlierTurn | None:
        if id is not None and id not in self._known and id in self._rows:
            self._known[id] = EarlierTurn.of(self._rows[id])
        return self._known.get(id or "")


def insert(db: Db, drafts: Sequence[TurnDraft]) -> int:
    """Put turns into the table but for those whose id is there; returns how many are new."""
    bases = EarlierTurns(db, drafts) if any(draft.links is None for draft in drafts) else None
    encoded: list[list[Any]] = []
    for draft in drafts:
        draft.row = None  # a first try may have been rolled back
        row = draft.encode(draft.links or cast(EarlierTurns, bases).links_of(draft))
        if bases is not None:
            bases.add(draft, row)
        encoded.append(row)
    num_new = insert_rows(db, encoded, merge_named(draft.named for draft in drafts))
    if num_new == len(drafts):
        for draft, row in zip(drafts, encoded, strict=True):
            draft.row = row
    return num_new


def merge_named(all: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {hash: text for named in all for hash, text in named.items()}


def insert_rows(db: Db, encoded: Sequence[Sequence[Any]], named: Mapping[str, str]) -> int:
    """Put rows into the table but for those whose id is there; returns how many are new. `named` are lists of tools and
    grammars by their hash."""
    if given := sorted(named.items()):
        add = "INSERT INTO tool_lists (hash, tools) VALUES (?, ?) ON CONFLICT (hash) DO NOTHING"
        db.executemany(add, given)
    return db.executemany(_INSERT, encoded).rowcount


SELECT = f"SELECT {COLUMNS} FROM turns WHERE id = ?"
"""A turn's row, as it is written."""
_INSERT = f"INSERT INTO turns ({COLUMNS}) VALUES ({rows.placeholders(COLUMNS)}) ON CONFLICT (id) DO NOTHING"
_WRITERS = [
    (place, kind.write)
    for place, (name, kind) in enumerate(rows.kinds(Turn).items())
    if kind.write is not None and name not in ("prompt_ids", "messages")
]


def _pack(prompt_ids: list[int], base: WrittenTurn | None) -> HashedBytes:
    """The ids of a prompt. If it begins with its parent's, their bytes and hashes are known."""
    if base is not None and prompt_ids[: len(base.prompt_ids)] == base.prompt_ids:
        return HashedBytes(base.ids.data + rows.to_blob("i", prompt_ids[len(base.prompt_ids) :]), base.ids)
    return HashedBytes(rows.to_blob("i", prompt_ids))


def _encode_messages(messages: list[dict[str, Any]], base: WrittenTurn | None) -> tuple[HashedBytes, list[int]]:
    """The JSON of messages with a comma after each, and where each of them begins in it, and the end."""
    if not messages:
        return HashedBytes(b""), [0]
    text = msgspec.json.encode(messages)[1:-1] + b","
    ends, told = (0,), None
    if base is not None and text.startswith(base.text.data):
        ends, told = base.ends, base.text
    own = messages[len(ends) - 1 :]
    found = accumulate([len(msgspec.json.encode(message)) + 1 for message in own], initial=ends[-1])
    return HashedBytes(text, told), [*ends[:-1], *found]


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


class RecordedTurns:
    """The turns that are in the table already. An attempt is read once for all of one write."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[str, int], dict[str, Turn]] = {}

    def has(self, db: Db, draft: TurnDraft) -> bool:
        """Whether it is there, the same in every field. Another one of the same id is refused."""
        where = db.execute("SELECT rollout, attempt FROM turns WHERE id = ?", (draft.id,)).fetchone()
        if where is None:
            return False
        place = (where[0], where[1])
        if place not in self._attempts:
            self._attempts[place] = {turn.id: turn for turn in rebuild(*read(db, *place))}
        if not draft.is_same(TurnDraft(self._attempts[place][draft.id])):
            raise TurnTaken(f"turn {draft.id!r} was recorded before. Fix: give each turn an id of its own")
        return True
