"""The embedded engine as a side: engine_strop.py MODEL DEVICE ROWS"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from engine_lap import Prompts, Side, serve

from strop.config import EngineConfig
from strop.engines.base import Chunk
from strop.engines.embedded.core import Core
from strop.learner.model import load
from strop.types import Sampling


class Strop(Side):
    def __init__(self, folder: str, device: str, rows: str) -> None:
        model: Any = load(folder, torch.bfloat16 if device == "cuda" else torch.float32)
        model.to(device)
        self.vocabulary = model.config.vocab_size
        self._core = Core(model, EngineConfig(max_sequences=int(rows)), context=2048)
        self._answers: dict[int, list[int]] = {}

    def answer(self, prompts: Prompts, sampled: int) -> Iterator[tuple[int, list[int]]]:
        self.more(prompts, sampled)
        while self._core.busy:
            for id, chunk in self._core.step():
                assert isinstance(chunk, Chunk), chunk
                self._answers[id] += chunk.ids
                if chunk.finish:
                    yield id, self._answers.pop(id)

    def more(self, prompts: Prompts, sampled: int) -> bool:
        for id, prompt in prompts.items():
            self._answers[id] = []
            self._core.add(id, prompt, Sampling(max_tokens=sampled), [])
        return True

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("torch", "transformers")}


if __name__ == "__main__":
    serve(Strop, *sys.argv[1:])
