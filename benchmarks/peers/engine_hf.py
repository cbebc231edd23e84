"""Hugging Face as a side: engine_hf.py MODEL DEVICE ROWS generate|continuous

`generate` takes all prompts as one batch, padded on the left, and computes every turn from its beginning. `continuous`
is transformers' own continuous batching, which wants a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from engine_lap import Prompts, Side, serve
from transformers import AutoModelForCausalLM, GenerationConfig


class HuggingFace(Side):
    def __init__(self, folder: str, device: str, rows: str, how: str) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        attention = "paged|sdpa" if how == "continuous" else "sdpa"
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        self._model = model.to(device).eval()
        self._continuous = how == "continuous"
        self._rows = int(rows)
        self.vocabulary = model.config.vocab_size

    def answer(self, prompts: Prompts, sampled: int) -> Iterator[tuple[int, list[int]]]:
        settings = GenerationConfig(
            max_new_tokens=sampled,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=0,
            eos_token_id=-1,  # never
        )
        if self._continuous:
            found = self._model.generate_batch(inputs=list(prompts.values()), generation_config=settings)
            for id, output in zip(prompts, found.values(), strict=True):
                yield id, list(output.generated_tokens)
            return
        every = list(prompts.items())
        for start in range(0, len(every), self._rows):
            yield from self._generate(dict(every[start : start + self._rows]), settings)

    def _generate(self, prompts: Prompts, settings: GenerationConfig) -> Iterator[tuple[int, list[int]]]:
        width = max(map(len, prompts.values()))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts.values()], device=self._model.device)
        seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts.values()], device=ids.device)
        settings.eos_token_id = None
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=seen, generation_config=settings)
        yield from zip(prompts, out[:, width:].tolist(), strict=True)

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("torch", "transformers")}


if __name__ == "__main__":
    serve(HuggingFace, *sys.argv[1:])
