"""Tokens that are held back for a moment lose nothing, keep their order and never outlast their answer's end."""

from hypothesis import given
from hypothesis import strategies as st

from strop.engines.base import Chunk
from strop.engines.embedded.outbox import HOLD, Outbox
from strop.errors import EngineError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def token(id: int, version: str = "1.0", finish=None) -> Chunk:
    return Chunk(ids=[id], logprobs=[-float(id)], version=version, finish=finish)


def test_tokens_wait_until_it_is_time():
    clock = Clock()
    outbox = Outbox(clock)
    assert outbox.take([(1, token(5)), (2, token(6))]) == []
    clock.now = HOLD
    sent = dict(outbox.take([(1, token(7)), (2, token(8))]))
    assert sent[1].ids == [5, 7]
    assert sent[1].logprobs == [-5.0, -7.0]
    assert sent[2].ids == [6, 8]
    assert outbox.take([(1, token(9))]) == []


def test_the_end_of_an_answer_is_not_held_back():
    outbox = Outbox(Clock())
    outbox.take([(1, token(5)), (2, token(6))])
    (id, chunk), *others = outbox.take([(1, token(7, finish="stop")), (2, token(8))])
    assert (id, chunk.ids, chunk.finish, others) == (1, [5, 7], "stop", [])


def test_what_came_before_an_error_goes_out_before_it():
    outbox = Outbox(Clock())
    outbox.take([(1, token(5))])
    error = EngineError("broken")
    assert outbox.take([(1, error)]) == [(1, token(5)), (1, error)]


def test_versions_are_not_mixed():
    outbox = Outbox(Clock())
    outbox.take([(1, token(5))])
    assert outbox.take([(1, token(6, version="1.1"))]) == [(1, token(5))]


def test_nothing_is_sent_of_what_was_cancelled():
    clock = Clock()
    outbox = Outbox(clock)
    outbox.take([(1, token(5))])
    outbox.forget(1)
    clock.now = 2 * HOLD
    assert outbox.take([]) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["1.0", "1.1"]), st.sampled_from([0.0, HOLD / 2, HOLD])),
        max_size=40,
    )
)
def test_every_token_goes_out_once_and_in_order(drawn):
    clock = Clock()
    outbox, sent, versions = Outbox(clock), [], {}
    for n, (id, version, passed) in enumerate(drawn):
        clock.now += passed
        versions[n] = version
        sent += outbox.take([(id, token(n, version))])
    for id in range(4):
        sent += outbox.take([(id, token(100 + id, "1.2", finish="stop"))])
    for id in range(4):
        chunks = [chunk for of, chunk in sent if of == id]
        assert [i for chunk in chunks for i in chunk.ids] == [n for n, d in enumerate(drawn) if d[0] == id] + [100 + id]
        assert all(versions.get(i, "1.2") == chunk.version for chunk in chunks for i in chunk.ids)
