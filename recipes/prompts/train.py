"""Start the scripted models where the configuration expects them, improve the prompts, stop them.

    python recipes/prompts/train.py --config recipes/prompts/laptop.toml --folder runs/prompts [--set ...]
    python recipes/prompts/train.py --resume runs/prompts

A configuration without the scripted models (gpu.toml) needs none of this: `strop train --config ...` does the same.
"""

import subprocess
import sys
from pathlib import Path

PORT = "8931"


def main() -> int:
    given = sys.argv[1:]
    train = [sys.executable, "-m", "strop.cli", "train", *given]
    if not needs_models(given):
        return subprocess.call(train)
    here = Path(__file__).parent
    command = [sys.executable, str(here / "scripted.py"), "--port", PORT]
    models = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert models.stdout is not None
    if not models.stdout.readline():
        sys.exit(f"the scripted models cannot listen at port {PORT}. Fix: stop what does")
    try:
        return subprocess.call(train)
    except KeyboardInterrupt:  # the terminal sends it to the run as well
        return 130
    finally:
        models.terminate()
        models.communicate()


def needs_models(given: list[str]) -> bool:
    """Whether the configuration, or that of the run that goes on, names the port."""
    names = [Path(word.rpartition("=")[2]) for word in given]
    files = [name / "config.json" if name.is_dir() else name for name in names]
    return any(file.suffix in (".toml", ".json") and file.is_file() and PORT in file.read_text() for file in files)


if __name__ == "__main__":
    sys.exit(main())
