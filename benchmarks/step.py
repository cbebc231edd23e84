"""A whole training step, phase by phase, beside the same step of another checkout.

    python benchmarks/step.py [--shape 7b|1.5b|tiny] [--engine embedded|vllm] [--steps 6] [--against CHECKOUT]
                              [--set a.b=c] [--json FILE]

Weights are random, of Qwen2.5's shapes; of 7B an adapter is trained (LoRA). Eight groups of eight rollouts make a step,
each of four turns of 192 sampled tokens (peers/four_turns.py) in a process of its own that speaks to the gateway
through the OpenAI client. A step is two optimizer steps, so that the old logprobs are scored before them. The last step
alone writes a checkpoint: checkpoint.py tells what one costs. With vLLM the server is on the learner's GPU and sleeps
while the learner works (hybrid engine): its weights are then in the CPU's memory, and its KV cache is gone.

    gen               rollouts, until the last one has ended
    pause_engines     engines let go: a server falls asleep
    old_log_prob      score: the learner's logprobs of all that was sampled
    update_actor      forward, loss, backward and both optimizer steps
    update_weights    a server wakes, and the new version reaches the engine
    send_weights      of that, sending the tensors
    save_checkpoint   what training waits for of the last step's

What changing between sampling and learning costs, as a share of the step, is at most pause_engines and update_weights.
Timed are phases as the run's own metrics have them, and the whole step from one commit to the next: medians of all but
the first two, in which things are compiled. --against runs another checkout's code after this one's, on the same model
and tasks; it must have this engine and these settings. `--shape tiny` runs on a CPU, to see that it works; with vLLM
for CPUs: `--engine vllm --set engine.vllm.python=PYTHON engine.vllm.sleep=false engine.vllm.weights=files`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import hardware
from peers import four_turns
from peers.processes import PEERS, ROOT, import_from, say

SWITCH = ("pause_engines", "update_weights")
PHASES = (
    "gen",
    "pause_engines",
    "assemble",
    "old_log_prob",
    "adv",
    "update_actor",
    "update_weights",
    "send_weights",
    "save_checkpoint",
)
SIZES = {
    "7b": {"groups": 8, "members": 8, "turn_tokens": 192, "budget": 8192},
    "1.5b": {"groups": 8, "members": 8, "turn_tokens": 192, "budget": 20480},
    "tiny": {"groups": 2, "members": 4, "turn_tokens": 24, "budget": 2048},
}
MORE = {"7b": ["learner.lora.rank=32"]}
VLLM = [
    "engine.vllm.sleep=true",
    "engine.vllm.weights=ipc",
    "engine.vllm.gpu_memory=0.5",
    "engine.vllm.stream_interval=64",
]
Found = dict[str, Any]


def settings(given: argparse.Namespace) -> list[str]:
    size = SIZES[given.shape]
    rollouts = size["groups"] * size["members"]
    return [
        *(f"loop.steps={given.steps}", f"loop.groups={size['groups']}", f"loop.group_size={size['members']}"),
        *("loop.eval_splits=[]", f"loop.checkpoint_every={given.steps}", "learner.minibatches=2"),
        *("learner.optim.lr=1e-6", f"learner.token_budget={size['budget']}", "policy.context=2048"),
        *(f"policy.train.max_tokens={size['turn_tokens']}", f"runner.workers={rollouts}"),
        *(f"tasks_args.count={size['groups'] * (given.steps + 2)}", f"tasks_args.seed={given.seed}"),
        *(f"engine.name={given.engine}", f"engine.max_sequences={rollouts}"),
        *MORE.get(given.shape, []),
        *(VLLM if given.engine == "vllm" else []),
        *given.set,
    ]


def run(checkout: Path, model: Path, folder: Path, given: argparse.Namespace) -> Found:
    """A run of a checkout's `strop train`, and what its steps took."""
    task = PEERS / "four_turns.py"
    command = [sys.executable, "-m", "strop.cli", "train", f"{task}:agent", "--tasks", f"{task}:tasks", "--json"]
    command += ["--model", str(model), "--folder", str(folder), "--seed", str(given.seed)]
    command += [f"--set={one}" for one in settings(given)]
    done = subprocess.run(command, env=os.environ | import_from(checkout), capture_output=True, text=True)
    if done.returncode:
        log = folder / "learner.log"
        raise SystemExit(done.stderr[-3000:] + (log.read_text()[-2000:] if log.exists() else ""))
    steps = read_steps(folder)
    kept = list(itertools.pairwise(steps))[1:] or list(itertools.pairwise(steps))
    metrics = [after["metrics"] for _, after in kept]
    return {
        "seconds_per_step": statistics.median(after["time"] - before["time"] for before, after in kept),
        "phases": {name: _median(metrics, f"timing_s/{name}") for name in PHASES},
        "unique_tokens": _median(metrics, "tree/unique_tokens"),
        "tokens": _median(metrics, "perf/total_num_tokens"),
        "tokens_per_turn": _median(metrics, "response_length/mean"),
        "logprob_diff": _median(metrics, "training/rollout_logprobs_diff_mean"),
        "steps": [after["metrics"] for after in steps],
    }


