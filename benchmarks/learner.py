"""A whole update on a token tree beside the same update on rows: seconds, work, memory, and how they grow.

    python benchmarks/learner.py [--quick] [--part PART ...] [--device cpu|cuda] [--json FILE]

    turns       8 rollouts of one prompt of 1024 tokens, 8 turns of 64 (environment) + 192 (sampled) tokens
    prompt      8 rollouts of one prompt of 4096 tokens, 4 such turns
    recorded    16 rollouts in the shape of recorded conversations of a tool agent (peers/learner_shapes.py), ids random
    thinking, compaction, delegation, choices
                the same conversations of agents that do not only append (proportions: peers/learner_shapes.py)
    growth      more and more groups like those of `turns`, up to 256k tokens, on the tree only

Sides are the token tree; one row per rollout, its longest context, with the sampled tokens of all its turns (exact only
where rollouts do nothing but append); and one row per turn. Rows are packed without padding into micro-batches of the
same token budget, the longest first. An update is forward, loss, backward and optimizer step, by one learner in one
process: rows are trees without branches, so kernels, checkpointing and chunks of logits are the same. Sides take turns,
figures are medians of laps behind one that does not count: compare ratios, not runs. Rows that would be more than a
million tokens (--most) are not timed, only counted. Where the time goes: learner_profile.py.

The model has Qwen2.5-1.5B's shape and random weights, in bf16 on a GPU; on a CPU it is strop/nano in fp32, with lengths
and budget divided by 4. Every side must compute the tree's loss, gradient norm and logprobs; how far apart they are is
printed, beside what a wrong mask does to them, and the exit status is 1 where that is too far.

What is counted as work: 6 operations per weight of the blocks and token, 6 per weight of the head and sampled token,
and 12 per layer, dimension of all heads and pair of tokens of which one sees the other. `6 P N` is 6 per parameter and
unique token, without attention. `computed` also has what is computed twice: blocks with --checkpointing, and logits of
more than a chunk. Padding counts nowhere. Shares are of the rate at which plain matrices were multiplied in the same
run.

Left out: several GPUs, LoRA, a critic, scoring.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from machine import hardware
from peers.learner_models import model_for
from peers.processes import PEERS, ROOT, LapProcess, say
from rich.console import Console
from rich.table import Table

from strop.learner.spawn import KEEP_MEMORY, WAIT_SHORTLY

RESULTS = ROOT / "benchmarks" / "results"
TREE, PER_ROLLOUT, PER_TURN = SIDES = ("token tree", "one row per rollout", "one row per turn")
CONVERSATIONS = ("recorded", "thinking", "compaction", "delegation", "choices")
COMPARED = ("turns", "prompt", *CONVERSATIONS)
PARTS = (*COMPARED, "growth")
BUDGET = 20480
"""Tokens: a multiple of what pieces are padded to, so that full ones have next to no padding."""

APART = {
    "float32": {"loss": 1e-5, "norm": 1e-3, "logprob_mean": 1e-5, "logprob_max": 1e-4},
    "bfloat16": {"loss": 5e-3, "norm": 2e-2, "logprob_mean": 5e-2, "logprob_max": 0.5},
}
"""How far from the tree's a side's loss, gradient norm (relative) and logprobs may be."""
MOST_TOKENS = 10**6
"""That a side is asked to compute in one update."""
CLEAR = 5
"""How many times farther a wrong mask must take logprobs, for their agreement to mean anything."""

Found = dict[str, Any]


def scale_of(device: str, quick: bool) -> int:
    """What lengths and the budget are divided by."""
    if quick:
        return 16 if device == "cuda" else 32
    return 1 if device == "cuda" else 4


def order(part: str, scale: int, quick: bool, groups: int = 1) -> Found:
    """The batch of a part, or the growth's with so many groups."""
    if part in CONVERSATIONS:
        return {"kind": part, "scale": scale, "rollouts_at_most": 4 if quick or part == "choices" else None}
    prompt, turns = (4096, 4) if part == "prompt" else (1024, 8)
    return {
        "kind": "grown",
        "scale": scale,
        "groups": groups,
        "rollouts": 4 if quick else 8,
        "prompt": prompt,
        "turns": min(turns, 3) if quick else turns,
        "message": 64,
        "sampled": 192,
    }


