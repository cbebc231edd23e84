"""The versions of a run's prompts: what each says, where it came from, and which tasks it wins.

prompts.json of a run's folder has all of them, and is what `strop prompts` reads; a checkpoint has the one that was the
best after its step, as prompts.json and as a file for each prompt.
"""

from __future__ import annotations

import difflib
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from strop.config import Config
from strop.errors import DamagedCheckpoint, PlaceError
from strop.files import private_folder, sync_folder, write_whole

PROMPTS = "prompts.json"


class PromptVersion(Struct, frozen=True, kw_only=True):
    """`scores` are those of the validation tasks, by id; `step` is the one that made it, 0 the beginning."""

    number: int
    step: int
    parents: list[int]
    prompts: dict[str, str]
    scores: dict[str, float]

    @property
    def score(self) -> float:
        return fmean(self.scores.values()) if self.scores else 0.0


class PromptPool(Struct, kw_only=True):
    """All versions in the order in which they were kept."""

    versions: list[PromptVersion] = []

    def add(self, version: PromptVersion) -> None:
        assert version.number == len(self.versions)
        self.versions.append(version)

    @property
    def best(self) -> PromptVersion:
        """The highest mean over the validation tasks; of equal ones the first, which is the shorter way."""
        return max(self.versions, key=lambda version: (version.score, -version.number))

    def find_winners(self) -> dict[str, list[int]]:
        """By validation task, the versions that no other one beats there: the Pareto front over tasks."""
        tasks = dict.fromkeys(task for version in self.versions for task in version.scores)
        found: dict[str, list[int]] = {}
        for task in tasks:
            best = max(version.scores[task] for version in self.versions if task in version.scores)
            found[task] = [version.number for version in self.versions if version.scores.get(task) == best]
        return found

    def find_front(self) -> list[int]:
        """The versions that nobody beats on some task."""
        return sorted({number for winners in self.find_winners().values() for number in winners})

    def digest(self) -> str:
        """A fingerprint of all versions."""
        return hashlib.blake2b(msgspec.json.encode(self.versions), digest_size=16).hexdigest()


def write_pool(folder: Path, pool: PromptPool) -> None:
    write_whole(folder / PROMPTS, msgspec.json.format(msgspec.json.encode(pool), indent=1) + b"\n")


def read_pool(folder: Path) -> PromptPool | None:
    """The versions of the run in `folder`; None where it improves no prompts, or has none yet."""
    try:
        pool = msgspec.json.decode((folder / PROMPTS).read_bytes(), type=PromptPool)
        if any(one.number != n or max(one.parents, default=-1) >= n for n, one in enumerate(pool.versions)):
            raise msgspec.ValidationError("versions do not follow from each other")
        return pool
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(
            f"{folder / PROMPTS} cannot be read: {error}. Fix: resume the run, which writes it"
        ) from None


class PromptCheckpoint(Struct, kw_only=True):
    """What a checkpoint's prompts.json holds."""

    version: str
    prompts: dict[str, str]
    number: int = 0
    score: float | None = None


def write_prompts(folder: Path, checkpoint: PromptCheckpoint) -> None:
    """A new folder with prompts, there whole or not at all: prompts.json, and a text file for each."""
    fresh = folder.with_name(f".{folder.name}.new")
    for half in (fresh, folder):  # of a step that was never committed
        shutil.rmtree(half, ignore_errors=True)
    private_folder(fresh)
    for name, text in checkpoint.prompts.items():
        (fresh / f"{name}.md").write_text(text, "utf-8")
    (fresh / PROMPTS).write_bytes(msgspec.json.format(msgspec.json.encode(checkpoint), indent=1) + b"\n")
    sync_folder(fresh, whole=True)
    fresh.rename(folder)
    sync_folder(folder.parent)


def read_prompts(folder: Path) -> dict[str, str] | None:
    """The prompts of a checkpoint; None where it is a model's."""
    try:
        return msgspec.json.decode((folder / PROMPTS).read_bytes(), type=PromptCheckpoint).prompts
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{folder} is damaged: {PROMPTS} cannot be read ({error})") from None


def replace_prompts(config: Config, prompts: Mapping[str, str]) -> Config:
    """The configuration with other texts for its prompts. Raises `PlaceError` where it has none of these."""
    if not prompts.keys() & config.prompts.keys():
        raise PlaceError(
            f"these are prompts ({', '.join(prompts)}), and the configuration has none of them. Fix: set "
            f"prompts.{next(iter(prompts))}.text, or name a model"
        )
    given = {name: replace(one, text=prompts.get(name, one.text)) for name, one in config.prompts.items()}
    return replace(config, prompts=given)


def list_differences(
    before: Mapping[str, str], after: Mapping[str, str], names: Sequence[str] = ("before", "after")
) -> list[str]:
    """A unified diff, line by line, of every prompt that differs."""
    lines: list[str] = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, ""), after.get(name, "")
        if old != new:
            labels = [f"{name} {label}" for label in names]
            lines += difflib.unified_diff(old.splitlines(), new.splitlines(), *labels, lineterm="", n=1)
    return lines
