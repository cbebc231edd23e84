from msgspec.structs import replace

from strop.trajectory import Sample
from strop.trajectory.exactness import Break, exactness
from strop.types import Rollout, Task, Turn


def turn(number, prompt, response, **more):
    return Turn(
        id=f"g1.0/1/{number}", rollout="g1.0", attempt=1, prompt_ids=prompt, response_ids=response,
        logprobs=[-1.0] * len(response), versions=[(0, "1.0")], finish="stop", started=0.0, ended=1.0, **more,
    )  # fmt: skip


ROLLOUT = Rollout(id="g1.0", group="g1", member=0, task=Task(id="t"), status="succeeded", created=0.0)
FIRST = turn(0, [1, 5, 2], [7, 8])
SECOND = turn(1, [1, 5, 2, 7, 8, 4], [9], parent=FIRST.id, shared=5)
EDITED = turn(2, [1, 5, 3, 3], [6, 6], parent=FIRST.id, shared=2, branch="edited_history")


def test_turns_are_told_apart_and_shared_tokens_count_once():
    outside = replace(FIRST, id="g1.0/1/3", prompt_ids=[], response_ids=[], logprobs=[])
    found = exactness([Sample(ROLLOUT, [FIRST, SECOND, EDITED, outside])])
    assert (found.turns, found.first, found.extended) == (3, 1, 1)
    assert found.breaks == [Break(EDITED.id, "edited_history", 2, 4)]
    assert found.tokens == 5 + 7 + 6
    assert found.unique == 7 + 4
    assert found.metrics() == {"session/exact": 1.0, "session/exact_share": 0.5, "session/edited_history": 1.0}


def test_paths_that_end_inside_others_add_nothing():
    short, long = turn(0, [1], [2]), turn(1, [1, 2, 3], [4])
    assert exactness([Sample(ROLLOUT, [long, short, short])]).unique == 4
    assert exactness([]).unique == 0


def test_a_turn_that_lies_about_its_parent_is_counted():
    lying = replace(SECOND, prompt_ids=[1, 5, 2, 7, 9, 4])
    found = exactness([Sample(ROLLOUT, [FIRST, lying])])
    assert found.extended == 0
    assert found.metrics() == {"session/exact": 0.0, "session/exact_share": 0.0, "session/disagrees": 1.0}
