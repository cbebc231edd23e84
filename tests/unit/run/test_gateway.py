"""How many gateway processes a run has."""

import os
import sys

import pytest

from strop import config as configs
from strop.config import Config
from strop.errors import ConfigError
from strop.run import gateway
from strop.run.gateway import count_workers

OUTSIDE = "gateway.outside.judge.url=http://127.0.0.1:9/v1"


def load(*sets: str) -> Config:
    return configs.load(sets=list(sets))


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_auto_is_one_for_four_cores(monkeypatch: pytest.MonkeyPatch, cores: int, workers: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert count_workers(load()) == workers
    assert count_workers(load("gateway.workers=3")) == 3
    assert count_workers(load(OUTSIDE)) == 1  # its budget is counted in one process


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.outside has models.*Fix"):
        count_workers(load("gateway.workers=2", OUTSIDE))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert count_workers(load()) == count_workers(load("gateway.workers=1")) == 1
    with pytest.raises(ConfigError, match="needs Linux"):
        count_workers(load("gateway.workers=2"))
    assert gateway.MAX_AUTO == 4
