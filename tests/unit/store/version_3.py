"""Stores as version 3 wrote them: every row of turns with its whole conversation. For tests of the migration."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from strop.store import rows, schema
from strop.types import Turn

TABLES = """
CREATE TABLE strop (
    version BIGINT NOT NULL,
    changes BIGINT NOT NULL
);

CREATE TABLE rollouts (
    seq SERIAL_KEY,
    id TEXT NOT NULL UNIQUE, grp TEXT NOT NULL, member BIGINT NOT NULL, task TEXT NOT NULL, mode TEXT NOT NULL,
    seed BIGINT NOT NULL, status TEXT NOT NULL, attempts BIGINT NOT NULL, retries TEXT NOT NULL,
    due DOUBLE PRECISION NOT NULL, created DOUBLE PRECISION NOT NULL, ended DOUBLE PRECISION, cause TEXT, detail TEXT,
    rewards TEXT NOT NULL,
    changed BIGINT NOT NULL
);
CREATE INDEX rollouts_status ON rollouts (status, seq);
CREATE INDEX rollouts_group ON rollouts (grp);
CREATE INDEX rollouts_changed ON rollouts (changed);

CREATE TABLE attempts (
    rollout TEXT NOT NULL, number BIGINT NOT NULL, runner TEXT NOT NULL, key TEXT NOT NULL,
    started DOUBLE PRECISION NOT NULL, lease_until DOUBLE PRECISION NOT NULL, ended DOUBLE PRECISION, cause TEXT,
    detail TEXT,
    token TEXT,
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
    original TEXT NOT NULL
);
CREATE TABLE lineages (number BIGINT PRIMARY KEY, after BIGINT NOT NULL);
CREATE TABLE steps (
    lineage BIGINT NOT NULL, number BIGINT NOT NULL, metrics TEXT NOT NULL, checkpoint TEXT, digest TEXT,
    superseded BIGINT NOT NULL, time DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (lineage, number)
);
CREATE TABLE consumed (
    lineage BIGINT NOT NULL, number BIGINT NOT NULL, rollout TEXT NOT NULL,
    position BIGINT,
    dropped TEXT,
    PRIMARY KEY (lineage, number, rollout)
) WITHOUT ROWID;
CREATE INDEX consumed_rollout ON consumed (rollout);"""

TURN = (
    "id, rollout, attempt, agent, policy, prompt_ids, response_ids, logprobs, versions, sampling, requested, finish, "
    "parent, shared, branch, choice, choices, messages, answer, started, ended"
)


def fill(execute: Callable[[str, Sequence[Any]], Any], turns: Sequence[Turn], words: dict[str, str]) -> None:
    """Make the tables, and record turns with their rollouts, which run, and their attempts."""
    for statement in schema.adapt(TABLES, words):
        execute(statement, ())
    execute("INSERT INTO strop VALUES (3, 9)", ())
    attempts = sorted({(turn.rollout, turn.attempt) for turn in turns})
    for rollout in sorted({rollout for rollout, _ in attempts}):
        last = max(number for name, number in attempts if name == rollout)
        execute(
            "INSERT INTO rollouts (id, grp, member, task, mode, seed, status, attempts, retries, due, created, "
            "rewards, changed) VALUES (?, 'g', 0, '{\"id\":\"t\"}', 'train', 0, 'running', ?, '{}', 0.0, 0.0, '[]', 1)",
            (rollout, last),
        )
    for rollout, number in attempts:
        execute(
            "INSERT INTO attempts (rollout, number, runner, key, started, lease_until) VALUES (?, ?, 'w', ?, 0.0, 9.9)",
            (rollout, number, f"key-{rollout}-{number}"),
        )
    for turn in turns:
        execute(f"INSERT INTO turns ({TURN}) VALUES ({rows.placeholders(TURN)})", rows.encode(turn))


def write(path: Path, turns: Sequence[Turn]) -> None:
    """A SQLite store."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    fill(db.execute, turns, {"SERIAL_KEY": "INTEGER PRIMARY KEY"})
    db.commit()
    db.close()
