"""A judge on a real socket that says what a test wants it to, however badly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Say = Callable[[str], "str | bytes | int | None"]


class Endpoint:
    """`say` gets the last message: text is the answer, bytes the body as it is, a number a status, None a line that is
    cut. `asked` has every request's body, `keys` its authorization, `kind` is the content type."""

    def __init__(self, say: Say) -> None:
        self.say, self.url, self.retry_after = say, "", ""
        self.kind = "application/json"
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.busy = self.busiest = 0
        self.lock = threading.Lock()
        self.slow = 0.0

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.asked]


@contextmanager
def endpoint(say: Say) -> Iterator[Endpoint]:
    place = Endpoint(say)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None: ...

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with place.lock:
                place.asked.append(body)
                place.keys.append(self.headers["authorization"])
                place.busy += 1
                place.busiest = max(place.busiest, place.busy)
                said = place.say(body["messages"][-1]["content"])
            time.sleep(place.slow)
            with place.lock:
                place.busy -= 1
            if said is None:
                self.close_connection = True
                return
            status = said if isinstance(said, int) else 200
            message = {"role": "assistant", "content": said if isinstance(said, str) else ""}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            data = json.dumps(answer if status == 200 else {"error": {"message": f"status {status}"}}).encode()
            data = said if isinstance(said, bytes) else data
            self.send_response(status)
            self.send_header("content-type", place.kind)
            self.send_header("content-length", str(len(data)))
            if status == 429 and place.retry_after:
                self.send_header("retry-after", place.retry_after)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    place.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield place
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
