"""Whole training runs beside TRL's: the same model, task, rollouts per step and learning rate on the same machine.

    python benchmarks/train.py [--sides embedded trl vllm trl-vllm ...] [--steps 20] [--runs 3] [--quick] [--json FILE]

The task has two turns and one tool (peers/adding.py); 32 questions of 8 rollouts make a step, and a step is one update.
With Strop every rollout is a process of its own that speaks to the gateway through the OpenAI client; with TRL the tool
is called by the trainer (peers/trl_side.py).

    embedded, vllm              Strop, with either engine; rollouts wait for the learner
    embedded-ahead, vllm-ahead  the same with loop.staleness 1: rollouts and learner work at once
    trl, trl-vllm               TRL with transformers' generate, and with vLLM colocated

Timed is the whole step, from one to the next, as the median of all but the first two; of several runs, in which sides
take turns, the one in the middle. Busy is the share of these steps in which the GPU computed anything, as the driver
counts it. TRL runs where the Python that runs this has it, or with the one that --trl names. Results are written after
each side; --add keeps those of other sides and runs that the file has already, to measure some at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peers import adding
from peers.processes import PEERS, ROOT, say
from rich.console import Console
from rich.table import Table

from strop.store import open_store
from strop.types import Step

RESULTS = ROOT / "benchmarks" / "results"
SIDES = ("embedded", "trl", "vllm", "trl-vllm", "embedded-ahead", "vllm-ahead")
PHASES = ("gen", "assemble", "adv", "update_actor", "update_weights", "save_checkpoint")
PAIRS = {"embedded": "trl", "embedded-ahead": "trl", "vllm": "trl-vllm", "vllm-ahead": "trl-vllm"}
DIFFERENCE = "training/rollout_logprobs_diff_mean"
PER_RUN = (
    "seconds_per_step",
    "phases",
    "rollouts_per_second",
    "gpu_busy",
    "reward_first",
    "reward_last",
    "steps_to_95",
)
Found = dict[str, Any]


def settings(side: str, given: argparse.Namespace) -> list[str]:
    engine, _, ahead = side.partition("-")
    chosen = [
        *(f"loop.steps={given.steps}", f"loop.groups={given.groups}", f"loop.group_size={given.members}"),
        *("loop.eval_splits=[]", f"loop.checkpoint_every={given.steps}", f"loop.staleness={int(bool(ahead))}"),
        *(f"learner.optim.lr={given.lr}", "learner.token_budget=65536", "policy.context=512"),
        *(f"policy.train.max_tokens={given.max_tokens}", f"runner.workers={given.workers}"),
        *(f"tasks_args.count={given.groups * (given.steps + 1)}", f"tasks_args.seed={given.seed}"),
        *(f"engine.name={engine}", f"engine.max_sequences={given.groups * given.members}"),
    ]
    if engine == "vllm":
        # For a model this small the process of a server sets the pace, not the GPU: there are two of them on it.
        chosen += ["engine.replicas=2", "engine.vllm.weights=ipc", "engine.vllm.gpu_memory=0.15"]
        chosen += ["engine.vllm.dtype=bfloat16", 'engine.vllm.args=["--kv-cache-memory-bytes=8G"]']
        # Agents here do not stream, and 256 of them ask at once.
        chosen += ["engine.vllm.stream_interval=64", "engine.vllm.servers=4"]
    return [*chosen, *given.set]


def strop(side: str, model: Path, place: Path, given: argparse.Namespace) -> Found:
    """A run of `strop train`."""
    folder, task = place / side, PEERS / "adding.py"
    command = [sys.executable, "-m", "strop.cli", "train", f"{task}:agent", "--tasks", f"{task}:tasks"]
    command += ["--model", str(model), "--folder", str(folder), "--seed", str(given.seed), "--json"]
    started = time.time()
    done = subprocess.run(
        [*command, *(f"--set={s}" for s in settings(side, given))], capture_output=True, text=True, check=False
    )
    if done.returncode:
        tails = [
            (folder / name).read_text()[-2000:] for name in ("learner.log", "vllm.log") if (folder / name).exists()
        ]
        raise SystemExit("\n".join([done.stderr, *tails]))
    summary, steps = json.loads(done.stdout), asyncio.run(steps_of(folder))
    compared = [s.metrics[DIFFERENCE] for s in steps if DIFFERENCE in s.metrics]  # not where older weights sampled all
    took = [{"seconds": b.time - a.time} | plain(b) for a, b in itertools.pairwise(steps)]
    return {
        "steps": [{"seconds": steps[0].time - started} | plain(steps[0]), *took],
        "failed": summary["failed"],
        "logprob_diff_mean": statistics.mean(compared) if compared else None,
    }


def plain(step: Step) -> dict[str, float]:
    phases = {name: step.metrics.get(f"timing_s/{name}", 0.0) for name in PHASES}
    found = {"reward": step.metrics["critic/rewards/mean"], "rollouts": float(len(step.rollouts)), "ended": step.time}
    return found | phases


async def steps_of(folder: Path) -> list[Step]:
    store = await open_store(folder)
    try:
        return await store.steps()
    finally:
        await store.close()


def trl(side: str, model: Path, place: Path, given: argparse.Namespace) -> Found:
    command = [given.trl, PEERS / "trl_side.py", "--model", str(model), "--folder", str(place / side)]
    for name in ("steps", "groups", "members", "lr", "seed"):
        command += [f"--{name}", str(getattr(given, name))]
    command += ["--max-tokens", str(given.max_tokens), *(["--vllm"] if side.endswith("vllm") else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


class BusyShare:
    """How much of the time the GPU computes, as the driver tells ten times a second; nothing where it does not."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
        try:
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except FileNotFoundError:
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self._seen.append((time.time(), float(line) / 100))

    def between(self, begin: float, end: float) -> float | None:
        seen = [share for moment, share in self._seen if begin <= moment <= end]
        return statistics.mean(seen) if seen else None


