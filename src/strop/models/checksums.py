"""SHA256SUMS: what the files of a checkpoint were when it was written, as `sha256sum --check` reads it.

A disk that lost the end of a file, or a bit of it, says nothing: weights that are a little wrong load without a word.
Checkpoints without the file, of earlier versions, cannot be compared and are taken as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from strop.errors import DamagedCheckpoint

SUMS = "SHA256SUMS"
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
TRAINING = ("optimizer.pt", "strop.json")
"""What only training reads, beside the parts that ranks wrote of it."""
SHARDS = ".metadata"
"""What says where these parts are: a file of torch.distributed.checkpoint."""
_EDITED = ("adapter_config.json",)
"""What users change: where the model of an adapter lies."""


def is_for_training(name: str) -> bool:
    """Whether a file of a checkpoint is only for training to go on.

    >>> is_for_training("__0_0.distcp"), is_for_training("model.safetensors")
    (True, False)
    """
    return name in (*TRAINING, SHARDS) or name.endswith(".distcp")


def write_sums(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Note what the files in `folder` are now. Those whose sums are `known`, by name, are not read again."""
    known = known or {}
    files = [file for file in sorted(folder.iterdir()) if file.name not in (SUMS, *_EDITED)]
    (folder / SUMS).write_text("".join(f"{known.get(file.name) or _sum(file)}  {file.name}\n" for file in files))


def verify(folder: Path, *, training: bool = True) -> None:
    """Raises `DamagedCheckpoint`, which names the file, unless all are what they were; or all but what only training
    reads."""
    for name, noted in _noted(folder).items():
        file = folder / name
        try:
            same = (not training and is_for_training(name)) or _sum(file) == noted
            size = file.stat().st_size if not same else 0
        except FileNotFoundError:
            raise describe_damage(file, "it is missing") from None
        except OSError as error:
            raise describe_damage(file, f"it cannot be read ({error.strerror})") from None
        if not same:
            raise describe_damage(
                file, f"its {size:,} bytes are not those that {SUMS} was made of" if size else "it is empty"
            )


def _noted(folder: Path) -> dict[str, str]:
    """What SHA256SUMS has: checksums by name."""
    try:
        text = (folder / SUMS).read_text()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError):
        raise describe_damage(folder / SUMS, "it cannot be read") from None
    noted = {name: sum for sum, _, name in (line.partition("  ") for line in text.splitlines())}
    wrong = not text.endswith("\n") or any(len(sum) != 64 or Path(name).name != name for name, sum in noted.items())
    if wrong or any(name not in noted and (folder / name).exists() for name in (*WEIGHTS, *TRAINING)):
        raise describe_damage(folder / SUMS, "it is empty" if not text else "it is not a list of all files")
    return noted


def describe_damage(file: Path, why: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{file} is damaged, {why}. Fix: name another checkpoint, or resume the run that it belongs to, which makes "
        "it anew"
    )


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
