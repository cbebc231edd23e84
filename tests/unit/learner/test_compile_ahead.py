"""Kernels compiled ahead of the first update, by another process."""

import json
import os
import subprocess
import sys

import pytest
import torch
from msgspec.structs import replace

from strop.config import LearnerConfig, LoraConfig, load
from strop.learner import compile_ahead
from strop.learner.blocks import Way
from strop.learner.compile_ahead import CompileAhead, KernelsAsked, needs_kernels
from strop.learner.process import LearnerProcess
from strop.learner.verbs import LearnerSettings

AHEAD = """
import sys, torch
from strop.config import LearnerConfig
from strop.learner import compile_ahead
from strop.learner.blocks import Way

compile_ahead.TOKENS, compile_ahead.ENTRIES = 100, 50  # in plain operations the number of blocks of a tree matters
asked = compile_ahead.KernelsAsked(sys.argv[1], LearnerConfig(device="cpu"), False)
compile_ahead.compile_kernels(asked, torch.device("cpu"), torch.float32, Way("blocks", compile=True))
"""
UPDATE = """
import json, random, sys
from torch._dynamo.utils import counters
from strop.algorithms import make
from strop.config import AlgorithmConfig, LearnerConfig
from strop.learner.blocks import Way
from strop.learner.learner import Learner
from strop.trajectory import Sample, assemble
from strop.types import Reward, Rollout, Task, Turn

config = LearnerConfig(device="cpu")
learner = Learner(sys.argv[1], config, make(AlgorithmConfig(), config))
learner.way = Way("blocks", compile=True)
samples = []
for n in range(4):
    turn = Turn(id=f"g.{n}/1/0", rollout=f"g.{n}", attempt=1, prompt_ids=[1, 2, 3], response_ids=[4 + n, 5, 6, 7 + n],
        logprobs=[-1.0] * 4, versions=[(0, "1.0")], finish="stop", started=0.0, ended=1.0)
    rollout = Rollout(id=f"g.{n}", task=Task(id="t"), group="g", member=n, status="succeeded", attempts=1,
        rewards=[Reward(name="reward", value=float(n))], created=0.0)
    samples.append(Sample(rollout=rollout, turns=[turn]))
batch = assemble(samples, agents=["main"], budget=100)
learner.algorithm.assign_credit(batch)
learner.update(batch)
print(json.dumps(dict(counters["inductor"])))
"""


@pytest.mark.slow
def test_an_update_finds_what_was_compiled_for_two_blocks_of_its_model(tmp_path) -> None:
    """Whatever the number of tokens, and though the model has more blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    for code in (AHEAD, UPDATE):
        given = [sys.executable, "-c", code, str(tmp_path / "model")]
        done = subprocess.run(given, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fxgraph_cache_hit"] > 0
    assert found.get("fxgraph_cache_miss", 0) == 0


def test_plain_operations_need_no_kernels() -> None:
    assert not needs_kernels(Way("blocks"))
    assert needs_kernels(Way("flex"))
    assert needs_kernels(Way("blocks", compile=True))


def test_on_a_cpu_nothing_is_compiled_ahead(folder) -> None:
    assert not CompileAhead().start(KernelsAsked(str(folder), LearnerConfig(device="cpu"), False))


def test_what_was_compiled_once_is_not_asked_for_again(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "choose_way", lambda *_: Way("blocks", compile=True))
    asked = KernelsAsked(str(folder), LearnerConfig(device="cpu"), False)
    done = compile_ahead._find_stamp(asked)
    done.touch()
    assert not CompileAhead().start(asked)
    assert not compile_ahead._find_stamp(replace(asked, scores=True)).exists()


def test_stopped_it_leaves_no_process(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "choose_way", lambda *_: Way("blocks", compile=True))
    compiling = CompileAhead()
    assert compiling.start(KernelsAsked(str(folder), LearnerConfig(device="cpu"), False))
    pid = compiling._process.pid
    compiling.stop()
    compiling.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_its_passes_run_for_whole_models_and_adapters(folder) -> None:
    for config in (LearnerConfig(device="cpu"), LearnerConfig(device="cpu", lora=LoraConfig(rank=2))):
        asked = KernelsAsked(str(folder), config, True)
        compile_ahead.compile_kernels(asked, torch.device("cpu"), torch.bfloat16, Way("blocks"))


async def test_a_learner_is_asked_and_says_whether(folder, tmp_path) -> None:
    process = LearnerProcess(tmp_path / "learner.log")
    try:
        config = load(learner={"device": "cpu"})
        await process.start(LearnerSettings.of(config, folder, serve=False))
        assert await process.compile_ahead() is False
    finally:
        await process.close()
