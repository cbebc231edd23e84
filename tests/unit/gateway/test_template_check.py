"""What `strop doctor` finds wrong, and what it says of templates that want something."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.cli import main
from strop.gateway.continuation import CALLS, END, NO_END, THINKING
from strop.gateway.template import Renderer
from strop.gateway.template_check import choose_samples, examine, look_at, needs
from strop.gateway.transcripts import SAMPLES, Transcript
from tests import chatml
from tests.unit.gateway.odd_templates import Odd
from tests.unit.gateway.test_continuation import CHAT, EOS, KINDS, made

CONVERSATION = Transcript(id="odd", messages=[*CHAT, {"role": "assistant", "content": "Yes."}])
REWRITING = Odd(thoughts="last", ids="later", end="later")
"""History is written otherwise as soon as it goes on, in three ways."""


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_templates_are_right_or_branch(renderer: Renderer, kind: str, tokens: bool) -> None:
    found = look_at(made(KINDS[kind], renderer.tokenizer, tokens=tokens), CONVERSATION)
    assert found.sampled.error is None
    assert found.wrong == []


def test_differences_have_names(renderer: Renderer) -> None:
    found = look_at(made(REWRITING, renderer.tokenizer, tokens=True), CONVERSATION)
    assert {THINKING, CALLS, END} <= {*found.differences}
    assert not found.sampled.stable
    assert look_at(renderer, CONVERSATION).sampled.differences == {}


def _doubled(ids: list[int], renderer: Renderer) -> list[int]:
    return [renderer.end_of_turn, *ids]


def _first_lost(ids: list[int], renderer: Renderer) -> list[int]:
    return ids[1:]


def _one_lost(ids: list[int], renderer: Renderer) -> list[int]:
    return ids[:3] + ids[4:]


def _last_lost(ids: list[int], renderer: Renderer) -> list[int]:
    return ids[:-1]


@pytest.mark.parametrize("change", [_doubled, _first_lost, _one_lost, _last_lost])
@pytest.mark.parametrize("odd", [Odd(), REWRITING], ids=["stable", "rewriting"])
def test_a_renderer_that_errs_is_found_out(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, change: Callable[..., list[int]], odd: Odd
) -> None:
    """Also where the template writes history otherwise, so that no prompt is its own text."""
    continuation = Renderer.continuation

    def changed(self: Renderer, *given: Any) -> list[int] | None:
        ids = continuation(self, *given)
        return ids and change(ids, self)

    monkeypatch.setattr(Renderer, "continuation", changed)
    found = look_at(made(odd, renderer.tokenizer, tokens=True), CONVERSATION)
    assert len(found.sampled.wrong) == len(found.sampled.turns) - 1
    assert found.exact is False
    assert found.equal is False
    assert "the template writes" in found.wrong[0]


def test_a_call_written_twice_is_found_out(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was when what could not be marked in the calls was marked in the words before them."""
    odd = made(REWRITING, renderer.tokenizer, tokens=True)
    after = Renderer.after

    def from_the_words(self: Renderer, messages: Any, tools: Any, served: int) -> str | None:
        text = self.text(messages, tools, generate=True)
        called = messages[served - 1].get("tool_calls")
        return text[text.rindex("<call>") :] if called else after(self, messages, tools, served)

    monkeypatch.setattr(Renderer, "after", from_the_words)
    monkeypatch.setattr(Renderer, "_would_repeat", lambda self, said, rest: False)
    assert any("<call>" in wrong for wrong in look_at(odd, CONVERSATION).sampled.wrong)


def test_an_end_that_nobody_knows_is_found_out(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model says it nevertheless, and it must not stand there twice."""
    odd = made(Odd(end="later"), renderer.tokenizer, tokens=True)
    end = odd.encode("<end>")[0]
    monkeypatch.setattr(odd, "stop_ids", tuple(id for id in odd.stop_ids if id != end))
    monkeypatch.setattr(odd, "_ends", [])
    monkeypatch.setattr(odd, "_end", None)
    assert look_at(odd, CONVERSATION).wrong == [], "a branch"
    monkeypatch.setattr(Renderer, "_would_repeat", lambda self, said, rest: False)
    assert look_at(odd, CONVERSATION).wrong


@pytest.mark.parametrize("odd", [Odd(mark="<end><over>"), Odd()], ids=["words", "calls"])
def test_a_closing_that_is_lost_is_found_out(renderer: Renderer, monkeypatch: pytest.MonkeyPatch, odd: Odd) -> None:
    """As it was when an answer that was cut off was taken to be closed."""
    found = made(odd, renderer.tokenizer, tokens=True)
    right = look_at(found, CONVERSATION)
    assert (right.wrong, right.exact, right.equal) == ([], True, True)
    unsaid = Renderer._find_unsaid
    monkeypatch.setattr(Renderer, "_find_unsaid", lambda self, closing, *given: unsaid(self, "", *given))
    assert look_at(found, CONVERSATION).exact is False


def test_an_end_behind_calls_that_have_none_is_a_named_difference(renderer: Renderer) -> None:
    """What follows them then is the mark of a tool's message, which may end a turn and does not here."""
    for tokens in (True, False):
        odd = made(Odd(calls_mark=""), renderer.tokenizer, tokens=tokens)
        found = examine(odd, CONVERSATION, endings=odd.encode(EOS))
        assert found.wrong == []
        assert NO_END in found.differences


def test_what_a_template_wants_is_said(renderer: Renderer) -> None:
    assert needs(renderer) == []
    demanding = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + chatml.TEMPLATE
    found = Renderer(renderer.tokenizer, demanding, specials={"eos_token": EOS})
    assert len(needs(found)) == 1
    assert "send `tools` with every request" in needs(found)[0]
    assert all(look_at(found, one).exact for one in choose_samples(found)[:2])
    assert choose_samples(renderer) is SAMPLES
    begun = Renderer(renderer.tokenizer, "{{ bos_token + '' }}" + chatml.TEMPLATE, specials={"eos_token": EOS})
    assert "set bos_token in that file" in needs(begun)[0]
    given = Renderer(renderer.tokenizer, "{{ bos_token + '' }}" + chatml.TEMPLATE,
                     specials={"eos_token": EOS, "bos_token": EOS})  # fmt: skip
    assert needs(given) == []


def test_calls_that_nobody_reads_are_named(renderer: Renderer) -> None:
    """The marks are those of a known family, and what stands between them is not."""
    call = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    assert call in chatml.TEMPLATE
    please = "{{ call.function.name }}, please: {{ call.function.arguments }}"
    other = Renderer(renderer.tokenizer, chatml.TEMPLATE.replace(call, please))
    assert other.format.name == renderer.format.name
    told = {one: needs(one, [look_at(one, SAMPLES[1])]) for one in (renderer, other)}
    assert told[renderer] == []
    assert "none was found in 2 answers" in told[other][0]
    assert "policy.tools to system" in told[other][0]


def test_nothing_compared_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = chatml.make(tmp_path / "model")
    lines = [{"messages": [{"role": "user", "content": "hi"}]}, {"messages": SAMPLES[0].messages}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["doctor", "--tokenizer", str(folder), "--transcripts", str(tmp_path / "chats.jsonl")]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    empty, full = told["conversations"]
    assert (empty["turns"], empty["equals_template"], empty["exact"]) == (0, None, None)
    assert "nothing was compared" in empty["note"]
    assert (full["turns"], full["equals_template"], full["exact"], full["note"]) == (3, True, True, None)
    assert full["wrong"] == full["ended_otherwise"]["wrong"] == []
    assert main(arguments) == 0
    assert "1 of 2 conversations exact" in capsys.readouterr().out
