"""Where the time of an update goes: kernels by what they compute, the device's idle time by what the host did in it.

    torch.profiler ──▶ a trace: what ran on the device, when the host launched it, what the host was doing
                   ──▶ kinds (attention, matmuls, ...) by the kernel's name and by what part of the update launched it

Parts of the learner are wrapped in named ranges, from outside: the same figures can be had of another checkout. A
kernel belongs to the innermost range in which it was launched, on whichever thread: autograd launches backward kernels
on one of its own, while the one that is measured waits. On a CPU operations are taken for kernels, and what is between
them for idle.

Left out: how much of a kernel's time is memory and how much arithmetic.
"""

from __future__ import annotations

import bisect
import importlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

WRAPPED = (
    ("strop.learner.learner", "pack", "pack"),
    ("strop.learner.learner", "pack_evenly", "pack"),
    ("strop.learner.learner", "check", "check"),
    ("strop.learner.learner", "_view", "columns"),
    ("strop.learner.learner", "_shares", "shares"),
    ("strop.learner.learner", "_mismatch", "mismatch"),
    ("strop.learner.learner", "measure_mismatch", "mismatch"),
    ("strop.learner.learner", "_array", "read back"),
    ("strop.learner.learner", "read", "head"),
    ("strop.learner.learner", "compute_entry_states", "forward"),
    ("strop.learner.learner", "compute_logprobs", "read only"),
    ("strop.learner.trunk_graphs", "TrunkGraphs.run", "forward"),
    ("strop.learner.logprobs", "read", "head"),
    ("strop.learner.logprobs", "compute_entry_states", "forward"),
    ("strop.learner.logprobs", "build_flex_plan", "mask"),
    ("strop.learner.logprobs", "plan", "mask"),
    ("strop.learner.logprobs", "_Chunks.backward", "head backward"),
    ("strop.learner.tree_attention", "TreePlan.attend", "attention"),
    ("strop.learner.masters", "Masters.write", "weights"),
    ("strop.learner.optim", "Optim.clip", "clip"),
    ("strop.learner.optim", "Optim.step", "optimizer"),
    ("torch", "Tensor.backward", "backward"),
)
"""Module, name, and what its range is called; one that a checkout does not have is left out."""

UPDATE = "update"
MATMUL = ("gemm", "cutlass", "nvjet", "xmma", "splitk", "gemv", "::mm", "::addmm", "::bmm", "::baddbmm")
COPIES = ("memcpy", "memset")
ATTENTION = "flex_attention"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Span:
    """Microseconds, from one moment to another."""

    name: str
    start: float
    end: float
    thread: Any = None

    @property
    def length(self) -> float:
        return self.end - self.start


@contextmanager
def named_ranges() -> Iterator[None]:
    """Every wrapped function records a range until the end of the context."""
    undo: list[Callable[[], None]] = []
    try:
        for module, path, name in WRAPPED:
            try:
                owner: Any = importlib.import_module(module)
            except ImportError:
                continue
            *outer, last = path.split(".")
            for one in outer:
                owner = getattr(owner, one, None)
            if owner is None or last not in vars(owner):
                continue
            kept = vars(owner)[last]
            static = isinstance(kept, staticmethod)
            wrapped = _recorded(kept.__func__ if static else kept, name)
            setattr(owner, last, staticmethod(wrapped) if static else wrapped)
            undo.append(lambda owner=owner, last=last, kept=kept: setattr(owner, last, kept))
        yield
    finally:
        for back in undo:
            back()


def _recorded(function: Any, name: str) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"strop: {name}"):
            return function(*args, **kwargs)

    return call


