"""How a family writes calls, piece by piece: what grammars are made of, and the beginnings that are given to models.

begin  before NAME after ARGUMENTS close  between  before NAME after ARGUMENTS close  end
"""

from __future__ import annotations

import re

from msgspec import Struct

from strop.gateway.tool_calls.arguments import Arguments, Json

ANY_NAME = r"""[^\s<>"'{}\[\]()]+"""
ZERO, ONE, ID = "\x000", "\x001", "\x00i"
"""Stand in a form for a number that counts calls, from 0 or from 1, and for nine letters or digits."""
_VARIABLE = re.compile("\x00(.)")
PATTERNS = {"0": r"/0|[1-9][0-9]?/", "1": r"/[1-9][0-9]?/", "i": r"/[A-Za-z0-9]{9}/"}


class CallForm(Struct, frozen=True):
    """`between` is None where an answer has one call. `names` is what the name of a tool may be.
    Where what begins a call has `told_in` in it already, `told_after` stands in the place of `after`."""

    before: str
    after: str
    close: str = ""
    begin: str = ""
    between: str | None = "\n"
    end: str = ""
    arguments: Arguments = Json()
    names: str = ANY_NAME
    told_in: str = ""
    told_after: str = ""

    @property
    def head(self) -> tuple[str, str] | None:
        """What stands before a name in the first call, and after it, as far as that is always the same."""
        before, after = self.begin + self.before, self.after + self.arguments.opening
        if ID in before:
            return None
        return _VARIABLE.sub(r"\1", before), _VARIABLE.sub(r"\1", after.partition(ID)[0])


def split_variables(text: str) -> list[tuple[str, str]]:
    """Text, and the terminal of what stands after it: empty at the end.

    >>> split_variables(f"a:{ONE}>")
    [('a:', '/[1-9][0-9]?/'), ('>', '')]
    """
    parts = _VARIABLE.split(text)
    return [(parts[i], PATTERNS[parts[i + 1]] if i + 1 < len(parts) else "") for i in range(0, len(parts), 2)]
