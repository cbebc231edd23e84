"""The guide to testing as written: its programs run."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "testing.md"


def test_programs_run(tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert programs
    for program in programs:
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
