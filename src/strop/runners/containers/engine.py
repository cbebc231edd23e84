"""Containers of docker or podman, whose engine starts them: what we start is the engine's client.

    docker run --rm --init --name strop-... IMAGE    its stdin, stdout, stderr and exit code are the agent's
    docker rm --force strop-...                      where the client does not end by itself: a time limit, a stop

Values of variables are never in the command line, which `ps` shows to every user: `--env NAME` has the client take them
from its own environment. A container belongs to the engine and does not die with us: `remover` is a process that
outlives a runner which is killed, and then removes what it had.

Left out: engines on other machines (DOCKER_HOST), which see none of the folders here; pulling images, which is done
once by hand rather than by every runner at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from strop.config import ContainerConfig
from strop.errors import ConfigError
from strop.net.secrets import child_environment
from strop.runners.containers import remover
from strop.runners.containers.base import TASK_FILE, Containers, Enclosed

ANSWER_SECONDS = 10.0
ASK = {"docker": ("version", "--format", "{{.Server.Version}}"), "podman": ("info", "--format", "{{.Host.Arch}}")}
"""What only an engine can answer. docker's client alone has an answer to most other questions."""
FAILED = 125
"""The exit code of a client whose engine could not run the container."""


async def answers(client: str) -> bool:
    """Whether there is an engine behind the client."""
    code, said = await _ask(client, *ASK[client])
    return code == 0 and bool(said.strip())


class ContainerEngine(Containers):
    def __init__(self, client: str, config: ContainerConfig, private: Sequence[Path] = ()) -> None:
        super().__init__(config, private)
        self.title = client
        self._watcher: subprocess.Popen[bytes] | None = None

    async def start(self, program: str) -> None:
        self.check_places()
        self.passed()
        client, image = self.title, self.config.image
        if not await answers(client):
            raise ConfigError(
                f"{client} is not installed, or its engine does not answer. Fix: start it, or set "
                "runner.container.runtime to auto or bubblewrap"
            )
        if (await _ask(client, "image", "inspect", image))[0]:
            raise ConfigError(f"{client} has no image {image!r}. Fix: {client} pull {image}, or build it")
        self._watcher = remover.begin(client, child_environment())

    def enclose(self, words: list[str], environment: Mapping[str, str], task_file: str) -> Enclosed:
        name, config = f"strop-{secrets.token_hex(8)}", self.config
        values = {**self.passed(), **environment}
        made = [self.title, "run", "--rm", "--interactive", "--init", "--name", name, "--pull", "never"]
        made += ["--network", "host", "--log-driver", "none", "--read-only", "--cap-drop", "ALL"]
        made += ["--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
        made += ["--user", f"{os.geteuid()}:{os.getegid()}"]
        if self.title == "podman" and os.geteuid():
            made += ["--userns", "keep-id"]  # without it the user's number means somebody else inside
        made += ["--memory", f"{config.memory_mb}m", "--memory-swap", f"{config.memory_mb}m"]
        made += ["--pids-limit", str(config.processes), *(["--cpus", f"{config.cpus:g}"] if config.cpus else [])]
        made += ["--tmpfs", f"/tmp:rw,exec,nosuid,nodev,size={config.disk_mb}m,mode=1777"]
        for place, writable in self.visible():
            made += ["--mount", _mount(place, place, writable=writable)]
        for place in self.hidden():
            made += ["--mount", _write_fields("type=tmpfs", f"target={place}", "tmpfs-size=4096", "tmpfs-mode=0555")]
        made += ["--mount", _mount(Path(task_file), Path(TASK_FILE)), "--workdir", str(self.folder)]
        for variable in values:
            made += ["--env", variable]
        made += ["--env", "HOME=/tmp", "--entrypoint", words[0], config.image, *words[1:]]
        self._tell(f"+{name}")
        return Enclosed(made, {**child_environment(), **values}, name)

    def explain(self, code: int | None, printed: str) -> str:
        return f"exit code {FAILED} ({self.title} could not run its container)" if code == FAILED else ""

    async def end(self, enclosed: Enclosed, code: int | None) -> None:
        if code is None or code < 0 or code == FAILED:  # the client has not seen its container end
            await asyncio.to_thread(remover.remove, self.title, [enclosed.name])
        self._tell(f"-{enclosed.name}")

    async def close(self) -> None:
        if self._watcher is not None:
            watcher, self._watcher = self._watcher, None
            assert watcher.stdin is not None
            watcher.stdin.close()  # it removes what is left, if anything is, and ends
            await asyncio.to_thread(watcher.wait)

    def _tell(self, line: str) -> None:
        if self._watcher is not None and self._watcher.stdin is not None:
            with contextlib.suppress(OSError):
                self._watcher.stdin.write(f"{line}\n".encode())


def _mount(source: Path, target: Path, *, writable: bool = False) -> str:
    return _write_fields("type=bind", f"source={source}", f"target={target}", *([] if writable else ["readonly"]))


def _write_fields(*fields: str) -> str:
    """As clients read them: a path may hold commas.

    >>> _write_fields("type=bind", "source=/a,b")
    'type=bind,"source=/a,b"'
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(fields)
    return out.getvalue()


async def _ask(client: str, *words: str) -> tuple[int, str]:
    """The exit code and the answer; 1 where there is none in time."""
    try:
        process = await asyncio.create_subprocess_exec(
            client,
            *words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
        )
    except OSError:
        return 1, ""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            out, _ = await process.communicate()
        return process.returncode or 0, out.decode(errors="replace")
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, ""
