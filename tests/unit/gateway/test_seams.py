"""Behind what a model said stands what the template writes there, once; where that cannot be known, a branch begins.

The templates say themselves where an answer ends, so that nothing here is asked of the code that is tested.
"""

import random
from dataclasses import asdict
from itertools import product
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from strop.gateway.render import Renderer
from tests.unit.gateway.odd_templates import Message, Odd

EOS = "<|endoftext|>"
MARKS = ("<end>", "<call_over>", "<another>", "<user>", "<assistant>", "<tool>", "<over>", "<call>", "</call>")


def call(n: int) -> Message:
    function = {"name": "f", "arguments": {"a": n, "b": f"c{n}"}}
    return {"id": f"call0000{n}", "type": "function", "function": function}


def results(*numbers: int) -> list[Message]:
    return [{"role": "tool", "content": f"r{n}", "name": "f", "tool_call_id": f"call0000{n}"} for n in numbers]


CHAT: list[Message] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [call(1)]},
    *results(1),
    {"role": "assistant", "content": "Now.", "tool_calls": [call(2), call(3)]},
    *results(2, 3),
    {"role": "assistant", "content": "It is 12."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "<think>so</think>Because."},
    {"role": "user", "content": "Ah."},
]
ANSWERS = [i for i, message in enumerate(CHAT) if message["role"] == "assistant"]


def made(odd: Odd, tokenizer: Tokenizer, *, tokens: bool) -> Renderer:
    """With the marks as tokens of the tokenizer's, or as mere text."""
    if tokens:
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return Renderer(tokenizer, odd.source, specials={"eos_token": EOS}, tools="template")


def faults(odd: Odd, renderer: Renderer) -> list[str]:
    """What is wrong behind any answer of the conversation, ended in any way."""
    found: list[str] = []
    for at in ANSWERS:
        upto = next((i for i in ANSWERS if i > at), len(CHAT))
        rest, body, end = odd.rest(CHAT[:upto], at), odd.body(CHAT[at]), odd.ended(CHAT[at])
        prompt = renderer.prompt(CHAT[:at], None)
        for ending in dict.fromkeys([end, EOS, ""]):
            said = renderer.encode_after(prompt, body + ending)
            new = renderer.continuation(CHAT[:upto], None, at + 1, prompt + said, len(said))
            expected = rest if ending else end + rest
            if new is not None and renderer.decode(new) != expected:
                found.append(f"{body + ending!r} + {renderer.decode(new)!r}, not {expected!r}")
    return found


KINDS = {
    "an id once answered": Odd(end="later", ids="later"),
    "an id once answered, another end of calls": Odd(ids="later", calls_mark="<call_over>"),
    "an end once answered": Odd(end="later"),
    "an end once answered, behind white space": Odd(end="later", space="\n"),
    "an end of calls once answered": Odd(end="later", space="\n", calls_mark="<call_over>", ids="later"),
    "every call but the first has an end": Odd(shown="numbered"),
    "every call but the first has an end, once answered": Odd(shown="numbered", end="later", ids="later"),
    "only the first call": Odd(shown="first"),
    "words behind the calls": Odd(words="behind"),
    "words behind the results": Odd(words="later"),
    "no end": Odd(end="never"),
}


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_twice(renderer: Renderer, kind: str, tokens: bool) -> None:
    assert faults(KINDS[kind], made(KINDS[kind], renderer.tokenizer, tokens=tokens)) == []


def test_any_mixture_of_kinds(renderer: Renderer) -> None:
    ways: dict[str, tuple[Any, ...]] = {
        "end": ("always", "later", "never"), "calls_mark": (None, "<call_over>"), "space": ("", "\n"),
        "ids": ("always", "later", "never"), "shown": ("all", "first", "numbered"),
        "words": ("before", "behind", "later"), "thoughts": ("kept", "last"),
    }  # fmt: skip
    mixtures = [Odd(**dict(zip(ways, values, strict=True))) for values in product(*ways.values())]
    for number, odd in enumerate(random.Random(0).sample(mixtures, 120)):
        assert faults(odd, made(odd, renderer.tokenizer, tokens=number % 2 == 0)) == [], asdict(odd)
