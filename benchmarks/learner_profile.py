"""Where the time of an update goes: attention, matmuls, elementwise kernels, head, optimizer, and a device that waits.

    python benchmarks/learner_profile.py [--quick] [--device cpu|cuda] [--part large small] [--fewer] [--against OTHER]

    large     the 1.5B shape: 8 rollouts of one prompt of 1024 tokens, 8 turns of 64 + 192 (`turns` of learner.py)
    small     the shape of SmolLM2-135M: 256 rollouts of two turns, about a step of train.py; members of every second
              group all got the same, so that their tokens are read for the comparison with the engine and not trained

Shown are the median of updates that nobody looks at, compiled, launched one by one where they are recorded otherwise,
not compiled, and compiled with fewer breaks around attention (torch's nested_graph_breaks), and then one under
torch.profiler, compiled: what ran on the device by kind (peers/learner_trace.py), and while nothing ran, what the host
was doing. On a CPU both are strop/nano with lengths divided, which shows that it works and no more. --against has
another checkout's learner do the same, in a process of its own after this one's.
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

from machine import hardware
from peers.learner_models import model_for
from peers.processes import PEERS, ROOT, LapProcess, say

from strop.learner.spawn import KEEP_MEMORY, WAIT_SHORTLY

PARTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "large": (
        "1.5b",
        20480,
        {"kind": "grown", "groups": 1, "rollouts": 8, "prompt": 1024, "turns": 8, "message": 64, "sampled": 192},
    ),
    "small": ("135m", 65536, {"kind": "two turns"}),
}
"""The shape of the model, the token budget, and the batch."""
Found = dict[str, Any]


def measure(part: str, folder: Path, given: argparse.Namespace, checkout: Path) -> Found:
    _, budget, batch = PARTS[part]
    scale = 1 if given.device == "cuda" and not given.quick else 8
    command = [sys.executable, PEERS / "learner_side.py", folder, given.device, str(budget // scale), "0"]
    with closing(LapProcess(*command, checkout=checkout)) as side:
        rate: Any = side.lap(do="matmul")
        order = batch | {"scale": scale}
        facts: Any = side.lap(do="facts", order=order)
        found: Found = side.lap(do="profile", order=order, laps=1 if given.quick else given.laps, fewer=given.fewer)
    return found | {"work": facts["work"], "unique_tokens": facts["unique_tokens"], "rate": rate["rate"]}


def show(title: str, found: Found) -> None:
    """In about 25 lines."""
    seconds = next(iter(found["seconds"].values()))
    share = found["work"] / seconds / found["rate"]
    print(f"\n{title}: " + ", ".join(f"{took:.4f} s {how}" for how, took in found["seconds"].items()))
    sizes = ", ".join(f"{name} {sum(found[name]):,}" for name in ("tokens", "padded", "kernel", "entries"))
    pieces = f"{found['unique_tokens']:,} unique tokens, {len(found['tokens'])} pieces to train ({sizes})"
    print(f"{pieces}; {share:.1%} of the matmul rate")
    idle = found["traced_ms"] - found["busy_ms"]
    busy = f"busy {found['busy_ms']:.1f}, idle {idle:.1f}"
    print(f"traced: {found['traced_ms']:.1f} ms, {found['launches']:,} kernels, {busy}")
    for kind, (took, count) in list(found["kinds"].items())[:14]:
        print(f"  {took:9.2f} ms {took / found['traced_ms']:6.1%} {int(count):6,} x  {kind}")
    waits = [f"{name} {took:.1f}" for name, took in found["idle"].items() if took >= 0.05]
    print(f"  idle (ms) while the host was in: {', '.join(waits[:10])}")
    hosts = ("pack", "check", "mask", "columns", "shares", "mismatch", "read back", "clip", "optimizer")
    print("  host (ms): " + ", ".join(f"{name} {found['host'][name]:.1f}" for name in hosts if name in found["host"]))
    for name, took, count in found["slowest"][:5]:
        print(f"  {took:9.2f} ms {int(count):6,} x  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--fewer", action="store_true", help="no updates without compiled blocks, which take a minute")
    parser.add_argument("--against", type=Path, metavar="OTHER", help="another checkout, profiled after this one")
    parser.add_argument("--quick", action="store_true", help="small counts, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures here")
    given = parser.parse_args()
    os.environ.update(
        {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **WAIT_SHORTLY, **KEEP_MEMORY, **os.environ}
    )
    if given.device is None:
        import torch

        given.device = "cuda" if torch.cuda.is_available() else "cpu"
    checkouts = {"this": ROOT} | ({"other": given.against} if given.against else {})
    kept: Found = {"hardware": hardware(given.device)}
    (ROOT / "runs").mkdir(exist_ok=True)  # a real disk: /tmp may be memory
    for part in given.part:
        with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-") as place:
            folder = model_for(given.device, Path(place), PARTS[part][0])
            for name, checkout in checkouts.items():
                say(f"{part}: {name} checkout")
                kept[f"{part} {name}"] = found = measure(part, folder, given, checkout)
                show(f"{part}, {name} checkout", found)
                if given.json:
                    given.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