def take_trace(update: Callable[[], Any], device: str) -> list[dict[str, Any]]:
    """The events of one update."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities):
        torch.ones(1, device=device).sum()  # the first time it is used the profiler sets itself up
    with named_ranges(), profile(activities=activities) as profiler, record_function(f"strop: {UPDATE}"):
        update()
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text())["traceEvents"]


def summarize(events: Sequence[dict[str, Any]], device: str) -> dict[str, Any]:
    """Milliseconds: `kinds` of what ran on the device, `idle` of the device by what the host did, `host` by range."""
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    ranges = _Ranges([_span(e) for e in whole if e.get("cat") == "user_annotation" and _is_ours(e)])
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in whole
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    if device == "cuda":
        ran = [(_span(e), launched.get(e["args"].get("correlation"))) for e in whole if e.get("cat") in DEVICE]
    else:
        ran = [(span, span.start) for span in _own_time([_span(e) for e in whole if e.get("cat") == "cpu_op"])]
    update = ranges.update
    ran = [(span, at) for span, at in ran if update.start <= span.start < update.end]
    kinds: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    slowest: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for span, at in ran:
        kind = _kind(span.name, ranges.find_all(at if at is not None else span.start))
        for table, key in ((kinds, kind), (slowest, span.name)):
            table[key][0] += span.length / 1e3
            table[key][1] += 1
    idle = _idle([span for span, _ in ran], ranges)
    ordered = sorted(slowest.items(), key=lambda item: -item[1][0])
    return {
        "traced_ms": update.length / 1e3,
        "busy_ms": update.length / 1e3 - sum(idle.values()),
        "launches": len(ran),
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1][0])),
        "idle": dict(sorted(idle.items(), key=lambda item: -item[1])),
        "host": ranges.sums(),
        "slowest": [[name[:70], *found] for name, found in ordered[:6]],
    }


def _is_ours(event: dict[str, Any]) -> bool:
    return str(event["name"]).startswith("strop: ")


def _span(event: dict[str, Any]) -> Span:
    name = str(event["name"]).removeprefix("strop: ")
    return Span(name, float(event["ts"]), float(event["ts"]) + float(event["dur"]), event.get("tid"))


def _own_time(spans: Sequence[Span]) -> list[Span]:
    """Operations on a CPU without those that they call: stretches of time by the innermost operation of a thread."""
    found: list[Span] = []
    by_thread: defaultdict[Any, list[Span]] = defaultdict(list)
    for span in spans:
        by_thread[span.thread].append(span)
    for own in by_thread.values():
        around: list[Span] = []
        at = 0.0
        for span in [*sorted(own, key=lambda span: (span.start, -span.end)), Span("", float("inf"), float("inf"))]:
            while around and around[-1].end <= span.start:
                inner = around.pop()
                found.append(Span(inner.name, at, inner.end))
                at = inner.end
            if around:
                found.append(Span(around[-1].name, at, span.start))
            around.append(span)
            at = span.start
    return sorted((span for span in found if span.length > 0), key=lambda span: span.start)


def _kind(kernel: str, ranges: Sequence[str]) -> str:
    """What a kernel computes; `ranges` are those in which it was launched, the outermost first."""
    low = kernel.lower()
    inner = ranges[-1] if ranges else ""
    way = "backward" if "backward" in ranges else "forward"
    if any(part in low for part in COPIES):
        return "copies"
    if ATTENTION in low:
        return f"attention, {'backward' if 'backward' in low or way == 'backward' else 'forward'}"
    if inner == "attention":
        return f"attention, {way}"
    if inner in ("head", "head backward"):
        return f"{inner.partition(' ')[0]}, {way}: {'matmuls' if _is_matmul(low) else 'logprobs'}"
    if inner in ("clip", "optimizer", "weights"):
        return "optimizer: " + inner
    if ranges and not {"forward", "read only", "backward"} & set(ranges):
        return "loss and metrics"
    return f"{'matmuls' if _is_matmul(low) else 'elementwise'}, {way}"


def _is_matmul(name: str) -> bool:
    return any(part in name for part in MATMUL)


def _idle(ran: Sequence[Span], ranges: _Ranges) -> dict[str, float]:
    """Milliseconds in which nothing ran, by the innermost range at the end of each gap: what was waited for."""
    found: defaultdict[str, float] = defaultdict(float)
    at = ranges.update.start
    for span in [*sorted(ran, key=lambda span: span.start), Span("", ranges.update.end, ranges.update.end)]:
        if span.start > at:
            for name, length in ranges.divide(at, span.start):
                found[name] += length / 1e3
        at = max(at, span.end)
    return found


class _Ranges:
    """The named ranges of one update."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start, -span.end))
        (self.update,) = [span for span in self.spans if span.name == UPDATE]
        self._cuts = sorted({moment for span in self.spans for moment in (span.start, span.end)})
        self._within: list[list[str]] = []
        coming, around = 0, list[Span]()
        for moment in self._cuts:
            while coming < len(self.spans) and self.spans[coming].start <= moment:
                around.append(self.spans[coming])
                coming += 1
            around = [span for span in around if span.end > moment]
            self._within.append([span.name for span in around])

    def find_all(self, moment: float) -> list[str]:
        """The ranges around a moment, the outermost first, without the update itself."""
        place = bisect.bisect_right(self._cuts, moment) - 1
        return self._within[place][1:] if place >= 0 else []

    def divide(self, start: float, end: float) -> Iterator[tuple[str, float]]:
        """A stretch of time by the innermost range."""
        while start < end:
            place = bisect.bisect_right(self._cuts, start) - 1
            until = min(end, self._cuts[place + 1] if place + 1 < len(self._cuts) else end)
            yield (self._within[place] or [UPDATE])[-1], until - start
            start = until if until > start else end

    def sums(self) -> dict[str, float]:
        """Milliseconds in each range, what is inside of it included."""
        found: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            found[span.name] += span.length / 1e3
        return dict(found)
