"""Folders of runs with a few rollouts in them, made without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strop.config import Config, PolicyConfig, to_json
from strop.store import open_store
from strop.types import Mode, Policy, Reward, Rollout, Sampling, Task, Turn


def turns(rollout: str, *said: Sequence[int], agent: str = "main", sampling: Sampling | None = None) -> list[Turn]:
    """Turns that go on from each other."""
    found: list[Turn] = []
    path: list[int] = [5]
    for n, response in enumerate(said):
        prompt = [*path, 6]
        found.append(
            Turn(
                id=f"{rollout}/1/{n}",
                rollout=rollout,
                attempt=1,
                agent=agent,
                prompt_ids=prompt,
                response_ids=list(response),
                logprobs=[-0.5] * len(response),
                versions=[(0, "1.3")],
                sampling=sampling or Sampling(temperature=0.0),
                finish="stop",
                parent=found[-1].id if found else None,
                shared=len(path) if found else 0,
                messages=[{"role": "user", "content": str(n)}],
                answer={"role": "assistant", "content": str(response)},
                started=float(n),
                ended=n + 0.5,
            )
        )
        path = found[-1].ids
    return found


async def make_run(
    folder: Path,
    rollouts: Sequence[tuple[str, float | None, Sequence[Sequence[int]]]],
    *,
    model: str = "strop/nano",
    mode: Mode = "train",
    split: str = "train",
    agent: str = "main",
) -> Path:
    """A run with one rollout for each id, reward and turns; a rollout called g0.1 is a member of group g0."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(to_json(Config(policy=PolicyConfig(model=model))))
    store = await open_store(folder)
    await store.put_policy(Policy(name="main", version="1.0", model=model))
    for id, reward, said in rollouts:
        group, _, member = id.partition(".")
        task = Task(id=f"task-{group}", split=split)
        wanted = Rollout(id=id, group=group, member=int(member or 0), task=task, mode=mode, created=0.0)
        lease = await store.begin(wanted, "test", seconds=60)
        await store.add_turns(turns(id, *said, agent=agent))
        own = [] if reward is None else [Reward(value=reward), Reward(name="neat", value=0.5, turn=f"{id}/1/0")]
        await store.finish(id, lease.attempt.number, rewards=own)
    await store.close()
    return folder
