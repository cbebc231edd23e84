from strop.cluster import hosts, placing
from strop.cluster.hosts import RankHost


def test_a_host_gives_up_to_foresee_before_who_asks_it_does(monkeypatch) -> None:
    assert hosts.FORESEE_SECONDS < placing.ANSWER_SECONDS
    monkeypatch.setattr(hosts, "hide_gpus", lambda: None)
    monkeypatch.setattr(hosts, "FORESEE_SECONDS", 0.5)
    monkeypatch.setattr(hosts, "FORESEE", "import time; time.sleep(20)")
    assert RankHost().foresee(b"") == b""
    monkeypatch.setattr(hosts, "FORESEE_SECONDS", 20)
    monkeypatch.setattr(hosts, "FORESEE", "import sys; sys.stdout.write(sys.stdin.read() + '!')")
    assert RankHost().foresee(b"asked") == b"asked!"
