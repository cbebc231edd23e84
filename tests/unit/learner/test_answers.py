"""Given answers are read as the learner reads its batch: with the weights of that moment, an adapter's too."""

import numpy as np
import pytest
import torch

from strop.config import LoraConfig, load
from strop.engines.base import Engine, GivenAnswer
from strop.engines.embedded.engine import Embedded
from strop.errors import EngineError
from strop.learner.answers import read_with, score_answers
from strop.learner.logprobs import compute_logprobs
from strop.learner.process import LearnerProcess
from strop.learner.verbs import LearnerSettings
from strop.trajectory import assemble
from tests.unit.learner.practice import credited, learner
from tests.unit.learner.test_lora import stirred


def given(batch):
    return [
        GivenAnswer(prompt_ids=t.prompt_ids, response_ids=t.response_ids, temperature=t.sampling.temperature)
        for t in batch.turns
    ]


def read(one, batch):
    """The learner's own logprobs, by turn."""
    now = np.full(len(batch.entries), np.nan)
    turns = np.arange(len(batch.turns))
    with torch.no_grad():
        for piece in one._pack(batch, turns):
            now[piece.entry] = compute_logprobs(one.model, piece, batch.entries)[0].double().numpy()
    return [now[batch.rows(t)] for t in turns]


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("budget", [1, 1000])
def test_they_are_the_learners_own_in_the_order_given(folder, episodes, rank, budget):
    if rank:
        pytest.importorskip("peft")
    one = learner(folder, lora=LoraConfig(rank=rank, alpha=8))
    if rank:
        stirred(one.model)
    batch = assemble(episodes(temperature=0.7), agents=["main"], budget=1000)
    wanted = read(one, batch)
    order = np.random.default_rng(0).permutation(len(batch.turns))
    answers = given(batch)
    found = score_answers(read_with(one.model), [answers[t] for t in order], budget)
    for t, logprobs in zip(order, found, strict=True):
        assert logprobs == pytest.approx(wanted[t].tolist(), abs=1e-5)
    before = score_answers(read_with(one.model), answers, 1000)
    one.update(credited(one, episodes()))
    assert score_answers(read_with(one.model), answers, 1000) != before, "the present weights"
    assert not any(parameter.grad is not None for parameter in one.model.parameters())
    assert score_answers(read_with(one.model), [], 1000) == []


async def test_policies_of_one_process_are_scored_each_with_its_weights(folder, episodes, tmp_path):
    """An adapter that was trained, and the frozen model that it is on: a teacher beside its student."""
    pytest.importorskip("peft")
    batch = assemble(episodes(), agents=["main"], budget=1000)
    shared = {"device": "cpu", "lora": {"rank": 4}, "optim": {"lr": 0.05}}
    student = load(learner=shared, engine={"threads": 1}, loop={"steps": 4})
    teacher = load(policy={"frozen": True, "agents": []}, learner=shared, engine={"threads": 1}, loop={"steps": 0})
    process = LearnerProcess(tmp_path / "log")
    try:
        await process.start(
            LearnerSettings.of(student, folder, name="student", serve=False),
            LearnerSettings.of(teacher, folder, name="teacher", serve=False, train=False),
        )
        engines = {name: Embedded(process.of(name)) for name in ("student", "teacher")}
        first = {name: await engine.score(given(batch)) for name, engine in engines.items()}
        assert first["student"] == first["teacher"], "an adapter that changes nothing yet"
        with_credit = credited(learner(folder), episodes())
        await process.of("student").update(with_credit.bare())
        await engines["student"].pause()
        second = {name: await engine.score(given(batch)) for name, engine in engines.items()}
        assert second["teacher"] == first["teacher"]
        assert second["student"] != first["student"]
    finally:
        await process.close()


async def test_an_engine_that_cannot_score_says_so():
    class Mute(Engine):
        context = 8
        generate = pause = resume = load = close = None

    with pytest.raises(EngineError, match="Mute cannot score given tokens"):
        await Mute().score([GivenAnswer(prompt_ids=[1], response_ids=[2])])
