"""Which kind of agent is meant, by how it is written.

    http://127.0.0.1:9000/run             a service that gets every task by POST
    agent.py:solve, package.module:solve  a Python function, in processes, loops or threads (`runner.agents_in`)
    node agent.js                         anything else is a command

What looks like a function or an address but is not one gets a sentence, rather than a shell's word for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from strop.config import ContainerConfig, RunnerConfig
from strop.errors import AgentError, ConfigError
from strop.imports import require_file
from strop.runners.base import Agent


def make(
    spec: str,
    config: RunnerConfig,
    *,
    folder: str,
    reward: str = "",
    log: Path | None = None,
    host: str = "",
    private: Sequence[Path] = (),
) -> Agent:
    """The agent that `spec` names, not started yet. A near miss of a function or a service raises `AgentError`.

    `folder` is for files that live as long as the agent, `reward` is the reward function, `log` the file for what is
    said outside of any rollout, `host` the gateway's, to be reached without a proxy. Agents in containers see
    nothing of the folders `private`.
    """
    check_container(spec, config.container)
    if spec.startswith(("http://", "https://")):
        from strop.runners.service import ServiceAgent

        return ServiceAgent(spec, reward=reward)
    if is_python(spec):
        if config.agents_in == "processes":
            from strop.runners.python import ProcessAgent

            return ProcessAgent(spec, config, folder=folder, reward=reward, log=log, host=host)
        if config.agents_in == "loops":
            from strop.runners.loops import LoopsAgent

            return LoopsAgent(spec, config, folder=folder, reward=reward, log=log, host=host)
        if config.python:
            raise ConfigError(
                "runner.python runs agents in processes. Fix: set runner.agents_in to processes or loops with it"
            )
        from strop.runners.in_process import InProcessAgent

        return InProcessAgent(spec, config, reward=reward, host=host)
    check(spec)
    from strop.runners.command import CommandAgent

    return CommandAgent(spec, reward=reward, container=config.container, private=private)


def check_container(spec: str, config: ContainerConfig) -> None:
    """Raises `ConfigError` for an agent that cannot be in a container."""
    if not config.runtime:
        return
    from strop.runners.containers.choose import check as check_settings

    check_settings(config)
    if spec.startswith(("http://", "https://")):
        raise ConfigError(
            f"runner.container is for agents that are commands, and {spec} is a service, which runs where it is. Fix: "
            "leave runner.container.runtime out"
        )
    if is_python(spec):
        raise ConfigError(
            f"runner.container is for agents that are commands, and {spec!r} is a Python function. Fix: call it from a "
            "program of its own, as in --agent 'python agent.py', or leave runner.container.runtime out"
        )


def check(spec: str) -> None:
    """Raises `AgentError` for what cannot be an agent, as far as that is known before anything of it runs."""
    if spec.startswith(("http://", "https://")):
        return
    place, _, _ = spec.rpartition(":")
    if not is_python(spec):
        if miss := explain_near_miss(spec):
            raise AgentError(f"agent: {miss}")
    elif place.endswith(".py"):
        require_file(place, "agent")


def is_python(spec: str) -> bool:
    """Whether it is written as `strop.imports.resolve` reads it.

    >>> is_python("agents/solver.py:solve"), is_python("my_package.agents:solve"), is_python("python agent.py:solve")
    (True, True, False)
    """
    place, _, name = spec.rpartition(":")
    if not name.isidentifier():
        return False
    if place.endswith(".py"):
        return not re.search(r"\s", place) or Path(place).is_file()
    return all(part.isidentifier() for part in place.split("."))


def explain_near_miss(spec: str) -> str | None:
    """What is wrong with something that was hardly meant as a command.

    >>> explain_near_miss("agent.py")
    "'agent.py' names no function: write agent.py:function, or 'python agent.py' to run it as a command"
    >>> explain_near_miss("localhost:9000/run")
    "'localhost:9000/run' is not the address of a service. Fix: write http://localhost:9000/run"
    """
    if not spec.strip():
        return "none is given: write FILE.py:function, a command, or the http:// URL of a service"
    if re.search(r"\s", spec):
        return None
    if spec.endswith((".py", ".py:")):
        place = spec.rstrip(":")
        return f"{spec!r} names no function: write {place}:function, or 'python {place}' to run it as a command"
    if ".py:" in spec or re.fullmatch(r"\w[\w.]*:|:\w+", spec):
        return f"{spec!r} names no function: write FILE.py:function or package.module:function"
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", spec):
        return f"{spec!r} is not the address of a service. Fix: write http://{spec}"
    return None
