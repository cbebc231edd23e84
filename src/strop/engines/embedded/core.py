"""The embedded engine's inside: continuous batching over a Hugging Face causal LM, one step at a time.

    step = admit (prefill waiting prompts into free slots) + decode (one token for every running sequence)

Deterministic mode makes a sequence's bits depend on nothing but its prompt, its sampling and the weights: prompts are
prefilled alone in chunks of one fixed size, decoding always runs all rows at one fixed width, and attention is the
explicit matmul-softmax. Otherwise shapes shrink to what is in use.

Left out: prefix reuse between prompts, and a cache that grows.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.config import EngineConfig
from strop.engines.base import Chunk
from strop.engines.embedded.cache import SlotCache
from strop.engines.embedded.sampler import sample
from strop.errors import ContextOverflow, EngineError
from strop.types import Sampling


@dataclass
class Sequence_:
    """One request at work. `length` counts the tokens whose keys are in the cache."""

    id: int
    prompt_ids: list[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    stream: np.random.Generator
    slot: int = -1
    length: int = 0
    last: int = -1
    count: int = 0


@dataclass
class Core:
    """Requests in, tokens out. Not thread-safe: one thread calls it."""

    model: Any
    config: EngineConfig
    context: int
    version: str = "1.0"
    waiting: deque[Sequence_] = field(default_factory=deque)
    running: dict[int, Sequence_] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameter = next(self.model.parameters())
        chunk = self.config.prefill_chunk
        self.device = parameter.device
        self.vocabulary = int(self.model.config.vocab_size)
        # A whole number of chunks, so that the last, padded one fits.
        self.width = math.ceil(self.context / chunk) * chunk
        self.cache = SlotCache(
            self.model.config, rows=self.config.rows, width=self.width, dtype=parameter.dtype, device=self.device
        )
        self.lowest = torch.finfo(parameter.dtype).min
        self.columns = torch.arange(self.width, device=self.device)
        self.slots = list(range(self.config.rows))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, id: int, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise EngineError("the prompt is empty: send at least one token")
        if len(prompt_ids) >= self.context:
            raise ContextOverflow(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {self.context}: shorten the history "
                "or raise policy.context"
            )
        if not all(0 <= i < self.vocabulary for i in prompt_ids):
            raise EngineError(f"a prompt id is outside the vocabulary of {self.vocabulary}: is it the right tokenizer?")
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        stream = np.random.Generator(np.random.Philox(key=seed))
        self.waiting.append(Sequence_(id, list(prompt_ids), sampling, frozenset(stop_ids), stream))

    def cancel(self, id: int) -> None:
        self.waiting = deque(s for s in self.waiting if s.id != id)
        if sequence := self.running.pop(id, None):
            self.slots.append(sequence.slot)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Chunk]]:
        """One token for every sequence at work; the first one for those just admitted."""
        out: list[tuple[int, Chunk]] = []
        decoding = list(self.running.values())
        while self.waiting and self.slots:
            self.slots.sort()  # low slots first: without fixed shapes only the rows up to the highest one are run
            sequence = self.waiting.popleft()
            sequence.slot = self.slots.pop(0)
            self.running[sequence.id] = sequence
            out += self._take([sequence], self._prefill(sequence))
        if decoding:
            out += self._take(decoding, self._decode(decoding))
        return out

    def _prefill(self, sequence: Sequence_) -> Tensor:
        ids = torch.tensor([sequence.prompt_ids], device=self.device)
        size = self.config.prefill_chunk
        row = slice(sequence.slot, sequence.slot + 1)
        hidden = torch.empty(0)
        for start in range(0, ids.shape[1], size):
            chunk = ids[:, start : start + size]
            count = chunk.shape[1]
            if self.config.deterministic:
                chunk = torch.nn.functional.pad(chunk, (0, size - count))
            places = torch.arange(start, start + chunk.shape[1], device=self.device)
            width = self.width if self.config.deterministic else int(places[-1]) + 1
            self.cache.aim(row, slice(start, start + chunk.shape[1]), width)
            hidden = self._forward(chunk, places[None], self.columns[None, :width] <= places[:, None])[:, count - 1]
        sequence.length = len(sequence.prompt_ids)
        return self.model.lm_head(hidden)

    def _decode(self, sequences: list[Sequence_]) -> Tensor:
        rows = self.config.rows if self.config.deterministic else max(s.slot for s in sequences) + 1
        ids = torch.zeros(rows, dtype=torch.long)
        # Rows with nothing to decode write where nobody looks: the last column is only ever seen by a sequence that
        # has just written it itself.
        places = torch.full((rows,), self.width - 1)
        for s in sequences:
            ids[s.slot], places[s.slot] = s.last, s.length
            s.length += 1
        ids, places = ids.to(self.device), places.to(self.device)
        width = self.width if self.config.deterministic else max(s.length for s in sequences)
        self.cache.aim(slice(0, rows), places, width)
        hidden = self._forward(ids[:, None], places[:, None], (self.columns[:width] <= places[:, None])[:, None])
        return self.model.lm_head(hidden[:, 0])[[s.slot for s in sequences]]

    def _forward(self, ids: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """seen [rows or 1, queries, width] -> hidden states [rows, queries, width of the model]."""
        mask = torch.zeros(seen.shape, dtype=self.cache.keys.dtype, device=self.device).masked_fill_(~seen, self.lowest)
        mask = mask[:, None] if mask.dim() == 3 else mask[None, None]
        return self.model.model(
            input_ids=ids, position_ids=places, attention_mask=mask, past_key_values=self.cache, use_cache=True
        ).last_hidden_state

    def _take(self, sequences: list[Sequence_], logits: Tensor) -> list[tuple[int, Chunk]]:
        """Draw a token for each sequence, and let go of those that end with it."""
        ids, logprobs = sample(logits, [s.sampling for s in sequences], [s.stream for s in sequences])
        out: list[tuple[int, Chunk]] = []
        for s, id, logprob in zip(sequences, ids, logprobs, strict=True):
            s.last = id
            s.count += 1
            finish = None
            if id in s.stop_ids:
                finish = "stop"
            elif s.count >= s.sampling.max_tokens or s.length + 1 >= self.context:
                finish = "length"
            if finish:
                del self.running[s.id]
                self.slots.append(s.slot)
            out.append((s.id, Chunk(ids=[id], logprobs=[logprob], version=self.version, finish=finish)))
        return out
