"""`strop search` over Wikipedia passages: how long an index takes to build, how good and how quick its answers are.

    python benchmarks/search.py [--quick] [--part words|dense] [--corpus FILE --questions FILE] [--json FILE]

    build    seconds and bytes of an index by words (BM25)
    recall   share of the paragraphs a multi-hop question needs that its own words find among the first 3, 5, 10, 20
    serve    `strop search serve` asked by 1, 8 and 32 clients, each with one question at a time; every question is new.
             The clients are in this one process, on the same cores as the server
    dense    the same by meaning, over the first --passages of the corpus: nearly all of the time is the model's

With c clients that ask without a pause, c / p50 is about what the server answers per second. On a machine with other
business the server's CPU time per query says more than the clock.

Left out: other search servers, several machines, and corpora that do not fit into memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import uvloop
from machine import hardware
from rich.console import Console
from rich.table import Table

import strop
from strop.net.client import Client
from strop.tools.search.dense import Dense
from strop.tools.search.index import Index, build

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data" / "qa"
RESULTS = ROOT / "benchmarks" / "results" / "search.json"
CLIENTS = (1, 8, 32)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def quiet(what: str, done: int, total: int) -> None:
    return None


def recall(index: Index, questions: list[dict[str, Any]]) -> dict[str, float]:
    """Of the titles that questions need, how many are among the first k."""
    found = index.search([question["question"] for question in questions], 20)
    titles = [[one.passage.title for one in some] for some in found]
    needed = [set(question["supporting_titles"]) for question in questions]
    total = sum(map(len, needed))
    return {
        str(k): sum(len(want & set(got[:k])) for want, got in zip(needed, titles, strict=True)) / total
        for k in (3, 5, 10, 20)
    }


@contextmanager
def server(index: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "strop.cli", "search", "serve", str(index), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process.pid
    finally:
        process.terminate()
        process.wait()


def worked(process: int) -> float:
    """Seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(url: str, questions: list[str], clients: int) -> dict[str, float]:
    client, waiting, times = Client(url), iter(questions), list[float]()

    async def one() -> None:
        for question in waiting:
            body = json.dumps({"queries": [question], "topk": 3, "return_scores": True}).encode()
            began = time.perf_counter()
            answer = await client.request("POST", "/retrieve", body, timeout=60)
            times.append(time.perf_counter() - began)
            assert answer.status == 200, answer.body

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    seconds = time.perf_counter() - began
    await client.close()
    cuts = statistics.quantiles(times, n=100)
    return {
        "clients": clients,
        "queries": len(times),
        "seconds": seconds,
        "per_second": len(times) / seconds,
        "p50_ms": cuts[49] * 1000,
        "p90_ms": cuts[89] * 1000,
        "p99_ms": cuts[98] * 1000,
    }


def loads(index: Path, questions: list[str], each: int) -> list[dict[str, float]]:
    with server(index) as (url, process):
        uvloop.run(load(url, questions[-each // 4 :], 8))  # what is first read from disk is not measured
        runs = []
        for number, clients in enumerate(CLIENTS):
            some = questions[number * each : (number + 1) * each]
            before = worked(process)
            run = uvloop.run(load(url, some if clients > 1 else some[: each // 4], clients))
            runs.append({**run, "server_cpu_ms_per_query": (worked(process) - before) / run["queries"] * 1000})
            say(f"{clients:>3} clients: p50 {runs[-1]['p50_ms']:.2f} ms, {runs[-1]['per_second']:,.0f} per second")
    return runs


def by_words(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    place = folder / "words"
    began = time.perf_counter()
    about = build(arguments.corpus, place, progress=quiet)
    seconds = time.perf_counter() - began
    questions = [json.loads(line) for line in arguments.questions.read_text().splitlines()]
    asked = [json.loads(line)["question"] for line in arguments.queries.read_text().splitlines()]
    index = Index.open(place)
    began = time.perf_counter()
    index.search(asked[:500], 3)
    alone = (time.perf_counter() - began) / len(asked[:500]) * 1000
    return {
        "passages": about.passages,
        "build_seconds": seconds,
        "bytes": sum(file.stat().st_size for file in place.rglob("*") if file.is_file()),
        "recall": recall(index, questions),
        "ms_per_query_in_process": alone,
        "serve": loads(place, asked, 500 if arguments.quick else 2000),
    }


def by_meaning(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    part, place = folder / "part.jsonl", folder / "meaning"
    with arguments.corpus.open() as lines, part.open("w") as file:
        file.writelines(islice(lines, arguments.passages))
    began = time.perf_counter()
    about = build(part, place, by=Dense(), progress=quiet)
    seconds = time.perf_counter() - began
    asked = [json.loads(line)["question"] for line in arguments.queries.read_text().splitlines()]
    return {
        "passages": about.passages,
        "model": Dense().model,
        "device": gpu(),
        "build_seconds": seconds,
        "serve": loads(place, asked, 50 if arguments.quick else 2000 if gpu() else 100),
    }


def gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def show(out: Console, part: dict[str, Any], title: str) -> None:
    out.print(f"{title}: {part['passages']:,} passages, built in {part['build_seconds']:.1f} s")
    if "recall" in part:
        shares = ", ".join(f"{share:.3f} of {k}" for k, share in part["recall"].items())
        out.print(f"  recall {shares}; {part['ms_per_query_in_process']:.3f} ms per query in process")
    table = Table()
    for column in ("clients", "per second", "p50 ms", "p90 ms", "p99 ms", "server's CPU ms per query"):
        table.add_column(column, justify="right")
    for run in part["serve"]:
        names = ("p50_ms", "p90_ms", "p99_ms", "server_cpu_ms_per_query")
        times = (f"{run[name]:.2f}" for name in names)
        table.add_row(str(run["clients"]), f"{run['per_second']:,.0f}", *times)
    out.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["words", "dense", "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="fewer questions, to see that it works; kept nowhere")
    parser.add_argument("--corpus", type=Path, default=DATA / "wiki_corpus.jsonl", metavar="JSONL")
    parser.add_argument("--questions", type=Path, default=DATA / "multihop_with_paragraphs.jsonl", metavar="JSONL")
    parser.add_argument("--queries", type=Path, default=DATA / "hotpotqa_dev7405_qa_only.jsonl", metavar="JSONL")
    parser.add_argument("--passages", type=int, default=128, help="how many a dense index is built of (default: 128)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/search.json")
    arguments = parser.parse_args()
    results = arguments.json or (None if arguments.quick else RESULTS)
    found: dict[str, Any] = json.loads(results.read_text()) if results and results.is_file() else {}
    parts_of = {"words": by_words, "dense": by_meaning}
    names = list(parts_of) if arguments.part == "all" else [arguments.part]
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    for name in names:
        about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "hardware": hardware()}
        versions = {"strop": strop.__version__} | {name: version(name) for name in ("bm25s", "faiss-cpu", "torch")}
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            measured = parts_of[name](Path(folder), arguments)
        versions["python"] = platform.python_version()
        found[name] = {**about, "versions": versions, "load_after": os.getloadavg(), **measured}
        show(out, found[name], name)
        if results is not None:
            results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
