"""A learner that lays batches out as it is told: learner_side.py MODEL DEVICE BUDGET CHECKPOINTING

    stdin: {"do": "lap", "order": {...}, "side": "token tree"} ──▶ one update ──▶ stdout: {"seconds": ..., ...}

All sides are this one process and one learner, so that kernels, weights and optimizer are the same. The learning rate
is too small to change a weight: every lap computes the same loss, and the sides' can be compared. For that `begin` has
the tree read the batch once; its logprobs with some noise are the proximal ones from then on, so that ratios are not 1
and some are clipped. The tree's logprobs, loss and gradient norm are what all laps are compared with. To see that such
a comparison tells anything, `begin` also says how far off the logprobs are when branches see each other.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import learner_batches as batches
import learner_trace
import numpy as np
import torch
import torch._dynamo
from learner_paths import DepthFirst, PeakBytes
from learner_shapes import KINDS

from strop.algorithms import EntryTensors
from strop.algorithms.grpo import GRPO
from strop.config import LearnerConfig, OptimConfig, PolicyConfig
from strop.learner import memory
from strop.learner.flex_attention import kernel_size, padded_size
from strop.learner.learner import Learner
from strop.learner.logprobs import CHUNK, find_head
from strop.trajectory import Batch, MicroBatch, check, pack
from strop.trajectory.batch import Floats

TREE, WRONG = "token tree", "wrong mask"
LAYOUTS: dict[str, batches.Layout] = {
    TREE: pack,
    "one row per rollout": batches.row_per_rollout,
    "one row per turn": batches.row_per_turn,
    WRONG: lambda *asked: [replace(piece, end=np.full(len(piece.ids), len(piece.ids))) for piece in pack(*asked)],
}
SIDES = [name for name in LAYOUTS if name != WRONG]
NOISE = 0.1
STILL = 1e-30
"""A learning rate that changes no weight but those that are 0, and those by nothing that is seen."""


class Watched(GRPO):
    """GRPO that remembers the logprobs it was given, on the device they are on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[tuple[Any, Any, Any]] = []

    def compute_loss(self, logp: Any, entropy: Any, value: Any, entries: EntryTensors) -> tuple[Any, dict[str, Any]]:
        self.seen.append((entries.turn, entries.index, logp.detach()))
        return super().compute_loss(logp, entropy, value, entries)

    def logps(self, batch: Batch) -> Floats:
        """By entry, what was given since the last time this was asked."""
        found = np.full(len(batch.entries), np.nan)
        for turn, index, logp in self.seen:
            found[batch.starts[turn.cpu().numpy()] + index.cpu().numpy()] = logp.double().cpu().numpy()
        self.seen.clear()
        return found


class Laid(Learner):
    layout: batches.Layout = staticmethod(pack)
    pieces: list[MicroBatch]

    def _pack(self, batch: Batch, turns: Any) -> list[MicroBatch]:
        if self.layout is pack:
            self.pieces = super()._pack(batch, turns)
            return self.pieces
        self.pieces = self.layout(batch, self.config.token_budget, turns)
        if self.layout is not LAYOUTS[WRONG]:
            check(self.pieces, batch, turns)
        return self.pieces


@dataclass
class Reference:
    """What the tree's lap gave."""

    logps: Floats
    loss: float
    norm: float


