"""What a server of OpenEnv's says of its actions. The real ones are in tests/frameworks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from strop.compat.openenv import read_schema
from strop.errors import AgentError

ANSWERS = {
    "/whole/schema": b'{"action": {"properties": {"x": {"type": "integer"}, "metadata": {}}}, "observation": {}}',
    "/other/schema": b'{"detail": "not this"}',
    "/list/schema": b"[]",
    "/text/schema": b"<html>",
}


class Schemas(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(ANSWERS[self.path])

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Schemas)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    serving.join()
    server.server_close()


def test_the_fields_of_an_action(url: str) -> None:
    assert read_schema(f"{url}/whole") == {"properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize("path", ["other", "list", "text"])
def test_another_server_is_refused(url: str, path: str) -> None:
    with pytest.raises(AgentError, match=rf"/{path} does not say what its actions are .* Fix: "):
        read_schema(f"{url}/{path}")
