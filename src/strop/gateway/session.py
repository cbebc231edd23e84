"""One attempt at the gateway: who may speak, what was said, and the numbers that seeds and ids are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, cast

import msgspec

from strop.gateway.contexts import Contexts, Prompt, extends, turn_number
from strop.gateway.conversation import Conversation
from strop.gateway.template import Tools
from strop.types import Attempt, Rollout, Turn

CALLS = "call"
"""The split of rollouts that are one request with the server's own key."""


class Session:
    """Belongs to one attempt. `in_flight` counts its requests at work."""

    def __init__(self, rollout: Rollout, attempt: Attempt) -> None:
        self.rollout = rollout
        self.attempt = attempt
        self.in_flight = 0
        self.told: set[tuple[str, str]] = set()
        """Of what agents were not served, in which words: once for each agent, not with every request."""
        self.answers: dict[str, dict[str, Any]] = {}
        """What the turns of its conversations said, by their ids: requests may name it and not send it."""
        self._contexts: dict[tuple[str, str], Contexts] = {}
        self._made: dict[str, str] = {}
        self._num_turns = 0
        self._asked: Counter[tuple[str, bytes]] = Counter()

    def contexts(self, agent: str, policy: str) -> Contexts:
        """One agent may speak to several policies, whose tokens are not each other's."""
        key = (agent, policy)
        if key not in self._contexts:
            self._contexts[key] = Contexts(b"[%d,%b,[" % (self.rollout.seed, msgspec.json.encode(agent)), self._made)
        return self._contexts[key]

    def next_turn(self) -> str:
        """The id of the next turn: unique, and in the order requests began."""
        number = self._num_turns
        self._num_turns += 1
        return f"{self.rollout.id}/{self.attempt.number}/{number}"

    @property
    def is_call(self) -> bool:
        """Whether nothing but this request is asked for, so that it may say how tokens are drawn."""
        return self.rollout.mode == "eval" and self.rollout.task.split == CALLS

    def next_seed(self, agent: str, prompt: Prompt) -> int:
        """Fixes what is sampled: `stable_hash` of the rollout's seed, the agent, the prompt's ids and how often they
        were asked before."""
        hashed = cast(blake2b, prompt.hashed).copy()
        asked = (agent, hashed.digest())
        hashed.update(b"],%d]" % self._asked[asked])
        self._asked[asked] += 1
        return int.from_bytes(hashed.digest(), "big") >> 1

    def add(self, turn: Turn, conversation: Conversation) -> None:
        self.contexts(turn.agent, turn.policy).add(turn, conversation)
        if is_conversation(turn):
            self.answers[turn.id] = turn.answer

    def restore(self, turns: Sequence[Turn]) -> None:
        """Take up an attempt that another gateway began: every context is in the store."""
        tools: dict[str | None, Tools] = {}
        for turn in sorted(turns, key=lambda turn: turn_number(turn.id)):  # whatever clocks say
            self._num_turns = max(self._num_turns, turn_number(turn.id) + 1)
            if turn.outside:
                continue
            tools[turn.id] = tools[turn.parent] if extends(turn) else turn.requested.get("tools", [])
            variables, lead = turn.requested.get("chat_template_kwargs"), turn.requested.get("lead", "")
            self.add(turn, Conversation.of(turn.messages, tools[turn.id], variables=variables, lead=lead))
            hashed = self.contexts(turn.agent, turn.policy).prompt_hash(turn.id)
            self._asked[turn.agent, hashed.digest()] += 1


def is_conversation(turn: Turn) -> bool:
    """Whether a turn can be gone on from by its name: a raw prompt's cannot, nor one of an outside model whose request
    was not understood."""
    return bool(turn.messages) and turn.messages[0]["role"] != "prompt"
