"""The tables, and how an older store becomes a newer one.

Written once for every database: `adapt` swaps the few words in which they differ. A store says which version of the
tables it has; one that is older is migrated when it is opened, in one transaction, one that is newer is refused.
"""

from __future__ import annotations

from strop.errors import NewerStore, StoreError

VERSION = 3
"""Rises when the tables change."""

TABLES = """
CREATE TABLE strop (
    version BIGINT NOT NULL,
    changes BIGINT NOT NULL  -- how many changes of status there were; whoever makes one takes the next number
);

CREATE TABLE rollouts (
    seq SERIAL_KEY,  -- the order of enqueueing
    id TEXT NOT NULL UNIQUE, grp TEXT NOT NULL, member BIGINT NOT NULL, task TEXT NOT NULL, mode TEXT NOT NULL,
    seed BIGINT NOT NULL, status TEXT NOT NULL, attempts BIGINT NOT NULL, retries TEXT NOT NULL,
    due DOUBLE PRECISION NOT NULL, created DOUBLE PRECISION NOT NULL, ended DOUBLE PRECISION, cause TEXT, detail TEXT,
    rewards TEXT NOT NULL,
    changed BIGINT NOT NULL  -- the number of its last change of status
);
CREATE INDEX rollouts_status ON rollouts (status, seq);
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
CREATE INDEX attempts_token ON attempts (token) WHERE ended IS NULL;
CREATE INDEX attempts_key ON attempts (key);

CREATE TABLE turns (
    seq SERIAL_KEY, id TEXT NOT NULL UNIQUE, rollout TEXT NOT NULL, attempt BIGINT NOT NULL,
    agent TEXT NOT NULL, policy TEXT NOT NULL, prompt_ids BLOB NOT NULL, response_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL, versions TEXT NOT NULL, sampling TEXT NOT NULL, requested TEXT NOT NULL,
    finish TEXT NOT NULL, parent TEXT, shared BIGINT NOT NULL, branch TEXT, choice BIGINT NOT NULL,
    choices BIGINT NOT NULL, messages TEXT NOT NULL, answer TEXT NOT NULL, started DOUBLE PRECISION NOT NULL,
    ended DOUBLE PRECISION NOT NULL
);
CREATE INDEX turns_attempt ON turns (rollout, attempt);

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

MIGRATIONS: dict[int, str] = {
    # Retries by cause with a pause, events with ids, leases that can be asked for again. Version 1 was SQLite only.
    1: """
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
    # Attempts are found by their key alone.
    2: "CREATE INDEX attempts_key ON attempts (key);",
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


def steps_from(version: int | None, where: str) -> list[str]:
    """The scripts that bring a store of `version` up to date; None: it has no tables yet."""
    if version is None:
        return [TABLES, f"INSERT INTO strop VALUES ({VERSION}, 0)"]
    if version > VERSION:
        raise NewerStore(
            f"{where} was written by a newer strop (store version {version}, this one reads {VERSION}):"
            " update strop: git pull in its clone"
        )
    if missing := [n for n in range(version, VERSION) if n not in MIGRATIONS]:
        raise StoreError(f"{where} has store version {missing[0]}, which no strop ever wrote: choose another store")
    scripts = [MIGRATIONS[n] for n in range(version, VERSION)]
    return [*scripts, f"UPDATE strop SET version = {VERSION}"] if scripts else []
