"""Conversations of files, in the shapes that training files have."""

import json
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError
from strop.gateway.transcripts import Transcript, read_transcripts

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


def read(tmp_path: Path, *lines: Any) -> list[Transcript]:
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_transcripts(file)


def test_messages_may_say_that_they_carry_no_loss(tmp_path: Path) -> None:
    (one,) = read(tmp_path, {"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}], "id": "x"})
    assert (one.unweighted, one.task, len(one.messages)) == ({1}, "x", 4)
    assert all("weight" not in message for message in one.messages)


def test_what_stands_in_a_prompt_is_read_and_not_learnt(tmp_path: Path) -> None:
    line = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "reward": 0.5}
    for lines in ([line], [line, line]):  # also where the file is one JSON document
        one = read(tmp_path, *lines)[0]
        assert (one.unweighted, len(one.messages), one.rewards) == ({1}, 4, {"reward": 0.5})


def test_a_preference_is_two_conversations_of_one_task(tmp_path: Path) -> None:
    other = ANSWER | {"content": "no"}
    line = {"prompt": [USER], "chosen": [ANSWER], "rejected": [other]}
    better, worse = read(tmp_path, line, {"messages": [USER, ANSWER]})[:2]
    assert (better.messages[1]["content"], worse.messages[1]["content"]) == ("hello", "no")
    assert (better.rewards, worse.rewards) == ({"reward": 1.0}, {"reward": 0.0})
    assert better.task == worse.task


def test_calls_without_ids_are_answered_in_their_order(tmp_path: Path) -> None:
    """As data sets on the Hugging Face hub have them; arguments are JSON there, not the text of it."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": n}}} for n in (1, 2)]
    results = [{"role": "tool", "name": "f", "content": str(n)} for n in (1, 2)]
    (one,) = read(tmp_path, {"messages": [USER, ANSWER | {"tool_calls": calls}, *results, ANSWER]})
    made = one.messages[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in made] == [{"a": 1}, {"a": 2}]
    assert [message["tool_call_id"] for message in one.messages[2:4]] == [call["id"] for call in made]
    assert len({call["id"] for call in made}) == 2


def test_a_string_may_hold_other_line_ends(tmp_path: Path) -> None:
    line = json.dumps({"messages": [USER, ANSWER | {"content": "a\u2028b\x85c"}]}, ensure_ascii=False)
    assert [one.messages[1]["content"] for one in read(tmp_path, line, line)] == ["a\u2028b\x85c"] * 2


def test_conversations_may_stand_in_one_document(tmp_path: Path) -> None:
    one = {"messages": [USER, ANSWER]}
    assert [found.id for found in read(tmp_path, {"a": one, "b": one})] == ["a", "b"]
    assert [found.id for found in read(tmp_path, [one, one])] == ["0", "1"]
    assert [found.id for found in read(tmp_path, one)] == ["line 1"]
    with pytest.raises(ConfigError, match="line 1: no list of messages"):
        read(tmp_path, {"text": "hi"})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"text": "hi"}, "line 2: no list of messages. Fix: write each line as an object with `messages`"),
        ({"prompt": "hi", "completion": "hello"}, "line 2: prompt is not a list of messages. Fix: write it as"),
        ({"prompt": [USER], "chosen": [ANSWER]}, "line 2: it has one of chosen and rejected. Fix: give both"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "line 2: a message has weight 0.5. Fix: write 0 or 1"),
        (
            {"messages": [{"role": "wizard", "content": "hi"}]},
            "line 2: messages[0] has role 'wizard'. Fix: write one of",
        ),
        ({"messages": ["hi"]}, "line 2: messages[0] is 'hi', not an object. Fix: "),
        ({"messages": [USER, ANSWER], "reward": 10**400}, "line 2: "),
        ({"messages": [USER, ANSWER], "reward": [1]}, "line 2: reward is [1], not a number. Fix: "),
        ({"messages": [USER, ANSWER], "reward": "good"}, "line 2: reward is 'good', not a number. Fix: "),
        ({"messages": [USER, ANSWER | {"tool_calls": ["f"]}]}, "line 2: messages[1].tool_calls is not a list of calls"),
        ({"messages": [USER, ANSWER | {"tool_calls": 3}]}, "line 2: messages[1].tool_calls is not a list of calls"),
        ({"messages": [USER, ANSWER | {"content": 3}]}, "line 2: messages[1]: Expected `str | array | null`"),
        ({"messages": [USER, ANSWER], "tools": "f"}, "line 2: tools is a text that is not JSON. Fix: "),
        ('{"messages": ' + "[" * 5000 + "]" * 5000 + "}", "line 2: it has too many brackets within each other. Fix: "),
        ({"messages": [USER, ANSWER], "tools": 3}, "line 2: tools is not a list. Fix: "),
        ("not json", "line 2: JSON is malformed"),
    ],
)
def test_what_is_no_transcript_is_said_with_its_line(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, {"messages": [USER, ANSWER]}, line)
    assert says in str(error.value)
    assert str(error.value).count("Fix: ") == 1


def test_a_reward_beyond_floats_is_said(tmp_path: Path) -> None:
    """Also where the file is one document, which another parser reads."""
    with pytest.raises(ConfigError, match=r"line 1: reward is .*\. Fix: "):
        read(tmp_path, {"messages": [USER, ANSWER], "reward": 10**400})
    with pytest.raises(ConfigError, match=r"line 1: it has too many brackets within each other\. Fix: "):
        read(tmp_path, '{"messages": ' + "[" * 5000 + "]" * 5000 + "}")
