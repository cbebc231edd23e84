"""A LoRA step of a 7B model, phase by phase, beside TRL's: the same shapes, rollouts and adapter on the same GPU.

    python benchmarks/lora.py [--sides strop trl] [--shape 7b|tiny] [--steps 6] [--limit 240] [--json FILE]

Weights are random, of Qwen2.5-7B's shape; the adapter has rank 16 and sits beside every linear layer of the blocks.
Eight groups of eight rollouts make a step, each of four turns of 192 sampled tokens (peers/four_turns.py); a step is
one update. vLLM samples on the GPU that the learner is on.

    strop         `strop train`: every rollout is a process that speaks to the gateway through the OpenAI client
    strop-ahead   the same with loop.staleness 1: rollouts and learner work at once
    trl           TRL's GRPOTrainer with vLLM in its process (peers/trl_lora.py): all rows of a round in one call

Nothing is compiled on either side (Strop's learner would be by default: the first update was not done with it after
84 s), and activations are not computed again unless --checkpointing is given. --budget and --micro-batch are the
largest micro-batches that fit beside vLLM. TRL also reads the old logprobs of every batch, to correct for what vLLM
rounds otherwise; Strop does not unless asked to. So there are two ratios: of whole steps, and with that pass taken off
TRL's.

`--shape tiny` runs without a GPU: Strop with vLLM for CPUs (peers/vllm_cpu.py), TRL with transformers' generate.

Timed is the whole step, from one to the next, as the median of all but the first two. A side that takes longer than
--limit seconds is killed, and the steps that it has made count. Results are written after each side.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from machine import hardware
from peers import vllm_cpu
from peers.processes import PEERS, ROOT

from strop.net.process_group import kill_tree
from strop.store import open_store
from strop.types import Step

RESULTS = ROOT / "benchmarks" / "results"
SIDES = ("strop", "strop-ahead", "trl")
PHASES = ("gen", "assemble", "old_log_prob", "adv", "update_actor", "update_weights", "save_checkpoint")
TOLD = {
    "tokens_per_turn": "response_length/mean",
    "turns": "num_turns/mean",
    "reward": "critic/rewards/mean",
    "logprob_diff": "training/rollout_logprobs_diff_mean",
    "token_budget": "perf/token_budget",
    "unique_tokens": "tree/unique_tokens",
}
"""What else is kept of each step, by its metric."""
SIZES = {
    "7b": {"groups": 8, "members": 8, "turn_tokens": 192, "budget": 8192, "micro_batch": 8},
    "tiny": {"groups": 2, "members": 4, "turn_tokens": 24, "budget": 4096, "micro_batch": 4},
}
CONTEXT = 2048
KV_CACHE = 8 << 30
"""Bytes: 150,000 tokens of a 7B model. Said, and not left to vLLM to find out: what a learner that loads its model at
the same time allocates is taken for its own use there."""
Found = dict[str, Any]
BEGAN = time.monotonic()


def say(line: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {line}", flush=True)


# -- Strop -------------------------------------------------------------------------------------------------------------


def settings(side: str, given: argparse.Namespace) -> list[str]:
    chosen = [
        *(f"loop.steps={given.steps}", f"loop.groups={given.groups}", f"loop.group_size={given.members}"),
        *("loop.eval_splits=[]", f"loop.checkpoint_every={given.steps}", f"loop.staleness={int(side != 'strop')}"),
        *(f"learner.lora.rank={given.rank}", f"learner.lora.alpha={2 * given.rank}", f"learner.optim.lr={given.lr}"),
        *(f"learner.token_budget={given.budget}", f"learner.gradient_checkpointing={str(given.checkpointing).lower()}"),
        f"learner.compile={str(given.compile).lower()}",
        *(f"policy.context={CONTEXT}", f"policy.train.max_tokens={given.turn_tokens}"),
        *(f"runner.workers={given.groups * given.members}", f"tasks_args.seed={given.seed}"),
        *(f"tasks_args.count={given.groups * (given.steps + 2)}", "engine.name=vllm"),
        *(f"engine.vllm.max_sequences={given.groups * given.members}", "engine.vllm.stream_interval=64"),
    ]
    if given.shape == "tiny":
        chosen += [f"engine.vllm.python={vllm_cpu.HOME / 'bin' / 'python'}", 'engine.vllm.args=["--enforce-eager"]']
        chosen += ['engine.vllm.env={VLLM_CPU_KVCACHE_SPACE="1", OMP_WAIT_POLICY="PASSIVE"}']
    else:
        chosen += [f"engine.vllm.gpu_memory={given.gpu_memory}", "engine.vllm.dtype=bfloat16"]
        chosen += [f'engine.vllm.args=["--kv-cache-memory-bytes", "{KV_CACHE}"]']
    return [*chosen, *given.set]


def strop(side: str, model: Path, place: Path, given: argparse.Namespace) -> Found:
    folder, task = place / side, PEERS / "four_turns.py"
    command = [sys.executable, "-m", "strop.cli", "train", f"{task}:agent", "--tasks", f"{task}:tasks"]
    command += ["--model", str(model), "--folder", str(folder), "--seed", str(given.seed), "--json"]
    command += [f"--set={one}" for one in settings(side, given)]
    began, watch = time.time(), Watch(side, folder)
    ended = run(command, place / f"{side}.out", given.limit, watch)
    watch()
    steps = asyncio.run(read_steps(folder)) if (folder / "store.sqlite").exists() else []
    if ended or not steps:
        say(f"{side}: {ended or 'no step was made'}")
        tell_logs(place / f"{side}.out", folder / "learner.log", folder / "vllm.log", folder / "agents.log")
    times = [began, *(step.time for step in steps)]
    took = [{"seconds": after - before} for before, after in itertools.pairwise(times)]
    return {
        "ended": ended or "done",
        "moments": watch.moments,
        "steps": [one | plain(step) for one, step in zip(took, steps, strict=True)],
        "adapter_syncs": [spent for step in steps[1:] if (spent := step.metrics.get("timing_s/update_weights"))],
    }


def plain(step: Step) -> dict[str, float]:
    """What is reported of a step. Its `update_weights` is what the version before took to get to the engine."""
    phases = {name: step.metrics.get(f"timing_s/{name}", 0.0) for name in PHASES}
    told = {name: step.metrics[metric] for name, metric in TOLD.items() if metric in step.metrics}
    failed = sum(count for name, count in step.metrics.items() if name.startswith("failed/"))
    return {"rollouts": float(len(step.rollouts)), "failed": failed, **told, **phases}


async def read_steps(folder: Path) -> list[Step]:
    store = await open_store(folder)
    try:
        return await store.steps()
    finally:
        await store.close()


async def read_stats(folder: Path) -> dict[str, int]:
    store = await open_store(folder)
    try:
        return await store.stats()
    finally:
        await store.close()


class Watch:
    """Looks at a run from outside and says how far it has come, in seconds since it was begun."""

    def __init__(self, side: str, folder: Path) -> None:
        self.side, self.folder, self.began = side, folder, time.monotonic()
        self.moments: dict[str, float] = {}

    def __call__(self) -> None:
        log = self.folder / "vllm.log"
        if "engine" not in self.moments and log.exists() and b"startup complete" in log.read_bytes():
            self.note("engine", "vLLM answers")
        if "ready" not in self.moments and (self.folder / "address.json").exists():
            self.note("ready", "engine and learner are ready")
        if "ready" in self.moments and "step" not in self.moments:
            stats = asyncio.run(read_stats(self.folder))
            if stats.get("turns"):
                self.note("turn", "the first turn is recorded")
            if stats.get("succeeded") or stats.get("failed"):
                self.note("rollout", f"the first rollout has ended ({stats})")
            if stats.get("steps"):
                self.note("step", "the first step is committed")

    def note(self, name: str, what: str) -> None:
        if name not in self.moments:
            self.moments[name] = round(time.monotonic() - self.began, 1)
            say(f"{self.side}: {what}, {self.moments[name]} s after it was begun")


# -- TRL ---------------------------------------------------------------------------------------------------------------


def trl(side: str, model: Path, place: Path, given: argparse.Namespace) -> Found:
    command = [given.trl, str(PEERS / "trl_lora.py"), "--model", str(model), "--folder", str(place / side)]
    for name in ("steps", "groups", "members", "lr", "seed", "rank", "turn_tokens", "micro_batch", "gpu_memory"):
        command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    command += ["--context", str(CONTEXT), *(["--checkpointing"] if given.checkpointing else [])]
    command += [] if given.shape == "tiny" else ["--vllm"]
    told: list[Found] = []
    out, began = place / "trl.out", time.monotonic()

    def watch() -> None:
        for line in out.read_text(errors="replace").splitlines()[len(told) :]:
            told.append(read(line))
            if "moment" in told[-1]:
                told[-1]["at"] = round(time.monotonic() - began, 1)
                say(f"{side}: {told[-1]['moment']}, {told[-1]['at']} s after it was begun")

    ended = run(command, out, given.limit, watch, errors=place / "trl.err")
    watch()
    steps = [one for one in told if "step" in one]
    if ended or not steps:
        say(f"{side}: {ended or 'no step was made'}")
        tell_logs(out, place / "trl.err")
    return {
        "ended": ended or "done",
        "moments": {one["moment"]: one["at"] for one in told if "moment" in one},
        "steps": steps,
    }


def read(line: str) -> Found:
    """A line that trl_lora.py wrote, or nothing of one that somebody else did."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# -- processes ---------------------------------------------------------------------------------------------------------


