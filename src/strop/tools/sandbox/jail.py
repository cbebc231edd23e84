"""What a process in the sandbox sees, as bubblewrap's arguments.

    /python             the interpreter, its standard library and the chosen packages, read-only
    /lib, /lib64        the shared libraries that these need, and no others, read-only
    /dev                null, zero, full, random, urandom
    /tmp, /tmp/work     empty, in memory, limited in size; /dev/shm is the same
    nothing else        no /proc, no /etc, no /home, no environment, no network but a loopback of its own

Ordinary users get a user namespace. Root is given up: bubblewrap makes the mounts as root, without a user namespace,
and the runner becomes a user that nobody else is, with no capabilities, before it runs a cell. So the Python of root's
home can be used, and Linux, which never limits how many processes root has, limits these.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import threading
from functools import lru_cache
from pathlib import Path

from strop.errors import ConfigError

RUNNER = Path(__file__).with_name("runner.py")
NEEDED = ("--size", "--perms", "--seccomp", "--die-with-parent")
ENVIRONMENT = {
    "PATH": "/python/bin",
    "HOME": "/tmp/work",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": "/lib",
    "PYTHONPATH": "/python/packages",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    "OMP_NUM_THREADS": "1",  # more threads would be counted as processes, and take gigabytes of address space
    "OPENBLAS_NUM_THREADS": "1",
}
# What the dynamic linker has loaded once it has seen all of these libraries, by the names that it looks for.
LOADED = """
import ctypes, sys
for path in sys.stdin.read().split("\\n"):
    try: ctypes.CDLL(path, 1)
    except OSError: pass
class Info(ctypes.Structure): _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
def tell(info, size, data):
    print((info.contents.name or b"").decode())
    return 0
ctypes.CDLL(None).dl_iterate_phdr(tell, None)
"""
_finding = threading.Lock()


def check(
    what: str = "running a model's Python", otherwise: str = "or say isolated=False to run it without isolation"
) -> None:
    """Raises `ConfigError` where there is no bubblewrap, or one that is too old: `what` needs it, and does not without
    it unless one does `otherwise`."""
    if (program := shutil.which("bwrap")) is None:
        raise ConfigError(f"{what} needs bubblewrap. Fix: apt-get install bubblewrap, {otherwise}")
    known = _help(program)
    if missing := [option for option in NEEDED if option not in known]:
        raise ConfigError(f"{program} has no option {missing[0]}: the sandbox needs bubblewrap 0.8 or newer")


@lru_cache(maxsize=1)
def _help(program: str) -> str:
    return subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout


def choose_user() -> int:
    """Who the runner becomes: 0 if it is not root and need not become anyone. Otherwise a user of its own, so that its
    processes are counted apart; at random, in the upper half of those there are."""
    if os.geteuid() != 0:
        return 0
    size = int(Path("/proc/self/uid_map").read_text().split()[2])
    size = min(size, 1 << 31)
    return size // 2 + secrets.randbelow(size // 2 - 2)


def build_command(seccomp: int, disk: int, packages: tuple[str, ...], arguments: list[str]) -> list[str]:
    """The command line that starts a runner. `seccomp` is the file descriptor of the filter."""
    if os.geteuid() == 0:
        powers = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        powers = ["--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    made = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    made += [*powers, "--die-with-parent", "--new-session", "--hostname", "box", "--seccomp", str(seccomp)]
    made += ["--clearenv", *(word for pair in ENVIRONMENT.items() for word in ("--setenv", *pair))]
    made += [*view(packages), "--perms", "1777", "--size", str(disk), "--tmpfs", "/tmp"]
    made += ["--perms", "0777", "--dir", "/tmp/work", "--chdir", "/tmp/work", "--remount-ro", "/"]
    return [*made, "--", "/python/bin/python3", "-S", "/python/runner.py", *arguments]


def view(packages: tuple[str, ...]) -> list[str]:
    """The mounts that are the same for all sessions. Finding the libraries takes a tenth of a second, once."""
    with _finding:
        return _view(packages)


@lru_cache(maxsize=8)
def _view(packages: tuple[str, ...]) -> list[str]:
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    library = Path(sysconfig.get_path("stdlib"))
    inside = f"/python/{sys.platlibdir}/{library.name}"
    chosen = [path for name in packages for path in _files(name)]
    made = [word for place in _folders(inside) for word in ("--perms", "0755", "--dir", place)]
    made += ["--ro-bind", program, "/python/bin/python3", "--ro-bind", str(library), inside]
    made += ["--ro-bind", str(RUNNER), "/python/runner.py"]
    for name in ("site-packages", "dist-packages"):
        if (library / name).is_dir():
            made += ["--tmpfs", f"{inside}/{name}", "--remount-ro", f"{inside}/{name}"]
    for path in chosen:
        made += ["--ro-bind", str(path), f"/python/packages/{path.name}"]
    for path in _libraries(program, [library / "lib-dynload", *chosen]):
        linker = path.name.startswith(("ld-", "ld.", "ld64"))
        made += ["--ro-bind", str(path), str(path) if linker else f"/lib/{path.name}"]
    for name in ("null", "zero", "full", "random", "urandom"):
        made += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return [*made, "--symlink", "/tmp", "/dev/shm"]


def _folders(inside: str) -> list[str]:
    """Made first, and open to all: those that bubblewrap makes on its way are for its own user only."""
    return ["/python", "/python/bin", os.path.dirname(inside), "/python/packages", "/lib", "/lib64", "/dev"]


def _files(package: str) -> list[Path]:
    """What a distribution has put into site-packages: its folders and single files."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"the sandbox cannot show {package}: pip install {package}, or leave it out") from None
    tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
    paths = [Path(str(found.locate_file(top))).resolve() for top in sorted(tops)]
    return [path for path in paths if path.exists()]


def _libraries(program: str, places: list[Path]) -> list[Path]:
    """The shared libraries outside of `places` that the Python at `program` and the modules in `places` need."""
    modules = [file for place in places for file in place.rglob("*.so*") if "tkinter" not in file.name]
    listed = "\n".join(map(str, modules))
    told = subprocess.run([program, "-I", "-S", "-c", LOADED], input=listed, capture_output=True, text=True, check=True)
    paths = {Path(line) for line in told.stdout.splitlines() if line.startswith("/")}
    return sorted(path for path in paths if not any(path.resolve().is_relative_to(place) for place in places))
