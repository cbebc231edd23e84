"""Agents of well-known frameworks, unchanged, against the gateway: what they are answered and what is recorded.

Every agent (see agents/) asks two questions in one conversation and calls tools in between. `make frameworks` makes the
environments they run in. An agent whose framework is not installed is skipped.
"""

import itertools
import shutil
import sys
from pathlib import Path

import pytest

from strop.gateway.template import Renderer
from strop.types import Turn
from tests.frameworks import environments
from tests.frameworks.model import ANSWERS, PEOPLE, TOGETHER
from tests.frameworks.place import Ended, Place

pytestmark = pytest.mark.frameworks

AGENTS = Path(__file__).parent / "agents"
CHAT, RESPONSES = "chat/completions", "responses"
RESULTS = [*map(str, PEOPLE.values()), str(TOGETHER)]
DELIVERY = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def run(place: Place, environment: str, agent: str, stream: bool) -> Ended:
    """Run an agent, a script with its arguments, in its framework's environment."""
    if not environments.ready(environment):
        pytest.skip(f"{environment} is not installed: run `make frameworks`")
    name, *arguments = [*agent.split(), *(["--stream"] if stream else [])]
    script = AGENTS / name
    if environment in environments.NODE:  # Node looks for packages where a script lies
        script = Path(shutil.copy(script, environments.PLACE / environment))
    ended = await place.run(str(environments.program(environment)), str(script), *arguments)
    assert len(ended.bodies) == len(ended.turns), "an agent was refused, or asked again"
    assert [body.get("stream") or False for body in ended.bodies] == [stream] * len(ended.bodies)
    assert [event.data for event in ended.events if event.kind == "error"] == []
    assert place.outside == []
    return ended


async def test_nothing_gets_out_unnoticed(place: Place) -> None:
    """What the other tests rely on where they say that an agent spoke to nobody but the gateway."""
    script = "import urllib.request as r\ntry: r.urlopen('https://example.com')\nexcept OSError: print('no way out')"
    ended = await place.run(sys.executable, "-c", script)
    assert ended.output == "no way out\n"
    assert place.outside == ["CONNECT example.com:443 HTTP/1.0"]


def check_appends(turns: list[Turn]) -> None:
    """Every turn goes on from the one before, token for token."""
    for before, after in itertools.pairwise(turns):
        assert (after.parent, after.branch) == (before.id, None)
        assert after.shared == len(before.ids)
        assert after.prompt_ids[: after.shared] == before.ids


def results(turn: Turn) -> list[str]:
    """What tools had said before this turn."""
    return [message["content"] for message in turn.messages if message["role"] == "tool"]


CONVERSATIONS = pytest.mark.parametrize(
    ("environment", "agent", "api"),
    [
        ("openai", "openai_agents.py", CHAT),
        ("openai", "openai_agents.py --responses", RESPONSES),
        ("openai", "langgraph_agent.py", CHAT),
        ("openai", "langgraph_agent.py --responses", RESPONSES),
        ("openai", "autogen_agent.py", CHAT),
        ("openai", "agentscope_agent.py", CHAT),
        ("openai", "pydantic_agent.py", CHAT),
        ("openai", "pydantic_agent.py --responses", RESPONSES),
        ("node", "node/agent.mjs", CHAT),
    ],
)


@DELIVERY
@CONVERSATIONS
async def test_one_conversation(place: Place, environment: str, agent: str, api: str, stream: bool) -> None:
    ended = await run(place, environment, agent, stream)
    assert ended.answers == ANSWERS
    assert [turn.finish for turn in ended.turns] == ["tool_calls", "tool_calls", "stop", "stop"]
    assert results(ended.turns[-1]) == RESULTS
    check_appends(ended.turns)
    assert {body["path"].partition("/v1/")[2] for body in ended.bodies} == {api}


@CONVERSATIONS
async def test_thoughts_may_come_back_or_not(thinking: Place, environment: str, agent: str, api: str) -> None:
    """Some frameworks send reasoning back, most drop it; the template shows none either way. What the model thought
    stays where it thought it."""
    ended = await run(thinking, environment, agent, stream=True)
    assert ended.answers == ANSWERS
    assert [turn.answer["reasoning_content"].strip() for turn in ended.turns] == ["The tools know more than I do."] * 4
    assert results(ended.turns[-1]) == RESULTS
    check_appends(ended.turns)


@DELIVERY
async def test_settings_of_its_own_choice_over_chat(place: Place, stream: bool) -> None:
    """An agent that leaves the model to its framework: what that asks for is recorded, and the policy answers."""
    ended = await run(place, "openai", "openai_agents.py --default --chat", stream)
    assert ended.answers == ANSWERS
    check_appends(ended.turns)
    for turn in ended.turns:
        assert turn.requested["model"].startswith("gpt-")
        assert (turn.requested["reasoning_effort"], turn.requested["verbosity"]) == ("none", "low")


@DELIVERY
async def test_settings_of_its_own_choice_over_responses(place: Place, stream: bool) -> None:
    ended = await run(place, "openai", "openai_agents.py --default", stream)
    assert ended.answers == ANSWERS
    check_appends(ended.turns)
    for turn in ended.turns:
        assert turn.requested["model"].startswith("gpt-")
        assert turn.requested["reasoning"]["effort"] == "none"