def run(command: list[str], out: Path, limit: float, watch: Callable[[], None], errors: Path | None = None) -> str:
    """Run a side and look at it until it ends or is killed. Returns what went wrong, if anything did."""
    cookie, deadline = secrets.token_hex(16), time.monotonic() + limit
    with out.open("w") as stdout, (errors or out).open("a") as stderr:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "STROP_BENCHMARK": cookie}
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.5)
                watch()
            if process.poll() is None:
                return f"killed after {limit:g} s"
            return f"ended with {process.returncode}" if process.returncode else ""
        finally:
            kill_tree(process.pid, cookie)
            process.wait()
            time.sleep(3)  # until a GPU's memory is there for the next side


def tell_logs(*files: Path, size: int = 1200) -> None:
    for file in files:
        if file.exists() and (text := file.read_text(errors="replace").strip()):
            print(f"--- {file.name}\n{text[-size:]}", flush=True)


def make_model(folder: Path, shape: str) -> Path:
    """The model in `folder`, made unless it is there. In a process of its own, which gives the GPU's memory back."""
    if not (folder / "tokenizer.json").exists():  # which is written last
        make = f"from peers import four_turns; four_turns.model({str(folder.resolve())!r}, {shape!r})"
        made = subprocess.run([sys.executable, "-c", make], cwd=ROOT / "benchmarks", stderr=subprocess.PIPE, text=True)
        if made.returncode:
            raise SystemExit(made.stderr[-2000:])
    say(f"the model is made: {shape}, {sum(file.stat().st_size for file in folder.iterdir()) / 2**30:.1f} GiB")
    return folder


