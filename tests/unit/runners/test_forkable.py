"""Whether a process may be forked after an import."""

import subprocess
import sys

import pytest

PROGRAM = """
from strop.runners import forkable
before = forkable.look()
{doing}
print(forkable.is_unchanged(before))
"""


@pytest.mark.parametrize(
    ("doing", "says"),
    [
        ("import json.tool", "True"),
        ("import numpy", "True"),  # its threads end for a fork
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "False"),
        ("import socket; s = socket.socket()", "False"),
        ("import subprocess; subprocess.Popen(['sleep', '1'])", "False"),
        ("import subprocess; subprocess.run(['true'])", "True"),
    ],
)
def test_what_an_import_leaves_behind_is_seen(doing: str, says: str):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(doing=doing)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [says]
