"""What happens on a cluster, as events in the run's folder."""

import io
import json

from strop.cluster.journal import Journal
from strop.monitor.console import Lines


def test_events_are_kept_and_deaths_are_said(tmp_path) -> None:
    out = io.StringIO()
    journal = Journal(tmp_path / "run", Lines(out))
    journal.write("started", "rank 0", node="10.0.0.7/3fa9c1", pid=71, host=64)
    journal.write("started", "gateway 0", url="http://10.0.0.7:4000")
    journal.write("died", "runner pool 1", node="10.0.0.8/aa00aa", why="was killed by signal 9")
    lines = [json.loads(line) for line in (tmp_path / "run" / "cluster.jsonl").read_text().splitlines()]
    assert [line.pop("time") > 0 for line in lines] == [True, True, True]
    assert lines == [
        {"event": "started", "what": "rank 0", "node": "10.0.0.7/3fa9c1", "pid": 71, "host": 64},
        {"event": "started", "what": "gateway 0", "url": "http://10.0.0.7:4000"},
        {"event": "died", "what": "runner pool 1", "node": "10.0.0.8/aa00aa", "why": "was killed by signal 9"},
    ]
    assert out.getvalue() == "note: runner pool 1 on 10.0.0.8/aa00aa: died (was killed by signal 9)\n"
    assert (tmp_path / "run" / "cluster.jsonl").stat().st_mode & 0o077 == 0
