"""How long a checkpoint keeps training waiting, and how long it takes until it is whole, beside writing it at once.

    python benchmarks/checkpoint.py [--shape small|1.5b] [--device cpu|cuda] [--laps 3] [--sides before now]
                                    [--folder PLACE] [--json FILE]

The model is random: 25M parameters in fp32, or Qwen2.5-1.5B's shape in bf16 with fp32 masters. A checkpoint has the
weights and AdamW's two moments, each 4 bytes a parameter. Sides take turns in one process, on the disk of `--folder`
(default: the system's folder for temporary files):

    before   as it was done: copied from the GPU tensor by tensor, `save_file`, `torch.save`, each file read again to be
             hashed, fsync; training waits for all of it
    now      copied into memory that is kept (`learner/snapshot.py`), then hashed while it is written; training waits
             for the copy

While `now` writes, updates go on; how much slower than alone they are is told. They change every weight: that the
checkpoint is of the weights from before is checked by restoring it. The first copy is told by itself, and so is how
long it took to have the memory for it, which a run does beside its first update.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import hardware
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from strop.algorithms import make
from strop.config import load
from strop.files import sync_folder
from strop.learner import rng
from strop.learner.learner import Learner
from strop.learner.spawn import KEEP_MEMORY, WAIT_SHORTLY
from strop.models.checksums import verify
from strop.trajectory import Batch, Sample, assemble
from strop.types import Reward, Rollout, Sampling, Task, Turn

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 2,
    },
    "1.5b": {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2,
    },
}  # fmt: skip
TOKENS = {"small": 64, "1.5b": 1024}
"""Of each of the four turns that an update learns from."""
Found = dict[str, Any]


def write_model(shape: str, device: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=4096, bos_token_id=None)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_learner(model: Path, device: str) -> Learner:
    config = load(learner={"device": device, "token_budget": 4096, "optim": {"lr": 1e-4}})
    return Learner(model, config.learner, make(config.algorithm, config.learner, config.policy), steps=1)


def make_batch(learner: Learner, shape: str) -> Batch:
    """Four rollouts of one task, of random tokens."""
    draw, samples = random.Random(0), list[Sample]()
    ids = [draw.randrange(SHAPES[shape]["vocab_size"]) for _ in range(5 * TOKENS[shape])]
    for member in range(4):
        name, response = f"g0.{member}", ids[(1 + member) * TOKENS[shape] :][: TOKENS[shape]]
        turn = Turn(
            id=f"{name}/1/0", rollout=name, attempt=1, prompt_ids=ids[: TOKENS[shape]], response_ids=response,
            logprobs=[-9.0] * len(response), versions=[(0, "1.0")], finish="stop", started=0.0, ended=1.0,
            sampling=Sampling(),
        )  # fmt: skip
        rollout = Rollout(id=name, group="g0", member=member, task=Task(id="t"), created=0.0)
        samples.append(Sample(finished(rollout, float(member % 2)), [turn]))
    batch = assemble(samples, agents=["main"], budget=4096)
    learner.score(batch)
    learner.algorithm.assign_credit(batch)
    return batch


def finished(rollout: Rollout, reward: float) -> Rollout:
    from msgspec.structs import replace

    return replace(rollout, status="succeeded", attempts=1, rewards=(Reward(value=reward),))


def save_at_once(learner: Learner, folder: Path) -> None:
    """What a checkpoint was written by before."""
    torch.serialization.set_crc32_options(True)
    folder.mkdir()
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in learner.optim.weights().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save({"optim": learner.optim.state(), "random": rng.state()}, folder / "optimizer.pt")
    sums = ""
    for file in sorted(folder.iterdir()):
        with file.open("rb") as opened:
            sums += f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.name}\n"
    (folder / "SHA256SUMS").write_text(sums)
    sync_folder(folder, whole=True)


def time_update(learner: Learner, batch: Batch) -> float:
    began = time.perf_counter()
    learner.update(batch)
    return time.perf_counter() - began


def time_before(learner: Learner, folder: Path) -> Found:
    began, cpu = time.perf_counter(), time.process_time()
    save_at_once(learner, folder)
    seconds = time.perf_counter() - began
    return {"standstill": seconds, "total": seconds, "cpu": time.process_time() - cpu}


def time_now(learner: Learner, folder: Path) -> Found:
    began, cpu = time.perf_counter(), time.process_time()
    learner.begin_save(folder, {"version": "1.1"})
    standstill = time.perf_counter() - began
    learner.finish_save()
    return {"standstill": standstill, "total": time.perf_counter() - began, "cpu": time.process_time() - cpu}


SIDES = {"before": time_before, "now": time_now}


def compare(medians: dict[str, Found]) -> dict[str, float]:
    """How many times as long the one side takes as the other; nothing where only one was measured."""
    if len(medians) < len(SIDES):
        return {}
    return {name: medians["before"][name] / medians["now"][name] for name in ("standstill", "total")}


def time_beside(learner: Learner, folder: Path, batch: Batch) -> Found:
    """With updates going on."""
    alone = statistics.median(time_update(learner, batch) for _ in range(3))
    there = learner.digest()
    began = time.perf_counter()
    learner.begin_save(folder, {"version": "1.1"})
    standstill, beside = time.perf_counter() - began, list[float]()
    while not folder.exists() or not beside:
        beside.append(time_update(learner, batch))
    learner.finish_save()
    total, changed = time.perf_counter() - began, learner.digest() != there
    verify(folder)
    learner.restore(folder)
    return {
        "standstill": standstill,
        "total": total,
        "update_alone": alone,
        "update_beside": statistics.median(beside),
        "updates": len(beside),
        "right": changed and learner.digest() == there,
    }


def measure(arguments: argparse.Namespace, place: Path) -> Found:
    learner = make_learner(write_model(arguments.shape, arguments.device, place / "model"), arguments.device)
    began = time.perf_counter()
    learner.reserve_snapshot()
    if learner._snapshots._allocating is not None:
        learner._snapshots._allocating.join()
    allocation = time.perf_counter() - began
    batch = make_batch(learner, arguments.shape)
    for _ in range(2):
        learner.update(batch)  # the second is not slowed by anything that is only done once
    size, folder, laps = 0, place / "checkpoint", {side: list[Found]() for side in arguments.sides}
    for lap in range(arguments.laps + 1):
        for side in laps:
            laps[side].append(SIDES[side](learner, folder))
            size = sum(file.stat().st_size for file in folder.iterdir())
            shutil.rmtree(folder)
            print(f"lap {lap}, {side}: " + json.dumps(laps[side][-1]), file=sys.stderr, flush=True)
    medians = {
        side: {name: statistics.median(lap[name] for lap in found[1:]) for name in found[0]}
        for side, found in laps.items()
    }
    found: Found = {
        "shape": arguments.shape,
        "parameters": sum(tensor.numel() for tensor in learner.optim.weights().values()),
        "gigabytes": size / 1e9,
        "seconds": medians,
        "first": {side: found[0] for side, found in laps.items()},
        "allocation": allocation,
        **{f"{name}_ratio": ratio for name, ratio in compare(medians).items()},
        "torch": torch.__version__,
        "hardware": hardware(arguments.device),
    }
    keep(found, arguments.json)
    found["beside_updates"] = time_beside(learner, folder, batch)
    keep(found, arguments.json)
    return found


def keep(found: Found, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    environment = WAIT_SHORTLY | KEEP_MEMORY
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--folder", type=Path, help="a folder on the disk to write to")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if not environment.items() <= os.environ.items():  # as the process that holds the learner has it
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        found = measure(arguments, Path(place))
    print(json.dumps(found, indent=1))
    return 0 if found["beside_updates"]["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
