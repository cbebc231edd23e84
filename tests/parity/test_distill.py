"""A step of distillation is what plain Hugging Face says, row by row: the teacher's logprobs, the KL of every token and
the gradient; with shared prefixes, at other temperatures, and where only the teacher sees a prompt."""

import asyncio
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from strop.algorithms import make
from strop.config import AlgorithmConfig, Config, LearnerConfig, PolicyConfig
from strop.engines.base import GivenAnswer
from strop.engines.embedded.engine import Embedded
from strop.engines.scripted import Scripted
from strop.gateway.template import Renderer
from strop.learner.answers import read_with, score_answers
from strop.learner.learner import Learner
from strop.learner.model import load
from strop.learner.process import LearnerProcess
from strop.learner.verbs import LearnerSettings
from strop.models.names import resolve
from strop.run.teacher import Teacher
from strop.trajectory import Sample, assemble
from tests.parity.conftest import SIZE
from tests.parity.forests import EXAMPLE, VOCAB
from tests.parity.rows import unrounded
from tests.runs import SMALL, demo, finish, story, told
from tests.unit.learner.practice import gradients

pytestmark = pytest.mark.usefixtures("one_thread")

HINT = "Use the calculator."
NANO = resolve("strop/nano")


class Held(Scripted):
    """An engine whose model is in this process, in any precision."""

    def __init__(self, model, budget):
        super().__init__([], Renderer.from_folder(NANO))
        self.model, self.budget = model, budget

    async def score(self, answers):
        return score_answers(read_with(self.model), answers, self.budget)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model with the student's vocabulary."""
    torch.manual_seed(8)
    path = tmp_path_factory.mktemp("teacher")
    LlamaForCausalLM(LlamaConfig(**SIZE | {"num_hidden_layers": 1}, tie_word_embeddings=False)).save_pretrained(path)
    return path


