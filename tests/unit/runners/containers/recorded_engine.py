#!/usr/bin/env python3
"""A recorded stand-in for docker's and podman's clients, because no engine can be had where the tests run: it writes
down what it was asked to do. Without an engine it says what docker's own client was recorded to say; what it says with
one follows that client's manual. What it cannot show is whether an engine then isolates anything.

It reads the folder in $RECORDED_ENGINE: the file `up` is there while its engine answers. `calls` gets a line of JSON
for each command. `run` starts the program without any isolation, detached and with none of the variables by which a
runner finds its processes, as an engine's containers are: it outlives the client, and `rm --force` ends it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WITH_VALUE = {
    *(
        "--name",
        "--pull",
        "--network",
        "--log-driver",
        "--cap-drop",
        "--security-opt",
        "--user",
        "--userns",
        "--memory",
    ),
    *("--memory-swap", "--pids-limit", "--cpus", "--tmpfs", "--mount", "--workdir", "--env", "--entrypoint"),
}
PLAIN = {"--rm", "--interactive", "--init", "--read-only"}
folder = Path(os.environ.get("RECORDED_ENGINE", "."))


def main(words: list[str]) -> int:
    with (folder / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    if not (folder / "up").exists():
        print("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", file=sys.stderr)
        return 125 if words[0] == "run" else 1
    if words[0] in ("version", "info"):
        print("27.3.1")
    elif words[:2] == ["image", "inspect"]:
        return 1 if words[2] == "missing" else 0
    elif words[:2] == ["rm", "--force"]:
        for name in words[2:]:
            remove(name)
    elif words[0] == "run":
        return run(words[1:])
    return 0


def run(words: list[str]) -> int:
    given: dict[str, list[str]] = {}
    while words[0].startswith("--"):
        option = words.pop(0)
        assert option in WITH_VALUE | PLAIN, f"unknown flag: {option}"
        given.setdefault(option, []).append(words.pop(0) if option in WITH_VALUE else "")
    environment = {"PATH": os.environ["PATH"]}
    for variable in given["--env"]:
        name, is_written, value = variable.partition("=")
        if is_written or not name.endswith("KEY"):
            environment[name] = value if is_written else os.environ[name]
    (folder / "environment").write_text(json.dumps(environment))
    child = subprocess.Popen([given["--entrypoint"][0], *words[1:]], env=environment, start_new_session=True)
    (folder / given["--name"][0]).write_text(str(child.pid))
    code = child.wait()
    return code if code >= 0 else 128 - code


def remove(name: str) -> None:
    for _ in range(100):
        if (folder / name).exists() and (pid := (folder / name).read_text()):
            os.killpg(int(pid), signal.SIGKILL)
            return
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
