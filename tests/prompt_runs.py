"""Runs that improve prompts, from the outside: the scripted models of benchmarks/hints.py, and what a run is given."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import runs

HINTS = Path(__file__).parents[1] / "benchmarks" / "hints.py"
AGENTS = """
import asyncio

async def marked(task, llm):
    '''It knows nothing of prompts: what it sends is marked.'''
    client = llm.async_client()
    system = "<strop:system>You answer questions about topics.</strop:system>\\nBe brief."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task.data["question"]}]
    answer = await client.chat.completions.create(model=llm.model, messages=messages)
    await client.close()
    return float(answer.choices[0].message.content == task.data["answer"])

async def ask(task, llm, system):
    client = llm.async_client()
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task.data["question"]}]
    answer = await client.chat.completions.create(model=llm.model, messages=messages)
    await client.close()
    return float(answer.choices[0].message.content == task.data["answer"])

async def fragile(task, llm):
    if "Hint" in llm.prompts["system"]:
        raise RuntimeError("it bears no hint")
    return await ask(task, llm, llm.prompts["system"])

async def unused(task, llm):
    return await ask(task, llm, "Answer.")

async def misnamed(task, llm):
    return {"right": await ask(task, llm, llm.prompts["system"])}

def local(task, llm):
    '''The demo's question to a model that is served here, with a system prompt that asks for nothing it knows.'''
    system = {"role": "system", "content": llm.prompts["system"]}
    messages = [system, {"role": "user", "content": task.data["question"]}]
    answer = llm.client().chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
    return float(len(answer.choices[0].message.content or "") % 2)
"""
SMALL = {"train": 20, "validation": 20, "test": 20}


@dataclass(frozen=True)
class Models:
    """The two scripted models."""

    url: str

    def control(self, **how: float) -> None:
        body = json.dumps(how).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/control", data=body)).read()

    @property
    def counts(self) -> dict[str, int]:
        return {"writer": 0, "refused": 0} | json.loads(urllib.request.urlopen(f"{self.url}/counts").read())


@contextmanager
def open_models() -> Iterator[Models]:
    server = subprocess.Popen([sys.executable, str(HINTS)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield Models(server.stdout.readline().strip())
    finally:
        server.kill()
        server.communicate()


def configure(models: Models, folder: Path, name: str, *, agent: str = f"{HINTS}:agent", **settings: Any) -> Path:
    """A TOML file beside the folder of a run, for `strop train --config`."""
    given = {"max_calls": 400, "max_rollouts": 4000, "minibatch": 8, "optimizer": "writer", **settings}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in given.items())
    sizes = ", ".join(f"{split} = {count}" for split, count in SMALL.items())
    toml = folder.with_suffix(".toml")
    toml.write_text(f"""
agent = "{agent}"
tasks = "{HINTS}:tasks"
tasks_args = {{ seed = 3, {sizes} }}
folder = "{folder}"
[prompts.system]
text = "You answer questions about topics."
[algorithm]
name = "{name}"
[algorithm.settings]
{lines}
[gateway.outside.follower]
url = "{models.url}/v1"
model = "follower"
agents = ["*"]
[gateway.outside.writer]
url = "{models.url}/v1"
model = "writer"
[loop]
steps = 400
[engine]
deterministic = true
[runner]
agents_in = "loop"
workers = 8
""")
    return toml


def train(toml: Path, *more: str) -> dict[str, Any]:
    """What `strop train` says of a run that must succeed."""
    return json.loads(runs.finish(runs.strop("train", "--config", toml, "--json", *more)).stdout)


def refuse(*arguments: str | Path) -> str:
    """What a command says that is refused: a sentence with the fix in it."""
    done = subprocess.run(runs.strop(*arguments), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (1, 2), (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert "Fix: " in done.stderr, done.stderr
    return done.stderr


def metrics(folder: Path) -> list[dict[str, float]]:
    """Those of the steps."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "prompts/calls" in line]


def calls(folder: Path) -> list[dict[str, Any]]:
    path = folder / "calls.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def is_asking(folder: Path, call: int) -> bool:
    """Whether a call from the given one on is under way."""
    known = calls(folder)
    settled = {(one["call"], one["attempt"]) for one in known if "key" not in one}
    return any("key" in one and one["call"] >= call and (one["call"], one["attempt"]) not in settled for one in known)
