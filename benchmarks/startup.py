"""How long a command takes to its first sampled token and to its first finished step, with empty and filled caches.

    python benchmarks/startup.py [--model strop/nano] [--engine embedded] [--device cpu] [--laps 3]
    python benchmarks/startup.py --against ../other/checkout      both in turns, in one run
    python benchmarks/startup.py --command serve                  to the first token of `strop serve --model`

    train    `strop train` with an agent that asks once, and streams: it notes when the first text arrives
    serve    `strop serve --model`: a request is sent as soon as its address is known

`cold` has an empty place for compiled kernels, `warm` the place that `cold` filled (they differ where torch.compile is
used, which is on GPUs). Beside the clock stands the CPU time of all of the command's processes until then, which says
more on a machine that has other things to do.

Left out: the system's file cache, which is warm after the first lap.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import hardware

ROOT = Path(__file__).resolve().parents[1]
AGENT = """
import os, time

def agent(task, llm):
    client = llm.client()
    asked = {"model": llm.model, "messages": [{"role": "user", "content": task.data["question"]}], "stream": True}
    text = ""
    for chunk in client.chat.completions.create(**asked):
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece and not text:
            note()
        text += piece or ""
    return float(len(text) % 2)

def note():
    try:
        with open(os.environ["STARTUP_STAMP"], "x") as file:
            file.write(str(time.time()))
    except FileExistsError:
        pass
"""
Measured = dict[str, float]


class Command:
    """A command of a checkout's code at work. `spent` is the CPU time of all its processes."""

    def __init__(self, checkout: Path, arguments: list[str], folder: Path, env: dict[str, str]) -> None:
        self.began, self._log = time.time(), folder / "log"
        env = os.environ | {"PYTHONPATH": _add_path(checkout), "STARTUP_STAMP": str(folder / "stamp")} | env
        with self._log.open("wb") as out:
            given = [sys.executable, "-m", "strop.cli", *arguments]
            self.process = subprocess.Popen(given, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT)

    def wait_for(self, found: Callable[[], Any], seconds: float = 600) -> Any:
        """What `found` gives once it gives something."""
        while not (value := found()):
            ended = self.process.poll() is not None
            if ended and (value := found()):
                break
            if ended or time.time() - self.began > seconds:
                self.end()
                sys.exit(f"the command did not get there:\n{self._log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.002)
        return value

    def spent(self) -> float:
        return _spent(self.process.pid) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def _add_path(checkout: Path) -> str:
    return os.pathsep.join(filter(None, [str(checkout / "src"), os.environ.get("PYTHONPATH", "")]))


def _spent(pid: int) -> int:
    """Clock ticks of a process, of those it has waited for and of its living descendants."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15])) + sum(_spent(int(child)) for child in children)


def measure_train(checkout: Path, folder: Path, given: argparse.Namespace, env: dict[str, str]) -> Measured:
    (folder / "agent.py").write_text(AGENT)
    tasks = [{"id": f"t{n}", "split": "train", "data": {"question": f"What is {n} + {n}?"}} for n in range(8)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    settings = [f"engine.name={given.engine}", f"learner.device={given.device}", "loop.groups=4", "loop.eval_splits=[]"]
    settings += ["policy.train.max_tokens=32", *given.set]
    sets = [part for one in settings for part in ("--set", one)]
    arguments = ["train", "agent.py:agent", "--tasks", "tasks.jsonl", "--model", given.model, "--steps", "1", "--json"]
    command = Command(checkout, [*arguments, "--folder", "run", *sets], folder, env)
    first = command.wait_for(lambda: _read(folder / "stamp"))
    spent = command.spent()
    command.wait_for(lambda: '"step":1' in _read(folder / "run" / "metrics.jsonl").replace(" ", ""))
    step, spent_step = time.time(), command.spent()
    command.process.wait()
    return {
        "first token s": float(first) - command.began,
        "first token CPU s": spent,
        "first step s": step - command.began,
        "first step CPU s": spent_step,
    }


def measure_serve(checkout: Path, folder: Path, given: argparse.Namespace, env: dict[str, str]) -> Measured:
    settings = [f"engine.name={given.engine}", f"learner.device={given.device}", *given.set]
    sets = [part for one in settings for part in ("--set", one)]
    arguments = ["serve", "--folder", "run", "--port", "0", "--model", given.model, "--json", *sets]
    command = Command(checkout, arguments, folder, env)
    try:
        said = command.wait_for(lambda: next((x for x in _read(folder / "log").splitlines() if x[:1] == "{"), ""))
        where = json.loads(said)
        asked = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 8}
        headers = {"authorization": f"Bearer {where['key']}", "content-type": "application/json"}
        url = f"{where['url']}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            answer.readline()
        return {"first token s": time.time() - command.began, "first token CPU s": command.spent()}
    finally:
        command.end()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def measure(checkout: Path, kernels: Path, given: argparse.Namespace) -> Measured:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(kernels / "inductor"), "TRITON_CACHE_DIR": str(kernels / "triton")}
    with tempfile.TemporaryDirectory(prefix="strop-startup-") as folder:
        run = measure_train if given.command == "train" else measure_serve
        return run(checkout, Path(folder), given, env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", choices=["train", "serve"], default="train")
    parser.add_argument("--model", default="strop/nano")
    parser.add_argument("--engine", default="embedded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting of the run")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another copy of this repository")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    sides = {"this": ROOT} | ({"other": given.against.resolve()} if given.against else {})
    laps: dict[str, list[Measured]] = {f"{side}, {state}": [] for side in sides for state in ("cold", "warm")}
    about = {"machine": hardware(given.device), "model": given.model, "engine": given.engine, "command": given.command}
    for lap in range(given.laps):
        for side, checkout in sides.items():
            with tempfile.TemporaryDirectory(prefix="strop-kernels-") as kernels:
                for state in ("cold", "warm"):
                    found = measure(checkout, Path(kernels), given)
                    laps[f"{side}, {state}"].append(found)
                    told = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
                    print(f"lap {lap + 1}, {side}, {state}: {told}", flush=True)
    medians = {
        name: {part: statistics.median(one[part] for one in every) for part in every[0]} for name, every in laps.items()
    }
    for name, found in medians.items():
        print(f"median, {name}: " + ", ".join(f"{part} {value:.2f}" for part, value in found.items()))
    if given.against:
        for state in ("cold", "warm"):
            pairs = zip(laps[f"this, {state}"], laps[f"other, {state}"], strict=True)
            ratios = [{part: ours[part] / theirs[part] for part in ours} for ours, theirs in pairs]
            told = ", ".join(f"{part} {statistics.median(one[part] for one in ratios):.2f}" for part in ratios[0])
            print(f"this / other, {state}, medians of ratios of laps: {told}")
    if given.json:
        given.json.write_text(json.dumps(about | {"median": medians, "laps": laps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
