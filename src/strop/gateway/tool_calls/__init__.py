"""Families' formats; `find` picks one."""

from strop.gateway.tool_calls.families import PLAIN, find, hermes_like

__all__ = ["PLAIN", "find", "hermes_like"]
