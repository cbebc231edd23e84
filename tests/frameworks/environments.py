"""Agent frameworks, each in an environment of its own under .frameworks: they are no dependencies of ours, and their
dependencies do not agree with each other.

    python tests/frameworks/environments.py     make what is missing or has other requirements than it was made with

What an environment was made with is in its file `made-with`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".frameworks"

LIGHT = "msgspec numpy starlette uvicorn httptools uvloop jinja2 tokenizers rich cloudpickle"
"""What strop needs itself, for agents that import it (`runner.python`)."""
PYTHON = {
    "openai-agents": "openai-agents==0.24.0 openai==3.49.0",
    "youtu": "openai-agents==0.24.0 openai==3.49.0 hydra-core==1.3.2",
    "langgraph": "langgraph==1.2.20 langchain-openai==1.7.3 openai==3.49.0",
    "autogen": "autogen-agentchat==0.7.5 autogen-ext[openai]==0.7.5 openai==3.49.0",
    "agentscope": "agentscope==2.0.10 openai==3.49.0",
    "crewai": "crewai==1.15.30 openai==2.54.0",
    "pydantic-ai": "pydantic-ai-slim[openai]==2.66.0 openai==3.49.0",
    "smolagents": "smolagents[openai]==1.26.0 openai==3.49.0",
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
NODE = {"node": "openai@7.53.0"}


def program(environment: str) -> Path:
    """What runs an environment's agents, whether or not it is there."""
    if environment in NODE:
        return Path(shutil.which("node") or "node")
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
        pip = (str(program(environment)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        _run(*pip, *requirements.split())
    _stamp(environment).write_text(requirements)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _stamp(environment: str) -> Path:
    return PLACE / environment / "made-with"


def main() -> None:
    failed: list[str] = []
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