def environment() -> dict[str, str]:
    """As `strop train` sets it for the process that holds the learner."""
    return {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **WAIT_SHORTLY, **KEEP_MEMORY, **os.environ}


# -- measuring ---------------------------------------------------------------------------------------------------------


def compare(
    side: LapProcess, part: str, scale: int, quick: bool, laps: int, rate: float, dtype: str, most: int
) -> Found:
    batch = order(part, scale, quick)
    facts: Any = side.lap(do="facts", order=batch)
    wrong: Any = side.lap(do="begin", order=batch)
    measured = [name for name in SIDES if name == TREE or facts["sides"][name]["tokens"] <= most]
    by: dict[str, list[Found]] = {name: [] for name in measured}
    for name in measured:
        # One that does not count: compilers, memory that is first touched.
        warm: Any = side.lap(do="lap", order=batch, side=name)
        say(f"{part}: {name}, first lap in {warm['seconds']:.2f} s, which does not count")
    for number in range(laps):
        first = number % len(measured)
        for name in measured[first:] + measured[:first]:
            lap: Any = side.lap(do="lap", order=batch, side=name)
            by[name].append(lap)
            say(f"{part}, lap {number + 1} of {laps}: {name} {lap['seconds']:.3f} s")
    return {
        "batch": batch | facts,
        "wrong_mask": wrong,
        "sides": {name: figures(laps, facts, rate, APART[dtype], wrong) for name, laps in by.items()},
        "ratios": {name: ratios(by[TREE], by[name], facts) for name in measured[1:]},
    }


def figures(laps: Sequence[Found], facts: Found, rate: float, limits: Found, wrong: Found) -> Found:
    seconds = [lap["seconds"] for lap in laps]
    middle = statistics.median(seconds)
    first = laps[0]
    apart = {key: max(lap["apart"][key] for lap in laps) for key in first["apart"]}
    return {
        "seconds": middle,
        "best": min(seconds),
        "worst": max(seconds),
        "cpu_seconds": statistics.median(lap["cpu_seconds"] for lap in laps),
        "peak_bytes": max(lap["peak_bytes"] for lap in laps) if first["peak_bytes"] is not None else None,
        **{key: first[key] for key in ("tokens", "padded_tokens", "pieces", "work", "worked", "loss", "norm")},
        "unique_tokens_per_second": facts["unique_tokens"] / middle,
        "share_plain": facts["plain_work"] / middle / rate,
        "share_needed": facts["work"] / middle / rate,
        "share_computed": first["worked"] / middle / rate,
        "apart": apart,
        "agrees": all(apart[key] <= limit for key, limit in limits.items())
        and CLEAR * apart["logprob_mean"] < wrong["logprob_mean"],
    }


def ratios(tree: Sequence[Found], rows: Sequence[Found], facts: Found) -> Found:
    """Rows to the tree; above 1 the tree is ahead."""
    clock = [other["seconds"] / ours["seconds"] for ours, other in zip(tree, rows, strict=True)]
    return {
        "time": statistics.median(clock),
        "time_best": max(clock),
        "time_worst": min(clock),
        "cpu": statistics.median(o["cpu_seconds"] / t["cpu_seconds"] for t, o in zip(tree, rows, strict=True)),
        "tokens": rows[0]["tokens"] / facts["unique_tokens"],
        "work": rows[0]["work"] / facts["work"],
    }


