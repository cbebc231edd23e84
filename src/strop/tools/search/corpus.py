"""Passages of a corpus, one JSON object per line, read as they are asked for.

    {"id": "7", "contents": "\\"Ed Wood\\"\\nEdward Davis Wood Jr. was an American filmmaker."}
    {"id": 7, "title": "Ed Wood", "text": "Edward Davis Wood Jr. was an American filmmaker."}

Both stand for the same passage. A `url` is kept where there is one; other fields are not. A line that is wrong ends the
reading, with a sentence that names it.

Left out: compressed files.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from strop.errors import PlaceError

LONGEST = 64 << 20
"""Most bytes of a line. What is longer is a file of another kind."""
SHAPES = 'a passage is {"id": ..., "contents": ...} or {"id": ..., "title": ..., "text": ...}'


class Passage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One passage, as it is kept and given out. A contents' first line, in quotes, is its title.

    >>> Passage(id="7", contents='"Ed Wood"\\nA filmmaker.').title
    'Ed Wood'
    """

    id: str
    contents: str
    url: str = ""

    @property
    def title(self) -> str:
        return split_title(self.contents)[0]


class _Line(Struct):
    id: str | int
    contents: str | None = None
    title: str | None = None
    text: str | None = None
    url: str | None = None


def split_title(contents: str) -> tuple[str, str]:
    """Title and text. A contents that does not begin with a line in quotes has no title.

    >>> split_title('"Ed Wood"\\nA filmmaker.'), split_title("A filmmaker.")
    (('Ed Wood', 'A filmmaker.'), ('', 'A filmmaker.'))
    """
    first, line_break, rest = contents.partition("\n")
    if line_break and len(first) > 1 and first[0] == first[-1] == '"':
        return first[1:-1], rest
    return "", contents


def read(path: Path) -> Iterator[tuple[int, int, Passage]]:
    """The line of each passage, how many bytes were read so far, and the passage. Raises `PlaceError`."""
    decode = msgspec.json.Decoder(_Line).decode
    done = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
                done += len(line)
                where = f"{path}, line {number}"
                if len(line) > LONGEST:
                    raise PlaceError(f"{where}: longer than {LONGEST >> 20} MiB. Fix: write one passage per line")
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield number, done, _passage(decode, line, where)
    except OSError as error:
        raise PlaceError(f"cannot read the corpus {path}: {error.strerror}. Fix: check the path") from None


def _passage(decode: Callable[[bytes], _Line], line: bytes, where: str) -> Passage:
    try:
        line.decode()  # whatever stands in fields that are not looked at
        found = decode(line)
    except UnicodeDecodeError:
        raise PlaceError(f"{where}: not UTF-8 text. Fix: save the file as UTF-8") from None
    except msgspec.ValidationError as error:
        raise PlaceError(f"{where}: {error}; {SHAPES}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise PlaceError(f"{where}: not valid JSON ({error}). Fix: write one passage per line") from None
    if found.id == "":
        raise PlaceError(f"{where}: its id is empty; {SHAPES}")
    contents = found.contents
    if contents is None:
        if found.text is None:
            raise PlaceError(f"{where}: it has neither contents nor text; {SHAPES}")
        title = " ".join((found.title or "").split())
        contents = f'"{title}"\n{found.text}' if title else found.text
    if not contents.strip():
        raise PlaceError(f"{where}: the passage is empty. Fix: leave such lines out")
    return Passage(id=str(found.id), contents=contents, url=found.url or "")
