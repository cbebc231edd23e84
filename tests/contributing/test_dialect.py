"""A model API is added in one file and one line: done here to a copy of the package, as a contributor would."""

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import strop
from tests import chatml

SRC = Path(strop.__file__).parent

DIALECT = '''
"""A small API: {"inputs": ..., "stream": ...} is answered with {"generated_text": ...}."""

from collections.abc import Sequence

import msgspec

from strop.gateway.dialects.base import AnswerInfo, ApiError, ChoiceDone, Delta, Dialect, Json, ModelRequest
from strop.gateway.dialects.fields import read_fields, read_object
from strop.gateway.dialects.proxied import ProxiedAnswer


class Generate(Dialect):
    path = "generate"

    def read(self, body: bytes) -> ModelRequest:
        fields = read_fields(read_object(body), {"inputs": str, "stream": bool}, {})
        if "inputs" not in fields:
            raise ApiError("inputs is required", param="inputs")
        message = {"role": "user", "content": fields["inputs"]}
        return ModelRequest(messages=[message], stream=fields.get("stream", False))

    def write(self, answer: AnswerInfo, choices: Sequence[ChoiceDone], request: ModelRequest) -> bytes:
        return msgspec.json.encode({"generated_text": choices[0].text})

    def stream(self, request: ModelRequest) -> "Lines":
        return Lines()

    def error(self, refused: ApiError) -> bytes:
        return msgspec.json.encode({"wrong": refused.message})

    def read_answer(self, data: Json, answer: ProxiedAnswer) -> None:
        answer.choice().text += data["generated_text"]


class Lines:
    def opening(self, answer: AnswerInfo) -> bytes:
        return b"begin\\n"

    def delta(self, answer: AnswerInfo, delta: Delta) -> bytes:
        return delta.text.encode()

    def closing(self, answer: AnswerInfo, choices: Sequence[ChoiceDone]) -> bytes:
        return b"\\nend\\n"

    def error(self, refused: ApiError) -> bytes:
        return b"broken\\n"
'''
LINE = '    "generate.Generate",\n'

PROGRAM = """
import asyncio, json, sys, urllib.error, urllib.request
from pathlib import Path

from strop.engines.scripted import Scripted
from strop.gateway.answer_reader import AnswerReader
from strop.gateway.app import Gateway
from strop.gateway.dialects.registry import BY_PATH
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.net.server import serve
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Sampling, Task


BODIES = [b'{"inputs": "3 * 4?"}', b'{"inputs": "5 * 6?", "stream": true}', b"{}", b'{"inputs": "", "odd": 1}']


def ask(url, key, body, path="generate"):
    headers = {"authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{path}", body, headers)) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def main(model, folder):
    renderer = Renderer.from_folder(model)
    engine = Scripted(["It is 12.", "It is 30."], renderer)
    route = PolicyRoute(
        policy="p", model="m", engine=engine, renderer=renderer, sampling_for=lambda rollout: Sampling(max_tokens=50)
    )
    store = await SqliteStore.open(folder / "store.sqlite")
    gateway = Gateway(store, Routes({"*": route}))
    server = await serve(gateway)
    await store.enqueue([Rollout(id="r", group="r", member=0, task=Task(id="t"), mode="train", seed=1, created=0.0)])
    (lease,) = await store.lease("w", seconds=60)
    url, key = f"{server.url}/r/r/1/agents/main/v1", lease.attempt.key
    said = [
        await asyncio.to_thread(ask, url, key, body)
        for body in BODIES
    ]
    said.append(await asyncio.to_thread(ask, url, key, None, "generate/odd"))
    reader = AnswerReader(BY_PATH["generate"])
    reader.read(b'{"generated_text": "from elsewhere"}')
    turns = await store.turns("r", attempt=1)
    print(json.dumps({
        "said": said,
        "proxied": reader.message(0)["content"],
        "turns": [turn.answer["content"] for turn in turns],
        "beside": gateway.serves("/v1/generate"),
    }))
    await server.close()
    await store.close()


asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def touched(before: Path, after: Path) -> dict[str, int]:
    """The files that differ, each with the number of lines added."""
    lines: dict[str, int] = {}
    for path in sorted(after.rglob("*.py")):
        old = before / path.relative_to(after)
        if not old.exists() or not filecmp.cmp(old, path, shallow=False):
            had = len(old.read_text().splitlines()) if old.exists() else 0
            lines[str(path.relative_to(after))] = len(path.read_text().splitlines()) - had
    return lines


def test_a_dialect_is_a_file_and_a_line(tmp_path: Path) -> None:
    copy = tmp_path / "src" / "strop"
    shutil.copytree(SRC, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "gateway" / "dialects" / "generate.py").write_text(DIALECT)
    registry = copy / "gateway" / "dialects" / "registry.py"
    registry.write_text(registry.read_text().replace('    "messages.Messages",\n', f'    "messages.Messages",\n{LINE}'))
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
    whole, streamed, missing, unknown, elsewhere = found["said"]
    assert whole == [200, '{"generated_text":"It is 12."}']
    assert streamed == [200, "begin\nIt is 30.\nend\n"]
    assert missing == [400, '{"wrong":"inputs is required"}']
    assert (unknown[0], json.loads(unknown[1])["wrong"][:27]) == (400, "unsupported parameter 'odd'")
    assert (elsewhere[0], "generate" in json.loads(elsewhere[1])["wrong"]) == (404, True), "errors in its own shape"
    assert found["turns"] == ["It is 12.", "It is 30."]
    assert (found["proxied"], found["beside"]) == ("from elsewhere", True)
    changes = touched(SRC, copy)
    assert changes.pop("gateway/dialects/registry.py") == 1
    assert list(changes) == ["gateway/dialects/generate.py"]
