"""The embedded engine beside Hugging Face's generate and vLLM: tokens per second, and what a growing history costs.

    python benchmarks/engine.py [--quick] [--part steady|chat|all] [--device cpu|cuda] [--json FILE]
    python benchmarks/engine.py --setup      only make the peers' virtualenv, in .peers/

    steady     32 requests at once (256 on a GPU), 100 prompt tokens and 64 sampled ones each
    chat       conversations that go on: 12 turns, each adds 50 tokens to the history and samples 16. `generate`
               computes the whole history every turn, the others use keys again

The model is SmolLM2-135M's shape with random weights, in fp32 on a CPU and bf16 on a GPU. Sides take turns within one
run, each in a process of its own, and figures are medians of several laps behind one that does not count: compare
ratios, not runs. CPU time counts what a side worked; on a machine with other business it says more than the clock.

Every side draws at temperature 1 with nothing cut. Ours and vLLM's tell each token's logprob, generate does not.

Left out: servers. All sides are called within their process, so nothing here is the cost of HTTP.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from machine import hardware
from peers import vllm_cpu
from peers.processes import PEERS, ROOT, LapProcess, say
from rich.console import Console
from rich.table import Table

from strop.learner.spawn import KEEP_MEMORY, WAIT_SHORTLY

RESULTS = ROOT / "benchmarks" / "results"
OURS, GENERATE, CONTINUOUS, VLLM = "strop embedded", "HF generate", "HF continuous batching", "vLLM"

Lap = dict[str, float]


def orders(part: str, device: str, quick: bool) -> dict[str, Any]:
    """What one lap of a part asks for."""
    if part == "steady":
        requests = 256 if device == "cuda" else 32
        return {"part": part, "requests": requests, "prompt": 100, "message": 0, "sampled": 16 if quick else 64}
    requests = 64 if device == "cuda" else 8
    return {
        "part": part,
        "requests": 2 if quick else requests,
        "prompt": 350,
        "message": 50,
        "sampled": 16,
        "turns": 3 if quick else 12,
    }


def commands(folder: Path, device: str) -> dict[str, list[str | Path]]:
    """How each side that can run here is started."""
    rows = "256" if device == "cuda" else "32"
    more = [folder, device, rows]
    found: dict[str, list[str | Path]] = {
        OURS: [sys.executable, PEERS / "engine_strop.py", *more],
        GENERATE: [sys.executable, PEERS / "engine_hf.py", *more, "generate"],
    }
    if device == "cuda":
        found[CONTINUOUS] = [sys.executable, PEERS / "engine_hf.py", *more, "continuous"]
        if importlib.util.find_spec("vllm"):
            found[VLLM] = [sys.executable, PEERS / "engine_vllm.py", *more]
    elif vllm_cpu.is_set_up():
        found[VLLM] = [vllm_cpu.HOME / "bin" / "python", PEERS / "engine_vllm.py", *more]
    else:
        say("vLLM is left out: make its virtualenv with --setup")
    return found


def environment() -> dict[str, str]:
    """The same for every side, as `strop train` sets it: all cores, threads that wait soon sleep, freed memory is
    kept; and nothing is fetched."""
    return {
        **WAIT_SHORTLY,
        **KEEP_MEMORY,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **os.environ,
    }


def make_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)


def measure(folder: Path, parts: Sequence[str], device: str, quick: bool, laps: int) -> dict[str, Any]:
    found: dict[str, dict[str, list[Lap]]] = {part: {} for part in parts}
    os.environ.update(environment())
    with ExitStack() as stack:
        sides: dict[str, LapProcess] = {}
        versions: dict[str, Any] = {}
        for name, command in commands(folder, device).items():
            say(f"starting {name}")
            try:
                sides[name] = side = stack.enter_context(closing(LapProcess(*command)))
                versions[name] = side.lap(part="versions")["versions"]
            except SystemExit:
                say(f"{name} did not start, see above: it is left out")
                sides.pop(name, None)
        for part in parts:
            order = orders(part, device, quick)
            names = [name for name in sides if (part, name) != ("chat", CONTINUOUS)]  # which keeps no keys of a turn
            for name in names:
                # One that does not count: compilers, recordings, memory that is first touched.
                sides[name].lap(**(order | {"turns": min(2, order.get("turns", 1))}), seed=0)
            for number in range(laps):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    lap: Any = sides[name].lap(**order, seed=number + 1)
                    found[part].setdefault(name, []).append(lap)
                    rate = lap["sampled_tokens"] / lap["seconds"]
                    say(f"{part}, lap {number + 1} of {laps}: {name} {rate:,.1f} tokens/s in {lap['seconds']:.1f} s")
    return {
        part: {
            "settings": orders(part, device, quick) | {"laps": laps, "device": device},
            "side_versions": versions,
            "sides": {name: figures(laps) for name, laps in by.items()},
            "ratios": ratios(by),
        }
        for part, by in found.items()
    }


def figures(laps: Sequence[Lap]) -> dict[str, float]:
    rates = [lap["sampled_tokens"] / lap["seconds"] for lap in laps]
    return {
        "rate": statistics.median(rates),
        "best": max(rates),
        "worst": min(rates),
        "cpu_ms": statistics.median(1000 * lap["cpu_seconds"] / lap["sampled_tokens"] for lap in laps),
        "seconds": statistics.median(lap["seconds"] for lap in laps),
        "prompt_tokens": laps[0]["prompt_tokens"],
        "sampled_tokens": laps[0]["sampled_tokens"],
    }


def ratios(by: dict[str, list[Lap]]) -> dict[str, dict[str, float]]:
    """Ours to each other side, lap by lap: by the clock and by CPU time; above 1 ours is ahead."""
    out: dict[str, dict[str, float]] = {}
    for name, laps in by.items():
        if name != OURS:
            pairs = list(zip(by[OURS], laps, strict=True))
            clock = [other["seconds"] / ours["seconds"] for ours, other in pairs]
            out[name] = {
                "clock": statistics.median(clock),
                "clock_best": max(clock),
                "clock_worst": min(clock),
                "cpu": statistics.median(other["cpu_seconds"] / ours["cpu_seconds"] for ours, other in pairs),
            }
    return out


def show(out: Console, name: str, part: dict[str, Any]) -> None:
    settings = part["settings"]
    what = f"{settings['requests']} requests of {settings['prompt']} + {settings['sampled']} tokens"
    if name == "chat":
        what = (
            f"{settings['requests']} conversations of {settings['turns']} turns: {settings['prompt']} tokens, then "
            f"{settings['message']} + {settings['sampled']} a turn"
        )
    table = Table(title=f"{name}: {what}, {settings['device']}", title_justify="left")
    for column in ("", "tokens/s", "best", "worst", "CPU ms/token", "ours is ahead by", "by CPU time"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for side, found in part["sides"].items():
        ratio = part["ratios"].get(side)
        table.add_row(
            f"[bold]{side}[/]" if side == OURS else side,
            *(f"{found[key]:,.1f}" for key in ("rate", "best", "worst", "cpu_ms")),
            *((f"{ratio['clock']:.2f}x", f"{ratio['cpu']:.2f}x") if ratio else ("", "")),
        )
    out.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["steady", "chat", "all"], default="all")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small counts, to see that it works; kept nowhere")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/engine.json")
    parser.add_argument("--setup", action="store_true", help="only make the peers' virtualenv")
    arguments = parser.parse_args()
    if arguments.setup:
        say(f"vLLM is {vllm_cpu.set_up()}")
        return
    if arguments.device is None:
        import torch

        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    results = arguments.json or (None if arguments.quick else RESULTS / "engine.json")
    parts = ["steady", "chat"] if arguments.part == "all" else [arguments.part]
    about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "hardware": hardware(arguments.device)}
    (ROOT / "runs").mkdir(exist_ok=True)  # a real disk: /tmp may be memory
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-") as folder:
        make_model(Path(folder))
        measured = measure(
            Path(folder), parts, arguments.device, arguments.quick, 1 if arguments.quick else arguments.laps
        )
    kept: dict[str, Any] = json.loads(results.read_text()) if results and results.is_file() else {}
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    for part, found in measured.items():
        show(out, part, found)
        name = part if arguments.device == "cpu" else f"{part} {arguments.device}"
        kept[name] = {**about, "python": platform.python_version(), "load_after": os.getloadavg(), **found}
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
