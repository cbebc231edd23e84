"""Two servers, each with a gateway and a model, over one store in PostgreSQL; agents at work at both."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from strop.store import open_store
from strop.store.base import Store
from strop.types import Turn
from tests import runs
from tests.postgres import Server as Postgres
from tests.postgres import postgres_server

__all__ = ["postgres_server"]  # a fixture

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(400)]
AGENTS = """
import json, os, time

def talk(task, llm):
    client, messages = llm.client(), [{"role": "user", "content": f"{task.data['n']} + 1?"}]
    for _ in range(3):
        answer = client.chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        messages.append({"role": "user", "content": "and then?"})
    return 1.0

def hang(task, llm):
    client = llm.client()
    client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hello"}], max_tokens=8)
    with open(f"{os.environ['PLACE']}/hangs", "w") as file:
        json.dump([llm.base_url, llm.api_key], file)
    time.sleep(600)
"""
KEY = "the-key-of-both"


class Site:
    def __init__(self, folder: Path, store: str) -> None:
        self.folder = folder
        self.environment = os.environ | {"STROP_KEY": KEY, "PLACE": str(folder)}
        (folder / "agents.py").write_text(AGENTS)
        (folder / "tasks.jsonl").write_text("".join(f'{{"id": "t{n}", "n": {n}}}\n' for n in range(12)))
        self.servers = [
            self.popen("serve", "--folder", name, "--store", store, "--model", "strop/nano", "--port", 0, "--json")
            for name in ("one", "two")
        ]
        self.urls: list[str] = []
        for server in self.servers:
            assert server.stdout is not None
            self.urls.append(json.loads(server.stdout.readline())["url"])

    def popen(self, *arguments: object) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            runs.strop(*map(str, arguments)),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def enqueue(self, name: str, members: int) -> None:
        given = ["--tasks", "tasks.jsonl", "--members", members, "--name", name, "--url", self.urls[0]]
        queued = self.popen("enqueue", *given, "--json")
        _, wrong = queued.communicate(timeout=60)
        assert queued.returncode == 0, wrong

    def run(self, at: int, agent: str, *more: object) -> "subprocess.Popen[str]":
        return self.popen(
            *("runner", "--url", self.urls[at], "--agent", f"agents.py:{agent}", "--name", f"runner{at}"),
            *("--workers", 3, "--set", "runner.lease=3", "--json", *more),
        )


@pytest.fixture
def site(tmp_path: Path, postgres_server: Postgres) -> Iterator[Site]:
    site = Site(tmp_path, postgres_server.url("two_servers"))
    yield site
    for server in site.servers:
        server.terminate()
        _, said = server.communicate(timeout=60)
        assert (server.returncode, said) == (0, "")


async def test_two_servers_share_a_store(site: Site, postgres_server: Postgres) -> None:
    store = await open_store(postgres_server.url("two_servers"))
    try:
        await _agents_at_both_are_recorded_exactly(site, store)
        await _what_one_lost_the_other_takes_over(site, store)
    finally:
        await store.close()


async def _agents_at_both_are_recorded_exactly(site: Site, store: Store) -> None:
    site.enqueue("a", 4)
    runners = [site.run(at, "talk", "--until-empty") for at in (0, 1)]
    counts = []
    for runner in runners:
        said, wrong = await asyncio.to_thread(runner.communicate, timeout=120)
        assert runner.returncode == 0, wrong
        counts.append(json.loads(said))
    assert sum(count["succeeded"] for count in counts) == 48
    assert all(count == {"leased": count["succeeded"], "succeeded": count["succeeded"]} for count in counts)
    assert all(count["succeeded"] > 0 for count in counts), counts
    rollouts = [rollout for rollout in await store.list(limit=100) if rollout.id.startswith("a-")]
    assert len(rollouts) == 48
    seen: set[str] = set()
    for rollout in rollouts:
        (attempt,) = await store.attempts(rollout.id)
        assert attempt.runner in ("runner0", "runner1")
        turns = await store.turns(rollout.id)
        _check_exact(turns)
        assert len(turns) == 3
        assert not seen & {turn.id for turn in turns}
        seen |= {turn.id for turn in turns}


async def _what_one_lost_the_other_takes_over(site: Site, store: Store) -> None:
    """A runner at one server dies with its agents; what it had is run at the other, and late words are refused by
    both."""
    (site.folder / "tasks.jsonl").write_text('{"id": "lost", "n": 1}\n')
    site.enqueue("b", 1)
    dying = site.run(0, "hang")
    deadline = time.monotonic() + 60
    while not (site.folder / "hangs").exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    dying.send_signal(signal.SIGKILL)
    dying.communicate()
    site.servers[0].send_signal(signal.SIGSTOP)  # so that it is the other server that notices
    try:
        other = site.run(1, "talk", "--until-empty")
        said, wrong = await asyncio.to_thread(other.communicate, timeout=120)
    finally:
        site.servers[0].send_signal(signal.SIGCONT)
    assert json.loads(said) == {"leased": 1, "succeeded": 1}, wrong
    (rollout,) = [rollout for rollout in await store.list(limit=100) if rollout.id.startswith("b-")]
    first, second = await store.attempts(rollout.id)
    assert (first.cause, second.cause, second.runner) == ("lost_runner", None, "runner1")
    base_url, key = json.loads((site.folder / "hangs").read_text())
    for url in site.urls:
        async with openai.AsyncOpenAI(
            base_url=base_url.replace(site.urls[0], url), api_key=key, max_retries=0
        ) as client:
            with pytest.raises(openai.ConflictError):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "late"}])
    assert len(await store.turns(rollout.id, attempt=1)) == 1  # what it had sampled is kept
    turns = await store.turns(rollout.id, attempt=2)
    _check_exact(turns)
    assert len(turns) == 3


def _check_exact(turns: list[Turn]) -> None:
    """Each goes on from the very tokens of the one before, and has a logprob for each that was sampled."""
    assert [turn.branch for turn in turns] == [None] * len(turns)
    assert all(len(turn.logprobs) == len(turn.response_ids) for turn in turns)
    for before, turn in pairwise(turns):
        whole = before.prompt_ids + before.response_ids
        assert turn.parent == before.id
        assert turn.shared >= len(whole) - 1
        assert turn.prompt_ids[: turn.shared] == whole[: turn.shared]
