"""The tables, and how an older store becomes a newer one.

Written once for every database: `adapt` swaps the few words in which they differ. Turns are told in `turns.py`, with
how a column is added to them; the lists of tools and the grammars that they name are in `tool_lists`. A store says
which version of the tables it has; one that is older is migrated when it is opened, in one transaction, one that is
newer is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from strop.errors import NewerStore, StoreError
from strop.store import turns, version_3
from strop.store.transitions import Db

VERSION = max(7, turns.VERSION)
"""Rises when the tables change."""
Script = str | Callable[[Db], None]
"""Statements, or what takes more than statements."""

_BESIDE_TURNS = """
CREATE TABLE strop (
    version BIGINT NOT NULL,
    changes BIGINT NOT NULL  -- how many changes of rollouts there were; each takes the next number
);

CREATE TABLE rollouts (
    seq SERIAL_KEY,  -- the order of enqueueing
    id TEXT NOT NULL UNIQUE, grp TEXT NOT NULL, member BIGINT NOT NULL, task TEXT NOT NULL, mode TEXT NOT NULL,
    seed BIGINT NOT NULL, status TEXT NOT NULL, attempts BIGINT NOT NULL, retries TEXT NOT NULL,
    due DOUBLE PRECISION NOT NULL, created DOUBLE PRECISION NOT NULL, ended DOUBLE PRECISION, cause TEXT, detail TEXT,
    rewards TEXT NOT NULL,
    prompts TEXT NOT NULL,  -- texts by name that the agent is given
    excluded TEXT NOT NULL,  -- turns that are to carry no loss, and why
    tokens TEXT NOT NULL,  -- what became of the sampled tokens in the step that consumed it
    changed BIGINT NOT NULL  -- the number of its last change of status
);
CREATE INDEX rollouts_status ON rollouts (status, seq);
CREATE INDEX rollouts_queued ON rollouts (seq) WHERE status = 'queued';  -- in the order they are leased
CREATE INDEX rollouts_group ON rollouts (grp);
CREATE INDEX rollouts_changed ON rollouts (changed);

CREATE TABLE attempts (
    rollout TEXT NOT NULL, number BIGINT NOT NULL, runner TEXT NOT NULL, key TEXT NOT NULL,
    started DOUBLE PRECISION NOT NULL, lease_until DOUBLE PRECISION NOT NULL, ended DOUBLE PRECISION, cause TEXT,
    detail TEXT,
    token TEXT,  -- of the request that leased it
    PRIMARY KEY (rollout, number)
) WITHOUT ROWID;
CREATE INDEX attempts_running ON attempts (lease_until) WHERE ended IS NULL;
-- Not of those that run: `attempts_running` has them too, and a planner that takes them for few may read them all.
CREATE INDEX attempts_token ON attempts (token) WHERE token IS NOT NULL;
CREATE INDEX attempts_key ON attempts (key);

CREATE TABLE events (
    seq SERIAL_KEY, id TEXT NOT NULL, rollout TEXT NOT NULL, attempt BIGINT NOT NULL, kind TEXT NOT NULL,
    data TEXT NOT NULL, time DOUBLE PRECISION NOT NULL
);
CREATE UNIQUE INDEX events_id ON events (rollout, attempt, id);