# -- results -----------------------------------------------------------------------------------------------------------


def judge(found: Found) -> Found:
    """The whole of a side from its steps."""
    kept = found["steps"][2:] or found["steps"]
    if not kept:
        return found
    medians = {name: statistics.median(one[name] for one in kept) for name in ("seconds", *PHASES) if name in kept[0]}
    means = {name: statistics.mean(one[name] for one in kept) for name in TOLD if all(name in one for one in kept)}
    seconds = medians.pop("seconds")
    if "save_checkpoint" in medians:  # only the last step has one
        medians["save_checkpoint"] = max(one["save_checkpoint"] for one in found["steps"])
    return found | {"seconds_per_step": seconds, "phases": medians, **means}


def compare(sides: Found) -> Found:
    """Seconds of a step of TRL's for one of Strop's; `same_passes`: without TRL's pass for old logprobs."""
    theirs = sides.get("trl", {})
    if "seconds_per_step" not in theirs:
        return {}
    whole = theirs["seconds_per_step"]
    less = whole - theirs["phases"].get("old_log_prob", 0.0)
    ours = {name: one["seconds_per_step"] for name, one in sides.items() if name != "trl" and "seconds_per_step" in one}
    return {name: {"whole": whole / own, "same_passes": less / own} for name, own in ours.items()}


