"""The engine behind clients: plays the script, and draws from a random model where the script leaves an answer open."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.config import EngineConfig
from strop.engines.base import Chunk
from strop.engines.embedded.core import Core
from strop.engines.embedded.engine import Arrival, Embedded
from strop.engines.given_answers import GivenAnswer
from strop.engines.scripted import Scripted, ScriptedRequest
from strop.errors import StropError
from strop.gateway.template import Renderer
from strop.models.grammar import TokenMatcher
from strop.types import AnswerGrammar, Sampling

Script = Callable[[ScriptedRequest], str | None]


class HeldScript(Scripted):
    """Plays what the script says. Where that is None, or not what the request's grammar allows, the embedded engine
    draws the answer."""

    @property
    def holds_to_schemas(self) -> bool:
        return True

    def __init__(self, script: Script, renderer: Renderer, folder: Path, drawn: Embedded, context: int) -> None:
        super().__init__(lambda asked: script(asked) or [], renderer, context=context)
        self._decide, self._renderer, self._folder, self._drawn = script, renderer, folder, drawn

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        prompt = list(prompt_ids)
        asked = ScriptedRequest(prompt_ids=prompt, prompt=self._renderer.decode(prompt), sampling=sampling)
        said = self._decide(asked)
        drawn = said is None or not self._allows(sampling.grammar, said)
        engine = self._drawn if drawn else super()
        async for chunk in engine.generate(prompt_ids, sampling, stop_ids=stop_ids):
            yield chunk

    def _allows(self, grammar: AnswerGrammar | None, said: str) -> bool:
        if grammar is None:
            return True
        vocabulary = self._renderer.tokenizer.get_vocab_size()
        matcher = TokenMatcher(self._folder, vocabulary, grammar)
        for token in [*self._renderer.encode(said), self._renderer.end_of_turn]:
            if not matcher.find_allowed()[token // 32] >> (token % 32) & 1:
                return False
            matcher.take(token)
        return True


class SameProcess:
    """A link to a core in this very process: steps are taken between the event loop's other business."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._ids = itertools.count()
        self._streams: dict[int, asyncio.Queue[Arrival]] = {}

    @property
    def context(self) -> int:
        return self.core.context

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], to: asyncio.Queue[Arrival]
    ) -> int:
        id = next(self._ids)
        try:
            self.core.add(id, prompt_ids, sampling, stop_ids)
            self._streams[id] = to
        except StropError as error:
            to.put_nowait(error)
        return id

    def cancel(self, id: int) -> None:
        self._streams.pop(id, None)
        self.core.cancel(id)

    async def wait_until_idle(self) -> None: ...

    async def load(self, version: str) -> None:
        self.core.load(version)

    async def score_answers(self, answers: list[GivenAnswer]) -> list[list[float]]:
        raise AssertionError("nothing is scored here")

    async def work(self) -> None:
        while True:
            for id, arrival in self.core.step() if self.core.busy else ():
                if id in self._streams:
                    self._streams[id].put_nowait(arrival)
            await asyncio.sleep(0 if self.core.busy else 0.01)


@asynccontextmanager
async def open_random(folder: Path, vocabulary: int) -> AsyncIterator[Embedded]:
    """The embedded engine with a model that knows nothing: what follows a schema here does so because it must."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=65_536, tie_word_embeddings=True,
    )  # fmt: skip
    core = Core(LlamaForCausalLM(config).eval(), EngineConfig(max_sequences=2), context=65_536, folder=folder)
    link = SameProcess(core)
    work = asyncio.create_task(link.work())
    try:
        yield Embedded(link)
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
