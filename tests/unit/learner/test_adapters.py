"""Several adapters on one model, in one process: each is trained and served as if it were alone."""

import asyncio
from pathlib import Path

import pytest
import torch

from strop.config import EngineConfig, LoraConfig, load
from strop.engines.base import Chunk
from strop.engines.embedded.core import Core
from strop.engines.embedded.engine import Embedded
from strop.learner import lora
from strop.learner.model import load_frozen
from strop.learner.model_copy import AdapterCopy
from strop.learner.process import LearnerProcess
from strop.learner.verbs import LearnerSettings
from strop.types import Sampling
from tests.unit.learner.practice import credited, gradients, learner
from tests.unit.learner.test_lora import broad, stirred

pytest.importorskip("peft")
__all__ = ["broad"]
SMALL, LARGE = LoraConfig(rank=4, alpha=8), LoraConfig(rank=8, alpha=8, targets=("q_proj", "down_proj"))


def on(base, folder: Path, config: LoraConfig):
    return learner(folder, lora=config, base=base)


def frozen(folder: Path):
    return load_frozen(folder, load(learner={"device": "cpu"}).learner)


def test_gradients_are_those_of_learners_of_their_own(folder, episodes) -> None:
    base = frozen(folder)
    for config in (SMALL, LARGE):
        shared, alone = on(base, folder, config), learner(folder, lora=config)
        stirred(shared.model)
        stirred(alone.model)
        ours, _ = gradients(shared, credited(shared, episodes()))
        theirs, _ = gradients(alone, credited(alone, episodes()))
        assert ours.keys() == theirs.keys()
        assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-6
        assert max(float(gradient.abs().max()) for gradient in ours.values()) > 1e-4


def test_training_one_leaves_the_other_and_the_model_as_they_were(folder, episodes) -> None:
    base = frozen(folder)
    first, second = on(base, folder, SMALL), on(base, folder, LARGE)
    untouched, before, started = second.digest(), frozen(folder).state_dict(), first.digest()
    for _ in range(2):
        first.update(credited(first, episodes()))
    assert second.digest() == untouched
    assert first.digest() != started
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    assert not any(p.grad is not None for model in (base, second.model) for p in model.parameters())
    ours, theirs = ({p.data_ptr() for p in one.model.parameters()} for one in (first, second))
    assert {p.data_ptr() for p in base.parameters()} == ours & theirs  # in memory once


def wanted(model, prompt: list[int], ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_sequence_of_a_pass_has_its_own_adapter(broad, deterministic: bool) -> None:
    """Beside each other with the very same prompts, one after another in the same slots, and as one of them changes."""
    base = frozen(broad)
    models = {"a": stirred(on(base, broad, SMALL).model), "b": on(base, broad, LARGE).model, "plain": None}
    copy = AdapterCopy(base, models, rows=7)
    config = EngineConfig(max_sequences=6, prefill_chunk=8, deterministic=deterministic)
    core = Core(copy.model, config, context=64, adapters=copy.adapters)
    prompts = [[k // 3 % 2 + 1, *range(3, 30)] for k in range(9)]
    owners = [("a", "b", "plain")[k % 3] for k in range(9)]

    def check(versions: dict[str, str], unknown: str = "") -> dict[str, list[list[int]]]:
        said: dict[int, list[Chunk]] = {k: [] for k in range(9)}
        for k, prompt in enumerate(prompts):
            core.add(k, prompt, Sampling(temperature=0.0, max_tokens=6), (), owners[k])
        while core.busy:
            for k, chunk in core.step():
                assert isinstance(chunk, Chunk)
                said[k].append(chunk)
        for k, chunks in said.items():
            ids = [id for chunk in chunks for id in chunk.ids]
            logps = torch.tensor([logp for chunk in chunks for logp in chunk.logprobs])
            model = models[owners[k]] or base
            if owners[k] != unknown:
                assert torch.allclose(logps, wanted(model, prompts[k], ids), atol=1e-4), (k, owners[k])
            assert {chunk.version for chunk in chunks} == {versions[owners[k]]}
        return {name: [[i for c in said[k] for i in c.ids] for k in range(9) if owners[k] == name] for name in models}

    before = check({"a": "1.0", "b": "1.0", "plain": "1.0"})
    assert before["b"] == before["plain"] != before["a"]  # b does nothing yet
    stirred(models["b"])
    assert check({"a": "1.0", "b": "1.0", "plain": "1.0"}, "b") == before  # the engine was not told of it
    copy.refresh("b")
    core.load("1.1", "b")
    after = check({"a": "1.0", "b": "1.1", "plain": "1.0"})
    assert (after["a"], after["plain"]) == (before["a"], before["plain"])
    assert after["b"] != before["b"]


@pytest.mark.parametrize("staleness", [0, 1])
async def test_one_process_trains_and_serves_two(folder, episodes, tmp_path: Path, staleness: int) -> None:
    more = {"engine": {"max_sequences": 4}, "loop": {"staleness": staleness}}
    ranks, taught = {"a": 2, "b": 4}, {"device": "cpu", "optim": {"lr": 0.01}}
    configs = {name: load(learner=taught | {"lora": {"rank": r}}, **more) for name, r in ranks.items()}
    process = LearnerProcess(tmp_path / "log")
    try:
        await process.start(*(LearnerSettings.of(one, folder, name=name) for name, one in configs.items()))
        engines = {name: Embedded(process.of(name)) for name in configs}

        async def say(name: str) -> tuple[list[float], set[str]]:
            sampling = Sampling(temperature=0.0, max_tokens=8)
            chunks = [c async for c in engines[name].generate([1, 2, 3], sampling, stop_ids=())]
            return [logp for chunk in chunks for logp in chunk.logprobs], {chunk.version for chunk in chunks}

        first, other = await asyncio.gather(say("a"), say("b"))
        assert first == (pytest.approx(other[0], abs=1e-5), {"1.0"})
        batch = credited(learner(folder, lora=LoraConfig(rank=2)), episodes())
        unchanged = await process.of("b").digest()
        for _ in range(3):
            assert (await process.of("a").update(batch.bare()))["actor/skipped"] == 0.0
        assert await process.of("b").digest() == unchanged
        await engines["a"].load("1.3")
        changed, other = await asyncio.gather(say("a"), say("b"))
        assert (changed[1], other) == ({"1.3"}, (pytest.approx(first[0], abs=1e-5), {"1.0"}))
        assert changed[0] != pytest.approx(first[0], abs=1e-3)
        await process.of("a").begin_save(tmp_path / "c", {})
        await process.of("a").finish_save()
        assert (tmp_path / "c" / "adapter_model.safetensors").is_file()
    finally:
        await process.close()


def test_models_that_share_weights_share_nothing_else(folder) -> None:
    base = frozen(folder)
    other = lora.share_weights(base)
    other.config.use_cache = not base.config.use_cache
    assert base.config.use_cache != other.config.use_cache
    assert [p.data_ptr() for p in base.parameters()] == [p.data_ptr() for p in other.parameters()]
    assert not {id(m) for m in base.modules()} & {id(m) for m in other.modules()}
