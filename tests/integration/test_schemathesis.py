"""The served store against its own description: made-up requests to every address, right and wrong ones, of a real
server. No answer is a 5xx, and every answer fits /openapi.json."""

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import positive_data_acceptance
from schemathesis.config import SchemathesisConfig

from strop.store.http.openapi import describe

KEY = "the-run-key"
AUTH = {"openapi": {"run": {"bearer": KEY}, "attempt": {"bearer": KEY}}}
SERVE = """
import sys, uvloop
from pathlib import Path
from strop import serve
ready = lambda url, key: print(url, flush=True)
uvloop.run(serve.main(Path(sys.argv[1]), key=sys.argv[2], on_ready=ready))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    server = subprocess.Popen([sys.executable, "-c", SERVE, str(folder), KEY], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server:
        yield server.stdout.readline().strip()
        server.terminate()
        assert server.wait(30) == 0
    log = folder / "serve.log"
    assert not log.exists() or "Traceback" not in log.read_text()


api = schemathesis.openapi.from_dict(
    json.loads(msgspec.json.encode(describe())), config=SchemathesisConfig.from_dict({"seed": 1, "auth": AUTH})
)


def shorten(case: schemathesis.Case) -> None:
    """Nobody waits a minute here."""
    for given, name in ((case.query, "timeout"), (case.body, "wait")):
        with contextlib.suppress(TypeError, ValueError):
            if isinstance(given, dict) and 0 < float(given.get(name, 0)) <= 60:
                given[name] = 0.01


@api.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_every_address(url: str, case: schemathesis.Case) -> None:
    shorten(case)
    # What two fields may not be together is more than the description tells, so right requests may be refused.
    more_than_told = [positive_data_acceptance]
    case.call_and_validate(base_url=url, excluded_checks=more_than_told)


def test_what_is_described_is_what_is_served(url: str) -> None:
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        assert json.load(answer) == api.raw_schema
