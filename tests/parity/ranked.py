"""What a rank of a test does: it trains on the same batches as every other one, and the first says what came out."""

import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from strop.algorithms import make
from strop.config import AlgorithmConfig, LearnerConfig, OptimConfig
from strop.engines.receiver import WeightsRefused
from strop.errors import EngineError
from strop.learner.learner import Learner
from strop.learner.model import load_frozen
from strop.learner.model_weights import FollowingRank, ModelWeights
from strop.learner.ranks import Ranks
from strop.learner.sharded_weights import ShardedWeights
from strop.learner.sharding import gather
from strop.learner.verbs import RankPlace, WeightVerbs
from strop.trajectory import assemble

LIMIT = 240


def run_ranks(count: int, do: Callable[..., Any], scratch: Path, **given: Any) -> list[Any]:
    """What `do(ranks, **given)` returns on each of so many ranks, processes of their own."""
    scratch.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_begin, args=(n, count, do, scratch, given)) for n in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    for process in processes:
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * count
    return [pickle.loads((scratch / str(n)).read_bytes()) for n in range(count)]


def _begin(index: int, count: int, do: Callable[..., Any], scratch: Path, given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    place = RankPlace(index=index, count=count, rendezvous=(scratch / "meet").as_uri())
    ranks = Ranks(place, torch.device("cpu"), given.pop("sequence_parallel", 1) if count > 1 else 1)
    found = do(ranks, **given)
    (scratch / str(index)).write_bytes(pickle.dumps(found))
    if count > 1:
        torch.distributed.barrier()
    os._exit(0)  # torch's own threads sometimes abort a process that ends as others do


def train(
    ranks: Ranks,
    folder: Path,
    samples: Any,
    config: dict[str, Any],
    algorithm: dict[str, Any],
    steps: int = 2,
    restore: Path | None = None,
    save: Path | None = None,
    idle: Any = None,
):
    """Gradients of every optimizer step, metrics and weights, of one policy, which begins with a checkpoint or ends
    with one. `idle` are samples that teach nothing, and come first."""
    made = make_learner(ranks, folder, config, algorithm)
    if restore is not None:
        made.restore(restore)
    if idle is not None:
        (metrics,) = watch(made, idle, 1)["metrics"]
        assert metrics["actor/skipped"] == 1
    found = watch(made, samples, steps)
    if save is not None:
        made.save(save, {"step": steps})
    return found


def give_away(ranks: Ranks, folder: Path, samples: Any, config: dict[str, Any], to: Path):
    """What leaves after a step: a folder of the whole model, or of its adapter, once a disk has refused it."""
    made = make_learner(ranks, folder, config, {"name": "grpo"})
    watch(made, samples, 1)
    if made.sharded:
        weights: WeightVerbs = ShardedWeights(made, folder)
    else:
        weights = ModelWeights(made.plain, folder) if ranks.leads else FollowingRank()
    weights.refuse_broken()
    write = weights.write_adapter if config.get("lora") else weights.write
    (to.parent / "file").touch()
    refused = ""
    try:
        write(to.parent / "file" / "1.1")
    except EngineError as error:
        refused = str(error)
    write(to)
    handles = ""
    if made.sharded:
        try:
            weights.export_handles(None)
        except WeightsRefused as error:
            handles = str(error)
        with torch.no_grad():
            next(iter(made.model.parameters())).mul_(torch.nan)
        try:
            weights.refuse_broken()
        except WeightsRefused as error:
            handles += str(error)
    return {"specs": weights.specs(), "probe": weights.probe(), "refused": refused, "handles": handles}


def train_two(ranks: Ranks, folder: Path, samples: Any, configs: list[dict[str, Any]], steps: int = 2):
    """The same of two adapters on one model, in turns."""
    base = load_frozen(folder, LearnerConfig(device="cpu"))
    learners = [make_learner(ranks, folder, config, {"name": "grpo"}, base) for config in configs]
    return [watch(one, samples, steps) for one in learners]


def make_learner(ranks: Ranks, folder: Path, config: dict[str, Any], algorithm: dict[str, Any], base: Any = None):
    settings = LearnerConfig(
        **{
            "optim": OptimConfig(lr=1e-2, grad_clip=1e9),
            "critic": OptimConfig(lr=1e-2, grad_clip=1e9),
            "device": "cpu",
            **config,
        }
    )
    dtype = None if base is not None or "dtype" in config else torch.float64
    how = make(AlgorithmConfig(**algorithm), settings)
    made = Learner(folder, settings, how, dtype=dtype, base=base, ranks=ranks, seed=3)
    with torch.no_grad():  # adapters begin at 0, where half of their gradients are
        for number, (name, parameter) in enumerate(made.model.named_parameters()):
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(number)
                parameter += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 10
    return made


def watch(made: Learner, samples: Any, steps: int) -> dict[str, Any]:
    caught: list[dict[str, Any]] = []
    for optim in (made.optim, made.critic_optim):
        if optim is not None:
            optim.clip = _catching(optim, optim.clip, caught)
    metrics: list[dict[str, float]] = []
    columns = []
    for _ in range(steps):
        batch = assemble(samples, agents=["main"], budget=made.config.token_budget)
        made.score(batch)
        made.algorithm.assign_credit(batch)
        metrics.append(made.update(batch))
        columns.append({name: getattr(batch.entries, name).copy() for name in ("proximal", "ref", "value")})
    weights = {name: gather(tensor.detach()).clone() for name, tensor in made.model.named_parameters()}
    return {"gradients": caught, "metrics": metrics, "columns": columns, "weights": weights, "digest": made.digest()}


def _catching(optim: Any, clip: Callable[[], Any], caught: list[dict[str, Any]]) -> Callable[[], Any]:
    def catch() -> Any:
        norm = clip()
        caught.append({name: gather(weight.grad).clone() for name, weight in optim.weights().items()})
        return norm

    return catch
