"""Hugging Face's hub as its client sees it, on a port of this machine: enough to list a model's files and give them."""

import hashlib
import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {
    "org/private": (401, "RepoNotFound"),
    "org/gated": (403, "GatedRepo"),
    "org/unknown": (404, "RepoNotFound"),
    "org/broken": (500, ""),
}


class Hub(BaseHTTPRequestHandler):
    """Model `org/nano` is the folder `models`; the others answer as REFUSALS says, and `org/slow` not at all."""

    models: Path
    given: list[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_GET

    def answer(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/models")
        repo = "/".join(path.split("/")[1:3])
        if repo == "org/slow":
            return time.sleep(20)
        if repo in REFUSALS:
            status, code = REFUSALS[repo]
            return self.send(status, b"{}", {"x-error-code": code, "x-error-message": "no"})
        rest = path.split("/")[3:] or ["revision", "main"]
        files = [file for file in sorted(self.models.rglob("*")) if file.is_file()]
        if rest[0] == "revision":
            if rest[1] != "main":
                return self.send(404, b"{}", {"x-error-code": "RevisionNotFound"})
            return self.send(200, json.dumps({"id": repo, "sha": SHA, "siblings": []}).encode())
        if rest[0] == "tree":
            listed = [
                {"type": "file", "path": str(f.relative_to(self.models)), "size": f.stat().st_size, "oid": etag(f)}
                for f in files
            ]
            return self.send(200, json.dumps(listed).encode())
        file = self.models / "/".join(rest[2:])
        if self.command == "GET":
            self.given.append("/".join(rest[2:]))
        return self.send(200, file.read_bytes(), {"etag": f'"{etag(file)}"', "x-repo-commit": SHA})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serving(models: Path) -> Generator[tuple[str, list[str]]]:
    """The hub's address, and the files that were fetched from it."""
    given: list[str] = []
    handler = type("Serving", (Hub,), {"models": models, "given": given})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", given
    finally:
        server.shutdown()
        server.server_close()
