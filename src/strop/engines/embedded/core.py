"""The embedded engine's inside: continuous batching over a Hugging Face causal LM, one step at a time.

    step = admit (waiting requests into free slots)
         + run (one token of every sequence being decoded, and chunks of prompts up to a budget, in one pass)
         + take (draw a token where a sequence has nothing left to run)

A sequence is its tokens and how many of them have keys in the cache; what has none is run. So a prompt, a prompt that
continues an earlier one, a sequence in mid-answer under new weights and one being decoded are all the same thing.

Sequences of several policies run side by side where those are adapters on one model (adapters.py).

Deterministic mode makes a sequence's bits depend on nothing but its prompt, its sampling and the weights (fixed.py);
otherwise passes are packed (packed.py; on a GPU ragged.py) and keys are used again (slots.py).

Left out: a cache in pages, several GPUs. vLLM has them.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from strop.config import MAIN, EngineConfig
from strop.engines.base import Chunk
from strop.engines.embedded.adapters import Adapters
from strop.engines.embedded.cache import Cache, RowCopy
from strop.engines.embedded.fixed import FixedPasses
from strop.engines.embedded.packed import PackedPasses
from strop.engines.embedded.passes import PROBE, Passes, PassSlice, check, measure_model
from strop.engines.embedded.ragged import RaggedPasses, fits
from strop.engines.embedded.sampler import sample
from strop.engines.embedded.slots import WORTHWHILE, Slots
from strop.engines.matchers import Matchers, take
from strop.errors import ContextOverflow, EngineError
from strop.models.grammar import OutOfGrammar, TokenMatcher, Words
from strop.types import Sampling

BEGIN = 512
"""Columns the cache begins with; it doubles when a sequence needs more."""
LOOK = 0.01
"""Seconds between two looks for new requests while there is nothing to do but to wait for grammars."""


@dataclass
class DecodeRequest:
    """One sequence. The first `filled` of `ids` have their keys in the cache, at row `slot`. It waits until its grammar
    is `compiled`, and is admitted with a `matcher` then."""

    id: int
    policy: str
    ids: list[int]
    num_prompt: int
    sampling: Sampling
    stop_ids: frozenset[int]
    stream: np.random.Generator
    prompt: np.ndarray
    compiled: Future[TokenMatcher] | None = None
    matcher: TokenMatcher | None = None
    allowed: Words | None = None
    slot: int = -1
    filled: int = 0

    @property
    def decoding(self) -> bool:
        """Only the token drawn last is left to run."""
        return self.filled == len(self.ids) - 1 and self.filled >= self.num_prompt

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        if self.ids[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.ids) - self.num_prompt >= self.sampling.max_tokens else None


@dataclass
class Core:
    """Requests in, tokens out. Not thread-safe: one thread calls it. `versions` are those of its policies: of the one
    that the model is, or of the several whose `adapters` it has. `folder` has the model's tokenizer, for grammars."""

    model: Any
    config: EngineConfig
    context: int
    adapters: Adapters | None = None
    folder: Path | None = None
    matchers: Matchers | None = None
    versions: defaultdict[str, str] = field(default_factory=lambda: defaultdict(lambda: "1.0"))
    waiting: dict[int, DecodeRequest] = field(default_factory=dict)
    running: dict[int, DecodeRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout, wanted = measure_model(self.model)
        self.device = layout.device
        self.vocabulary = int(self.model.config.vocab_size)
        deterministic = self.config.deterministic
        usual = 128 if deterministic else 8192 if self.device.type == "cuda" else 512
        self.chunk = self.config.prefill_chunk or usual
        rows = self.config.max_sequences
        if self.config.kv_cache_gib is not None:
            tokens = int(self.config.kv_cache_gib * 2**30) // layout.bytes_per_token
            most = tokens // (1 + layout.spare)
            self.context = min(self.context, most // self.chunk * self.chunk if deterministic else most)
            rows = max(1, min(rows, tokens // max(1, self._width()) - layout.spare))
        if self.context < 2:
            raise EngineError(
                f"engine.kv_cache_gib = {self.config.kv_cache_gib} does not hold one sequence: a token of this model "
                f"takes {layout.bytes_per_token:,} bytes. Fix: raise it"
            )
        width = self._width()
        self.cache = Cache(
            layout,
            rows=rows,
            width=width if deterministic else BEGIN,
            limit=width,
            heads_first=not deterministic and not fits(layout),
        )
        self.cache.adapters = self.adapters
        self.slots = Slots(rows, width, reuse=not deterministic)
        self.passes = self._passes()
        if width >= len(PROBE[0]):
            check(self.model, self.passes, wanted, rows=rows, chunk=self.chunk)

    def _passes(self) -> Passes:
        if self.config.deterministic:
            return FixedPasses(self.model, self.cache, chunk=self.chunk)
        return (RaggedPasses if fits(self.cache.layout) else PackedPasses)(self.model, self.cache)

    def _width(self) -> int:
        """Columns of the cache: in deterministic mode a whole number of chunks, so that the last, padded one fits."""
        return math.ceil(self.context / self.chunk) * self.chunk if self.config.deterministic else self.context

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(
        self, id: int, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], policy: str = MAIN
    ) -> None:
        if not prompt_ids:
            raise EngineError("the prompt is empty. Fix: send at least one token")
        if len(prompt_ids) >= self.context:
            raise ContextOverflow(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {self.context}. Fix: shorten the "
                "history or raise "
                f"policy.context{'' if self.config.kv_cache_gib is None else ' and engine.kv_cache_gib'}"
            )
        if not all(0 <= i < self.vocabulary for i in prompt_ids):
            raise EngineError(f"a prompt id is outside the vocabulary of {self.vocabulary}: is it the right tokenizer?")
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        stream = np.random.Generator(np.random.Philox(key=seed))
        ids = list(prompt_ids)
        prompt, ends, compiled = np.array(ids, np.int32), frozenset(stop_ids), None
        if sampling.grammar is not None:
            if self.matchers is None:
                assert self.folder is not None, "the tokenizer's folder is known where agents ask"
                self.matchers = Matchers(self.folder, self.vocabulary)
            compiled = self.matchers.begin(sampling.grammar)
        self.waiting[id] = DecodeRequest(id, policy, ids, len(ids), sampling, ends, stream, prompt, compiled)

    @torch.inference_mode()  # as in a step: what was made there may only be changed there
    def cancel(self, id: int) -> None:
        self.waiting.pop(id, None)
        if request := self.running.get(id):
            self._end(request, broken=not request.decoding)  # nobody has seen yet whether its keys are numbers

    def load(self, version: str, policy: str = MAIN) -> None:
        """Serve other weights of a policy, which are in place. Nothing computed with the old ones is used again:
        sequences in flight are run once more from their beginning, and go on."""
        self.versions[policy] = version
        if self.adapters is None:
            self.passes.refresh()
        self.slots.forget_owner(self._owner(policy))
        for request in self.running.values():
            if request.policy == policy:
                request.filled = 0

    def _owner(self, policy: str) -> int:
        return self.adapters.number(policy) if self.adapters is not None else 0

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Chunk | EngineError]]:
        """A token for every sequence that has nothing left to run."""
        refused: list[tuple[int, Chunk | EngineError]] = [*self._read_grammars()]
        self._admit()
        work = self._work()
        if not work:
            return refused
        logits = self.passes.run([piece for _, piece in work])
        self.slots.fill([(piece.row, piece.ids) for _, piece in work])
        for request, piece in work:
            request.filled = piece.stop
        ready = [request for request, piece in work if piece.last]
        if not ready:
            return refused
        lost = self._find_masks(ready)  # a GPU is still at work on the logits
        drawn = zip(ready, *sample(logits, ready, precise=self.config.deterministic), strict=True)
        return refused + [
            (request.id, lost.get(request.id) or self._take(request, id, logprob)) for request, id, logprob in drawn
        ]

    def _read_grammars(self) -> list[tuple[int, EngineError]]:
        """Give matchers to those whose grammars are compiled by now. Where nobody could do anything else, wait."""
        refused: list[tuple[int, EngineError]] = []
        coming = [request for request in self.waiting.values() if request.compiled is not None]
        if coming and len(coming) == len(self.waiting) and not self.running:
            wait([request.compiled for request in coming if request.compiled], LOOK, FIRST_COMPLETED)
        for request in coming:
            assert request.compiled is not None
            if request.compiled.done():
                try:
                    request.matcher, request.compiled = take(request.compiled), None
                except EngineError as error:
                    del self.waiting[request.id]
                    refused.append((request.id, error))
        return refused

    def _find_masks(self, ready: Sequence[DecodeRequest]) -> dict[int, EngineError]:
        """What may come next, of those that are held to a grammar; who is lost is ended, and drawn for all the same."""
        lost: dict[int, EngineError] = {}
        for request in ready:
            if request.matcher is not None:
                try:
                    request.allowed = request.matcher.find_allowed()
                except OutOfGrammar as error:
                    request.allowed = None
                    lost[request.id] = self._give_up(request, error)
        return lost

    def _give_up(self, request: DecodeRequest, error: OutOfGrammar) -> EngineError:
        self._end(request)
        return EngineError(f"the answer cannot be held to its schema any longer: {error}. Fix: simplify the schema")

    def _admit(self) -> None:
        """Requests get slots in the order they came, except that one whose beginning is being run right now by another
        waits for it and then takes it over."""
        copies: dict[int, RowCopy] = {}  # by the row they go to; they are made together
        ready = (request for request in self.waiting.values() if request.compiled is None)
        for request in list(islice(ready, 2 * self.cache.rows)):
            if self.slots.full:
                break
            owner = self._owner(request.policy)
            shared = self.slots.shared(request.prompt, owner)
            if shared.coming >= WORTHWHILE and shared.coming > shared.there.max():
                continue
            place = self.slots.choose(shared)
            self.slots.take(place, request.prompt, owner)
            if self.adapters is not None:
                self.adapters.assign(place.row, request.policy)
            if any(place.row == copy.source for copy in copies.values()):  # it is about to be written over
                self.cache.copy([*copies.values()])
                copies.clear()
            if place.source is not None:  # one that is to be copied itself has no more than where that comes from
                source = copies[place.source].source if place.source in copies else place.source
                copies[place.row] = RowCopy(source, place.row, place.reused)
            del self.waiting[request.id]
            request.slot, request.filled = place.row, place.reused
            self.running[request.id] = request
        self.cache.copy([*copies.values()])

    def _work(self) -> list[tuple[DecodeRequest, PassSlice]]:
        """What the next pass runs: those decoding, by their rows, then prompts in the order they came."""
        decoding: list[DecodeRequest] = []
        others: list[DecodeRequest] = []
        for request in self.running.values():
            (decoding if request.decoding else others).append(request)
        decoding.sort(key=attrgetter("slot"))
        work = [(r, PassSlice(r.slot, r.filled, r.ids[-1:], sampled=True, last=True)) for r in decoding]
        # In deterministic mode chunks are run one by one: each sequence may have one.
        budget = self.chunk * (self.cache.rows if self.config.deterministic else 1)
        for request in others:
            if budget <= 0:
                break
            size = self.chunk if self.config.deterministic else min(self.chunk, budget)
            ids = request.ids[request.filled : request.filled + size]
            last = request.filled + len(ids) == len(request.ids)
            work.append((request, PassSlice(request.slot, request.filled, ids, sampled=False, last=last)))
            budget -= size if self.config.deterministic else len(ids)
        return work

    def _take(self, request: DecodeRequest, id: int, logprob: float) -> Chunk | EngineError:
        if not math.isfinite(logprob):
            self._end(request, broken=True)
            return EngineError(
                f"request {request.id} got logits that are not numbers after {len(request.ids)} tokens: version "
                f"{self.versions[request.policy]} of the weights may be broken. Fix: go back to an earlier checkpoint"
            )
        request.ids.append(id)
        if request.matcher is not None:
            try:
                request.matcher.take(id)
            except OutOfGrammar as error:
                return self._give_up(request, error)
        finish = request.finish or ("length" if len(request.ids) >= self.context else None)
        if finish:
            self._end(request)
        return Chunk(ids=[id], logprobs=[logprob], version=self.versions[request.policy], finish=finish)

    def _end(self, request: DecodeRequest, *, broken: bool = False) -> None:
        del self.running[request.id]
        self.slots.let_go(request.slot)
        if broken:
            self.slots.forget(request.slot)
            self.cache.wipe(request.slot)