def grow(side: LapProcess, scale: int, quick: bool, laps: int, rate: float) -> Found:
    points: list[Found] = []
    for groups in (1, 2, 3) if quick else (1, 2, 4, 8, 15):
        batch = order("growth", scale, quick, groups)
        facts: Any = side.lap(do="facts", order=batch)
        side.lap(do="lap", order=batch, side=TREE)
        found: list[Any] = [side.lap(do="lap", order=batch, side=TREE) for _ in range(laps)]
        seconds = statistics.median(lap["seconds"] for lap in found)
        say(f"growth: {facts['unique_tokens']:,} unique tokens in {seconds:.3f} s")
        points.append(
            {
                "groups": groups,
                "unique_tokens": facts["unique_tokens"],
                "tokens": found[0]["tokens"],
                "padded_tokens": found[0]["padded_tokens"],
                "pieces": found[0]["pieces"],
                "seconds": seconds,
                "best": min(lap["seconds"] for lap in found),
                "worst": max(lap["seconds"] for lap in found),
                "peak_bytes": found[0]["peak_bytes"],
                "share_plain": facts["plain_work"] / seconds / rate,
            }
        )
    return {"batch": order("growth", scale, quick), "points": points, "fit": fit(points)}


def fit(points: Sequence[Found]) -> Found:
    """seconds = fixed + per_token x unique tokens, by least squares; `off` is the farthest a point lies from that."""
    tokens, seconds = [p["unique_tokens"] for p in points], [p["seconds"] for p in points]
    slope, fixed = statistics.linear_regression(tokens, seconds)
    said = [fixed + slope * n for n in tokens]
    per_token = [s / n for s, n in zip(seconds, tokens, strict=True)]
    return {
        "fixed": fixed,
        "per_token": slope,
        "r2": statistics.correlation(tokens, seconds) ** 2,
        "off": max(abs(s - line) / s for s, line in zip(seconds, said, strict=True)),
        "largest_to_smallest": per_token[-1] / per_token[0],
    }


# -- showing -----------------------------------------------------------------------------------------------------------


def show(out: Console, name: str, found: Found) -> None:
    batch, settings = found["batch"], found["settings"]
    if name in CONVERSATIONS:
        what = f"{batch['num_rollouts']} rollouts in recorded shapes"
    else:
        what = f"{batch['rollouts']} rollouts, prompt {batch['prompt']}, {batch['turns']} turns of 64 + 192"
    if batch["scale"] > 1:
        what += f" (lengths / {batch['scale']})"
    model, rate = found["model"], found["matmul"]["rate"]
    title = f"{name}: {what}; {model['parameters'] / 1e6:,.1f}M parameters, {model['dtype']}, {settings['device']}"
    show_growth(out, title, found) if name == "growth" else show_sides(out, title, found)
    foreseen = f"foreseen at most {_gib(found['foreseen_bytes'])} GiB"
    out.print(f"plain matrices: {rate / 1e12:,.2f} TFLOP/s; {foreseen} with pieces as large as the budget")


def show_sides(out: Console, title: str, found: Found) -> None:
    table = _table(
        title,
        *("", "s/update", "best", "worst", "tokens", "padded", "peak GiB", "6 P N", "computed"),
        *("time", "tokens", "work"),
    )
    for side, row in found["sides"].items():
        ratio = found["ratios"].get(side)
        table.add_row(
            f"[bold]{side}[/]" if side == TREE else side,
            *(f"{row[key]:,.3f}" for key in ("seconds", "best", "worst")),
            *(f"{row[key]:,}" for key in ("tokens", "padded_tokens")),
            _gib(row["peak_bytes"]),
            *(f"{row[key]:.1%}" for key in ("share_plain", "share_computed")),
            *((f"{ratio[key]:.2f}x" for key in ("time", "tokens", "work")) if ratio else ("", "", "")),
        )
    out.print(table)
    for side, row in found["batch"]["sides"].items():
        if side not in found["sides"]:
            out.print(
                f"{side}, not measured: {row['tokens']:,} tokens, {row['work'] / found['batch']['work']:.2f}x the work"
            )
    unique, entries = found["batch"]["unique_tokens"], found["batch"]["entries"]
    out.print(f"{unique:,} unique tokens, {entries:,} entries; the last three columns are times the tree's")
    for side, row in found["sides"].items():
        verdict = "agrees" if row["agrees"] else "[bold red]DOES NOT AGREE[/]"
        out.print(f"{side} {verdict}: loss {row['loss']:.6f}, {_off(row['apart'])}")
    out.print(f"a wrong mask: {_off(found['wrong_mask'])}")


