"""Samples from transcripts: every answer becomes a turn, with the tokens that the model would have seen and said.

The gateway's own code makes them: a prompt extends what was said before it, token for token, and an answer is what the
model's chat template writes for it, up to the end of its turn. So masks, token trees and `policy.history` are those of
a conversation that the model had itself. An answer that nothing comes before has no prompt: it is read, not learnt.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from strop.errors import ConfigError
from strop.gateway.contexts import Contexts, History, extends
from strop.gateway.dialects.base import Json
from strop.gateway.jinja import BadTemplate
from strop.gateway.simulated_model import SimulatedModel
from strop.gateway.template import Renderer
from strop.gateway.transcripts import Transcript, read_transcripts
from strop.types import DATA, Reward, Task, Turn


def read_file(
    name: str, renderer: Renderer, *, history: History, agent: str, policy: str
) -> Iterator[tuple[str, str, Task, list[Reward], list[Turn]]]:
    """The conversations of a file: where each stands, its group, its task, its rewards, its turns."""
    path = Path(name).expanduser()
    for one in read_transcripts(path):
        try:
            turns = list(make_turns(one, renderer, history=history, agent=agent, policy=policy))
        except BadTemplate as error:
            raise ConfigError(
                f"{name}, {one.id}: {str(error).rstrip('.')}. Fix: write the conversation as the model's chat template "
                "takes it, or set policy.template"
            ) from None
        rewards = [Reward(name=key, value=value) for key, value in one.rewards.items()]
        if wrong := next((reward.wrong for reward in rewards if reward.wrong), None):
            raise ConfigError(f"{name}, {one.id}: {wrong}")
        task = one.task if one.task != one.id else f"{path.name}, {one.id}"
        yield one.id, find_group(one), Task(id=task, data={"messages": _find_question(one.messages)}), rewards, turns


def find_group(transcript: Transcript) -> str:
    """What a transcript may be compared with, under one name: the other answer of its line, or else all that have the
    same task and, whatever their `id` says, the very same prompt."""
    if transcript.pair:
        return transcript.id
    learnt = (
        at
        for at, message in enumerate(transcript.messages)
        if message["role"] == "assistant" and at and at not in transcript.unweighted
    )
    prompt = transcript.messages[: next(learnt, None)], transcript.tools
    return f"{transcript.task} {blake2b(msgspec.json.encode(prompt), digest_size=16).hexdigest()}"


def make_turns(
    transcript: Transcript, renderer: Renderer, *, history: History, agent: str = "main", policy: str = "main"
) -> Iterator[Turn]:
    """The turns of a conversation, under ids of their own. Raises `BadTemplate`."""
    messages, tools = transcript.messages, transcript.tools
    contexts, model = Contexts(b""), SimulatedModel(renderer, messages, tools)
    for at, answer in enumerate(messages):
        if answer["role"] != "assistant" or at == 0:
            continue
        asked = contexts.read(messages[:at], tools, variables={})
        prompt = contexts.prompt(renderer, asked, history)
        said = model.say(at, prompt.ids, "stop")
        if said.tail is None:
            raise BadTemplate(f"the model's chat template does not show messages[{at}], which is an answer")
        if not said.end:  # the template writes none here, and a model that stops says one all the same
            said = model.say(at, prompt.ids, renderer.end_of_turn)
        requested: Json = {"tools": tools} if tools and not extends(prompt) else {}
        turn = Turn(
            id=f"transcript/1/{at}",
            rollout="transcript",
            attempt=1,
            agent=agent,
            policy=policy,
            prompt_ids=prompt.ids,
            response_ids=said.ids,
            logprobs=[0.0] * len(said.ids),
            versions=[(0, DATA)],
            requested=requested | ({"weight": 0} if at in transcript.unweighted else {}),
            finish="tool_calls" if answer.get("tool_calls") else "stop",
            parent=prompt.parent,
            shared=prompt.shared,
            branch=prompt.branch,
            messages=messages[:at],
            answer=answer,
            started=float(at),
            ended=float(at),
        )
        contexts.add(turn, asked)
        yield turn


def _find_question(messages: list[Json]) -> list[Json]:
    """What stands before the first answer."""
    first = next((at for at, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[: max(first, 1)]
