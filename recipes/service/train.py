"""Start the service, train the model behind it, stop the service.

    python recipes/service/train.py --config recipes/service/laptop.toml --folder runs/service [--set ...]
    python recipes/service/train.py --resume runs/service

The configuration says where the service listens (`agent`) and where its model is (`gateway.port`). A service that runs
already, or elsewhere, needs none of this: `strop train --config ...` trains it as it is.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from strop import config as configs
from strop.errors import StropError
from strop.learner.child import die_with_parent
from strop.run.folder import RunFolder

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".recipes" / "service" / "bin" / "python"
STOPPED = 130
"""How `strop train` ends after Ctrl-C."""
PATIENCE = 60.0
"""Seconds that the service has to begin."""


def main() -> int:
    parser = argparse.ArgumentParser(description="whatever else is given goes to `strop train`", allow_abbrev=False)
    begin = parser.add_mutually_exclusive_group(required=True)
    begin.add_argument("--config")
    begin.add_argument("--resume", metavar="FOLDER", help="go on with a run that was stopped")
    parser.add_argument("--folder", default="runs/service")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--python", default=PYTHON, type=Path, help="the service's own (default: %(default)s)")
    given, rest = parser.parse_known_args()
    folder = given.resume or given.folder
    try:
        config = RunFolder.config(Path(folder)) if given.resume else configs.load(toml=given.config, sets=given.set)
    except StropError as error:
        sys.exit(str(error))
    base_url = f"http://127.0.0.1:{config.gateway.port}/v1"
    log = Path(f"{folder.rstrip('/')}-service.log")
    what = ["--resume", folder] if given.resume else ["--config", given.config, "--folder", folder]
    train = [sys.executable, "-m", "strop.cli", "train", *what, *(f"--set={one}" for one in given.set), *rest]
    with serving(given.python, config.agent, base_url, log):
        run = subprocess.Popen(train)
        signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to the run as well
        signal.signal(signal.SIGTERM, lambda *_: run.terminate())
        if (code := run.wait()) == STOPPED:
            print(f"the service is stopped too: {sys.executable} {__file__} --resume {folder} starts both", flush=True)
        return code


@contextmanager
def serving(python: Path, url: str, base_url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The service at `url`, in its own environment and with its model at `base_url`, until the end of the block."""
    place = urlsplit(url)
    health = f"http://{place.netloc}/health"
    if not python.exists():
        sys.exit(f"the service's environment is not there ({python}): `make recipe NAME=service` makes it")
    if answers(health):
        sys.exit(f"something answers at {health} already: stop it, or take another port with --set agent=http://...")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python), "-m", "uvicorn", "--app-dir", str(HERE), "agent:app"]
    command += ["--host", str(place.hostname), "--port", str(place.port), "--no-access-log"]
    with log.open("ab") as out:
        service = subprocess.Popen(
            command,
            env={**os.environ, "OPENAI_BASE_URL": base_url},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while not answers(health):
            if service.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the service did not start, {log} ends with:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield service
    finally:
        service.terminate()
        try:
            service.wait(10)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
