"""Samples from the stores of runs: rollouts that ended well, with the tokens that were recorded.

Their ids mean the same here only with the same vocabulary. A run whose model has another one is refused: its text could
be tokenised anew, but then what is learnt would not be what was sampled (a transcript of it says so, and may be given).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping
from pathlib import Path

from msgspec.structs import replace

from strop.config import Config, default_policy, find_policy, resolve_policies
from strop.errors import ConfigError, ModelError, PlaceError
from strop.gateway.model_files import read_tokenizer
from strop.models.names import prepare_folder
from strop.run.folder import RunFolder
from strop.store import open_store
from strop.types import Mode, Rollout, Turn

Vocabulary = Mapping[str, int]


async def read_run(
    folder: Path, *, modes: Collection[Mode], splits: Collection[str], held_out: Collection[str], left_out: Counter[str]
) -> AsyncGenerator[tuple[Rollout, list[Turn]]]:
    """Every rollout of a run that succeeded, with its turns. Of tasks of `splits` only, if any are named, and never of
    `held_out` ones otherwise. What is passed over is counted in `left_out`."""
    config = RunFolder.config(folder)
    store = await open_store(config.store.url or folder, create=False)
    try:
        after: str | None = None
        while page := await store.list(after=after):
            for rollout in page:
                if why := _pass_over(rollout, modes, splits, held_out):
                    left_out[why] += 1
                else:
                    yield rollout, await store.turns(rollout.id)
            after = page[-1].id
    finally:
        await store.close()


def _pass_over(
    rollout: Rollout, modes: Collection[Mode], splits: Collection[str], held_out: Collection[str]
) -> str | None:
    if rollout.status in ("queued", "running"):
        return "unfinished"
    if rollout.mode not in modes:
        return "mode"
    if rollout.status != "succeeded":
        return "failed"
    if splits:
        return None if rollout.task.split in splits else "split"
    return "held_out" if rollout.task.split in held_out else None


async def refuse_other_vocabulary(name: Path, policies: Collection[str], own: Config, vocabulary: Vocabulary) -> None:
    """Raises `ConfigError` where tokens that these policies of the run in the folder `name` said do not mean what they
    mean to our model."""
    for policy, theirs in resolve_policies(RunFolder.config(name)).items():
        if policy not in policies or theirs.policy.model == own.policy.model:
            continue
        try:
            folder = await asyncio.to_thread(prepare_folder, replace(theirs.policy, template=""))
            known = read_tokenizer(folder).get_vocab(with_added_tokens=True)
        except (ModelError, PlaceError, ConfigError, OSError) as error:
            why = str(error).partition(". Fix: ")[0]
            raise ConfigError(
                f"the tokens of {name} are those of {theirs.policy.model}, whose tokenizer cannot be had ({why}). Fix: "
                "put that model back, or give the rollouts as transcripts"
            ) from None
        if known != vocabulary:
            which = f"its policy {policy}, " if policy != "main" else ""
            raise ConfigError(
                f"the rollouts of {name} were sampled by {which}{theirs.policy.model}, whose vocabulary is not that of "
                f"{own.policy.model}: the same ids are other text. Fix: train that model, or give them as transcripts"
            )


def find_owner(agent: str, policies: Mapping[str, Config]) -> str:
    """The policy of this run that an agent's turns belong to: the gateway would route it there."""
    return find_policy(agent, policies) or default_policy(policies) if len(policies) > 1 else next(iter(policies))
