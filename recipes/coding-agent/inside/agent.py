"""Claude Code or Codex repairs a package, unmodified: a folder to work in, a home of its own, and our model's address.

    python3 agent.py claude [--lean] [--compact TOKENS]

    task     {"package": "roman", "files": {"roman.py": ..., "test_roman.py": ...}, "issue": "write(30) gives ..."}
    answer   {"files": {"roman.py": ...}, "code": 0}     what is in the folder afterwards; the program's exit code

`--lean` gives it the tools that a repair needs and a short system prompt: a fifth of the tokens. `--compact` has it sum
its conversation up once that has so many tokens.

This folder is all of the project that it sees, beside the programs: its tests are elsewhere. What is not the gateway is
asked for through a proxy that is not there. Left out: a network that has nothing else in it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[3] / ".recipes/coding-agent/node_modules/.bin"
NO_PROXY_THERE = "http://127.0.0.1:9"
WINDOW, RESERVED, SLACK = 100_000, 20_000, 13_000
"""Claude Code's smallest window, what it keeps of one for a summary, and how much earlier it sums up at the latest. Of
what is left it takes a share: that may be less."""
MOST = 100_000
"""Most characters of a file that are looked at."""
SYSTEM = "You repair Python packages with the tools you are given, and say in a sentence what was wrong."
PROMPT = """\
The package in this folder has a bug. A user writes:

{issue}

Find what is wrong in {package}.py and put it right there. `python3 -m unittest` runs the tests that there are; others \
will be run when you are done."""


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("program", choices=["claude", "codex"])
    given.add_argument("--lean", action="store_true", help="few tools and a short system prompt")
    given.add_argument("--compact", type=int, metavar="TOKENS", help="sum the conversation up at so many tokens")
    options = given.parse_args()
    task = json.load(sys.stdin)["data"]
    with tempfile.TemporaryDirectory(prefix="repair-", ignore_cleanup_errors=True) as place:
        # Inside a container /tmp is the rollout's own, and paths are in prompts: the same ones are shared.
        top = Path("/tmp") if os.environ.get("HOME") == "/tmp" else Path(place)
        work, home = top / "repair", top / "home"
        work.mkdir()
        home.mkdir()
        for name, text in task["files"].items():
            (work / name).write_text(text)
        start = claude if options.program == "claude" else codex
        words, variables = start(PROMPT.format(**task), home, options.lean, options.compact)
        code = run(words, work, surroundings(home) | variables)
        files = {path.name: path.read_text(errors="replace")[:MOST] for path in work.glob("*.py") if path.is_file()}
    print(json.dumps({"files": files, "code": code}))


def surroundings(home: Path) -> dict[str, str]:
    """The variables of the contract, a home, and no way out but to the gateway, which NO_PROXY names."""
    kept = {name: value for name, value in os.environ.items() if name not in ("STROP_TASK", "STROP_EVENTS_URL")}
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NO_PROXY_THERE)
    return kept | proxies | {"HOME": str(home)}


def claude(prompt: str, home: Path, lean: bool, compact: int | None) -> tuple[list[str], dict[str, str]]:
    words = [str(PROGRAMS / "claude"), "--print", prompt, "--dangerously-skip-permissions"]
    if lean:
        words += ["--system-prompt", SYSTEM, "--tools", "Read,Edit,Write,Bash,Agent", "--disable-slash-commands"]
    model = os.environ["STROP_MODEL"]
    variables = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"), model)
    variables |= dict.fromkeys(("DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER"), "1")
    variables |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "API_TIMEOUT_MS": "3600000"}
    variables |= {"IS_SANDBOX": "1"}  # it refuses to skip permissions for root otherwise, who is root in here only
    if compact:
        window = max(WINDOW, compact + RESERVED + SLACK)
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(window)
        variables["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = f"{100 * compact / (window - RESERVED):.4f}"
    return words, variables


def codex(prompt: str, home: Path, lean: bool, compact: int | None) -> tuple[list[str], dict[str, str]]:
    settings = [
        f"model = {json.dumps(os.environ['STROP_MODEL'])}",
        'model_provider = "gateway"',
        'web_search = "disabled"',
        "check_for_update_on_startup = false",
        *([f"model_auto_compact_token_limit = {compact}"] if compact else []),
        *(["include_apps_instructions = false", 'model_instructions_file = "system.md"'] if lean else []),
        "[analytics]",
        "enabled = false",
        *(["[features]", *(f"{name} = false" for name in NOT_FOR_REPAIRS)] if lean else []),
        "[model_providers.gateway]",
        'name = "gateway"',
        f"base_url = {json.dumps(os.environ['OPENAI_BASE_URL'])}",
        'env_key = "OPENAI_API_KEY"',
        'wire_api = "responses"',
        "stream_idle_timeout_ms = 3600000",
    ]
    place = home / ".codex"
    place.mkdir()
    (place / "config.toml").write_text("\n".join(settings) + "\n")
    (place / "system.md").write_text(SYSTEM)
    words = [str(PROGRAMS / "codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [*words, prompt], {"CODEX_HOME": str(place)}


NOT_FOR_REPAIRS = ("apps", "goals", "image_generation", "plugins", "tool_suggest")


def run(words: list[str], work: Path, variables: dict[str, str]) -> int:
    """The program's exit code; what it prints is told. That it gave up is the model's doing, and the tests say what
    that is worth; that it could not run at all is not."""
    code = subprocess.run(words, cwd=work, env=variables, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode
    if code < 0 or code in (126, 127):
        sys.exit(f"{words[0]} ended with {code}")
    return code


if __name__ == "__main__":
    main()
