"""The served store against its own description: made-up requests to every address, right and wrong ones, of a real
server. No answer is a 5xx, every answer fits /openapi.json, and nothing is answered without a key."""

import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import positive_data_acceptance
from schemathesis.config import SchemathesisConfig

from strop.store.remote import HttpStore
from strop.store.server.openapi import describe
from strop.types import Event, Policy, Reward, Rollout, Step, Task, Turn

KEY = "the-run-key"
AUTH = {"openapi": {"run": {"bearer": KEY}, "attempt": {"bearer": KEY}}}
SERVE = """
import sys, uvloop
from pathlib import Path
from strop.run import serve
ready = lambda url, key: print(url, flush=True)
uvloop.run(serve.main(Path(sys.argv[1]), key=sys.argv[2], on_ready=ready))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    server = subprocess.Popen([sys.executable, "-c", SERVE, str(folder), KEY], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server:
        url = server.stdout.readline().strip()
        asyncio.run(filled(url))
        yield url
        server.terminate()
        assert server.wait(30) == 0
    log = folder / "serve.log"
    assert not log.exists() or "Traceback" not in log.read_text()


async def filled(url: str) -> None:
    """Something to find: of every record one, and NaN where it may be."""
    store = await HttpStore.open(url, KEY)
    await store.enqueue([Rollout(id=id, group="g", member=0, task=Task(id="t"), created=1.0) for id in ("seen", "ran")])
    await store.lease("w", seconds=3600, count=2)
    turn = {"prompt_ids": [1], "response_ids": [2], "logprobs": [-0.5], "versions": [(0, "1.0")], "finish": "stop"}
    for id in ("seen", "ran"):
        await store.add_turns([Turn(id=f"{id}/1/0", rollout=id, attempt=1, started=1.0, ended=2.0, **turn)])
        await store.add_events([Event(rollout=id, attempt=1, kind="message", data={"text": "hi"}, time=1.0)])
    await store.finish("ran", 1, rewards=[Reward(value=1.0)])
    await store.put_policy(Policy(name="main", version="1.0", model="m"))
    await store.commit_step(Step(lineage=1, number=1, rollouts=["ran"], metrics={"kl": float("nan")}, time=1.0))
    await store.close()


def looser(schema: Any) -> Any:
    """Schemathesis takes lists of a fixed length for an error of the description: let their parts be anywhere."""
    if isinstance(schema, list):
        return [looser(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: looser(part) for name, part in schema.items()}
    return plain | {"items": {"anyOf": plain.pop("prefixItems")}} if "prefixItems" in plain else plain


DESCRIBED = json.loads(msgspec.json.encode(describe()))
api = schemathesis.openapi.from_dict(looser(DESCRIBED), config=SchemathesisConfig.from_dict({"seed": 1, "auth": AUTH}))


@api.parametrize()
@settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_every_address(url: str, case: schemathesis.Case) -> None:
    known_ids(case)
    short_waits(case)
    # What two fields may not be together is more than the description tells, so right requests may be refused.
    case.call_and_validate(base_url=url, excluded_checks=[positive_data_acceptance])


def known_ids(case: schemathesis.Case) -> None:
    """Half of the rollouts that are asked for are there."""
    for name in ("id", "rollout"):
        given = case.path_parameters.get(name)
        if isinstance(given, str) and len(given) % 2 and given.isalnum():
            case.path_parameters[name] = "seen" if len(given) % 4 == 1 else "ran"


def short_waits(case: schemathesis.Case) -> None:
    """Nobody waits a minute here."""
    for given, name in ((case.query, "timeout"), (case.body, "wait")):
        with contextlib.suppress(TypeError, ValueError):
            if isinstance(given, dict) and 0 < float(given.get(name, 0)) <= 60:
                given[name] = 0.01


def test_what_is_described_is_what_is_served(url: str) -> None:
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        assert json.load(answer) == DESCRIBED
