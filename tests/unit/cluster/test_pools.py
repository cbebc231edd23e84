"""The options that a runner pool of a run is started with."""

from strop.cli import parser
from strop.cluster.pools import list_words, read_last_line
from strop.config import load


def test_a_pool_runs_what_the_run_would_run_itself() -> None:
    config = load(
        agent="a.py:agent",
        agents={"other": "b.py:agent"},
        reward="r.py:f",
        runner={"workers": 3, "timeout": 7.0, "agents_in": "threads", "python": "/p y"},
    )
    words = list_words(config, "http://10.0.0.1:4000", 2)
    asked = parser("runner").parse_args(["runner", *words])
    assert (asked.url, asked.agent, asked.reward, asked.workers) == ("http://10.0.0.1:4000", "a.py:agent", "r.py:f", 3)
    assert (asked.key_file, asked.name) == ("-", "pool-2")
    theirs = load(sets=asked.set)
    assert theirs.agents == config.agents
    assert (theirs.runner.timeout, theirs.runner.agents_in, theirs.runner.python) == (7.0, "threads", "/p y")


def test_the_last_thing_that_a_pool_said(tmp_path) -> None:
    (tmp_path / "log").write_text("one\nstrop: there is no a.py. Fix: check it.\n\n")
    assert read_last_line(tmp_path / "log") == "strop: there is no a.py. Fix: check it"
    assert read_last_line(tmp_path / "none") == "it said nothing"
