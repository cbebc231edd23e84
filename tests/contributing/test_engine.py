"""An engine is added in one file and one line: done here to a copy of the package, as a contributor would."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import strop
from tests import chatml
from tests.contributing.test_dialect import touched

SRC = Path(strop.__file__).parent

ENGINE = '''
"""An engine that says part of its prompt again."""

from collections.abc import AsyncIterator, Sequence

from msgspec import Struct

from strop.engines.base import Chunk, Engine, EngineSetup
from strop.engines.receiver import WeightSource
from strop.types import Sampling


class ParrotSettings(Struct, frozen=True, forbid_unknown_fields=True):
    first: int = 0
    last: int = 4


class Parrot(Engine):
    def __init__(self, settings: ParrotSettings, context: int) -> None:
        self._settings, self._context, self._version = settings, context, "1.0"

    @classmethod
    def make(cls, setup: EngineSetup) -> "Parrot":
        return cls(setup.settings(ParrotSettings), setup.context or 512)

    @property
    def context(self) -> int:
        return self._context

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        ids = [*prompt_ids[self._settings.first : self._settings.last], stop_ids[0]]
        yield Chunk(ids=ids, logprobs=[0.0] * len(ids), version=self._version, finish="stop")

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load(self, version: str, weights: WeightSource | None = None) -> None:
        self._version = version

    async def close(self) -> None: ...
'''
LINE = '    "parrot": "parrot.Parrot",\n'

PROGRAM = """
import asyncio, json, sys, urllib.request
from pathlib import Path

from strop import config
from strop.engines.base import EngineSetup
from strop.engines.registry import engine_class
from strop.errors import ConfigError
from strop.gateway.app import Gateway
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.net.server import serve
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Sampling, Task

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Twelve parrots"}]}).encode()


def make(model, folder, **settings):
    chosen = config.load(engine={"name": "parrot", "settings": settings}).engine
    return engine_class(chosen).make(EngineSetup(model=model, config=chosen, folder=folder))


def ask(url, key):
    request = urllib.request.Request(url, BODY, {"authorization": f"Bearer {key}", "content-type": "application/json"})
    with urllib.request.urlopen(request) as got:
        return json.loads(got.read())["choices"][0]["message"]["content"]


async def main(model, folder):
    ids = Renderer.from_folder(model).prompt([{"role": "user", "content": "Twelve parrots"}], None)
    engine = make(model, folder, last=len(ids))
    await engine.start()
    route = PolicyRoute(
        policy="p",
        model="m",
        engine=engine,
        renderer=Renderer.from_folder(model),
        sampling_for=lambda rollout: Sampling(max_tokens=50),
    )
    store = await SqliteStore.open(folder / "store.sqlite")
    server = await serve(Gateway(store, Routes({"*": route})))
    await store.enqueue([Rollout(id="r", group="r", member=0, task=Task(id="t"), mode="train", seed=1, created=0.0)])
    (lease,) = await store.lease("w", seconds=60)
    said = await asyncio.to_thread(ask, f"{server.url}/r/r/1/agents/main/v1/chat/completions", lease.attempt.key)
    await engine.load("1.1")
    await asyncio.to_thread(ask, f"{server.url}/r/r/1/agents/main/v1/chat/completions", lease.attempt.key)
    turns = await store.turns("r", attempt=1)
    try:
        make(model, folder, frist=1)
    except ConfigError as error:
        refused = str(error)
    print(json.dumps({"said": said, "versions": [turn.versions[0][1] for turn in turns], "refused": refused}))
    await server.close()
    await store.close()


asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def test_an_engine_is_a_file_and_a_line(tmp_path: Path) -> None:
    copy = tmp_path / "src" / "strop"
    shutil.copytree(SRC, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "engines" / "parrot.py").write_text(ENGINE)
    registry = copy / "engines" / "registry.py"
    after = '    "sglang": "sglang.engine.Sglang",\n'
    registry.write_text(registry.read_text().replace(after, after + LINE))
    (program := tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, chatml.make(tmp_path / "model"), tmp_path],
        env=os.environ | {"PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "Twelve parrots" in found["said"]
    assert found["versions"] == ["1.0", "1.1"]
    assert "frist" in found["refused"]
    assert "Fix: its settings are first, last" in found["refused"]
    changes = touched(SRC, copy)
    assert changes.pop("engines/registry.py") == 1
    assert list(changes) == ["engines/parrot.py"]