def judge_run(found: Found, busy: BusyShare) -> Found:
    """The whole of a side's run from its steps."""
    steps = found["steps"]
    kept = steps[2:] or steps
    phases = {name: statistics.median(s[name] for s in kept) for name in PHASES if name in kept[0]}
    enough = [n for n, step in enumerate(steps, 1) if step["reward"] > 0.95]
    return found | {
        "seconds_per_step": statistics.median(step["seconds"] for step in kept),
        "phases": phases,
        "rollouts_per_second": sum(s["rollouts"] for s in kept) / sum(s["seconds"] for s in kept),
        "gpu_busy": busy.between(kept[0]["ended"] - kept[0]["seconds"], kept[-1]["ended"]),
        "reward_first": steps[0]["reward"],
        "reward_last": statistics.mean(step["reward"] for step in steps[-3:]),
        "steps_to_95": enough[0] if enough else None,
    }


def judge_side(before: Found, run: Found) -> Found:
    """A side by the run in the middle of all that it has made; steps are the last one's."""
    runs = [*before.get("runs", []), {name: run[name] for name in PER_RUN}]
    return run | sorted(runs, key=lambda one: one["seconds_per_step"])[(len(runs) - 1) // 2] | {"runs": runs}


def show(found: Found) -> None:
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"{found['rollouts']} rollouts of two turns a step", title_justify="left")
    for column in (
        "",
        "s/step",
        "gen",
        "update",
        "weights",
        "rollouts/s",
        "busy",
        "reward",
        "over .95 at",
        "beside TRL",
    ):
        table.add_column(column, justify="right" if column else "left")
    for name, side in found["sides"].items():
        phases, ratio = side["phases"], found["ratios"].get(name)
        table.add_row(
            name,
            f"{side['seconds_per_step']:.2f}",
            *(f"{phases[phase]:.2f}" if phase in phases else "" for phase in ("gen", "update_actor", "update_weights")),
            f"{side['rollouts_per_second']:.0f}",
            f"{side['gpu_busy']:.0%}" if side["gpu_busy"] is not None else "",
            f"{side['reward_first']:.2f} to {side['reward_last']:.3f}",
            f"step {side['steps_to_95']}" if side["steps_to_95"] else "",
            f"{ratio:.2f}x as fast" if ratio else "",
        )
    out.print(table)


def hardware() -> Found:
    import torch

    found: Found = {"cores": os.cpu_count(), "machine": platform.machine(), "load_before": os.getloadavg()}
    found |= {"torch": torch.__version__, "python": platform.python_version()}
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["embedded", "trl"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=int, default=1, help="how often each side runs")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=256, help="processes that run agents")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting of Strop's side")
    parser.add_argument("--trl", default=sys.executable, metavar="PYTHON", help="a Python that has TRL")
    parser.add_argument("--folder", type=Path, help="where runs are kept (default: nowhere)")
    parser.add_argument("--quick", action="store_true", help="three small steps, to see that it works; kept nowhere")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/train.json")
    parser.add_argument("--add", action="store_true", help="keep what the file has of other sides and runs")
    given = parser.parse_args()
    if given.quick:
        given.steps, given.groups, given.members, given.workers = 3, 2, 4, 8
    file = given.json or (None if given.quick else RESULTS / "train.json")
    sides: Found = json.loads(file.read_text())["sides"] if given.add and file is not None and file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="strop-train-") as scratch:
        place = given.folder or Path(scratch)
        model = adding.model(place / "model")
        busy, rounds = BusyShare(), [(number, side) for number in range(given.runs) for side in list[str](given.sides)]
        for number, side in rounds:
            if side.startswith("trl") and given.trl == sys.executable and find_spec("trl") is None:
                say(f"{side}: TRL is not installed here; name a Python that has it with --trl")
                continue
            run = place / f"run-{number + 1}"
            measured = judge_run((trl if side.startswith("trl") else strop)(side, model, run, given), busy)
            date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            sides[side] = {"date": date} | judge_side(sides.get(side, {}), measured)
            say(f"{side}: {measured['seconds_per_step']:.2f} s a step, reward {measured['reward_last']:.3f}")
            if file is not None:
                file.write_text(json.dumps(whole(sides, given), indent=1) + "\n")
    show(whole(sides, given))


def whole(sides: Found, given: argparse.Namespace) -> Found:
    ratios = {
        ours: sides[theirs]["seconds_per_step"] / sides[ours]["seconds_per_step"]
        for ours, theirs in PAIRS.items()
        if ours in sides and theirs in sides
    }
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware(),
        "rollouts": given.groups * given.members,
        "lr": given.lr,
        "seed": given.seed,
        "sides": sides,
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