class LearnerSide:
    def __init__(self, folder: str, device: str, budget: str, checkpointing: str) -> None:
        self.device = device
        self.config = LearnerConfig(
            device="cuda" if device == "cuda" else "cpu",
            token_budget=int(budget),
            gradient_checkpointing=bool(int(checkpointing)),
            optim=OptimConfig(lr=STILL),
        )
        self.watched = Watched()
        self.watched.prepare(self.config, PolicyConfig())
        self.learner = Laid(folder, self.config, self.watched)
        self.model: Any = self.learner.model
        self.head = find_head(self.model).weight
        self.parameters = sum(p.numel() for p in self.model.parameters())
        embedded = {id(p) for p in (self.head, self.model.get_input_embeddings().weight)}
        self.blocks = sum(p.numel() for p in self.model.parameters() if p.ndim > 1 and id(p) not in embedded)
        self.references: dict[str, Reference] = {}
        self.batch = cache(self._made)

    def _made(self, order: str) -> Batch:
        asked = json.loads(order)
        scale = asked.pop("scale")
        most = asked.pop("rollouts_at_most", None)
        shapes = KINDS[asked.pop("kind")](**asked)[:most]
        shapes = [shape.smaller(scale) for shape in shapes]
        batch = batches.made(shapes, self.model.config.vocab_size, self.config.token_budget)
        self.learner.algorithm.assign_credit(batch)
        assert set(batch.dropped.values()) <= {"zero_variance"}, batch.dropped
        return batch

    # -- orders --------------------------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        names = ("torch", "transformers", "triton", "numpy")
        shape = self.model.config
        foreseen = memory.plan(shape, self.config, 2**60, device=torch.device(self.device))
        return {
            "versions": {name: found for name in names if (found := _version(name))} | {"cuda": torch.version.cuda},
            "model": {
                "parameters": self.parameters,
                "in_blocks": self.blocks,
                "in_head": self.head.numel(),
                "layers": shape.num_hidden_layers,
                "dtype": str(self.model.dtype).removeprefix("torch."),
            },
            "attention": self.learner.way.attention,
            "foreseen_bytes": foreseen.peak,
        }

    def matmul(self) -> dict[str, float]:
        """How fast plain square matrices are multiplied, in what the model computes in."""
        size, times = (8192, 10) if self.device == "cuda" else (1024, 3)
        a, b = torch.randn(2, size, size, device=self.device, dtype=self.model.dtype)
        rates: list[float] = []
        for _ in range(8):
            began = self._now()
            for _ in range(times):
                torch.matmul(a, b)
            rates.append(times * 2 * size**3 / (self._now() - began))
        return {"size": size, "rate": statistics.median(rates[1:]), "best": max(rates)}

    def begin(self, order: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps(order)
        batch = self.batch(key)
        noise = np.random.default_rng(0).standard_normal(len(batch.entries))
        batch.entries.proximal[:] = self._update(batch, TREE)["logps"] + NOISE * noise
        found = self._update(batch, TREE)
        self.references[key] = Reference(found["logps"], found["loss"], found["norm"])
        return self._apart(self._update(batch, WRONG), self.references[key])

    def lap(self, order: dict[str, Any], side: str) -> dict[str, Any]:
        """One update. A batch that was begun says how far it is from the tree's."""
        key = json.dumps(order)
        found = self._update(self.batch(key), side)
        reference = self.references.get(key)
        apart = self._apart(found, reference) if reference else None
        del found["logps"]
        return found | {"apart": apart}

    def profile(self, order: dict[str, Any], laps: int, fewer: bool) -> dict[str, Any]:
        """Where the time of the tree's update goes, and how long one takes when nobody looks: as it is, with
        nothing recorded and, unless `fewer` are wanted, not compiled."""
        batch = self.batch(json.dumps(order))
        way = self.learner.way
        seconds = {"compiled" if way.compile else "not compiled": self._repeat(batch, laps)}
        events = learner_trace.take_trace(lambda: self._plain_update(batch), self.device)
        if getattr(self.learner, "graphs", None) is not None:  # another checkout may have none
            graphs, self.learner.graphs = self.learner.graphs, None
            seconds["launched one by one"] = self._repeat(batch, laps)
            self.learner.graphs = graphs
        if way.compile and not fewer:
            self.learner.way = replace(way, compile=False)
            seconds["not compiled"] = self._repeat(batch, laps)
            self.learner.way = way
            if hasattr(torch._dynamo.config, "nested_graph_breaks"):
                # One break per block, around attention, instead of one in every function on the way to it.
                torch._dynamo.reset()
                with torch._dynamo.config.patch(nested_graph_breaks=True):
                    seconds["compiled with nested graph breaks"] = self._repeat(batch, laps)
                torch._dynamo.reset()
        pieces = self.learner.pieces
        flex = self.learner.way.attention == "flex"
        return {
            "seconds": seconds,
            "tokens": [len(piece.ids) for piece in pieces],
            "padded": [padded_size(len(p.ids)) if flex else len(p.ids) for p in pieces],
            "kernel": [kernel_size(len(p.ids)) if flex else len(p.ids) for p in pieces],
            "entries": [len(piece.entry) for piece in pieces],
            **learner_trace.summarize(events, self.device),
        }

    def count(self, order: dict[str, Any]) -> dict[str, Any]:
        """Tokens laid out by micro-batches of once and twice the longest path, beside the unique ones."""
        batch = self.batch(json.dumps(order))
        longest, whole = max(len(path) for path in batch.paths), sum(len(path) for path in batch.paths)
        budgets = {"unique": whole, "longest path x 1": longest, "longest path x 2": 2 * longest}
        return {name: sum(len(piece.ids) for piece in pack(batch, budget)) for name, budget in budgets.items()}

    def cut(self, order: dict[str, Any], budget: int) -> dict[str, Any]:
        """The gradients of a batch by micro-batches of a token tree, without compiled blocks."""
        batch = self.batch(json.dumps(order))
        self.learner.way = replace(self.learner.way, compile=False)
        self.learner.layout, self.learner.budget = pack, budget
        turns = np.arange(len(batch.turns))
        measured = self._measure(lambda: self.learner._gradients(batch, turns, 1))
        sizes = [len(piece.ids) for piece in self.learner.pieces]
        return measured | {"tokens": sum(sizes), "passes": len(sizes), "held": max(sizes)}

    def depth_first(self, order: dict[str, Any], unit: int) -> dict[str, Any]:
        """The same gradients by depth-first execution."""
        batch = self.batch(json.dumps(order))
        (tree,) = pack(batch, sum(len(path) for path in batch.paths))
        runs: list[DepthFirst] = []

        def run() -> None:
            runs.append(DepthFirst(self.learner, batch, tree, unit))
            runs[-1].run()

        measured = self._measure(run)
        return measured | {"tokens": len(tree.ids), "passes": runs[-1].passes, "held": runs[-1].held}

    def _measure(self, gradients: Callable[[], Any]) -> dict[str, Any]:
        """Seconds and the norm of the gradient, behind a time that does not count; bytes beyond what was there."""
        gradients()
        self.learner._clear()
        began = self._now()
        gradients()
        seconds = self._now() - began
        norm = float(self.learner.optim.clip())
        self.learner._clear()
        if self.device == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            gradients()
            peak = torch.cuda.max_memory_allocated() - before
        else:
            with PeakBytes() as live:
                gradients()
            peak = live.peak
        self.learner._clear()
        self.watched.seen.clear()
        return {"seconds": seconds, "norm": norm, "peak_bytes": peak}

    def _repeat(self, batch: Batch, laps: int) -> float:
        """The median of updates behind two that do not count."""
        return statistics.median([self._plain_update(batch) for _ in range(2 + laps)][2:])

    def _plain_update(self, batch: Batch) -> float:
        """The tree's update, and no more than that."""
        self.learner.layout = pack
        began = self._now()
        self.learner.update(batch)
        seconds = self._now() - began
        self.watched.seen.clear()
        return seconds

    def _apart(self, found: dict[str, Any], reference: Reference) -> dict[str, float]:
        logps = np.abs(found["logps"] - reference.logps)
        return {
            "loss": abs(found["loss"] - reference.loss),
            "norm": abs(found["norm"] / reference.norm - 1),
            "logprob_mean": float(logps.mean()),
            "logprob_max": float(logps.max()),
        }

    def _update(self, batch: Batch, side: str) -> dict[str, Any]:
        self.learner.layout = LAYOUTS[side]
        gc.collect()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began, worked = self._now(), time.process_time()
        metrics = self.learner.update(batch)
        seconds = self._now() - began
        worked = time.process_time() - worked
        logps = self.watched.logps(batch)
        assert np.isfinite(logps).all()
        return {
            "seconds": seconds,
            "cpu_seconds": worked,
            "peak_bytes": torch.cuda.max_memory_allocated() if self.device == "cuda" else None,
            "loss": metrics["actor/pg_loss"],
            "norm": metrics["actor/grad_norm"],
            "clipped": metrics["actor/pg_clipfrac"],
            "logps": logps,
            **self._work(self.learner.pieces),
        }

    def facts(self, order: dict[str, Any]) -> dict[str, Any]:
        """Of a batch, whichever way it is laid out."""
        batch = self.batch(json.dumps(order))
        whole = pack(batch, sum(len(path) for path in batch.paths))
        work = self._work(whole)
        return {
            "num_rollouts": len(batch.samples),
            "num_turns": len(batch.turns),
            "longest": max(len(path) for path in batch.paths),
            "entries": len(batch.entries),
            "unique_tokens": work["tokens"],
            "work": work["work"],
            "sides": {name: self._work(LAYOUTS[name](batch, self.config.token_budget, None)) for name in SIDES},
            "plain_work": 6 * self.parameters * work["tokens"],
        }

    def _work(self, pieces: list[MicroBatch]) -> dict[str, Any]:
        """Tokens and floating-point operations. `work` is what the loss and its gradient need; `worked` has what is
        computed a second time too: blocks when checkpointing, logits of more than a chunk."""
        shape = self.model.config
        width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        tokens = sum(len(piece.ids) for piece in pieces)
        entries = sum(len(piece.entry) for piece in pieces)
        pairs = sum(int((piece.pos + 1).sum()) for piece in pieces)
        blocks = 2 * self.blocks * tokens
        attention = 4 * shape.num_hidden_layers * shape.num_attention_heads * width * pairs
        logits = 2 * self.head.numel() * entries
        most = 0 if self.device == "cuda" else CHUNK["cpu"]
        chunked = sum(len(p.entry) for p in pieces if len(p.entry) * self.head.shape[0] > most)
        again = self.config.gradient_checkpointing * (blocks + attention) + 2 * self.head.numel() * chunked
        flex = self.learner.way.attention == "flex"
        return {
            "tokens": tokens,
            "padded_tokens": sum(padded_size(len(piece.ids)) for piece in pieces) if flex else tokens,
            "pieces": len(pieces),
            "work": 3 * (blocks + attention + logits),
            "worked": 3 * (blocks + attention + logits) + again,
        }

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def serve(side: LearnerSide) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(side, order.pop("do"))(**order)), flush=True)


if __name__ == "__main__":
    serve(LearnerSide(*sys.argv[1:]))
