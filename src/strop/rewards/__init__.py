"""What an answer is worth: rewards that agents, reward functions and recipes import. docs/guides/rewards.md shows them.

    text          exact_match f1 contains
    extract       last_boxed after_hashes last_tag last_number
    mathematics   math_equal
    sql           sql_match
    forms         has_format valid_tool_calls soft_overlong
    judge         Judge, a model that grades answers; read_grade
    pairs         Pairwise, a model that compares the answers of a group

Nothing here knows of runs, stores or policies. What is more than a number is a Verdict: a value and the reason for it.
"""

from strop.rewards.extract import after_hashes, last_boxed, last_number, last_tag
from strop.rewards.formats import has_format, soft_overlong, valid_tool_calls
from strop.rewards.judge import Judge, read_grade
from strop.rewards.math import math_equal
from strop.rewards.pairwise import Pairwise
from strop.rewards.sql import sql_match
from strop.rewards.text import contains, exact_match, f1
from strop.rewards.verdict import Verdict

__all__ = [
    "Judge",
    "Pairwise",
    "Verdict",
    "after_hashes",
    "contains",
    "exact_match",
    "f1",
    "has_format",
    "last_boxed",
    "last_number",
    "last_tag",
    "math_equal",
    "read_grade",
    "soft_overlong",
    "sql_match",
    "valid_tool_calls",
]