def read_row(model, prompt_ids, response_ids, temperature):
    """The logprobs of one answer, the plainest way."""
    logits = model(input_ids=torch.tensor([prompt_ids + response_ids]), use_cache=False).logits[0]
    logps = (logits[len(prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
    return logps.gather(1, torch.tensor(response_ids)[:, None])[:, 0]


def stock(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def make_batch(folder, settings, teacher, budget):
    """What a step makes of the example: scored by both, with credit."""
    config = LearnerConfig(token_budget=budget, device="cpu")
    algorithm = make(AlgorithmConfig(name="distill", settings=settings), config)
    learner = Learner(folder, config, algorithm, dtype=torch.float64)
    batch = assemble(EXAMPLE, agents=["main", "helper"], budget=budget)
    asyncio.run(teacher.score(batch))
    learner.score(batch)
    return learner, batch, algorithm.assign_credit(batch)


@pytest.mark.parametrize("budget", [40, 1000])
@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_logprobs_kl_and_gradient_are_those_of_plain_rows(llama, other, budget, factor):
    with unrounded():
        engine = Held(load(other, torch.float64), budget)
        teacher = Teacher(engine=engine, most=128, num_ids=VOCAB, renderer=Renderer.from_folder(NANO))
        learner, batch, metrics = make_batch(llama, {"kl_discount": factor}, teacher, budget)
        found, updated = gradients(learner, batch)
        student, theirs = stock(llama, torch.float64), stock(other, torch.float64)
        alive = [t for t, turn in enumerate(batch.turns) if not turn.abandoned and turn.sampling.temperature > 0]
        assert len(alive) > 12
        assert {batch.turns[t].sampling.temperature for t in alive} == {0.7, 1.0, 1.3}
        shares = {t: 1 / batch.turns[t].choices for t in alive}
        count = sum(share * len(batch.turns[t].response_ids) for t, share in shares.items())
        mean = loss = 0.0
        for t in alive:
            turn = batch.turns[t]
            row = turn.prompt_ids, turn.response_ids, turn.sampling.temperature
            logp = read_row(student, *row)
            kl = (logp - read_row(theirs, *row)).detach()
            rows = batch.rows(t)
            np.testing.assert_allclose(batch.entries.teacher[rows], (logp - kl).detach(), atol=1e-9)
            np.testing.assert_allclose(batch.entries.proximal[rows] - batch.entries.teacher[rows], kl, atol=1e-9)
            to_go = [sum(factor**n * later for n, later in enumerate(kl[k:].tolist())) for k in range(len(kl))]
            np.testing.assert_allclose(batch.entries.advantage[rows], -np.array(to_go), atol=1e-9)
            mean += shares[t] * float(kl.sum()) / count
            loss = loss + shares[t] * (torch.tensor(to_go, dtype=torch.float64) * logp).sum() / count
        loss.backward()
    assert metrics["distill/kl/mean"] == pytest.approx(mean, abs=1e-9)
    assert updated["actor/skipped"] == 0
    expected = {name: weight.grad for name, weight in student.named_parameters()}
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-9, rtol=0)
        assert gradient.abs().max() > 1e-6


def test_what_is_not_trained_is_not_asked_of_the_teacher(llama, other):
    asked = []

    class Counting(Held):
        async def score(self, answers):
            asked.extend(answers)
            return await super().score(answers)

    engine = Counting(load(other, torch.float64), 40)
    teacher = Teacher(engine=engine, most=128, num_ids=VOCAB, renderer=Renderer.from_folder(NANO))
    _, batch, _ = make_batch(llama, {}, teacher, 40)
    scored = np.isfinite(batch.entries.teacher)
    assert np.array_equal(scored, batch.alive())
    assert sum(len(answer.response_ids) for answer in asked) == scored.sum() < len(scored)


# -- a prompt that only the teacher sees -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A step of the demo at another temperature, taught by the model itself, which is told to use its calculator."""
    folder = tmp_path_factory.mktemp("runs") / "taught"
    settings = [one for one in SMALL if not one.startswith("loop.eval")]
    finish(
        demo(
            folder,
            *settings,
            *("loop.steps=1", "loop.eval_splits=[]", "policy.train.temperature=0.8", "algorithm.name=distill"),
            *("algorithm.settings.teacher=self", f"algorithm.settings.teacher_prompt={json.dumps(HINT)}"),
        )
    )
    return folder


def render_otherwise(tokenizer, turn):
    """The teacher's prompt of a root, by Hugging Face's own way with templates."""
    messages = [{"role": "system", "content": HINT}, *turn.messages]
    given = {"tools": turn.requested.get("tools"), "add_generation_prompt": True, "tokenize": False}
    return tokenizer(tokenizer.apply_chat_template(messages, **given), add_special_tokens=False)["input_ids"]


def test_with_a_prompt_the_kl_of_a_run_is_that_of_plain_rows(taught):
    run = story(taught)
    tokenizer, model = AutoTokenizer.from_pretrained(NANO), stock(NANO, torch.float32)
    kl, longest = [], 0
    with torch.no_grad():
        for turns in run.turns.values():
            roots = {}
            for turn in turns:
                first = turn if turn.parent is None else roots[turn.parent]
                roots[turn.id] = first
                shown = render_otherwise(tokenizer, first) + turn.prompt_ids[len(first.prompt_ids) :]
                assert shown != turn.prompt_ids
                longest = max(longest, len(turn.prompt_ids) - len(first.prompt_ids))
                student = read_row(model, turn.prompt_ids, turn.response_ids, 0.8)
                kl += (student - read_row(model, shown, turn.response_ids, 0.8)).tolist()
    metrics = run.steps[0].metrics
    assert longest > 0, "no turn goes on from another one"
    assert metrics["distill/kl/mean"] == pytest.approx(np.mean(kl), abs=1e-5)
    assert metrics["distill/kl/max"] == pytest.approx(max(kl), abs=1e-5)
    assert metrics["distill/kl/min"] == pytest.approx(min(kl), abs=1e-5)
    assert max(map(abs, kl)) > 0.1, "the prompt changes nothing"
    assert not [name for name in metrics if name.startswith("filter_tokens/teacher")]


async def test_a_frozen_teacher_in_its_process_gives_the_logprobs_of_plain_rows(taught, tmp_path):
    """As the embedded engine has it, in float32, at temperature 0.8, with and without a prompt."""
    model = stock(NANO, torch.float32)
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    model.save_pretrained(tmp_path / "model")
    config = Config(policy=PolicyConfig(frozen=True, agents=()))
    process = LearnerProcess(tmp_path / "learner.log")
    try:
        await process.start(LearnerSettings.of(config, tmp_path / "model", serve=False, train=False))
        renderer, engine = Renderer.from_folder(NANO), Embedded(process.of())
        recorded = await told(taught)
        samples = [Sample(one, recorded.turns[one.id]) for one in recorded.rollouts]
        for prompt in ("", HINT):
            batch = assemble(samples, agents=["main"], budget=4096)
            teacher = Teacher.of(prompt, renderer, renderer, engine, config, NANO)
            await teacher.score(batch)
            asked = teacher.read_turns(batch, range(len(batch.turns)))
            assert all(isinstance(one, GivenAnswer) for one in asked.values())
            with torch.no_grad():
                for t, one in asked.items():
                    row = read_row(model, one.prompt_ids, one.response_ids, 0.8)
                    np.testing.assert_allclose(batch.entries.teacher[batch.rows(t)], row, atol=1e-5)
    finally:
        await process.close()
