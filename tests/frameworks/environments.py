"""Clients and agent frameworks, in environments of their own under .frameworks: they are no dependencies of ours, and
what some depend on does not agree with others. Those that agree share one. uv makes it: it finds in seconds which
versions of two hundred packages fit together.

    python tests/frameworks/environments.py     make what is missing or has other requirements than it was made with

What an environment was made with is in its file `made-with`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".frameworks"
UV = PLACE / "uv" / "bin" / "uv"

LIGHT = "msgspec numpy starlette uvicorn httptools uvloop jinja2 tokenizers rich cloudpickle"
"""What strop needs itself, for agents that import it (`runner.python`)."""
PYTHON = {
    "openai": "openai==3.51.0 anthropic==2.10.0 langchain-openai==1.7.3 langchain-anthropic==1.7.7 langgraph==1.2.22 "
    "pydantic-ai-slim[openai,anthropic]==2.68.0 openai-agents==0.24.0 autogen-agentchat==0.7.5 "
    "autogen-ext[openai]==0.7.5 smolagents[openai]==1.26.0 agentscope==2.0.10 haystack-ai==3.4.0 "
    "semantic-kernel==1.45.0 outlines[openai]==1.3.3 agent-framework-openai==1.17.0 agent-framework-core==1.23.0 "
    "magentic==0.41.1 agno==3.1.10 claude-agent-sdk==0.2.184 ag2[openai]==1.2.1 griptape==1.13.0 hydra-core==1.3.2",
    "litellm": "litellm==1.106.2 llama-index-llms-openai-like==0.8.1 strands-agents[openai]==1.62.0 instructor==1.17.0 "
    "dspy==3.4.1 google-adk==2.13.0 mini-swe-agent==2.4.6 beeai-framework==0.1.85",
    "crewai": "crewai==1.15.30 camel-ai==0.2.90",
    "browser-use": "browser-use==0.13.14",
    "aider": "aider-chat==0.86.2",
    "agentlightning-calc": "autogen-agentchat==0.7.5 autogen-ext[openai,mcp]==0.7.5 openai==3.49.0 sympy "
    f"mcp-server-calculator==0.2.1 {LIGHT}",
    "agentlightning-spider": "langgraph==1.2.20 langchain-openai==1.7.3 langchain langchain-community openai==3.49.0 "
    f"pandas sqlparse termcolor tqdm {LIGHT}",
    "verifiers-0.1": f"verifiers==0.1.14 {LIGHT}",
    "verifiers-0.4": f"verifiers==0.4.0 uv {LIGHT}",
    "gymnasium": f"gymnasium[toy-text]==1.4.0 openai==3.49.0 {LIGHT}",
    "openenv": f"openenv==0.10.0 openai==3.49.0 {LIGHT}",
}
"""Requirements by environment. The versions are those the tests were written against."""
NODE = {
    "node": "node@22.23.3 openai@7.55.0 @anthropic-ai/sdk@1.10.0 ai@7.0.173 @ai-sdk/openai@4.0.118 "
    "@ai-sdk/openai-compatible@3.0.92 @ai-sdk/anthropic@4.0.105 @langchain/openai@1.6.0 @langchain/anthropic@1.5.11 "
    "@langchain/core@1.2.13 zod@4.6.7 @openai/agents@0.20.0",
    "coding": "node@22.23.3 @openai/codex@0.169.0 @anthropic-ai/claude-code@2.1.328 opencode-ai@1.18.33 "
    "@qwen-code/qwen-code@0.24.4 @earendil-works/pi-coding-agent@0.74.2",
}


def program(environment: str) -> Path:
    """What runs an environment's agents, whether or not it is there."""
    if environment in NODE:
        return PLACE / environment / "node_modules/.bin/node"
    return PLACE / environment / "bin" / "python"


def ready(environment: str) -> bool:
    """Whether an environment is there, made with today's requirements."""
    return _stamp(environment).exists() and _stamp(environment).read_text() == (PYTHON | NODE)[environment]


def make(environment: str) -> None:
    """Make an environment anew. Raises `CalledProcessError`."""
    folder, requirements = PLACE / environment, (PYTHON | NODE)[environment]
    print(f"{folder.relative_to(ROOT)}: {requirements}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if environment in NODE:
        _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *requirements.split())
    else:
        _run(sys.executable, "-m", "venv", str(folder))
        uv = (str(UV), "pip", "install", "--quiet", "--python", str(program(environment)))
        _run(*uv, *requirements.split())
    _stamp(environment).write_text(requirements)


def _make_uv() -> None:
    _run(sys.executable, "-m", "venv", str(UV.parents[1]))
    pip = (str(UV.parent / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, "uv==0.13.8")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _stamp(environment: str) -> Path:
    return PLACE / environment / "made-with"


def main() -> None:
    failed: list[str] = []
    if not UV.exists() and not all(ready(environment) for environment in PYTHON):
        _make_uv()
    for environment in PYTHON | NODE:
        if ready(environment):
            continue
        if environment in NODE and not shutil.which("npm"):
            print(f"{environment}: npm is not installed, so its tests will be skipped (Debian: apt-get install npm)")
            continue
        try:
            make(environment)
        except subprocess.CalledProcessError as error:
            print(f"{environment}: {' '.join(error.cmd[:4])} ... ended with {error.returncode}, see above")
            failed.append(environment)
    if failed:
        sys.exit(f"not made: {', '.join(failed)}. Run `make frameworks` again once what is said above is put right.")


if __name__ == "__main__":
    main()
