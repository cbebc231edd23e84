"""Small Python packages with three bugs each, and what is asked of them afterwards.

A bug is a piece of the right source that is written wrongly. The hidden tests of a package are calls; what they should
come to is what the right source comes to. Neither is ever in the agent's folder, and results are compared outside of
the sandbox in which the repaired source runs: it cannot know what it should say.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bug:
    """`right` stands in the source once; the agent finds `wrong` in its place."""

    right: str
    wrong: str
    issue: str


@dataclass(frozen=True)
class Package:
    """One module of its own name. `known` are calls that its own tests make, which the bugs do not touch."""

    name: str
    source: str
    known: tuple[str, ...]
    hidden: tuple[str, ...]
    bugs: tuple[Bug, ...]

    def files(self, bug: int) -> dict[str, str]:
        """The folder that the agent finds."""
        broken = self.bugs[bug]
        assert self.source.count(broken.right) == 1, f"{self.name}: {broken.right!r} is not there once"
        tests = "\n".join(f"        self.assertEqual({call}, {self.result(call)})" for call in self.known)
        return {
            f"{self.name}.py": self.source.replace(broken.right, broken.wrong),
            f"test_{self.name}.py": TESTS.format(name=self.name, tests=tests),
        }

    def result(self, call: str) -> str:
        """What a call comes to, as Python writes it."""
        space: dict[str, Any] = {}
        exec(self.source, space)
        return repr(eval(call, space))


TESTS = """\
import unittest

from {name} import *


class Known(unittest.TestCase):
    def test_what_works(self):
{tests}
"""

INTERVALS = '''\
"""Intervals of numbers, as pairs (start, end) with start <= end."""


def merge(intervals):
    """The same numbers in as few intervals as possible, in order. Those that touch are one."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def overlap(one, other):
    """What two intervals have in common, or None."""
    start, end = max(one[0], other[0]), min(one[1], other[1])
    return (start, end) if start <= end else None


def gaps(intervals):
    """What lies between the first start and the last end and is in none of them."""
    joined = merge(intervals)
    return [(before[1], after[0]) for before, after in zip(joined, joined[1:])]
'''

TEXTS = '''\
"""Words and lines."""


def wrap(text, width):
    """Lines of at most `width` characters, broken between words. A word that is longer has a line of its own."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return lines + [line] if line else lines


def slug(title):
    """Lower case letters and digits, with one dash for whatever stood between."""
    kept = [c if c.isalnum() else " " for c in title.lower()]
    return "-".join("".join(kept).split())


def initials(name):
    """The first letters of a name's parts, large, each with a dot."""
    return "".join(f"{part[0].upper()}." for part in name.replace("-", " ").split())
'''

STOCK = '''\
"""What is in a shop: names and how many of each."""


class Stock:
    def __init__(self):
        self.counts = {}

    def add(self, name, count=1):
        if count < 1:
            raise ValueError("add at least one")
        self.counts[name] = self.counts.get(name, 0) + count
        return self

    def take(self, name, count=1):
        """Take some away. None is left behind of what is used up."""
        if self.counts.get(name, 0) < count:
            raise ValueError(f"there are not {count} of {name}")
        self.counts[name] -= count
        if not self.counts[name]:
            del self.counts[name]
        return self

    def total(self):
        return sum(self.counts.values())


def restock(counts, wanted):
    """What to order so that there is as much of everything as is wanted, by name in order."""
    missing = {name: count - counts.get(name, 0) for name, count in wanted.items()}
    return {name: missing[name] for name in sorted(missing) if missing[name] > 0}
'''

GRIDS = '''\
"""Lists of rows of equal length."""


def rotate(grid):
    """A quarter turn clockwise."""
    return [list(row) for row in zip(*grid[::-1])]


def neighbours(grid, row, column):
    """The values above, below, left and right of a place, as far as there are any."""
    found = []
    for y, x in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
        if 0 <= y < len(grid) and 0 <= x < len(grid[0]):
            found.append(grid[y][x])
    return found


