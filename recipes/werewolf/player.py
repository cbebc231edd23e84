"""A player: an agent of AgentScope's, with a model, a memory and a place at the table.

What others say is gathered and handed over with the next question, as one message. Turns alternate then, as some chat
templates demand, and every prompt is the one before, the answer and a message more: token for token, since
`OpenAIChatFormatter` sends the player's own words back as they were. (`OpenAIMultiAgentFormatter` writes the whole
history into one message, so that no prompt extends the one before. AgentScope 2 has no message hub.)

A history that is too long loses its oldest half; the gateway then records a branch, `truncated`. Nothing is summarised:
a summary is a model call of its own, and would be trained as a turn of the game.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openai
from agentscope.agent import Agent, InjectionConfig, ReActConfig
from agentscope.credential import OpenAICredential
from agentscope.message import AssistantMsg, Msg, TextBlock, UserMsg
from agentscope.middleware import MiddlewareBase
from agentscope.model import ChatResponse, OpenAIChatModel
from pydantic import SecretStr

from strop import LLM

logging.getLogger("as").setLevel(logging.ERROR)
SHORTEST = 200
"""Characters of a single message that is not cut any more."""


@dataclass(frozen=True)
class Said:
    """What came back: the text, the id of the turn that has it, why there is none (`timeout`, `overflow`), and whether
    an outside model answered. A policy's answers have their turn's id, which begins with the rollout's; a provider's
    have its own, so that nobody here knows the turn's."""

    text: str = ""
    turn: str | None = None
    fault: str | None = None
    outside: bool = False


class Guard(MiddlewareBase):
    """Around every model call: it may take `seconds`; a history that is too long is cut, and the rest asked again."""

    def __init__(self, seconds: float, room: int, brief: str, kept: int, forgot: Callable[[int], None]) -> None:
        self._seconds, self._room, self._brief, self._kept, self._forgot = seconds, room, brief, kept, forgot
        self._tokens_per_byte = 0.0  # of the last prompt: it depends on language and tokenizer
        self.answer_id: str | None = None

    async def on_compress_context(self, agent: Agent, input_kwargs: dict[str, Any], next_handler: Any) -> None:
        """In the place of AgentScope's summaries: forget what leaves no room for an answer, where it is known how much
        there is."""
        messages = agent.state.context
        while self._room and self._tokens_per_byte * self._count(messages) > self._room:
            if len(messages) <= self._kept + 1:
                break
            self._forgot(cut(messages, self._kept))

    async def on_model_call(self, agent: Agent, input_kwargs: dict[str, Any], next_handler: Any) -> ChatResponse:
        self.answer_id = None
        system = input_kwargs["messages"][0]
        while True:
            try:
                response = await self._call(next_handler, [system, *agent.state.context])
                break
            except openai.BadRequestError as error:
                if error.code != "context_length_exceeded" or not (dropped := cut(agent.state.context, self._kept)):
                    raise
                self._forgot(dropped)
        self.answer_id = response.id
        if response.usage:
            self._tokens_per_byte = response.usage.input_tokens / self._count(agent.state.context)
        # AgentScope asks again after nothing but thoughts. A player that says nothing has said so.
        response.content = [*response.content, *([] if _texts(response) else [TextBlock(text="")])]
        return response

    def _count(self, messages: list[Msg]) -> int:
        """Bytes of a prompt."""
        return len((self._brief + "".join(one.get_text_content() or "" for one in messages)).encode())

    async def _call(self, next_handler: Any, messages: list[Msg]) -> ChatResponse:
        async with asyncio.timeout(self._seconds) as limit:
            response = await next_handler(messages=messages)
        if limit.expired():  # AgentScope takes a cancelled call for an answer that was broken off
            raise TimeoutError
        return response


def _texts(response: ChatResponse) -> list[TextBlock]:
    return [block for block in response.content if isinstance(block, TextBlock)]


def cut(messages: list[Msg], kept: int = 0) -> int:
    """Forget the older half of what follows the first `kept`, in place, so that a question begins what is left; of a
    single message its first half. Returns how many characters are gone: 0 if there is too little to cut."""
    before = sum(len(one.get_text_content() or "") for one in messages)
    if len(messages) > kept + 1:
        end = kept + max(1, (len(messages) - kept) // 2)
        while end < len(messages) - 1 and messages[end].role == "assistant":
            end += 1
        del messages[kept:end]
    else:
        text = messages[-1].get_text_content() or ""
        if len(text) < SHORTEST:
            return 0
        messages[-1].content = [TextBlock(text=text[len(text) // 2 :])]
    return before - sum(len(one.get_text_content() or "") for one in messages)


def _user(text: str) -> Msg:
    return UserMsg(name="moderator", content=text)


class Player:
    """`seat` is what AgentScope calls it in requests; `llm` is the model under the name that tells its role."""

    def __init__(
        self, seat: int, brief: str, llm: LLM, http: Any, *, seconds: float, context: int,
        examples: list[tuple[str, str]], forgot: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._guard = Guard(seconds, max(0, context - llm.sampling.max_tokens), brief, 2 * len(examples), forgot)
        self._name, self._turns = f"player-{seat}", f"{llm.rollout}/"
        self._agent = Agent(
            name=self._name,
            system_prompt=brief,
            model=OpenAIChatModel(
                OpenAICredential(api_key=SecretStr(llm.api_key), base_url=llm.base_url),
                llm.model,
                stream=False,
                max_retries=0,  # the client does that, within the player's seconds
                client_kwargs={"http_client": http},
            ),
            middlewares=[self._guard],
            react_config=ReActConfig(max_iters=1),
            injection_config=InjectionConfig(inject_runtime_state=False),  # it would tell the time of day
        )
        for question, answer in examples:
            self._agent.state.context += [_user(question), AssistantMsg(name=self._name, content=answer)]
        self._heard: list[str] = []

    def hear(self, line: str) -> None:
        self._heard.append(line)

    async def answer(self, question: str) -> Said:
        """Whatever the model does with it. A model that cannot answer at all (5xx) is the rollout's error."""
        heard, self._heard = self._heard, []
        try:
            reply = await self._agent.reply(_user("\n".join([*heard, question])))
        except TimeoutError:
            return Said(fault="timeout")
        except openai.BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return Said(fault="overflow")
        text, id = reply.get_text_content() or "", self._guard.answer_id or ""
        return Said(text, id) if id.startswith(self._turns) else Said(text, outside=True)
