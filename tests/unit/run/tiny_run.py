"""A run with a real store, a real folder and a learner of a model so small that a step takes milliseconds; without
engine and agents."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop import algorithms
from strop import config as configs
from strop.learner.client import LearnerClient
from strop.learner.learner import Learner
from strop.monitor.console import Silent
from strop.run.checkpoints import finish_checkpoint
from strop.run.folder import RunFolder
from strop.run.loop import advance
from strop.run.resume import go_back
from strop.run.state import Collected, Run, TrainedPolicy
from strop.store.sqlite import SqliteStore
from strop.trajectory import Sample
from strop.types import Policy, Reward, Task, Turn, version

STEPS = 4


class Noted(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Here(LearnerClient):
    """The learner's verbs in this process."""

    def __init__(self, model: Path, config: configs.Config) -> None:
        self.learner = Learner(model, config.learner, algorithms.make(config.algorithm, config.learner))

    async def _send_call(self, verb: str, args: tuple[Any, ...]) -> Any:
        if verb == "finish_save":  # waits beside everything else
            return await asyncio.to_thread(self.learner.finish_save)
        found = getattr(self.learner, verb)(*args)
        return (args[0].entries, found) if verb == "score" else found


class Nobody:
    """Engines that serve whatever they are told to."""

    sending = 0.0

    def __init__(self) -> None:
        self.published: list[str] = []

    def prepare(self, version: str) -> None: ...

    async def publish(self, version: str) -> None:
        self.published.append(version)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


def write_model(path: Path) -> Path:
    torch.manual_seed(1)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=32, **size)).save_pretrained(path)
    return path


async def opened(folder: Path, model: Path, *changes: str) -> Run:
    """A run in `folder` without engine and agents; begun if it is not there yet."""
    sets = ["loop.groups=1", "loop.group_size=2", "loop.checkpoint_every=1", f"loop.steps={STEPS}", "seed=3"]
    sets += ["learner.device=cpu", "learner.dtype=float32", "engine.deterministic=true", "loop.keep_checkpoints=9"]
    sets += ["learner.logprob_limit=1e9"]  # logprobs are made up
    sets += changes
    config = configs.load(sets=sets, folder=str(folder))
    fresh = not (folder / "config.json").exists()
    place = RunFolder.create(folder) if fresh else RunFolder.open(folder)
    place.keep(config)
    store = await SqliteStore.open(place.store)
    if fresh:
        await store.put_policy(Policy(name=configs.MAIN, version=version(1, 0), model="m"))
    nobody: Any = Nobody()
    learner: Any = Here(model, config)
    algorithm = algorithms.make(config.algorithm, config.learner)
    nothing: dict[str, Any] = {
        "gateway": None,
        "pool": None,
        "writers": None,
        "learners": [learner],
        "engines": [nobody],
    }
    policy = TrainedPolicy(
        name=configs.MAIN, config=config, algorithm=algorithm, learner=learner, engine=nobody, publisher=nobody
    )
    tasks = [Task(id=f"t{n}") for n in range(3)]
    return Run(
        config=config, folder=place, tasks=tasks, view=Noted(), store=store, policies={policy.name: policy}, **nothing
    )  # fmt: skip


async def closed(run: Run) -> None:
    await run.store.close()
    run.folder.close()


async def collected(run: Run) -> Collected:
    """The next step's rollouts, as agents and engine would have left them."""
    await run.store.enqueue(run.next_rollouts())
    samples: list[Sample] = []
    for member, lease in enumerate(await run.store.lease("w", seconds=60.0, count=2)):
        id, now = lease.rollout.id, time.time()
        turn = Turn(
            id=f"{id}/1/0", rollout=id, attempt=1, prompt_ids=[1, 2], response_ids=[3 + member, run.step],
            logprobs=[-2.0, -2.0], versions=[(0, run.versions[0])], finish="stop", started=now, ended=now,
        )  # fmt: skip
        await run.store.add_turns([turn])
        ended = await run.store.finish(id, 1, rewards=[Reward(value=float(member))])
        samples.append(Sample(ended, [turn]))
    return Collected(samples)


async def resumed(folder: Path, model: Path) -> tuple[list[str], list[str], list[str]]:
    """The versions and fingerprints of a run that was gone back to and replayed, and what it said."""
    run = await opened(folder, model)
    try:
        for again in await go_back(run):
            await advance(run, again)
        await finish_checkpoint(run)
        steps = await run.store.steps()
        return [s.version for s in steps], [str(s.digest) for s in steps], run.view.notes  # type: ignore[attr-defined]
    finally:
        await closed(run)