def _off(apart: Found) -> str:
    logprobs = f"logprobs {apart['logprob_mean']:.1e} (most {apart['logprob_max']:.1e})"
    return f"{apart['loss']:.1e} off; gradient norm {apart['norm']:.1e} off (relative), {logprobs}"


def show_growth(out: Console, title: str, found: Found) -> None:
    table = _table(title, "unique tokens", "laid out", "padded", "s/update", "us/token", "peak GiB", "6 P N")
    for point in found["points"]:
        table.add_row(
            *(f"{point[key]:,}" for key in ("unique_tokens", "tokens", "padded_tokens")),
            f"{point['seconds']:,.3f}",
            f"{1e6 * point['seconds'] / point['unique_tokens']:,.2f}",
            _gib(point["peak_bytes"]),
            f"{point['share_plain']:.1%}",
        )
    out.print(table)
    line = found["fit"]
    out.print(
        f"{line['fixed']:.3f} s + {1e6 * line['per_token']:.2f} us a token: R2 {line['r2']:.4f}, no point farther than "
        f"{line['off']:.1%}; a token of the largest costs {line['largest_to_smallest']:.2f}x one of the smallest"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    return table


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:,.1f}"


# -- running -----------------------------------------------------------------------------------------------------------


def measure(folder: Path, parts: Sequence[str], arguments: argparse.Namespace, results: Path | None) -> bool:
    """All parts, each shown and kept as soon as it is measured. Returns whether all sides agree."""
    device, quick, checkpointing = arguments.device, arguments.quick, arguments.checkpointing
    laps = 1 if quick else arguments.laps
    scale = scale_of(device, quick)
    budget = max(arguments.budget // scale, 512)
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    agree = True
    command = [sys.executable, PEERS / "learner_side.py", folder, device, str(budget), str(int(checkpointing))]
    with closing(LapProcess(*command)) as side:
        about: Found = side.lap(do="about")
        for part in parts:
            before = hardware(device)
            matmul: Any = side.lap(do="matmul")
            say(f"plain matrices: {matmul['rate'] / 1e12:,.2f} TFLOP/s")
            if part == "growth":
                found = grow(side, scale, quick, laps, matmul["rate"])
            else:
                found = compare(side, part, scale, quick, laps, matmul["rate"], about["model"]["dtype"], arguments.most)
                agree &= all(row["agrees"] for row in found["sides"].values())
            found = {
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "hardware": before,
                "python": platform.python_version(),
                "load_after": os.getloadavg(),
                **about,
                "settings": {"laps": laps, "device": device, "token_budget": budget, "checkpointing": checkpointing},
                "matmul": matmul,
                **found,
            }
            if results is not None:
                name = " ".join([part, *["checkpointing"] * checkpointing, *[device] * (device != "cpu")])
                keep(results, name, found)
            show(out, part, found)
    return agree


def keep(results: Path, name: str, found: Found) -> None:
    kept: Found = json.loads(results.read_text()) if results.is_file() else {}
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(kept | {name: found}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS, "all"], nargs="+", default=["all"])
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--budget", type=int, default=BUDGET, help="tokens of a micro-batch at most")
    parser.add_argument("--most", type=int, default=MOST_TOKENS, help="tokens of rows that are timed, not only counted")
    parser.add_argument("--checkpointing", action="store_true", help="compute blocks again instead of keeping them")
    parser.add_argument("--quick", action="store_true", help="small counts, to see that it works; kept nowhere")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/learner.json")
    arguments = parser.parse_args()
    os.environ.update(environment())
    if arguments.device is None:
        import torch

        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    results = arguments.json or (None if arguments.quick else RESULTS / "learner.json")
    parts = PARTS if "all" in arguments.part else arguments.part
    (ROOT / "runs").mkdir(exist_ok=True)  # a real disk: /tmp may be memory
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-") as place:
        folder = model_for(arguments.device, Path(place))
        agree = measure(folder, parts, arguments, results)
    if not agree:
        raise SystemExit("sides do not compute the same, see above: their figures cannot be compared")


if __name__ == "__main__":
    main()
