"""A model for whole episodes of the coding agents: it reads the package, repairs it, runs its tests, starts a sub-agent
and, when it is asked to, sums up what was done. It decides by what the prompt says, as any model does.

Which program asks shows in the tools it offers. A rollout's first member repairs the package, the others only look.
"""

import re
from collections.abc import Callable, Iterator

from strop.engines.scripted import ScriptedRequest
from strop.testing import call

ISSUE = "A user writes"
"""In the task, and in what a compaction keeps of it."""
CHECK = "SUBTASK: run the tests of the package"
SUMMARY = f"{ISSUE} of a bug. It is repaired, and nothing is left but to have the tests run."
LONG = "python3 -c \"print('all is well ' * 300)\""
"""Prints so much that the conversation has to be summed up."""


def play(right: str, wrong: str, name: str) -> Callable[[ScriptedRequest], str]:
    """Answers for one rollout after the other."""
    conversations: dict[str, Iterator[str | Callable[[str], str]]] = {}
    begun = 0

    def answer(asked: ScriptedRequest) -> str:
        nonlocal begun
        prompt = asked.prompt
        last = prompt.rsplit("<|im_start|>user", 1)[-1]
        if "detailed summary of the conversation" in last or "CHECKPOINT COMPACTION" in last:
            return f"<summary>{SUMMARY}</summary>"
        is_claude = "\nRead(" in prompt
        if ISSUE in prompt and prompt.count("<|im_start|>assistant") == 1 and SUMMARY not in prompt:
            begun += 1
            steps = claude if is_claude else codex
            conversations["main"] = iter(steps(right, wrong, name, repair=begun == 1))
            conversations["helper"] = iter([in_shell("python3 -m unittest", is_claude), "All of them pass."])
        said = next(conversations["main" if ISSUE in prompt else "helper"], "There is nothing left to do.")
        return said if isinstance(said, str) else said(prompt)

    return answer


def in_shell(command: str, is_claude: bool) -> str:
    return call("Bash", command=command) if is_claude else call("exec_command", cmd=command)


def claude(right: str, wrong: str, name: str, *, repair: bool) -> list[str | Callable[[str], str]]:
    file = f"/tmp/repair/{name}.py"
    edit = call("Edit", file_path=file, old_string=wrong, new_string=right)
    return [
        call("Read", file_path=file),
        *(["I see it.\n" + edit] if repair else []),
        in_shell(LONG, True),
        call("Agent", description="Run the tests", prompt=CHECK, run_in_background=False),
        "It is put right.",
    ]


def codex(right: str, wrong: str, name: str, *, repair: bool) -> list[str | Callable[[str], str]]:
    edit = f"python3 - <<'END'\nfrom pathlib import Path\nfile = Path('{name}.py')\n"
    edit += f"file.write_text(file.read_text().replace({wrong!r}, {right!r}))\nEND"
    return [
        in_shell(f"cat {name}.py", False),
        *(["I see it.\n" + in_shell(edit, False)] if repair else []),
        call("multi_agent_v1__spawn_agent", message=CHECK),
        wait_for_helper,
        in_shell(LONG, False),
        in_shell("ls", False),
        "It is put right.",
    ]


def wait_for_helper(prompt: str) -> str:
    helper = re.findall(r'"agent_id": ?"([0-9a-f-]+)"', prompt)[-1]
    return call("multi_agent_v1__wait_agent", targets=[helper], timeout_ms=60_000)
