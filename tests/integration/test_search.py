"""`strop search` as a user runs it: processes that are killed, and the guide as written."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from strop.errors import PlaceError
from strop.tools.search import Search
from strop.tools.search.encoder import PACKAGE
from strop.tools.search.index import Index
from tests import runs

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "search.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@contextmanager
def server(index: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        runs.strop("search", "serve", index, "--port", "0", "--json"), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process
    finally:
        process.kill()
        process.communicate()


def small(folder: Path, count: int) -> Path:
    path = folder / "corpus.jsonl"
    words = ("river", "tower", "minster", "bridge", "market", "harbour", "castle")
    with path.open("w") as file:
        for n in range(count):
            text = " ".join(f"{words[(n + k) % 7]}{(n * k) % 101}" for k in range(60))
            file.write(json.dumps({"id": n, "title": f"Town {n}", "text": text}) + "\n")
    return path


def test_a_build_that_is_killed_leaves_nothing_that_looks_like_an_index(tmp_path: Path) -> None:
    corpus, index = small(tmp_path, 20_000), tmp_path / "index"
    part = tmp_path / ".index.part"
    building = subprocess.Popen(runs.strop("search", "build", corpus, index))
    deadline = time.monotonic() + 60
    while not (part / "documents.jsonl").exists() or (part / "documents.jsonl").stat().st_size < 1 << 20:
        assert time.monotonic() < deadline
        assert building.poll() is None
        time.sleep(0.002)
    building.send_signal(signal.SIGSTOP)
    second = subprocess.run(runs.strop("search", "build", corpus, index), capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert "another process is building" in second.stderr
    building.kill()
    building.wait()
    assert not index.exists()
    with pytest.raises(PlaceError, match="holds no search index"):
        Index.open(part)
    runs.finish(runs.strop("search", "build", corpus, index, "--json"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["corpus.jsonl", "index"]
    assert Index.open(index).about.passages == 20_000


def test_a_server_that_dies_in_mid_query_is_an_observation(tmp_path: Path) -> None:
    runs.finish(runs.strop("search", "build", small(tmp_path, 50), tmp_path / "index"))
    with server(tmp_path / "index") as (url, process):
        tools = Search(url, timeout=20)
        assert tools.access("Town 7").startswith("(Title: Town 7) ")
        process.send_signal(signal.SIGSTOP)  # the query arrives, and is not answered
        said: list[str] = []
        asking = threading.Thread(target=lambda: said.append(tools.search("Town 7")))
        asking.start()
        time.sleep(0.3)
        assert asking.is_alive()
        process.kill()
        asking.join(10)
        assert said == [
            "The search server cannot be used now (Connection refused): go on without it, or try again later."
        ]


def test_a_server_ends_when_it_is_told_to_and_says_what_it_cannot_do(tmp_path: Path) -> None:
    runs.finish(runs.strop("search", "build", small(tmp_path, 50), tmp_path / "index"))
    with server(tmp_path / "index") as (url, process):
        taken = url.rpartition(":")[2]
        for arguments, why in (
            ([tmp_path / "index", "--port", taken], f"port {taken} on 127.0.0.1 is in use"),
            ([tmp_path / "none"], "holds no search index"),
            ([tmp_path / "index", "--topk", "0"], "--topk"),
        ):
            command = runs.strop("search", "serve", *arguments)
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1)
            assert why in done.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_the_guide_works_as_written(tmp_path: Path) -> None:
    """Its corpus is built, asked and served; its program speaks to the server, wherever that listens."""
    (tmp_path / "corpus.jsonl").write_text(blocks("json")[0])
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^strop (search .*)$", TEXT, re.MULTILINE)]
    build, ask, serve, dense = commands
    assert serve[:3] == ["search", "serve", "index"]
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    for command in (dense, build, ask) if find_spec(PACKAGE) else (build, ask):
        done = subprocess.run(runs.strop(*command), cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert "Jeff Porcaro was an American drummer" in done.stdout
    with server(tmp_path / "index") as (url, _):
        program = blocks("python")[0].replace("http://127.0.0.1:8000", url)
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Doc 1 (Title: Jeff Porcaro) Jeff Porcaro was an")
    assert "with Toto.\nHe was born in Hartford" in done.stdout


def test_the_guide_links_to_what_exists() -> None:
    for place in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (PAGE.parent / place).exists(), place
