"""Families' formats; `find` picks one."""

from strop.gateway.formats.families import PLAIN, find

__all__ = ["PLAIN", "find"]
