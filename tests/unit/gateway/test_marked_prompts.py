"""Prompts in requests of agents that do not know of them: what is replaced, and what stays as it is."""

import json
import time

import pytest

from strop.config import PromptConfig
from strop.gateway.dialects.base import ApiError
from strop.gateway.marked_prompts import PromptReplacer
from tests.limits import stretch

FIRST = "You book rooms. Today is {date}."
NEXT = "You book rooms. Today is {date}. Look at the size first."


def replace(request: object, find: str = "mark", versions: dict[str, str] | None = None, first: str = FIRST):
    replacer = PromptReplacer({"system": PromptConfig(text=first, find=find)})  # type: ignore[arg-type]
    body = json.dumps(request).encode()
    return replacer.replace(body, {"system": NEXT} if versions is None else versions), body


MARKED = "<strop:system>You book rooms.</strop:system> Be brief."


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        ({"messages": [{"role": "system", "content": MARKED}]}, ("messages", 0, "content")),
        ({"messages": [{"role": "developer", "content": [{"type": "text", "text": MARKED}]}]},
         ("messages", 0, "content", 0, "text")),
        ({"system": MARKED, "messages": []}, ("system",)),
        ({"system": [{"type": "text", "text": MARKED}], "messages": []}, ("system", 0, "text")),
        ({"instructions": MARKED, "input": "hello"}, ("instructions",)),
        ({"input": [{"role": "system", "content": MARKED}]}, ("input", 0, "content")),
    ],
)  # fmt: skip
def test_between_marks(request_: dict[str, object], path: tuple[object, ...]):
    found, _ = replace(request_, versions={"system": r"New \1 words: {date}"}, first="You book rooms.")
    text: object = json.loads(found)
    for key in path:
        text = text[key]  # type: ignore[index]
    assert text == r"New \1 words: {date} Be brief."


@pytest.mark.parametrize("escaped", [b"\\u003c", b"\\u003C"])
def test_a_mark_that_json_escapes(escaped: bytes):
    body = rb'{"messages":[{"role":"system","content":"<strop:system>old</strop:system>"}]}'.replace(b"<", escaped)
    replacer = PromptReplacer({"system": PromptConfig(text="old")})
    assert json.loads(replacer.replace(body, {"system": "new"}))["messages"][0]["content"] == "new"


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": [{"role": "user", "content": MARKED}]},  # what a user says is not a system prompt
        {"messages": [{"role": "system", "content": "nothing is marked"}]},
        {"messages": [{"role": "system", "content": "<strop:other>x</strop:other>"}]},
        {"messages": [{"role": "system", "content": "<strop:system>never closed"}]},
        ["<strop:system>x</strop:system>"],
    ],
)
def test_what_stays_byte_for_byte(request_: object):
    found, body = replace(request_)
    assert found == body


def test_without_a_version_nothing_is_read():
    found, body = replace({"messages": [{"role": "system", "content": MARKED}]}, versions={})
    assert found == body


def test_by_the_words_of_the_first_version():
    """What the agent filled in is filled into the present version."""
    said = "You book rooms. Today is 2025-10-13.\nOnly answer with a name."
    found, _ = replace({"messages": [{"role": "system", "content": said}]}, find="text")
    content = json.loads(found)["messages"][0]["content"]
    assert content == "You book rooms. Today is 2025-10-13. Look at the size first.\nOnly answer with a name."


def test_an_agent_that_sends_the_present_version_itself():
    """It begins with the words of the first one, and is not made longer."""
    said = "You book rooms. Today is Monday. Look at the size first."
    found, body = replace({"messages": [{"role": "system", "content": said}]}, find="text")
    assert found == body


def test_a_placeholder_at_the_end():
    found, _ = replace(
        {"system": "Rooms: Atlas, Nova"}, find="text", first="Rooms: {rooms}", versions={"system": "Choose of {rooms}!"}
    )
    assert json.loads(found)["system"] == "Choose of Atlas, Nova!"


def test_what_is_filled_into_a_mark_is_filled_into_the_version():
    said = "<strop:system>You book rooms. Today is Monday.</strop:system> Be brief."
    found, _ = replace({"system": said})
    assert json.loads(found)["system"] == "You book rooms. Today is Monday. Look at the size first. Be brief."


def test_a_mark_whose_values_cannot_be_told_is_refused():
    """Otherwise the model would read the name of a placeholder."""
    with pytest.raises(ApiError, match="is not its first version"):
        replace({"system": "<strop:system>Book!</strop:system>"})


def test_a_prompt_without_words_is_replaced_once():
    found, _ = replace({"system": "hello"}, find="text", first="{role}", versions={"system": "NEW {role}"})
    assert json.loads(found)["system"] == "NEW hello"


def test_a_placeholder_that_comes_again_says_the_same():
    first, versions = "{a} and {a}", {"system": "twice {a}"}
    found, _ = replace({"system": "x and x"}, find="text", first=first, versions=versions)
    assert json.loads(found)["system"] == "twice x"
    found, body = replace({"system": "x and y!"}, find="text", first=first, versions=versions)
    assert found == body


def test_no_text_takes_long():
    """A pattern of several gaps that backtracks takes minutes for this."""
    first = "Hello {first} {last}, today is {day} {date}."
    began = time.monotonic()
    replace({"system": "Hello " + "word, today is " * 20_000}, find="text", first=first, versions={"system": "x"})
    assert time.monotonic() - began < stretch(5)


def test_broken_json_is_left_to_its_api():
    replacer = PromptReplacer({"system": PromptConfig(text=FIRST)})
    assert replacer.replace(b'{"system": "<strop:system>', {"system": "x"}) == b'{"system": "<strop:system>'
