"""Sampled tokens to text: the same whatever the pieces it arrives in, and nothing half given out."""

from hypothesis import given
from hypothesis import strategies as st

from strop.gateway.detokenize import Detokenizer, StopStrings
from strop.gateway.template import Renderer


@given(text=st.text(alphabet="abc", max_size=30), stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4)))
def test_stop_strings(text: str, stops: list[str]) -> None:
    cutter = StopStrings(stops)
    given_out = ""
    for i, letter in enumerate(text):
        given_out += cutter.feed(letter)
        hit = any(stop in text[: i + 1] for stop in stops)
        assert (cutter.hit in stops) == hit, "noticed with the letter that completes it"
        if hit:
            break
    else:
        given_out += cutter.close()
    if cutter.hit:
        assert text.startswith(given_out)
        assert not any(stop in given_out for stop in stops)
        assert text.startswith(cutter.hit, len(given_out))
    else:
        assert given_out == text


@given(text=st.text(max_size=40), data=st.data())
def test_text_survives_any_chunking(renderer: Renderer, text: str, data: st.DataObject) -> None:
    ids = renderer.encode(text)
    detokenizer = Detokenizer(renderer.decode_answer)
    pieces: list[str] = []
    while ids:
        size = data.draw(st.integers(1, 4))
        pieces.append(detokenizer.feed(ids[:size]))
        ids = ids[size:]
    pieces.append(detokenizer.close())
    assert "".join(pieces) == renderer.decode_answer(renderer.encode(text))
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 399), max_size=30))
def test_any_tokens_read_the_same_streamed_or_not(renderer: Renderer, ids: list[int]) -> None:
    one, all_at_once = Detokenizer(renderer.decode_answer), Detokenizer(renderer.decode_answer)
    streamed = "".join(one.feed([i]) for i in ids) + one.close()
    assert streamed == all_at_once.feed(ids) + all_at_once.close() == renderer.decode_answer(ids)