def gather(sides: Found, given: argparse.Namespace) -> Found:
    versions: dict[str, str] = {}
    for name in ("torch", "transformers", "peft", "vllm", "trl"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    sized = (
        "shape",
        "groups",
        "members",
        "turn_tokens",
        "rank",
        "checkpointing",
        "compile",
        "budget",
        "micro_batch",
        "set",
    )
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware("cpu" if given.shape == "tiny" else "cuda"),
        "versions": versions,
        **{name: getattr(given, name) for name in sized},
        "sides": sides,
        "ratios": compare(sides),
    }


def show(side: str, found: Found) -> None:
    if "seconds_per_step" not in found:
        return say(f"{side}: no step to judge by ({found['ended']})")
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found["phases"].items())
    say(f"{side}: {found['seconds_per_step']:.2f} s a step over {len(found['steps'])} steps ({phases})")
    say(f"{side}: every step {[round(one['seconds'], 1) for one in found['steps']]}")
    told = {name: round(found[name], 3) for name in TOLD if name in found}
    say(f"{side}: {told}, failed rollouts {sum(one.get('failed', 0) for one in found['steps']):g}")
    if syncs := found.get("adapter_syncs"):
        say(f"{side}: the adapter reached vLLM in {', '.join(f'{one:.2f}' for one in syncs)} s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["strop", "trl"])
    parser.add_argument("--shape", choices=SIZES, default="7b")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="for each side")
    for name, what in {
        "groups": "groups per step",
        "members": "rollouts per group",
        "turn-tokens": "sampled tokens per turn",
        "budget": "tokens of a micro-batch of Strop's",
        "micro-batch": "rollouts of a micro-batch of TRL's",
    }.items():
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: by the shape)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, on both sides")
    parser.add_argument("--compile", action="store_true", help="learner.compile, which the first step waits for")
    parser.add_argument("--gpu-memory", type=float, default=0.2, help="vLLM's share of the GPU's memory")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting of Strop's sides")
    parser.add_argument("--trl", default=sys.executable, metavar="PYTHON", help="a Python that has TRL")
    parser.add_argument("--folder", type=Path, help="where the model and runs are kept (default: nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/lora.json, not for tiny")
    parser.add_argument("--add", action="store_true", help="keep what the file has of other sides")
    given = parser.parse_args()
    for name, value in SIZES[given.shape].items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


def main() -> None:
    given = parse()
    file = given.json or (None if given.shape == "tiny" else RESULTS / "lora.json")
    sides: Found = json.loads(file.read_text())["sides"] if given.add and file is not None and file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="strop-lora-") as scratch:
        place = given.folder or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        model = make_model(place / f"model-{given.shape}", given.shape)
        for side in given.sides:
            found = (trl if side == "trl" else strop)(side, model, place, given)
            sides[side] = judge(found)
            show(side, sides[side])
            if file is not None:
                file.write_text(json.dumps(gather(sides, given), indent=1) + "\n")
    for side, ratio in compare(sides).items():
        say(f"{side}: {ratio['whole']:.2f}x as fast as TRL; {ratio['same_passes']:.2f}x without TRL's old logprobs")


if __name__ == "__main__":
    main()
