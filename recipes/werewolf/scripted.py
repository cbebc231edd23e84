"""A player by rule of thumb, as a server that speaks OpenAI's chat completions: an opponent that needs no model.

    python recipes/werewolf/scripted.py --port 9700

It knows nothing but the messages it is sent, like a model, and always answers the same to the same. Wolves follow each
other and go after whoever claims to be the seer; the seer looks at somebody new and says what it saw; the witch cures
whom she can; all believe their own eyes, then whoever claims to be the seer, and no others.

[gateway.outside.scripted]
url = "http://127.0.0.1:9700/v1"
agents = ["*"]
probability = 0.2                     # a fifth of the players; without it, all that `agents` names

Left out: streaming.
"""

import argparse
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from reading import SEAT
from words import TEXTS, Language, Words

LINES: dict[Language, dict[str, str]] = {
    "en": {
        "seer": "I am the seer: {} is a werewolf.",
        "doubt": "I think {} is a werewolf.",
        "none": "I am not sure yet.",
    },
    "zh": {"seer": "我是预言家：{}是狼人。", "doubt": "我觉得{}是狼人。", "none": "我还不确定。"},
}
ACCUSED = {"en": r"Player (\d+) is a werewolf", "zh": r"(\d+)号玩家是狼人"}
CLAIMS = {"en": r"Player (\d+): I am the seer", "zh": r"(\d+)号玩家：我是预言家"}
EYES, CLAIM = 100, 10
"""How many doubts it weighs to have seen a werewolf, and to be told of one by somebody who claims to be the seer."""


@dataclass(frozen=True)
class Position:
    """What a player knows when it is asked: all that it can be told by its messages."""

    language: Language
    seat: int
    role: str
    pack: set[int]
    kind: str
    options: list[int]
    lines: list[str]

    @classmethod
    def of(cls, messages: list[dict[str, Any]]) -> "Position":
        system, *rest = [_text(one) for one in messages]
        language: Language = "zh" if "号玩家" in system else "en"
        texts = TEXTS[language]
        role = next(one for one in ("wolf", "villager", "seer", "witch", "hunter") if _has(system, texts, one))
        pack = re.search(_pattern(texts["hint wolf"]), system)
        question, _, form = rest[-1].partition(_pattern_start(texts["form"]))
        kind = next(one[4:] for one in texts if one.startswith("ask ") and _ends(question, texts[one]))
        return cls(
            language=language,
            seat=_seats(system)[0],
            role=role,
            pack=set(_seats(pack[0])) if pack else set(),
            kind=kind,
            options=_seats(form),
            lines=[line for text in rest for line in text.splitlines()],
        )

    def accused(self) -> list[int]:
        """Those that may be chosen and seem to be werewolves, the likeliest first."""
        own, counts = {self.seat, *self.pack}, Counter[int]()
        for line in self.lines:
            weight = EYES if _is_sight(line, self.language) else CLAIM if re.match(CLAIMS[self.language], line) else 1
            counts.update({int(one): weight for one in re.findall(ACCUSED[self.language], line)})
        return [
            seat
            for seat, weight in counts.most_common()
            if weight >= CLAIM and seat in self.options and seat not in own
        ]


def answer(messages: list[dict[str, Any]]) -> str:
    """What the player says.

    >>> from game import Ask, deal
    >>> table, words = deal(7), Words("en")
    >>> asked = "You see that Player 9 is a werewolf.\\n" + words.ask(Ask("vote", 6, (1, 9)), 2)
    >>> answer([{"role": "system", "content": words.brief(table, 6)}, {"role": "user", "content": asked}])
    'CHOICE: Player 9'
    """
    at = Position.of(messages)
    words, lines = Words(at.language), LINES[at.language]
    if at.kind == "speak":
        at = Position(**{**vars(at), "options": list(range(1, 10))})
        suspects = at.accused() or ([_draw(at)] if at.role == "wolf" else [])
        if not suspects:
            return lines["none"]
        return lines["seer" if at.role == "seer" else "doubt"].format(words.name(suspects[0]))
    choice = choose(at)
    said = f"{words.choice(choice)}.\n" if at.kind == "plan" else ""
    return said + words.choose(choice)


def choose(at: Position) -> int | None:
    """One of the options, or nobody."""
    accused = at.accused()
    match at.kind:
        case "plan" | "hunt":
            claims = [int(one) for line in at.lines for one in re.findall(CLAIMS[at.language], line)]
            named = [seat for line in at.lines[-4:] for part in re.findall(r"[(（](.*)", line) for seat in _seats(part)]
            return next((seat for seat in [*named, *claims] if seat in at.options), _draw(at))
        case "heal":
            return at.options[0]
        case "poison" | "shoot":
            return accused[0] if accused else None
        case "check":
            seen = {seat for line in at.lines for seat in _seats(line) if _is_sight(line, at.language)}
            return _draw(at, [seat for seat in at.options if seat not in seen])
        case _ if accused:
            return accused[0]
        case _:
            return _draw(at) if set(at.options) - at.pack else None


def _draw(at: Position, among: list[int] | None = None) -> int:
    """Somebody else than the pack, always the same in the same position."""
    free = among or [seat for seat in at.options if seat not in {at.seat, *at.pack}]
    return random.Random("\n".join([str(at.seat), *at.lines])).choice(free)


def _seats(text: str) -> list[int]:
    return [int(found["after"] or found["before"]) for found in SEAT.finditer(text)]


def _is_sight(line: str, language: Language) -> bool:
    return any(re.search(_pattern(TEXTS[language][key]), line) for key in ("check wolf", "check good"))


def _has(system: str, texts: dict[str, str], role: str) -> bool:
    return re.search(_pattern(texts[f"hint {role}"]), system) is not None


def _ends(question: str, template: str) -> bool:
    return re.search(_pattern(template) + r"\s*$", question) is not None


def _pattern(template: str) -> str:
    return re.sub(r"\\\{\w+\\\}", "[^\n]*", re.escape(template))


def _pattern_start(template: str) -> str:
    return template.partition("{")[0]


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        if asked.get("stream"):
            return self._send(400, {"error": {"message": "it does not stream. Fix: ask without stream"}})
        try:
            said = answer(asked["messages"])
        except (StopIteration, IndexError, KeyError):
            return self._send(400, {"error": {"message": "these are no messages of a game of werewolf"}})
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        self._send(200, {
            "id": "scripted", "object": "chat.completion", "created": 0, "model": asked.get("model", "scripted"),
            "choices": [choice], "usage": usage,
        })  # fmt: skip

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a game asks dozens of times."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A werewolf player by rule of thumb, at /v1/chat/completions.")
    parser.add_argument("--port", type=int, default=9700, help="0 picks a free one")
    server = ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
