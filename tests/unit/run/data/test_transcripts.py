"""Transcripts as turns: what the model would have seen and said, whatever its chat template is like."""

from itertools import pairwise
from pathlib import Path

import pytest

from strop.gateway.jinja import BadTemplate
from strop.gateway.template import Renderer
from strop.gateway.transcripts import SAMPLES, Transcript
from strop.run.data.transcripts import make_turns
from tests import chatml
from tests.unit.gateway.odd_templates import Odd


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml.make(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_a_conversation_is_one_path_of_the_templates_own_text(folder: Path, sample: Transcript) -> None:
    renderer = Renderer.from_folder(folder)
    turns = list(make_turns(sample, renderer, history="sampled"))
    answers = [message for message in sample.messages if message["role"] == "assistant"]
    assert [turn.answer for turn in turns] == answers
    for before, turn in pairwise(turns):
        assert (turn.parent, turn.shared, turn.branch) == (before.id, len(before.ids), None)
        assert turn.prompt_ids[: len(before.ids)] == before.ids
    whole = renderer.text(sample.messages, sample.tools, generate=False)
    assert renderer.decode(turns[-1].ids) == whole.removesuffix("\n")
    assert all(turn.response_ids[-1] == renderer.end_of_turn for turn in turns)
    assert [turn.finish for turn in turns] == ["tool_calls" if "tool_calls" in one else "stop" for one in answers]
    assert turns[0].requested == ({"tools": sample.tools} if sample.tools else {})


@pytest.mark.parametrize("end", ["always", "later", "never"])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_every_answer_is_ended_once(folder: Path, sample: Transcript, end: str) -> None:
    """A template may write the end of a turn only once another message follows, or never: a model that stops says it
    all the same, and must learn to."""
    renderer = Renderer.from_parts(folder, Odd(end=end, mark="<|im_end|>").source)
    for turn in make_turns(sample, renderer, history="sampled"):
        assert renderer.find_end(turn.ids)[0]
        assert not any(renderer.find_end(turn.ids[:n])[0] for n in range(len(turn.prompt_ids) + 1, len(turn.ids)))


def test_an_answer_of_weight_0_is_a_turn_that_says_so(folder: Path) -> None:
    one = Transcript(id="x", messages=SAMPLES[0].messages, unweighted=frozenset({2}))
    marked = [turn.requested.get("weight") for turn in make_turns(one, Renderer.from_folder(folder), history="sampled")]
    assert marked == [0, None, None]


def test_thoughts_that_history_leaves_out_stay_in_their_own_turn(folder: Path) -> None:
    """With history = template a branch begins where they were left out, as when agents are served."""
    messages = [
        {"role": "user", "content": "3 * 4?"},
        {"role": "assistant", "content": "<think>four and four and four</think>12"},
        {"role": "user", "content": "And 5 * 6?"},
        {"role": "assistant", "content": "<think>five times six</think>30"},
    ]
    renderer = Renderer.from_parts(folder, Odd(thoughts="last", mark="<|im_end|>").source)
    one = Transcript(id="x", messages=messages)
    sampled, template = (list(make_turns(one, renderer, history=way)) for way in ("sampled", "template"))
    assert "four and four" in renderer.decode(sampled[0].response_ids)
    assert "four and four" in renderer.decode(sampled[1].prompt_ids)
    assert "four and four" not in renderer.decode(template[1].prompt_ids)
    assert (sampled[1].branch, template[1].branch) == (None, "template_rewrote")


def test_an_answer_that_the_template_does_not_show_is_refused(folder: Path) -> None:
    silent = chatml.TEMPLATE.replace("{{ message.content }}\n{%- for", "{%- for")
    with pytest.raises(BadTemplate, match=r"does not show messages\[2\], which is an answer"):
        list(make_turns(SAMPLES[0], Renderer.from_parts(folder, silent), history="sampled"))
