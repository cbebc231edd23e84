"""Gradients of long trees by micro-batches and by depth-first execution: memory, time, and tokens computed.

    python benchmarks/learner_depth_first.py [--part PART ...] [--device cpu|cuda] [--quick] [--count] [--json FILE]

    longest path x 1, x 2     token trees cut into micro-batches of at most so many tokens, which repeat prefixes
    budget                    the same with 20,480 tokens, where the longest path has no more
    depth first               nothing is repeated; the path and one subtree of at most --unit tokens are held
                              (peers/learner_paths.py)

Parts are those of learner.py that have long trees. The model has Qwen2.5-1.5B's shape, in bf16 on a GPU; on a CPU it is
strop/nano in fp32, with lengths divided. Nothing is compiled but FlexAttention, and only passes are measured, not the
optimizer. `peak` is what passes hold at most beyond weights and optimizer, the float32 gradients included. All must
have the same gradient norm; the exit status is 1 where one has not. --count computes nothing: it says how many tokens
micro-batches lay out, at full lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from learner import BUDGET, environment, order
from machine import hardware
from peers.learner_models import model_for
from peers.processes import PEERS, ROOT, LapProcess, say

PARTS = ("recorded", "thinking", "compaction", "choices")
APART = {"cpu": 1e-3, "cuda": 2e-2}
"""How far norms may be from each other, relative."""
Found = dict[str, Any]


def measure(side: LapProcess, part: str, given: argparse.Namespace, scale: int) -> Found:
    batch = order(part, scale, given.quick)
    facts: Any = side.lap(do="facts", order=batch)
    longest, budget = facts["longest"], BUDGET // scale
    sizes = {"longest path x 1": longest, "longest path x 2": 2 * longest, f"budget {budget:,}": budget}
    found: Found = {}
    for name, size in sizes.items():
        if longest <= size <= given.most // scale:
            found[name] = side.lap(do="cut", order=batch, budget=size)
            say(f"{part}: {name} in {found[name]['seconds']:.2f} s")
    found["depth first"] = side.lap(do="depth_first", order=batch, unit=given.unit // scale)
    return {"unique_tokens": facts["unique_tokens"], "longest": longest, "ways": found}


def count(parts: list[str]) -> None:
    """On any machine: no model runs."""
    folder = model_for("cpu", Path())
    with closing(LapProcess(sys.executable, PEERS / "learner_side.py", folder, "cpu", "40000", "0")) as side:
        for part in parts:
            found: Any = side.lap(do="count", order=order(part, 1, False))
            unique = found.pop("unique")
            times = ", ".join(f"{name} {tokens:,} ({tokens / unique:.2f}x)" for name, tokens in found.items())
            print(f"{part}: {unique:,} unique tokens; laid out at {times}")


def show(part: str, found: Found) -> None:
    unique = found["unique_tokens"]
    print(f"\n{part}: {unique:,} unique tokens, the longest path has {found['longest']:,}")
    print(f"{'':24}{'seconds':>9}{'peak MiB':>10}{'computed':>10}{'/ unique':>9}{'passes':>8}{'held':>8}{'norm':>12}")
    for name, way in found["ways"].items():
        print(
            f"{name:24}{way['seconds']:9.3f}{way['peak_bytes'] / 2**20:10,.0f}{way['tokens']:10,}"
            f"{way['tokens'] / unique:9.2f}{way['passes']:8,}{way['held']:8,}{way['norm']:12.6f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--unit", type=int, default=4096, help="tokens of a subtree that is run at once")
    parser.add_argument("--most", type=int, default=24576, help="tokens of a micro-batch that memory holds")
    parser.add_argument("--count", action="store_true", help="only count tokens")
    parser.add_argument("--quick", action="store_true", help="small counts, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures here")
    given = parser.parse_args()
    os.environ.update(environment())
    if given.count:
        count(given.part)
        return
    if given.device is None:
        import torch

        given.device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = {"cpu": 8, "cuda": 1}[given.device] * (4 if given.quick else 1)
    kept: Found = {"hardware": hardware(given.device)}
    agree = True
    (ROOT / "runs").mkdir(exist_ok=True)  # a real disk: /tmp may be memory
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-") as place:
        folder = model_for(given.device, Path(place))
        command = [sys.executable, PEERS / "learner_side.py", folder, given.device, str(given.most // scale), "0"]
        with closing(LapProcess(*command)) as side:
            for part in given.part:
                kept[part] = found = measure(side, part, given, scale)
                show(part, found)
                norms = [way["norm"] for way in found["ways"].values()]
                agree &= max(norms) <= min(norms) * (1 + APART[given.device])
                if given.json:
                    given.json.write_text(json.dumps(kept, indent=1) + "\n")
    if not agree:
        raise SystemExit("gradients are not the same, see above: figures cannot be compared")


if __name__ == "__main__":
    main()
