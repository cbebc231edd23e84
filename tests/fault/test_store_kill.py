"""What the store acknowledged survives kill -9 of the process that holds it."""

import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from strop.store.sqlite import SqliteStore

pytestmark = pytest.mark.fault

WRITER = """
    import asyncio, itertools, sys
    from strop.store.sqlite import SqliteStore
    from strop.types import Reward, Rollout, Task, Turn

    def say(*words):
        sys.stdout.write(" ".join(map(str, words)) + "\\n")
        sys.stdout.flush()

    async def work(store, life, worker):
        for n in itertools.count():
            id = f"r{life}-{worker}-{n}.0"
            await store.enqueue([Rollout(id=id, group=id, member=0, task=Task(id="t"), created=0.0)])
            say("enqueued", id)
            (lease,) = await store.lease("w", seconds=60)
            id, number = lease.rollout.id, lease.attempt.number
            say("leased", id, number)
            for k in range(3):
                turn = Turn(id=f"{id}/{number}/{k}", rollout=id, attempt=number, prompt_ids=list(range(100)),
                            response_ids=[k], logprobs=[-0.1], versions=[(0, "1.0")], finish="stop", started=k, ended=k)
                await store.add_turns([turn])
                say("turn", id, number, k)
            await store.finish(id, number, rewards=[Reward(value=n / 7)])
            say("finished", id, number, (n / 7).hex())

    async def main():
        store = await SqliteStore.open(sys.argv[1])
        await store.reclaim(everything=True)
        await asyncio.gather(*(work(store, sys.argv[2], worker) for worker in range(8)))

    asyncio.run(main())
"""


async def test_acknowledged_work_survives_kill_9(tmp_path: Path):
    program, path = tmp_path / "writer.py", tmp_path / "store.sqlite"
    program.write_text(textwrap.dedent(WRITER))
    rng = random.Random(1)
    said: list[list[str]] = []
    for life in range(6):
        command = [sys.executable, program, path, str(life)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:  # noqa: ASYNC220
            assert writer.stdout is not None
            heard = [writer.stdout.readline()]  # it is at work
            deadline = time.monotonic() + rng.uniform(0.05, 0.5)
            while time.monotonic() < deadline:
                heard.append(writer.stdout.readline())
            writer.kill()
            heard += writer.stdout.readlines()
        said += [line.decode().split() for line in heard if line.endswith(b"\n")]
        await check(path, said)
    assert sum(words[0] == "finished" for words in said) > 50


async def check(path: Path, said: list[list[str]]) -> None:
    store = await SqliteStore.open(path)
    ids = {words[1] for words in said}
    rollouts = {id: await store.get(id) for id in ids}  # UnknownId if one was lost
    turns = {
        id: {t.id for n in range(1, r.attempts + 1) for t in await store.turns(id, attempt=n)}
        for id, r in rollouts.items()
    }
    await store.close()
    for words in said:
        what, id, *rest = words
        if what == "leased":
            assert rollouts[id].attempts >= int(rest[0])
        elif what == "turn":
            assert f"{id}/{rest[0]}/{rest[1]}" in turns[id]
        elif what == "finished":
            assert rollouts[id].status == "succeeded"
            assert rollouts[id].attempts == int(rest[0])
            assert rollouts[id].reward() == float.fromhex(rest[1])