def _median(metrics: list[Found], name: str) -> float:
    return statistics.median(one.get(name, 0.0) for one in metrics)


def read_steps(folder: Path) -> list[Found]:
    """From the file itself: the store of another checkout may be of another version."""
    with sqlite3.connect(folder / "store.sqlite") as store:
        store.row_factory = sqlite3.Row
        rows = store.execute("SELECT * FROM steps WHERE superseded = 0 ORDER BY number").fetchall()
    return [{"time": row["time"], "metrics": json.loads(row["metrics"])} for row in rows]


def show(sides: dict[str, Found]) -> None:
    print(f"{'':18}" + "".join(f"{name:>12}" for name in sides) + ("       ratio" if len(sides) > 1 else ""))
    for name in ("step", *PHASES):
        took = [side["seconds_per_step"] if name == "step" else side["phases"][name] for side in sides.values()]
        ratio = f"{took[1] / took[0]:11.2f}x" if len(took) > 1 and took[0] else ""
        print(f"{name:18}" + "".join(f"{one:10.3f} s" for one in took) + ratio)
    for name, side in sides.items():
        share = sum(side["phases"][phase] for phase in SWITCH) / side["seconds_per_step"]
        print(f"{name}: engines let go and take up again within {share:.1%} of a step")
        told = f"{side['unique_tokens']:,.0f} tokens laid out of {side['tokens']:,.0f}"
        print(f"{name}: {told}, {side['tokens_per_turn']:.0f} a turn, logprobs {side['logprob_diff']:.1e} apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, run after this one")
    parser.add_argument("--shape", choices=list(SIZES), default="1.5b")
    parser.add_argument("--engine", choices=["embedded", "vllm"], default="embedded")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="a.b=c", help="any setting, of both sides"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures here")
    given = parser.parse_args()
    checkouts = {"this": ROOT} | ({"other": given.against} if given.against else {})
    before = hardware("cuda" if given.shape != "tiny" else "cpu")
    sides: dict[str, Found] = {}
    (ROOT / "runs").mkdir(exist_ok=True)  # a real disk: /tmp may be memory
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="step-") as place:
        model = four_turns.model(Path(place) / "model", given.shape)
        for name, checkout in checkouts.items():
            began = time.monotonic()
            sides[name] = run(checkout, model, Path(place) / name, given)
            say(f"{name}: {len(sides[name]['steps'])} steps in {time.monotonic() - began:.0f} s, start included")
            if given.json:
                found = {"hardware": before, "settings": settings(given), "sides": sides}
                given.json.write_text(json.dumps(found, indent=1) + "\n")
    show(sides)


if __name__ == "__main__":
    main()
