"""Parsing: the same answer whatever the pieces it arrives in, and nothing half given out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.gateway.parse import Call, Detokenizer, Piece, StopStrings, ToolCalls, read_call
from strop.gateway.render import Renderer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = Call("add", {"a": 1})


def parse(text: str, sizes: list[int]) -> tuple[str, list[Call], int]:
    parser = ToolCalls()
    pieces: list[Piece] = []
    at = 0
    while at < len(text):
        size = sizes.pop() if sizes else len(text)
        new = parser.feed(text[at : at + size])
        assert all(piece for piece in new)
        pieces += new
        at += size
    pieces += parser.close()
    words = "".join(piece for piece in pieces if isinstance(piece, str))
    return words, [piece for piece in pieces if isinstance(piece, Call)], parser.malformed


@pytest.mark.parametrize(
    ("text", "words", "calls", "malformed"),
    [
        ("", "", 0, 0),
        ("plain < text <tool> \n", "plain < text <tool> \n", 0, 0),
        (CALL, "", 1, 0),
        (f"Let me see.\n\n{CALL}\n{CALL} \n", "Let me see.", 2, 0),
        (f"{CALL}\nand then", "and then", 1, 0),
        (f"a {CALL} b", "a b", 1, 0),
        (f"a {CALL}\n{CALL}\nb {CALL}\n", "a\nb", 3, 0),
        ("x\n<tool_call>{oops}</tool_call>", "x\n<tool_call>{oops}</tool_call>", 0, 1),
        ("<tool_call>" + CALL[11:-12], "<tool_call>" + CALL[11:-12], 0, 1),
        ("<tool_call>[]</tool_call>\n" + CALL, "<tool_call>[]</tool_call>", 1, 1),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', 0, 1),
    ],
)
@given(sizes=st.lists(st.integers(1, 5), max_size=100))
def test_tool_calls(text: str, words: str, calls: int, malformed: int, sizes: list[int]) -> None:
    assert parse(text, sizes) == (words, [ADD] * calls, malformed)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[1]",
        "[" * 9000,
        '{"name": "f"}',
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": {"x": NaN}}',
    ],
)
def test_what_is_no_call(body: str) -> None:
    assert read_call(body) is None


@given(text=st.text(alphabet="abc", max_size=30), stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4)))
def test_stop_strings(text: str, stops: list[str]) -> None:
    cutter = StopStrings(stops)
    given_out = ""
    for i, letter in enumerate(text):
        given_out += cutter.feed(letter)
        hit = any(stop in text[: i + 1] for stop in stops)
        assert cutter.hit == hit, "noticed with the letter that completes it"
        if hit:
            break
    else:
        given_out += cutter.close()
    if cutter.hit:
        assert text.startswith(given_out)
        assert not any(stop in given_out for stop in stops)
        assert any(text.startswith(stop, len(given_out)) for stop in stops)
    else:
        assert given_out == text


@given(text=st.text(max_size=40), data=st.data())
def test_text_survives_any_chunking(renderer: Renderer, text: str, data: st.DataObject) -> None:
    ids = renderer.encode(text)
    detokenizer = Detokenizer(renderer.spoken)
    pieces: list[str] = []
    while ids:
        size = data.draw(st.integers(1, 4))
        pieces.append(detokenizer.feed(ids[:size]))
        ids = ids[size:]
    pieces.append(detokenizer.close())
    assert "".join(pieces) == renderer.spoken(renderer.encode(text))
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 399), max_size=30))
def test_any_tokens_read_the_same_streamed_or_not(renderer: Renderer, ids: list[int]) -> None:
    one, all_at_once = Detokenizer(renderer.spoken), Detokenizer(renderer.spoken)
    streamed = "".join(one.feed([i]) for i in ids) + one.close()
    assert streamed == all_at_once.feed(ids) + all_at_once.close() == renderer.spoken(ids)
