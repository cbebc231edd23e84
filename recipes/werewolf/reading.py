"""From what a model wrote to what a player said and chose.

An answer is read in three steps: thoughts are taken out, so that nobody else hears them; so is what it says in the name
of others, which is out of turn; then the line with the choice is looked for. A choice without that line is understood
too where only one player is named, for half the credit of the form.
"""

import re
from dataclasses import dataclass

from game import Ask, Reply

CHOICE = re.compile(r"(?:CHOICE|选择)[ \t*]*[:：](?P<said>[^\n]*)", re.IGNORECASE)
SEAT = re.compile(r"(?:player|玩家)[ _-]*#?(?P<after>\d+)|(?P<before>\d+)\s*号", re.IGNORECASE)
NOBODY = re.compile(r"\b(?:nobody|no one|none|pass|abstain)\b|无人|没有人|弃权|放弃", re.IGNORECASE)
SPEAKER = re.compile(
    r"^[ \t>*#]*(?:(?:player|玩家)[ _-]*(?P<after>\d+)|(?P<before>\d+)\s*号(?:玩家)?|moderator|host|法官|主持人)"
    r"[ \t*]*[:：]",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class Reading:
    """`form` is 1 where the answer has the form that was asked for, 0.5 where it is understood without, else 0."""

    reply: Reply
    form: float


def read(text: str, question: Ask) -> Reading:
    """
    >>> vote = Ask("vote", 1, (2, 5))
    >>> read("<think>5 is odd</think>I trust nobody.\\nCHOICE: Player 5", vote)
    Reading(reply=Reply(words='I trust nobody.', choice=5, fault=None), form=1.0)
    >>> read("Player 5, surely.", vote).form, read("It was the wind.", vote).reply.fault
    (0.5, 'unreadable')
    """
    said, out_of_turn = cut_others(drop_thoughts(text), question.seat)
    lines = list(CHOICE.finditer(said))
    words = " ".join(CHOICE.sub("", said).split())
    if not words and not lines:
        return Reading(Reply(fault="out_of_turn" if out_of_turn else "nothing"), 0.0)
    fault = "out_of_turn" if out_of_turn else None
    if not question.options:
        return Reading(Reply(words, fault=fault or (None if words else "nothing")), float(bool(words)))
    if lines and (found := _find(lines[-1]["said"])) is not None:
        return Reading(Reply(words, found or None, fault), 1.0)
    if (found := _find(said)) is not None:
        return Reading(Reply(words, found or None, fault), 0.5)
    return Reading(Reply(words, fault=fault or "unreadable"), 0.0)


def drop_thoughts(text: str) -> str:
    """
    >>> drop_thoughts("<think>I am the wolf.</think>Good morning."), drop_thoughts("so I lie.</think>\\nHello.")
    ('Good morning.', 'Hello.')
    >>> drop_thoughts("Hello. <think>now, as a wolf")
    'Hello.'
    """
    text = re.sub(r"<think(?:ing)?>.*?</think(?:ing)?>", "", text, flags=re.DOTALL | re.IGNORECASE)
    text = re.split(r"</think(?:ing)?>", text, flags=re.IGNORECASE)[-1]  # the prompt had begun the thought
    return re.split(r"<think(?:ing)?>", text, flags=re.IGNORECASE)[0].strip()  # it was cut off


def cut_others(text: str, seat: int) -> tuple[str, bool]:
    """What a player says for itself, and whether it went on in another's name.

    >>> cut_others("Player 3: I saw it.\\nPlayer 4: Me too!", seat=3)
    ('I saw it.', True)
    """
    for found in SPEAKER.finditer(text):
        number = found["after"] or found["before"]
        if number is None or int(number) != seat:
            return _drop_own(text[: found.start()], seat).strip(), True
    return _drop_own(text, seat).strip(), False


def _drop_own(text: str, seat: int) -> str:
    own = (str(seat), None)
    return SPEAKER.sub(lambda found: "" if (found["after"] or found["before"]) in own else found[0], text)


def _find(text: str) -> int | None:
    """The only seat that is named, 0 for nobody; None where none or several are.

    >>> _find("Player 3"), _find("3号玩家"), _find(" nobody."), _find("Player 2 or Player 4"), _find("who?")
    (3, 3, 0, None, None)
    """
    seats = {int((found["after"] or found["before"])[:3]) for found in SEAT.finditer(text)}
    if not seats and re.fullmatch(r"[\s*\"'.]*\d{1,3}[\s*\"'.]*", text):
        seats = {int(re.sub(r"\D", "", text))}
    if len(seats) == 1:
        return seats.pop() or -1  # there is no seat 0, which stands for nobody
    return 0 if not seats and NOBODY.search(text) else None
