"""What PostgreSQL says when something failed, as sentences with the fix in them."""

from __future__ import annotations

import re

import psycopg
from psycopg import errors

from strop.errors import PlaceError, StoreError, StropError, Unavailable


def is_away(error: psycopg.Error) -> bool:
    """Whether the server, rather than what it was asked, is the matter. Failing to connect has no code."""
    code = error.sqlstate or "08000"
    return isinstance(error, psycopg.OperationalError) and (code.startswith("08") or code.startswith("57P"))


def read_reason(error: psycopg.Error) -> str:
    """What PostgreSQL says, in one line."""
    said = error.diag.message_primary or str(error).strip().rpartition("failed: ")[2]
    return " ".join(said.split()).removesuffix(".")


def explain_unreachable(error: psycopg.Error, where: str) -> StropError:
    """Why there is no connection, as a sentence with the fix in it. Never with the password."""
    reason = read_reason(error)
    if re.search("(?i)refused|starting up|shut(ting )?down|recovery|closed|lost|terminating|time(d )?out", reason):
        return Unavailable(f"PostgreSQL at {where} does not answer ({reason}). Fix: start it, or correct the address")
    fixes = {
        "password": "give the right user and password, in the address or in ~/.pgpass",
        "database .* does not exist": "make it with `createdb`, or correct the address",
        "role .* does not exist": "make it with `createuser`, or correct the address",
        "pg_hba.conf": "let this machine in there, or correct the address",
        "too many|connection slots": "raise the server's max_connections, or end what uses them up",
    }
    fix = next((fix for said, fix in fixes.items() if re.search(said, reason)), "check the address and the server")
    return PlaceError(f"cannot open {where} ({reason}). Fix: {fix}")


def explain(error: psycopg.Error, where: str) -> StropError:
    """What PostgreSQL says, as a sentence with the fix in it."""
    reason = read_reason(error)
    if isinstance(error, errors.DiskFull):
        return Unavailable(f"the disk of the server of {where} is full. Fix: free some space, then resume the run")
    if isinstance(error, errors.InsufficientPrivilege):
        return PlaceError(f"cannot write {where} ({reason}). Fix: grant that to the user, or choose another schema")
    if isinstance(error, errors.ReadOnlySqlTransaction):
        return Unavailable(f"{where} can only be read ({reason}). Fix: give the address of the primary server")
    if isinstance(error, errors.ProgramLimitExceeded):
        return StoreError(f"something is too long to be stored in {where} ({reason}). Fix: use shorter ids and names")
    if isinstance(error, psycopg.DataError):
        return StoreError(f"a value does not fit into {where}: {reason}. Fix: give a smaller one")
    return StoreError(f"the store {where} failed: {reason}. Fix: see the log of its server")
