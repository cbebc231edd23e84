"""What a turn costs the gateway by its place in a conversation, and whether it costs more than in other code.

    python benchmarks/gateway_turns.py [--messages 60] [--conversations 40] [--runs 5] [--json FILE]
    python benchmarks/gateway_turns.py --against ../other/checkout      both in turns, in one run

Requests are given to the app itself, without a socket: what is counted is CPU time of the gateway's own thread. Reading
the body (JSON to a request) is reported apart, since agents send the whole conversation each time and its bytes must be
read. `process` is the CPU time of all threads. Each conversation is that of gateway.py: a system prompt, a question and
pairs of a tool call (64 tokens with logprobs) and its result. Figures of a turn are medians over conversations, then
over runs; the first turn opens a session and extends nothing, so the last is compared with the second.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import hardware

ROOT = Path(__file__).resolve().parents[1]
NANO = ROOT / "src" / "strop" / "models" / "nano"
PARTS = ("gateway", "reading", "process")

# -- one run, in a process of its own ----------------------------------------------------------------------------------


def _find(*places: str) -> Any:
    """The first of some `module:name` that this code has: the other checkout may have it elsewhere."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"this checkout has none of {', '.join(places)}")


class Reading:
    """Counts the CPU time of reading bodies."""

    def __init__(self) -> None:
        self.seconds = 0.0
        dialect = _find("strop.gateway.dialects.registry:BY_PATH", "strop.gateway.app:DIALECTS")["chat/completions"]
        self._read = dialect.read
        dialect.read = self.read

    def read(self, body: bytes) -> Any:
        start = time.thread_time()
        try:
            return self._read(body)
        finally:
            self.seconds += time.thread_time() - start


async def ask(gateway: Any, path: str, key: str, body: bytes) -> dict[str, Any]:
    """One request to the app, and its answer."""
    asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    asked.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await gateway(scope, asked.get, send)
    assert sent[0]["status"] == 200, sent
    return json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


async def converse(gateway: Any, address: tuple[str, str], number: int, num_turns: int, reading: Reading) -> Any:
    """The CPU seconds of every turn of a conversation."""
    talk = importlib.import_module("gateway_conversation")
    messages: list[Any] = [
        {"role": "system", "content": talk.SYSTEM},
        {"role": "user", "content": talk.QUESTION.format(number)},
    ]
    spent: list[tuple[float, float, float]] = []
    for turn in range(num_turns):
        asks = {"model": "tiny", "messages": messages, "tools": talk.TOOLS, "temperature": 1.0, "logprobs": True}
        body = json.dumps(asks).encode()
        reading.seconds = 0.0
        process, thread = time.process_time(), time.thread_time()
        answer = await ask(gateway, *address, body)
        thread, process = time.thread_time() - thread, time.process_time() - process
        spent.append((thread - reading.seconds, reading.seconds, process - reading.seconds))
        said = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": f"{talk.RESULT}{turn + 1}}}"}
        messages += [said, result]
    return spent


async def measure(folder: Path, model: Path, conversations: int, num_turns: int) -> dict[str, list[float]]:
    package = importlib.import_module("strop").__file__ or ""
    sys.path.insert(0, str(Path(package).parents[2] / "benchmarks" / "peers"))  # that checkout's own
    side = importlib.import_module("gateway_strop")
    renderer = _find("strop.gateway.template:Renderer", "strop.gateway.render:Renderer").from_folder(model)
    policy, routes = _find("strop.gateway.route:PolicyRoute"), _find("strop.gateway.route:Routes")
    sampling = _find("strop.types:Sampling")
    engine = side.Instant(side.answer_ids(renderer))
    route = policy(
        policy="main",
        model="tiny",
        engine=engine,
        renderer=renderer,
        sampling_for=lambda rollout: sampling(max_tokens=1024),
    )
    store = await _find("strop.store.sqlite:SqliteStore").open(folder / "store.sqlite")
    gateway = _find("strop.gateway.app:Gateway")(store, routes({"*": route}))
    stand, reading = side.Stand(store, gateway), Reading()
    found: list[Any] = []
    for number in range(conversations + 2):
        ((path, key),) = await stand.make(1)
        spent = await converse(gateway, (path, key), number, num_turns, reading)
        found += [spent] * (number >= 2)  # what is made once is made in the first two
        await stand.end()
    await store.close()
    by_part = [[[turn[part] * 1e3 for turn in spent] for spent in found] for part in range(len(PARTS))]
    return {
        name: [statistics.median(turns) for turns in zip(*spent, strict=True)]
        for name, spent in zip(PARTS, by_part, strict=True)
    }


# -- all runs ----------------------------------------------------------------------------------------------------------


def run(checkout: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="strop-turns-") as folder:
        command = [sys.executable, __file__, "--child", folder, "--model", arguments.model]
        command += ["--messages", str(arguments.messages), "--conversations", str(arguments.conversations)]
        env = os.environ | {"PYTHONPATH": str(checkout / "src")}
        return json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)


def figures(runs: list[dict[str, list[float]]]) -> dict[str, Any]:
    points = {
        name: [statistics.median(turns) for turns in zip(*(one[name] for one in runs), strict=True)] for name in PARTS
    }
    ratios = {name: statistics.median(one[name][-1] / one[name][1] for one in runs) for name in PARTS}
    return {"ms": points, "last_to_second": ratios}


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: CPU ms of a turn, by the number of messages")
    print("  messages" + "".join(f"{part:>10}" for part in PARTS))
    points = found["ms"]
    last = len(points["gateway"]) - 1
    for turn in sorted({0, 1, last // 4, last // 2, last}):
        print(f"  {2 * turn + 2:>8}" + "".join(f"{points[part][turn]:>10.3f}" for part in PARTS))
    print("  last to second" + "".join(f"  {part} {found['last_to_second'][part]:.2f}x" for part in PARTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=60, help="of the last request (default 60)")
    parser.add_argument("--conversations", type=int, default=40, help="in each run (default 40)")
    parser.add_argument("--runs", type=int, default=5, help="of each code (default 5)")
    parser.add_argument("--model", default=str(NANO), metavar="FOLDER", help="whose tokenizer and template")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another copy of this repository")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        work = measure(arguments.child, Path(arguments.model), arguments.conversations, arguments.messages // 2)
        return print(json.dumps(asyncio.run(work)))
    before = hardware()
    sides = {"this": ROOT} | ({"other": arguments.against.resolve()} if arguments.against else {})
    runs: dict[str, list[dict[str, list[float]]]] = {name: [] for name in sides}
    for _ in range(arguments.runs):
        for name, checkout in sides.items():
            runs[name].append(run(checkout, arguments))
    found = {name: figures(of) for name, of in runs.items()}
    for name, of in found.items():
        show(name, of)
    if arguments.against:
        for part in PARTS:
            pairs = zip(runs["other"], runs["this"], strict=True)
            speed = statistics.median(sum(old[part]) / sum(new[part]) for old, new in pairs)
            print(f"{part}: {speed:.2f}x the speed of {arguments.against}, over whole conversations")
            found["this"].setdefault("speed", {})[part] = speed
    if arguments.json:
        about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "hardware": before}
        about |= {"python": platform.python_version(), "messages": arguments.messages, "runs": arguments.runs}
        arguments.json.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
