"""The learner's kernels, compiled beside the first rollouts by a process of its own: the learner finds them on disk
(compile_cache.py) when its first update wants them.

    all models are loaded ──▶ CompileAhead.start ──▶ two blocks of the model, random weights ──▶ a pass both ways
    the first update      ──▶ CompileAhead.stop: what is not done by then the learner compiles itself

Nothing of it is the learner's: neither weights nor random numbers nor memory, but a GPU's is taken until it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from transformers import AutoModelForCausalLM

from strop.config import LearnerConfig
from strop.learner import lora
from strop.learner.blocks import Way
from strop.learner.flex_attention import SMALLEST
from strop.learner.logprobs import compute_logprobs
from strop.learner.masters import lower
from strop.learner.model import choose_way, place, read_config
from strop.learner.tree_attention import NAME
from strop.net.process_group import die_with_parent
from strop.trajectory import Entries, MicroBatch

BLOCKS = 2
"""One is compiled for the second as well, as in the model."""
TOKENS, ENTRIES = 640, 320


class KernelsAsked(Struct, frozen=True):
    """Whose kernels are wanted. `scores`: also for a pass without gradients."""

    folder: str
    learner: LearnerConfig
    scores: bool


class CompileAhead:
    """The process, seen from the learner's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, asked: KernelsAsked) -> bool:
        """Begin, where a learner compiles anything and it was not all compiled before; returns whether."""
        device, _ = place(asked.learner)
        if (
            not needs_kernels(choose_way(asked.learner, device))
            or (done := _find_stamp(asked)) is None
            or done.exists()
        ):
            return False
        code = "from strop.learner.compile_ahead import main; main()"
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        with self._process.stdin as given:
            given.write(msgspec.json.encode(asked))
        return True

    def stop(self) -> None:
        """What it has compiled stays; files of the cache are there whole or not at all."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that compile for it
            self._process.wait()
            self._process = None


def needs_kernels(way: Way) -> bool:
    return way.compile or way.attention == "flex"


def main() -> None:
    die_with_parent()
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=KernelsAsked)
    device, dtype = place(asked.learner)
    compile_kernels(asked, device, dtype, choose_way(asked.learner, device))
    if (done := _find_stamp(asked)) is not None:
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def compile_kernels(asked: KernelsAsked, device: torch.device, dtype: torch.dtype, way: Way) -> None:
    """Run the passes of an update, and of scoring, on a piece of a model of the same shapes."""
    config = read_config(Path(asked.folder))
    config.num_hidden_layers = BLOCKS
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:BLOCKS]
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=NAME).eval()
    if asked.learner.lora.rank:
        lora.attach(model, asked.learner.lora)
        model.to(device)
    lower(model, dtype)
    sizes = {TOKENS, asked.learner.token_budget if asked.learner.token_budget > SMALLEST else TOKENS}
    for size in sorted(sizes):  # attention has a kernel for each size; all else has one for any
        piece, entries = _make_piece(size, int(config.vocab_size))
        if asked.scores:
            with torch.no_grad():
                compute_logprobs(model, piece, entries, way=way)
        logp, entropy = compute_logprobs(model, piece, entries, way=way)
        (logp.sum() + entropy.sum()).backward()


def _make_piece(size: int, vocabulary: int) -> tuple[MicroBatch, Entries]:
    """A path of `size` tokens, half of which were sampled."""
    order = np.arange(size)
    piece = MicroBatch(order % vocabulary, order, np.full(size, size), np.arange(ENTRIES), np.arange(ENTRIES))
    columns: dict[str, Any] = {field.name: np.ones(ENTRIES) for field in fields(Entries)}
    columns["target"] = np.arange(ENTRIES) % vocabulary
    return piece, Entries(**columns)


def _find_stamp(asked: KernelsAsked) -> Path | None:
    """A file that says that all of this was compiled; None where it would not be found again."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not cache:
        return None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    about = [(Path(asked.folder) / "config.json").read_bytes(), msgspec.json.encode(asked.learner)]
    about += [str(asked.scores).encode(), gpu.encode()]
    return Path(cache) / f"strop-{blake2b(b'|'.join(about), digest_size=8).hexdigest()}"