CREATE TABLE policies (
    name TEXT PRIMARY KEY, version TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL,
    original TEXT NOT NULL  -- the version before any step, where a line that begins after step 0 starts
);
CREATE TABLE lineages (number BIGINT PRIMARY KEY, after BIGINT NOT NULL);
CREATE TABLE steps (
    lineage BIGINT NOT NULL, number BIGINT NOT NULL, metrics TEXT NOT NULL, checkpoint TEXT, digest TEXT,
    superseded BIGINT NOT NULL, time DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (lineage, number)
);
CREATE TABLE consumed (
    lineage BIGINT NOT NULL, number BIGINT NOT NULL, rollout TEXT NOT NULL,
    position BIGINT,  -- in the step's list; NULL: named only among the dropped
    dropped TEXT,     -- why it carried no loss
    PRIMARY KEY (lineage, number, rollout)
) WITHOUT ROWID;
CREATE INDEX consumed_rollout ON consumed (rollout);
"""
TABLES = _BESIDE_TURNS + turns.TABLES

MIGRATIONS: dict[int, tuple[Script, ...]] = {
    # Retries by cause with a pause, events with ids, leases that can be asked for again. Version 1 was SQLite only.
    1: (
        """
    ALTER TABLE strop ADD COLUMN changes BIGINT NOT NULL DEFAULT 0;
    UPDATE strop SET changes = (SELECT coalesce(max(changed), 0) FROM rollouts);
    ALTER TABLE rollouts ADD COLUMN retries TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE rollouts ADD COLUMN due DOUBLE PRECISION NOT NULL DEFAULT 0;
    UPDATE rollouts SET retries = '{"lost_runner":{"limit":' || (max_attempts - 1) || ',"wait":0.0},'
        || '"engine_error":{"limit":' || (max_attempts - 1) || ',"wait":1.0}}';
    ALTER TABLE rollouts DROP COLUMN max_attempts;
    ALTER TABLE attempts ADD COLUMN token TEXT;
    CREATE INDEX attempts_token ON attempts (token) WHERE ended IS NULL;
    ALTER TABLE events ADD COLUMN id TEXT NOT NULL DEFAULT '';
    UPDATE events SET id = 'e' || seq;
    DROP INDEX events_attempt;
    CREATE UNIQUE INDEX events_id ON events (rollout, attempt, id);
    """,
    ),
    # Attempts are found by their key alone.
    2: ("CREATE INDEX attempts_key ON attempts (key);",),
    # Rows of turns hold what each adds.
    3: (version_3.BEFORE, version_3.move_turns, version_3.AFTER),
    # Rollouts keep the prompts that they began with.
    4: ("ALTER TABLE rollouts ADD COLUMN prompts TEXT NOT NULL DEFAULT '{}';",),
    # What is to be leased is found among what is queued, and what a request leased before by its token alone.
    5: (
        """
    CREATE INDEX rollouts_queued ON rollouts (seq) WHERE status = 'queued';
    DROP INDEX attempts_token;
    CREATE INDEX attempts_token ON attempts (token) WHERE token IS NOT NULL;
    """,
    ),
    # Turns may be left out by name, and each rollout says which of its tokens were trained.
    6: (
        """
    ALTER TABLE rollouts ADD COLUMN excluded TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE rollouts ADD COLUMN tokens TEXT NOT NULL DEFAULT '{}';
    """,
    ),
}
"""What turns version n into n + 1."""


def adapt(sql: str, words: dict[str, str]) -> list[str]:
    """The statements of a script, without comments, with a database's own words put in.

    >>> adapt("CREATE TABLE a (b BLOB); -- c\\n DROP TABLE a;", {"BLOB": "BYTEA"})
    ['CREATE TABLE a (b BYTEA)', 'DROP TABLE a']
    """
    plain = "\n".join(line.partition("--")[0] for line in sql.splitlines())
    for word, own in words.items():
        plain = plain.replace(word, own)
    return [statement.strip() for statement in plain.split(";") if statement.strip()]


def run(db: Db, script: Script, words: dict[str, str]) -> None:
    """Do one of the steps below, inside a transaction."""
    if not isinstance(script, str):
        return script(db)
    for statement in adapt(script, words):
        db.execute(statement)


def list_migrations(version: int | None, where: str) -> list[Script]:
    """What brings a store of `version` up to date; None: it has no tables yet."""
    if version is None:
        return [TABLES, f"INSERT INTO strop VALUES ({VERSION}, 0)"]
    if version > VERSION:
        raise NewerStore(
            f"{where} was written by a newer strop (store version {version}, this one reads {VERSION}). "
            "Fix: update strop with git pull in its clone"
        )
    scripts: list[Script] = []
    for number in range(version, VERSION):
        # A store older than that gets the turns' table anew, with every column there is.
        columns = turns.added(number + 1) if version >= turns.FIRST else []
        if number not in MIGRATIONS and not turns.added(number + 1):
            raise StoreError(
                f"{where} has store version {number}, which no strop ever wrote. Fix: choose another store"
            )
        scripts += [*MIGRATIONS.get(number, ()), *columns]
    return [*scripts, f"UPDATE strop SET version = {VERSION}"] if version < VERSION else []
