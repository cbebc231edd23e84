"""The task of an attempt as a file, for programs in any language ($STROP_TASK)."""

from __future__ import annotations

import os
import secrets
import stat

import msgspec

from strop.runners.base import Job


def write_task(job: Job) -> str:
    """Write the task over that of an earlier job, which costs less than a new file; returns where it is. An agent may
    have put something else in the file's place, or have made a link to it: that is left alone, and a new file made."""
    path = job.task_file
    file = _open_own(path)
    if file is None:
        path = f"{path}.{secrets.token_hex(8)}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with open(file, "wb") as out:
        out.write(msgspec.json.encode(job.llm.task))
        out.truncate()
    return path


def _open_own(path: str) -> int | None:
    """None where a file of ours is not to be had: a folder is there, a link, a pipe, or a file with another name."""
    try:
        try:
            file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError:
        return None
    about = os.fstat(file)
    if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
        return file
    os.close(file)
    return None
