"""Runs inside the sandbox: takes cells on its stdin, runs them in one namespace, and says what came of each.

    in    length, code                       stdin, a socket; it is /dev/null for the cells
    out   kind, length, text                 the same socket: ready, or what the cell's last value or exception is
    fd 1, fd 2                               one pipe for all that is printed, by the cells and by what they start

This file imports nothing of strop, and little of anything, so that it starts fast. The cells share its process and can
do to it what they like: the outside must trust nothing that comes from here.
"""

from __future__ import annotations

import io
import os
import struct
import sys
from typing import Any

READY, DONE, RAISED = b"+", b"=", b"!"
ANSWER, CELL = struct.Struct(">cI"), struct.Struct(">I")
AST_ONLY = 0x400
"""ast.PyCF_ONLY_AST, without the time it takes to import ast."""
SPARE = 16 << 20
"""Bytes of memory that are kept back, to say what went wrong when all the rest is used up."""


def main() -> None:
    uid, memory, processes, disk, cpu, kept = map(int, sys.argv[1:])
    if uid:  # started by root, who must not run a cell
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    limit(memory, processes, disk, cpu)
    control, printed, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    me = os.getpid()
    space = make_main()
    sources: dict[str, str] = {}
    open_streams(null, printed)
    send(control, READY, "", kept)
    while (code := receive(control)) is not None:
        open_streams(null, printed)
        set_spare_memory(False)
        kind, text = run_cell(code, space, sources)
        flush()
        if os.getpid() != me:  # a copy that the cell forked and forgot
            os._exit(0)
        end_others()
        send(control, kind, text, kept)


def limit(memory: int, processes: int, disk: int, cpu: int) -> None:
    """Hard limits, which nothing in here can raise again. 0 for processes: not isolated, where what is asked for may
    not be had (macOS), and processes are counted for the whole user."""
    import resource

    wanted = [
        (resource.RLIMIT_AS, memory + SPARE),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ]
    for which, most in wanted + ([(resource.RLIMIT_NPROC, processes)] if processes else []):
        try:
            resource.setrlimit(which, (most, most))
        except (OSError, ValueError):
            if processes:
                raise
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))  # the first ends it with a signal that says why


def set_spare_memory(free: bool) -> None:
    """Let the spare memory be used, or keep it back again."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    if most > SPARE:  # it is limited
        resource.setrlimit(resource.RLIMIT_AS, (most if free else most - SPARE, most))


def make_main() -> dict[str, Any]:
    """The cells' own __main__, with what `site` would have put into builtins."""
    import site

    site.setquit()
    site.sethelper()
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    sys.path[0] = os.getcwd()
    return module.__dict__


def open_streams(null: int, printed: int) -> None:
    """Anew for every cell, since one may have closed them. Nothing is held back, so that the order is kept."""
    os.dup2(null, 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open_writer(1)
    sys.stderr = sys.__stderr__ = open_writer(2)


def open_writer(file: int) -> io.TextIOWrapper:
    raw: Any = io.FileIO(file, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - contextlib takes longer to import than the rest
            stream.flush()
        except BaseException:  # closed, or something else by now
            pass


def run_cell(code: str, space: dict[str, Any], sources: dict[str, str]) -> tuple[bytes, str]:
    """Run it. The value of a last expression is shown as in a notebook."""
    name = f"<cell {len(sources) + 1}>"
    sources[name] = code
    try:
        tree: Any = compile(code, name, "exec", AST_ONLY, dont_inherit=True)
        last = tree.body.pop() if tree.body and type(tree.body[-1]).__name__ == "Expr" else None
        exec(compile(tree, name, "exec", dont_inherit=True), space)
        if last is None:
            return DONE, ""
        import _ast

        value = eval(compile(_ast.Expression(last.value), name, "eval", dont_inherit=True), space)
        if value is None:
            return DONE, ""
        space["_"] = value
        return DONE, repr(value)
    except SystemExit as error:
        return (DONE, "") if error.code in (None, 0) else (RAISED, f"SystemExit: {error.code}")
    except BaseException as error:
        try:
            set_spare_memory(True)
            return RAISED, shorten_traceback(error, sources)
        except MemoryError:
            return RAISED, "MemoryError"


def shorten_traceback(error: BaseException, sources: dict[str, str]) -> str:
    """The traceback with the cells' own lines only, and those of modules that they wrote."""
    import linecache
    import traceback

    for name, code in sources.items():
        linecache.cache[name] = (len(code), None, [f"{line}\n" for line in code.splitlines()], name)

    def own(said: traceback.TracebackException | None) -> None:
        if said is None:
            return
        mine = [frame for frame in said.stack if frame.filename in sources or frame.filename.startswith(sys.path[0])]
        said.stack = traceback.StackSummary.from_list(mine)
        for other in (said.__cause__, said.__context__, *(getattr(said, "exceptions", None) or ())):
            own(other)

    told = traceback.TracebackException.from_exception(error)
    own(told)
    return "".join(told.format()).rstrip("\n")


def end_others() -> None:
    """Kill and reap whatever the cell left running. Only where this is the second process of a namespace of its own:
    elsewhere it would hit every process of the user."""
    if os.getpid() != 2 or os.getppid() != 1:
        return
    try:  # noqa: SIM105
        os.kill(-1, 9)
    except ProcessLookupError:
        pass
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def shorten(text: str, kept: int, gone: int = 0) -> str:
    """Its first and its last characters, `kept` together, and how many are missing between them. `gone` were lost from
    its middle before.

    >>> shorten("abcdefghij", 4)
    'ab\\n[... 6 characters are left out here ...]\\nij'
    """
    if len(text) + gone <= kept:
        return text
    half = kept // 2
    missing = len(text) - 2 * half + gone
    return f"{text[:half]}\n[... {missing} characters are left out here ...]\n{text[len(text) - half :]}"


def send(control: int, kind: bytes, text: str, kept: int) -> None:
    said = shorten(text, kept).encode(errors="backslashreplace")
    message = memoryview(ANSWER.pack(kind, len(said)) + said)
    while message:
        message = message[os.write(control, message) :]


def receive(control: int) -> str | None:
    """The next cell; None when nobody sends any more."""
    head = read(control, CELL.size)
    return None if len(head) < CELL.size else read(control, CELL.unpack(head)[0]).decode()


def read(control: int, length: int) -> bytes:
    parts: list[bytes] = []
    while length and (part := os.read(control, min(length, 1 << 20))):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
