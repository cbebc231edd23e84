"""Keys as they are made, and what a process shows of those that it was given."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strop.run.serve import open_store_server
from strop.store.server.keys import run_key
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Task


async def test_no_key_that_is_made_begins_with_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands would take it for an option."""
    made = iter(["-one", "--two", "three", "-four", "five", "-six", "seven"])
    monkeypatch.setattr("secrets.token_urlsafe", lambda _: next(made))
    assert run_key(tmp_path) == "three"
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.enqueue([Rollout(id="a", group="a", member=0, task=Task(id="t"), created=1.0)])
    (lease,) = await store.lease("w", seconds=30)
    assert lease.attempt.key == "five"
    async with open_store_server(store) as server:
        assert server.key == "seven"
    await store.close()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
def test_what_is_hidden_is_still_readable_here_but_not_from_outside() -> None:
    code = (
        "import os, subprocess, sys\n"
        "from strop.net.secrets import hide, child_environment\n"
        "hide('SECRET')\n"
        "shown = open('/proc/self/environ', 'rb').read()\n"
        "child = subprocess.run([sys.executable, '-c', 'import os; print(os.environ)'], env=child_environment(),"
        " capture_output=True, text=True).stdout\n"
        "print(os.environ['SECRET'], b'4711' in shown, b'beside' in shown, '4711' in child, 'beside' in child)\n"
    )
    environment = os.environ | {"SECRET": "4711", "OTHER": "beside"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4711", "False", "True", "False", "True"]
