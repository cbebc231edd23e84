"""What is tokenised again is looked up, and what is kept stays small."""

from __future__ import annotations

import tracemalloc

from strop.gateway.kept_tokens import LONGEST, KeptTokens


class Encoder:
    """One token per character, and a count of how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, text: str) -> list[int]:
        self.asked += 1
        return [ord(c) for c in text]


def test_a_text_is_tokenised_once_and_every_list_is_its_callers_own() -> None:
    encoder = Encoder()
    kept = KeptTokens(encoder)
    first = kept.encode("abc")
    first.append(7)
    second = kept.encode("abc")
    second.append(8)
    assert kept.encode("abc") == [97, 98, 99]
    assert encoder.asked == 1


def test_what_is_kept_stays_below_its_limit_and_what_was_used_last_stays() -> None:
    encoder = Encoder()
    kept = KeptTokens(encoder, limit=10_000)
    for n in range(1000):
        kept.encode("always")
        kept.encode(f"text {n}")
        assert kept.size <= 10_000
    assert encoder.asked == 1001  # "always" was never dropped
    assert kept.encode("text 0") == [ord(c) for c in "text 0"]
    assert encoder.asked == 1002


def test_short_texts_count_as_what_they_take() -> None:
    kept = KeptTokens(Encoder(), limit=1 << 20)
    tracemalloc.start()
    for n in range(20_000):
        kept.encode(chr(0x4E00 + n % 20_000))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 2 << 20


def test_what_is_long_is_not_kept() -> None:
    encoder = Encoder()
    kept = KeptTokens(encoder)
    assert kept.encode("a" * (LONGEST + 1)) == kept.encode("a" * (LONGEST + 1))
    assert encoder.asked == 2
    assert kept.size == 0