@DELIVERY
async def test_answer_demanded_as_a_call(place: Place, stream: bool) -> None:
    """An answer with a type is a call, and every turn must make one: the beginning of it is the gateway's, and the
    conversation is gone on from it exactly."""
    ended = await run(place, "openai", "pydantic_agent.py --demanded", stream)
    assert ended.answers == ANSWERS
    assert [turn.finish for turn in ended.turns] == ["tool_calls"] * 4
    assert [turn.requested["tool_choice"] for turn in ended.turns] == ["required"] * 4
    assert results(ended.turns[2]) == RESULTS
    check_appends(ended.turns)


YOUTU = AGENTS / "youtu"


@DELIVERY
@pytest.mark.parametrize("api", [CHAT, RESPONSES])
@pytest.mark.parametrize("settings", ["environment", "yaml"])
async def test_an_agent_made_as_youtu_agent_makes_them(place: Place, settings: str, api: str, stream: bool) -> None:
    """Pointed at the gateway by UTU_LLM_BASE_URL and UTU_LLM_API_KEY, or by its YAML."""
    if not environments.ready("openai"):
        pytest.skip("openai is not installed: run `make frameworks`")
    command = [str(environments.program("openai")), str(YOUTU / "agent.py"), *(["--stream"] if stream else [])]
    if settings == "environment":
        command = ["sh", str(YOUTU / "youtu.sh"), *command]
    else:
        command += ["--config", "cities_at_strop"]
    kind = "responses" if api == RESPONSES else "chat.completions"
    ended = await place.run("env", f"UTU_LLM_TYPE={kind}", *command)
    assert ended.answers == ANSWERS
    assert place.outside == []
    assert [turn.finish for turn in ended.turns] == ["tool_calls", "tool_calls", "stop", "stop"]
    assert results(ended.turns[-1]) == RESULTS
    check_appends(ended.turns)
    assert {body["path"].partition("/v1/")[2] for body in ended.bodies} == {api}
    assert {turn.requested["temperature"] for turn in ended.turns} == {0.3}  # asked for; the policy's own counts


def check_edit(before: Turn, after: Turn, shared: int) -> None:
    """A turn goes on from another, but what the model had said there came back in other words: a branch that shares
    at least `shared` ids with it."""
    assert (after.parent, after.branch) == (before.id, "edited_history")
    assert after.shared >= shared
    assert after.prompt_ids[: after.shared] == before.ids[: after.shared]


@DELIVERY
async def test_smolagents_writes_calls_as_text(place: Place, renderer: Renderer, stream: bool) -> None:
    """It demands a call in every turn, and sends calls back as text, in the order of their ids, with their results as
    words of the user's. To a model that is another history than the one it made: everything before it is shared."""
    ended = await run(place, "openai", "smolagents_agent.py", stream)
    assert ended.answers == ANSWERS
    assert [turn.finish for turn in ended.turns] == ["tool_calls"] * 4
    assert [turn.requested["tool_choice"] for turn in ended.turns] == ["required"] * 4
    for before, after in itertools.pairwise(ended.turns):
        check_edit(before, after, shared=len(before.prompt_ids) - len(renderer.encode(before.requested["lead"])))
    said = [message["content"].strip() for message in ended.turns[-1].messages]
    assert all(text.startswith("Calling tools:\n[{'id': ") for text in said[2::2])
    assert sorted(said[3].splitlines()) == ["2748109", "709037", "Observation:"]
    assert said[5] == f"Observation:\n{TOGETHER}"


@DELIVERY
async def test_smolagents_writes_code_twice(place: Place, stream: bool) -> None:
    """Its other agent writes code, ended by a stop string, and sends the code back with the stop string put on again
    and the same code once more, as a call. Here the model writes as its tokenizer would, so all that it said is
    shared; of the text behind it the model said nothing."""
    ended = await run(place, "openai", "smolagents_agent.py --code", stream)
    assert ended.answers == ANSWERS
    assert [turn.finish for turn in ended.turns] == ["stop"] * 4
    for before, after in itertools.pairwise(ended.turns):
        check_edit(before, after, shared=len(before.ids))
        assert before.answer["content"].endswith(")\n")
        assert after.messages[-2]["content"].startswith(f"{before.answer['content']}</code>\nCalling tools:\n")
    assert "2748109\n709037" in ended.turns[-1].messages[3]["content"]
    assert str(TOGETHER) in ended.turns[-1].messages[5]["content"]


@DELIVERY
async def test_crewai_leaves_out_what_is_said_beside_calls(place: Place, stream: bool) -> None:
    """A call comes back without the text that came with it: a branch. One without text is gone on from exactly. Each of
    the crew's tasks is a conversation of its own, which shares the instructions and the tools."""
    ended = await run(place, "crewai", "crewai_agent.py", stream)
    assert ended.answers == ANSWERS
    looked_up, added, answered, again, bigger = ended.turns
    assert [turn.finish for turn in ended.turns] == ["tool_calls", "tool_calls", "stop", "tool_calls", "stop"]
    assert (looked_up.answer["content"], added.messages[2]["content"]) == ("Let me look it up.", "")
    check_edit(looked_up, added, shared=len(looked_up.prompt_ids))
    check_appends([added, answered])
    assert (again.parent, again.branch) == (looked_up.id, "new_conversation")
    assert again.shared > len(looked_up.prompt_ids) / 2
    check_edit(again, bigger, shared=len(again.prompt_ids))
    assert results(answered) == RESULTS
    assert results(bigger) == RESULTS[:2]
