"""Behind what a model said stands what the template writes there, once; where that cannot be known, a branch begins.

The templates say themselves where an answer ends, so that nothing here is asked of the code that is tested.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from strop.gateway.template import Renderer
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
        upto = following(at)
        rest, body, end = odd.rest(CHAT[:upto], at), odd.body(CHAT[at]), odd.ended(CHAT[at])
        prompt = renderer.prompt(CHAT[:at], None)
        for ending in dict.fromkeys([end, EOS, ""]):
            said = renderer.encode_after(prompt, body + ending)
            new = renderer.continuation(CHAT[:upto], None, at + 1, prompt + said, len(said))
            expected = rest if ending else end + rest
            if new is not None and renderer.decode(new) != expected:
                found.append(f"{body + ending!r} + {renderer.decode(new)!r}, not {expected!r}")
    return found


def faults_of_cuts(odd: Odd, renderer: Renderer) -> list[str]:
    """What is wrong behind any answer that was cut off somewhere in its closing."""
    return [
        f"{said!r} + {new!r}, not {expected!r}"
        for at in ANSWERS
        for said, new, expected in cut_off(odd, renderer, at)
        if new not in (None, expected)
    ]


def following(at: int) -> int:
    """Where the next answer stands, or would."""
    return next((i for i in ANSWERS if i > at), len(CHAT))


def cut_off(odd: Odd, renderer: Renderer, at: int) -> Iterator[tuple[str, str | None, str]]:
    """An answer cut off behind each token of its closing: what was said, what is written then, and what should be."""
    upto = following(at)
    body, prompt = odd.body(CHAT[at]), renderer.prompt(CHAT[:at], None)
    whole = body + odd.ended(CHAT[at])
    ids = renderer.encode_after(prompt, whole)
    for n in range(1, len(ids)):
        path, said = prompt + ids[:n], renderer.decode(ids[:n])
        if len(said) < len(body.removesuffix("</call>")) or renderer.find_end(path)[0]:
            continue
        new = renderer.continuation(CHAT[:upto], None, at + 1, path, n)
        yield said, None if new is None else renderer.decode(new), whole[len(said) :] + odd.rest(CHAT[:upto], at)


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
    "two marks at the end": Odd(mark="<end><over>"),
    "two marks at the end of calls": Odd(mark="<end>", calls_mark="<call_over><over>"),
    "two marks at the end, once answered": Odd(mark="<end><over>", end="later"),
    "an end that is no mark": Odd(mark="\n###"),
    "calls without an end": Odd(calls_mark=""),
}


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_twice(renderer: Renderer, kind: str, tokens: bool) -> None:
    found = made(KINDS[kind], renderer.tokenizer, tokens=tokens)
    assert faults(KINDS[kind], found) == []
    assert faults_of_cuts(KINDS[kind], found) == []


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("odd", [Odd(), Odd(mark="<end><over>"), Odd(mark="\n###")], ids=["one", "two", "text"])
def test_what_was_left_unsaid_of_a_closing_is_written(renderer: Renderer, odd: Odd, tokens: bool) -> None:
    """Of two marks both, and none of what stands there already; calls are closed before the turn is."""
    found = made(odd, renderer.tokenizer, tokens=tokens)
    for at in ANSWERS:
        cuts = list(cut_off(odd, found, at))
        assert cuts
        for said, new, expected in cuts:
            assert new == expected, said


def test_a_cut_that_nobody_can_place_is_a_branch(renderer: Renderer) -> None:
    """The second call was begun and is not one; a word behind the calls; an answer that ends as its closing does."""
    odd = Odd(mark="<end><over>")
    found = made(odd, renderer.tokenizer, tokens=False)
    for at, more in ((1, '<call>{"na'), (1, " So."), (1, "</c")):
        prompt = found.prompt(CHAT[:at], None)
        said = found.encode_after(prompt, odd.body(CHAT[at]) + more)
        assert found.continuation(CHAT[: following(at)], None, at + 1, prompt + said, len(said)) is None, more
    chat = [CHAT[0], {"role": "assistant", "content": "It is <end>"}, CHAT[0]]
    prompt = found.prompt(chat[:1], None)
    said = found.encode_after(prompt, "It is <end>")
    assert found.continuation(chat, None, 2, prompt + said, len(said)) is None


def test_any_mixture_of_kinds(renderer: Renderer) -> None:
    ways: dict[str, tuple[Any, ...]] = {
        "end": ("always", "later", "never"), "mark": ("<end>", "<end><over>", "\n###"),
        "calls_mark": (None, "<call_over>"), "space": ("", "\n"),
        "ids": ("always", "later", "never"), "shown": ("all", "first", "numbered"),
        "words": ("before", "behind", "later"), "thoughts": ("kept", "last"),
    }  # fmt: skip
    mixtures = [Odd(**dict(zip(ways, values, strict=True))) for values in product(*ways.values())]
    for number, odd in enumerate(random.Random(0).sample(mixtures, 80)):
        found = made(odd, renderer.tokenizer, tokens=number % 2 == 0)
        assert faults(odd, found) == [], asdict(odd)
        if number % 8 < 2:
            assert faults_of_cuts(odd, found) == [], asdict(odd)