def flood(grid, row, column, value):
    """A copy in which all that hangs together with a place and has its value has another one."""
    copy, old, to_do = [list(line) for line in grid], grid[row][column], [(row, column)]
    while to_do:
        y, x = to_do.pop()
        if 0 <= y < len(copy) and 0 <= x < len(copy[0]) and copy[y][x] == old != value:
            copy[y][x] = value
            to_do += [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
    return copy
'''

ROMAN = '''\
"""Roman numerals from 1 to 3999."""

SIGNS = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"),
         (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]


def write(number):
    if not 1 <= number <= 3999:
        raise ValueError("there are numerals from 1 to 3999")
    written = ""
    for value, sign in SIGNS:
        written += sign * (number // value)
        number %= value
    return written


def read(numeral):
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    total = 0
    for this, following in zip(numeral, numeral[1:] + " "):
        value = values[this]
        total += -value if values.get(following, 0) > value else value
    return total
'''

QUEUES = '''\
"""A queue of bounded size that forgets what is oldest, and the mean of what is in it."""


class Window:
    def __init__(self, size):
        self.size, self.items = size, []

    def push(self, item):
        self.items.append(item)
        if len(self.items) > self.size:
            self.items.pop(0)
        return self

    def mean(self):
        """0.0 while there is nothing in it."""
        return sum(self.items) / len(self.items) if self.items else 0.0


def moving(values, size):
    """The mean of the last `size` values at each of them."""
    window = Window(size)
    return [window.push(value).mean() for value in values]


def chunks(values, size):
    """Lists of `size` values; the last one has what is left."""
    return [values[i : i + size] for i in range(0, len(values), size)]
'''

CONFIGS = '''\
"""Settings as lines of NAME = VALUE."""


def parse(text):
    """Values are whole numbers, true, false, or text. What follows a # is a remark; later lines win."""
    found = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        name, sign, value = line.partition("=")
        if not sign:
            raise ValueError(f"no = in {line!r}")
        found[name.strip()] = convert(value.strip())
    return found


def convert(value):
    if value in ("true", "false"):
        return value == "true"
    digits = value[1:] if value.startswith("-") else value
    return int(value) if digits.isdigit() else value


def merge(base, changes):
    """Both, the changes winning; tables in both are merged in the same way."""
    merged = dict(base)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge(merged[name], value) if both else value
    return merged
'''

CALENDAR = '''\
"""Days of the Gregorian calendar, as (year, month, day)."""

LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def is_leap(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def length(year, month):
    return LENGTHS[month - 1] + (month == 2 and is_leap(year))


def following(day):
    """The day after."""
    year, month, number = day
    if number < length(year, month):
        return (year, month, number + 1)
    return (year, month + 1, 1) if month < 12 else (year + 1, 1, 1)


def of_year(day):
    """Its number in the year, from 1."""
    year, month, number = day
    return sum(length(year, before) for before in range(1, month)) + number
'''

PACKAGES = (
    Package(
        "intervals",
        INTERVALS,
        known=("merge([(1, 2), (5, 6)])", "overlap((1, 3), (2, 5))"),
        hidden=(
            "merge([(4, 6), (1, 5)])",
            "merge([(1, 3), (3, 5)])",
            "merge([(1, 9), (2, 3), (8, 10)])",
            "merge([])",
            "overlap((1, 2), (2, 4))",
            "overlap((1, 2), (3, 4))",
            "gaps([(5, 6), (1, 2), (2, 3)])",
            "gaps([(1, 10), (2, 3), (12, 13)])",
        ),
        bugs=(
            Bug(
                "if merged and start <= merged",
                "if merged and start < merged",
                "merge() leaves intervals apart that touch: merge([(1, 3), (3, 5)]) gives [(1, 3), (3, 5)] instead of "
                "[(1, 5)].",
            ),
            Bug(
                "max(merged[-1][1], end)",
                "end",
                "merge() loses numbers where one interval lies within another: merge([(1, 9), (2, 3)]) gives [(1, 3)].",
            ),
            Bug(
                "(start, end) if start <= end else None",
                "(start, end) if start < end else None",
                "overlap() says None for intervals that share one number: overlap((1, 2), (2, 4)) should be (2, 2).",
            ),
        ),
    ),
    Package(
        "texts",
        TEXTS,
        known=('wrap("a b", 10)', 'slug("Hello")'),
        hidden=(
            'wrap("one two three", 6)',
            'wrap("one two three", 8)',
            'wrap("extraordinary is long", 4)',
            'wrap("", 5)',
            'slug("Hello,  World!")',
            'slug(" 3 Ways -- to win ")',
            'initials("ada lovelace")',
            'initials("jean-luc picard")',
        ),
        bugs=(
            Bug(
                "len(line) + 1 + len(word) > width",
                "len(line) + len(word) > width",
                'wrap() makes lines that are too long by one: wrap("one two three", 6) has a line "one two" of seven '
                "characters.",
            ),
            Bug(
                '"-".join("".join(kept).split())',
                '"".join(kept).strip().replace(" ", "-")',
                'slug() writes several dashes in a row: slug("Hello,  World!") gives "hello---world" instead of '
                '"hello-world".',
            ),
            Bug(
                'name.replace("-", " ").split()',
                "name.split()",
                'initials() overlooks parts behind a hyphen: initials("jean-luc picard") should be "J.L.P.".',
            ),
        ),
    ),
    Package(
        "stock",
        STOCK,
        known=('Stock().add("nut").counts', 'Stock().add("nut", 3).total()'),
        hidden=(
            'Stock().add("nut", 2).add("nut", 3).counts',
            'Stock().add("nut", 2).take("nut", 2).counts',
            'Stock().add("nut", 3).take("nut").counts',
            'Stock().add("nut", 3).add("bolt").total()',
            'restock({"nut": 1}, {"nut": 4, "bolt": 2})',
            'restock({"nut": 9}, {"nut": 4})',
            'restock({"nut": 4}, {"nut": 4, "axe": 1})',
            'list(restock({}, {"nut": 1, "axe": 1}))',
        ),
        bugs=(
            Bug(
                "self.counts.get(name, 0) + count",
                "count",
                'add() forgets what was there: after add("nut", 2) and add("nut", 3) there should be 5.',
            ),
            Bug(
                "        if not self.counts[name]:\n            del self.counts[name]\n",
                "",
                "Names of what is used up stay in counts with a 0: they should be gone.",
            ),
            Bug(
                "if missing[name] > 0}",
                "if missing[name]}",
                'restock() orders negative amounts: restock({"nut": 9}, {"nut": 4}) should be {}.',
            ),
        ),
    ),
    Package(
        "grids",
        GRIDS,
        known=("rotate([[1]])", "flood([[1]], 0, 0, 2)"),
        hidden=(
            "rotate([[1, 2], [3, 4]])",
            "rotate([[1, 2, 3]])",
            "neighbours([[1, 2], [3, 4]], 0, 0)",
            "neighbours([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 1, 1)",
            "neighbours([[1, 2], [3, 4]], 1, 1)",
            "flood([[1, 1], [0, 1]], 0, 0, 5)",
            "flood([[1, 0], [0, 1]], 0, 0, 5)",
            "flood([[1, 1, 0], [0, 1, 1]], 1, 2, 7)",
        ),
        bugs=(
            Bug(
                "zip(*grid[::-1])",
                "zip(*grid)",
                "rotate() mirrors instead of turning: rotate([[1, 2], [3, 4]]) should be [[3, 1], [4, 2]].",
            ),
            Bug(
                "if 0 <= y < len(grid) and 0 <= x < len(grid[0]):",
                "if y < len(grid) and x < len(grid[0]):",
                "neighbours() of a place at the upper or left edge has values from the other side.",
            ),
            Bug(
                "(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]\n    return copy",
                "(y + 1, x), (y, x + 1)]\n    return copy",
                "flood() spreads down and to the right only: flood([[1, 1], [0, 1]], 1, 1, 5) changes one place.",
            ),
        ),
    ),
    Package(
        "roman",
        ROMAN,
        known=('read("X")', 'read("VI")'),
        hidden=(
            "write(4)",
            "write(1994)",
            "write(3999)",
            "write(40)",
            'read("IV")',
            'read("MCMXCIV")',
            'read("MMXXIII")',
            "[read(write(n)) for n in (9, 49, 444)]",
        ),
        bugs=(
            Bug('(900, "CM"), ', "", "write(1994) gives MDCCCCXCIV instead of MCMXCIV."),
            Bug("number %= value", "number -= value", "write() does not end up right for numbers like 3999 or 30."),
            Bug(
                "values.get(following, 0) > value",
                "values.get(following, 0) >= value",
                'read() is wrong where a sign is repeated: read("XX") should be 20.',
            ),
        ),
    ),
    Package(
        "queues",
        QUEUES,
        known=("Window(2).push(1).items", "chunks([1, 2], 2)"),
        hidden=(
            "Window(2).push(1).push(2).push(3).items",
            "Window(2).mean()",
            "Window(3).push(1).push(2).mean()",
            "moving([1, 2, 3, 4], 2)",
            "moving([4, 8], 5)",
            "chunks([1, 2, 3, 4, 5], 2)",
            "chunks([], 3)",
            "chunks([1, 2, 3, 4], 2)",
        ),
        bugs=(
            Bug(
                "len(self.items) > self.size",
                "len(self.items) >= self.size",
                "A Window of size 2 keeps one item only.",
            ),
            Bug(
                "sum(self.items) / len(self.items) if",
                "sum(self.items) / self.size if",
                "mean() is too small until a Window is full: Window(3).push(1).push(2).mean() should be 1.5.",
            ),
            Bug(
                "range(0, len(values), size)",
                "range(0, len(values) - size + 1, size)",
                "chunks() drops what is left at the end: chunks([1, 2, 3], 2) should be [[1, 2], [3]].",
            ),
        ),
    ),
    Package(
        "configs",
        CONFIGS,
        known=('parse("a = b")', 'merge({"a": 1}, {"b": 2})'),
        hidden=(
            'parse("a = 1\\nb = true")',
            'parse("a = 1 # why\\n# all\\n\\nb = x")',
            'parse("a = -5")',
            'parse("url = http://h?x=1")',
            'parse("a = 1\\na = 2")',
            'merge({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})',
            'merge({"a": 1}, {"a": {"b": 2}})',
            'merge({"a": {"b": 2}}, {"a": 1})',
        ),
        bugs=(
            Bug(
                'line.partition("#")[0].strip()',
                "line.strip()",
                'parse() takes remarks for values: parse("a = 1 # why") should be {"a": 1}.',
            ),
            Bug(
                'digits = value[1:] if value.startswith("-") else value',
                "digits = value",
                'Negative numbers stay text: parse("a = -5") should be {"a": -5}.',
            ),
            Bug(
                "merge(merged[name], value) if both else value",
                "value",
                'merge() loses settings of inner tables: merge({"a": {"b": 1}}, {"a": {"c": 2}}) should have both.',
            ),
        ),
    ),
    Package(
        "calendars",
        CALENDAR,
        known=("following((2021, 5, 3))", "length(2023, 4)"),
        hidden=(
            "is_leap(1900), is_leap(2000), is_leap(2024)",
            "length(2023, 2), length(2024, 2)",
            "following((2023, 2, 28))",
            "following((2024, 2, 28))",
            "following((2023, 12, 31))",
            "following((2023, 4, 30))",
            "of_year((2024, 3, 1))",
            "of_year((2023, 12, 31))",
        ),
        bugs=(
            Bug(
                "(year % 100 != 0 or year % 400 == 0)",
                "year % 100 != 0",
                "is_leap(2000) is False, but 2000 was a leap year.",
            ),
            Bug(
                "(year, month + 1, 1) if month < 12 else (year + 1, 1, 1)",
                "(year, month + 1, 1)",
                "following((2023, 12, 31)) should be (2024, 1, 1).",
            ),
            Bug(
                "range(1, month)) + number",
                "range(1, month + 1)) + number",
                "of_year() counts the month itself: of_year((2021, 1, 9)) should be 9.",
            ),
        ),
    ),
)
BY_NAME = {package.name: package for package in PACKAGES}
