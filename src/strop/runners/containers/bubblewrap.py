"""Containers without an engine: bubblewrap's, which need no root, no daemon and no image.

    /usr, /bin, /lib, /lib64, /sbin     this machine's, read-only
    /etc                                what programs need to start and to find names: no passwords, no keys
    the agent's folder, mounts          where they are on this machine, read-only unless it is said otherwise
    /tmp, /dev/shm                      empty, in memory, limited in size
    /proc, /dev                         of the container's own processes; null, zero, random and the like
    nothing else                        no /home, no /root, no /var, no other rollouts

A container has namespaces of its own for processes, IPC, mounts and host name, no capabilities, and the sandbox's
filter of system calls, but for those that an agent's programs need. It dies with the runner, whatever that dies of.

Memory and processes are limited by a look every 0.25 s, which fast ones outrun meanwhile, and which then ends the whole
container. Left out: cgroups, and with them a share of the CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from strop.errors import AgentError, ConfigError
from strop.runners.containers.base import TASK_FILE, Containers, Enclosed
from strop.tools.sandbox import jail, memory, seccomp

LOOK = 0.25
TRIAL_SECONDS = 20.0
SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = (
    *("alternatives", "ca-certificates", "crypto-policies", "gai.conf", "group", "host.conf", "hosts", "ld.so.cache"),
    *("ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "os-release", "passwd", "pki"),
    *("protocols", "resolv.conf", "services", "ssl", "timezone"),
)
KEPT = ("PATH", "LANG", "LC_ALL", "TZ")
"""Variables of the runner that say how programs are found and what they print."""


class Bubblewrap(Containers):
    title = "bubblewrap"

    async def start(self, program: str) -> None:
        jail.check("running an agent in a container", "or set runner.container.image and run docker or podman")
        if self.config.cpus:
            raise ConfigError(
                "bubblewrap cannot limit runner.container.cpus. Fix: leave it out, or set runner.container.runtime to "
                "docker or podman"
            )
        self.check_places()
        trial = self.enclose(["sh", "-c", 'command -v -- "$1"', "sh", program], {}, os.devnull)
        try:
            done = await asyncio.to_thread(_try, trial)
        finally:
            trial.close()
        if done.returncode and done.stderr.startswith("bwrap:"):
            raise ConfigError(
                f"bubblewrap cannot make a container here ({done.stderr.strip()[6:].strip()}). Fix: allow user "
                "namespaces (sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns), "
                "or set runner.container.runtime to docker or podman"
            )
        if done.returncode:
            raise AgentError(
                f"agent: there is no program {program!r} in its container ({_find_outside(program)}). Fix: check its "
                "name, or add the folder of its installation to runner.container.mounts"
            )

    def enclose(self, words: list[str], environment: Mapping[str, str], task_file: str) -> Enclosed:
        file = os.memfd_create("strop-seccomp")
        os.write(file, seccomp.build_filter(agent=True))
        os.lseek(file, 0, os.SEEK_SET)
        made = [shutil.which("bwrap") or "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-uts"]
        made += ["--unshare-cgroup-try", *([] if os.geteuid() == 0 else ["--unshare-user"]), "--cap-drop", "ALL"]
        made += ["--die-with-parent", "--new-session", "--hostname", "agent", "--seccomp", str(file)]
        made += [*_view_system(), *self._view_places(), "--ro-bind", task_file, TASK_FILE]
        made += ["--remount-ro", "/", "--chdir", str(self.folder), "--", *words]
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        own = {"HOME": "/tmp", "TMPDIR": "/tmp"}
        return Enclosed(made, {**kept, **self.passed(), **environment, **own}, files=[file])

    async def watch(self, pid: int) -> str:
        config = self.config
        while True:
            await asyncio.sleep(LOOK)
            why = ""
            if memory.exceeds(pid, config.memory_mb << 20):
                why = f"it used more than {config.memory_mb} MB of memory (runner.container.memory_mb)"
            elif memory.count_threads(pid) > config.processes + 2:  # bubblewrap itself is two of them
                why = f"it had more than {config.processes} processes and threads (runner.container.processes)"
            if why:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # the namespace dies with it, all of it at once
                return why

    def explain(self, code: int | None, printed: str) -> str:
        return "its container could not be made" if code == 1 and printed.startswith("bwrap: ") else ""

    def _view_places(self) -> list[str]:
        disk = str(self.config.disk_mb << 20)
        made = [
            word for place in ("/tmp", "/dev/shm") for word in ("--perms", "1777", "--size", disk, "--tmpfs", place)
        ]
        made += ["--remount-ro", "/dev"]
        for place, writable in self.visible():
            made += ["--bind" if writable else "--ro-bind", str(place), str(place)]
        for place in self.hidden():
            made += ["--perms", "0555", "--size", "4096", "--tmpfs", str(place), "--remount-ro", str(place)]
        return made


def _view_system() -> list[str]:
    made = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM:
        if os.path.islink(name):
            made += ["--symlink", os.readlink(name), name]
        else:
            made += ["--ro-bind-try", name, name]
    for name in ETC:  # what a link leads to may not be there inside
        made += ["--ro-bind-try", str(Path("/etc", name).resolve()), f"/etc/{name}"]
    return [*made, "--proc", "/proc", "--dev", "/dev"]


def _find_outside(program: str) -> str:
    where = shutil.which(program)
    return f"outside of it, it is {os.path.realpath(where)}" if where else "nor is there one outside of it"


def _try(trial: Enclosed) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            trial.words,
            env=trial.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            pass_fds=trial.files,
            timeout=TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"bubblewrap made no container in {TRIAL_SECONDS:g} s. Fix: see what holds it up") from None
