"""Prompt optimisers side by side on the scripted task of hints.py, and the PyPI package `gepa` without Strop.

    python benchmarks/prompts.py [--seeds 5] [--json FILE]

Everybody has the same tasks, the same two scripted models over HTTP, the same minibatches and the same budget: so many
calls of the optimiser model, and so many rollouts. Told is what is earned on held-out tasks before and after, and what
was spent. The plain package has no notion of a held-out set or of a budget of calls: what it holds for best is run on
the held-out tasks afterwards, and a stopper counts its calls. It is run as it is by default, and with its cache of
evaluations, which Strop always has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import hints
from machine import hardware

HERE = Path(__file__).parent
CALLS, ROLLOUTS, MINIBATCH = 600, 6000, 8
APO = {"beam_width": 2, "branch_factor": 4}


@contextmanager
def open_models() -> Any:
    """The two scripted models in a process of their own; yields their address."""
    server = subprocess.Popen([sys.executable, str(HERE / "hints.py")], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()


def configure(url: str, name: str, seed: int, settings: dict[str, Any]) -> str:
    """A TOML file for `strop train`."""
    given = {"max_calls": CALLS, "max_rollouts": ROLLOUTS, "minibatch": MINIBATCH, "optimizer": "writer", **settings}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in given.items())
    return f"""
agent = "{HERE}/hints.py:agent"
tasks = "{HERE}/hints.py:tasks"
tasks_args = {{ seed = {seed} }}
seed = {seed}
[prompts.system]
text = "{hints.FIRST.strip()}"
[algorithm]
name = "{name}"
[algorithm.settings]
{lines}
[gateway.outside.follower]
url = "{url}/v1"
model = "follower"
agents = ["*"]
[gateway.outside.writer]
url = "{url}/v1"
model = "writer"
[loop]
steps = 1000
[engine]
deterministic = true
[runner]
agents_in = "loop"
workers = 32
"""


def run_strop(name: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    with open_models() as url, tempfile.TemporaryDirectory() as place:
        toml = Path(place) / "run.toml"
        toml.write_text(configure(url, name, seed, settings))
        strop = [
            sys.executable,
            "-m",
            "strop.cli",
            "train",
            "--config",
            str(toml),
            "--folder",
            f"{place}/run",
            "--json",
        ]
        began = time.monotonic()
        done = subprocess.run(strop, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        last = json.loads(Path(place, "run", "metrics.jsonl").read_text().splitlines()[-2])
        counts = json.loads(urllib.request.urlopen(f"{url}/counts").read())
        assert counts["writer"] == last["prompts/calls"] <= CALLS, (counts, last)
        return {
            "before": summary["start"],
            "after": summary["end"],
            "calls": int(last["prompts/calls"]),
            "rollouts": int(last["prompts/rollouts"]),
            "versions": int(last["prompts/versions"]),
            "steps": summary["steps"],
            "seconds": round(time.monotonic() - began, 1),
        }


def run_plain(seed: int, *, cache: bool) -> dict[str, Any]:
    """The package by itself, with an adapter of a few lines."""
    import openai
    from gepa.api import optimize
    from gepa.core.adapter import EvaluationBatch

    tasks = hints.tasks(seed)
    by_split = {split: [task for task in tasks if task["split"] == split] for split in ("train", "validation", "test")}
    spent = {"calls": 0, "rollouts": 0}
    with open_models() as url, ThreadPoolExecutor(32) as threads:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="-")

        def say(model: str, **request: Any) -> str:
            return client.chat.completions.create(model=model, **request).choices[0].message.content or ""

        def run(task: dict[str, Any], system: str) -> float:
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": task["data"]["question"]},
            ]
            return float(say("follower", messages=messages) == task["data"]["answer"])

        class Adapter:
            propose_new_texts = None

            def evaluate(self, batch: Any, candidate: Any, capture_traces: bool = False) -> Any:
                spent["rollouts"] += len(batch)
                scores = list(threads.map(lambda task: run(task, candidate["system"]), batch))
                traces = [
                    {"Inputs": task["data"]["question"], "Generated Outputs": "", "Feedback": f"score {score:g}"}
                    for task, score in zip(batch, scores, strict=True)
                ]
                return EvaluationBatch(outputs=scores, scores=scores, trajectories=traces)

            def make_reflective_dataset(self, candidate: Any, eval_batch: Any, components: Any) -> Any:
                return dict.fromkeys(components, eval_batch.trajectories)

        def reflect(prompt: Any) -> str:
            spent["calls"] += 1
            question = [{"role": "user", "content": str(prompt)}]
            return say("writer", messages=question, seed=1000 * seed + spent["calls"])

        class Quiet:
            def log(self, message: str) -> None:
                pass

        def is_over(state: Any) -> bool:
            return spent["calls"] >= CALLS or max(state.program_full_scores_val_set) >= 1.0

        began = time.monotonic()
        found = optimize(
            seed_candidate={"system": hints.FIRST.strip()},
            trainset=by_split["train"],
            valset=by_split["validation"],
            adapter=Adapter(),  # type: ignore[arg-type]
            reflection_lm=reflect,
            reflection_minibatch_size=MINIBATCH,
            max_metric_calls=ROLLOUTS,
            stop_callbacks=is_over,
            cache_evaluation=cache,
            logger=Quiet(),  # type: ignore[arg-type]
            seed=seed,
        )
        seconds, rollouts = time.monotonic() - began, spent["rollouts"]

        def score(system: str) -> float:
            return fmean(threads.map(lambda task: run(task, system), by_split["test"]))

        best = found.best_candidate
        return {
            "before": score(hints.FIRST.strip()),
            "after": score(best["system"] if isinstance(best, dict) else best),
            "calls": spent["calls"],
            "rollouts": rollouts,
            "versions": len(found.candidates),
            "seconds": round(seconds, 1),
        }


SIDES: dict[str, Callable[[int], dict[str, Any]]] = {
    "strop gepa": lambda seed: run_strop("gepa", seed, {}),
    "strop apo": lambda seed: run_strop("apo", seed, APO),
    "plain gepa": lambda seed: run_plain(seed, cache=False),
    "plain gepa, cached": lambda seed: run_plain(seed, cache=True),
}


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--seeds", type=int, default=5)
    given.add_argument("--json", type=Path, default=HERE / "results" / "prompts.json")
    arguments = given.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for seed in range(arguments.seeds):
        for name, side in SIDES.items():
            one = {"seed": seed, **side(seed)}
            results.setdefault(name, []).append(one)
            print(f"{name:20} {json.dumps(one)}", flush=True)
    means = {
        name: {key: round(fmean(run[key] for run in runs), 3) for key in ("before", "after", "calls", "rollouts")}
        | {"over_90": sum(run["after"] > 0.9 for run in runs)}
        for name, runs in results.items()
    }
    told = {
        "budget": {"calls": CALLS, "rollouts": ROLLOUTS, "minibatch": MINIBATCH, "apo": APO},
        "means": means,
        "runs": results,
        "versions": {name: version(name) for name in ("gepa", "openai")},
        "hardware": hardware(),
    }
    arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(means, indent=1))


if __name__ == "__main__":
    main()
