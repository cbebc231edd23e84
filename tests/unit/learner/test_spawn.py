"""The process that holds the weights, started ahead of the run that will use it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strop.cli import COMMANDS, main, parser
from strop.config import load
from strop.learner import spawn
from strop.learner.compile_cache import compile_environment
from strop.learner.process import LearnerProcess
from strop.learner.verbs import LearnerSettings

EMBEDDED = {"name": "embedded"}


@pytest.fixture(autouse=True)
def _leave_nothing():
    yield
    spawn.discard()


async def test_what_was_started_ahead_is_the_runs_and_writes_to_its_log(folder, tmp_path) -> None:
    config = load(learner={"device": "cpu"}, engine=EMBEDDED)
    spawn.start_ahead(config, train=True)
    [(ahead, _)] = spawn._ahead
    process = LearnerProcess(tmp_path / "learner.log")
    try:
        await process.start(LearnerSettings.of(config, folder, serve=True))
        assert process._process is ahead
        assert spawn._ahead == []
        outputs = {os.readlink(f"/proc/{ahead.pid}/fd/{fd}") for fd in (1, 2)}
        assert outputs == {str(tmp_path / "learner.log")}
        assert (tmp_path / "learner.log").stat().st_mode & 0o077 == 0
        assert await process.of().digest()
    finally:
        await process.close()


async def test_one_that_died_is_replaced(folder, tmp_path) -> None:
    config = load(learner={"device": "cpu"}, engine=EMBEDDED)
    spawn.start_ahead(config, train=True)
    [(ahead, _)] = spawn._ahead
    ahead.kill()
    ahead.wait()
    process = LearnerProcess(tmp_path / "learner.log")
    try:
        await process.start(LearnerSettings.of(config, folder, serve=False))
        assert process._process is not ahead
        assert await process.of().digest()
    finally:
        await process.close()


def test_it_gets_no_key_of_an_outside_model(monkeypatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "secret")
    outside = {"judge": {"url": "http://127.0.0.1:1/v1", "key_env": "THEIR_KEY", "agents": ["judge"]}}
    spawn.start_ahead(load(gateway={"outside": outside}, engine=EMBEDDED), train=True)
    [(ahead, _)] = spawn._ahead
    assert b"secret" not in Path(f"/proc/{ahead.pid}/environ").read_bytes()


def test_none_is_started_where_none_is_needed() -> None:
    spawn.start_ahead(load(engine={"name": "vllm"}), train=False)
    everything = {"all": {"url": "http://127.0.0.1:1/v1", "model": "theirs", "agents": ["*"]}}
    spawn.start_ahead(load(gateway={"outside": everything}, loop={"steps": 0}), train=True)
    assert spawn._ahead == []


def test_a_command_that_fails_leaves_none(tmp_path, monkeypatch, capsys) -> None:
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.chdir(tmp_path)
    real = spawn._spawn
    monkeypatch.setattr(spawn, "_spawn", lambda out: (child := real(out), started.append(child[0]))[0])
    assert main(["train", "nowhere.py:agent", "--tasks", "none.jsonl", "--set", "engine.name=embedded"]) == 2
    assert "nowhere.py" in capsys.readouterr().err
    assert [process.poll() is not None for process in started] == [True]


def test_a_command_imports_no_other() -> None:
    code = "import sys; from strop.cli import parser; parser('train'); assert 'strop.cli.train' in sys.modules; "
    code += "assert not {'strop.cli.doctor', 'strop.run.runtime', 'strop.gateway.app', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_command_is_named_like_its_module() -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            parser(name).parse_args([name, "--help"])
        assert ended.value.code == 0


def test_kernels_are_kept_in_our_cache_by_version(tmp_path, monkeypatch) -> None:
    import torch

    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    found = compile_environment()
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert Path(found[name]).is_relative_to(tmp_path / "cache" / "compile")
        assert torch.__version__ in found[name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path, monkeypatch) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "closed" / "cache"))
    assert compile_environment() == {}
