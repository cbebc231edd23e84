"""Imitation and preferences are what plain rows of stock Hugging Face make of them, in float64: which tokens carry
loss, how much of it, and every gradient.

The other side shares no code with ours. Transcripts are rendered and tokenised whole by transformers, and what carries
loss is found in the text; the losses are written from the papers, a row at a time.
"""

import json
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from strop.algorithms import make
from strop.config import AlgorithmConfig, LearnerConfig, LoraConfig
from strop.gateway.template import Renderer
from strop.gateway.transcripts import read_transcripts
from strop.learner.learner import Learner
from strop.run.data.copies import copy_turn
from strop.run.data.transcripts import make_turns
from strop.trajectory import Sample, assemble, pack
from strop.types import Reward, Rollout, Task
from tests import chatml
from tests.parity.forests import AGENTS, EXAMPLE, Move, forest
from tests.parity.rows import Rows, unrounded
from tests.parity.trees import compare, longest

pytestmark = pytest.mark.usefixtures("one_thread")


# -- our side ----------------------------------------------------------------------------------------------------------


@dataclass
class Ours:
    """A learner whose weights are a little beside those that it began with."""

    learner: Learner
    algorithm: object

    @classmethod
    def of(cls, folder, name, settings, budget, lora=0):
        config = LearnerConfig(device="cpu", token_budget=budget, lora=LoraConfig(rank=lora, alpha=6))
        algorithm = make(AlgorithmConfig(name=name, settings=settings), config)
        learner = Learner(folder, config, algorithm, dtype=torch.float64)
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in learner.model.parameters():
                if weight.requires_grad:
                    weight += 0.05 * torch.randn(weight.shape, generator=noise, dtype=torch.float64)
        return cls(learner, algorithm)

    def gradients(self, batch):
        """Metrics of a step, and the gradients that it would apply."""
        caught = {}

        def catch():
            weights = self.learner.model.named_parameters()
            caught.update({n: w.grad.clone() for n, w in weights if w.grad is not None})
            return 0.0

        self.learner.score(batch)
        metrics = self.algorithm.assign_credit(batch)
        self.learner.optim.clip, self.learner.optim.step = catch, lambda: None
        return metrics | self.learner.update(batch), caught


def near(ours, theirs):
    assert abs(ours - theirs) <= 1e-9 * max(1e-2, abs(theirs))


# -- transcripts -------------------------------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "3 * 4"}'}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM = {"role": "system", "content": "You are helpful."}
LINES = [
    {  # several turns with tool calls, and two calls at once
        "messages": [
            SYSTEM,
            {"role": "user", "content": "What is 3 * 4?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "a", **CALL}]},
            {"role": "tool", "tool_call_id": "a", "content": "12"},
            {"role": "assistant", "content": "Once more.", "tool_calls": [{"id": "b", **CALL}, {"id": "c", **CALL}]},
            {"role": "tool", "tool_call_id": "b", "content": "12"},
            {"role": "tool", "tool_call_id": "c", "content": "12"},
            {"role": "assistant", "content": "It is 12."},
        ],
        "tools": TOOLS,
        "parallel_tool_calls": True,
    },
    {  # begins as the first one does and goes on otherwise
        "messages": [
            SYSTEM,
            {"role": "user", "content": "What is 3 * 4?"},
            {"role": "assistant", "content": "It is yes."},
        ],
        "tools": TOOLS,
    },
    {  # an answer that is read and not learnt, between two that are
        "messages": [
            SYSTEM,
            {"role": "user", "content": "Hello, how are you?"},
            {"role": "assistant", "content": "I am fine, thank you.", "weight": 1},
            {"role": "user", "content": "And the weather?"},
            {"role": "assistant", "content": "The weather in Paris is the answer.", "weight": 0},
            {"role": "user", "content": "The weather."},
            {"role": "assistant", "content": "The weather in Paris is sunny. 🙂"},
        ]
    },
    {  # the history of the one before, edited: a branch; answers in the prompt are read and not learnt
        "prompt": [
            SYSTEM,
            {"role": "user", "content": "Hello, how are you?"},
            {"role": "assistant", "content": "I am fine."},
            {"role": "user", "content": "And the weather?"},
        ],
        "completion": [{"role": "assistant", "content": "It is sunny, and the question is yes."}],
    },
]
UNLEARNT = {(2, 1), (3, 0)}
"""Line and answer of those that carry no loss."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A model with a tokenizer and a chat template."""
    folder = chatml.make(tmp_path_factory.mktemp("chat"))
    torch.manual_seed(7)
    shape = LlamaConfig(
        vocab_size=Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def read_samples(folder, tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    renderer, samples = Renderer.from_folder(folder), []
    for n, one in enumerate(read_transcripts(file)):
        turns = list(make_turns(one, renderer, history="sampled"))
        names = {turn.id: f"g{n}.0/1/{k}" for k, turn in enumerate(turns)}
        rollout = Rollout(
            id=f"g{n}.0", group=f"g{n}", member=0, task=Task(id=one.task), status="succeeded", created=0.0
        )
        samples.append(Sample(rollout, [copy_turn(turn, names, rollout.id, 1) for turn in turns]))
    return samples


def label_rows(folder):
    """Every conversation as the ids of its whole text, and which of them carry loss."""
    template = (folder / "chat_template.jinja").read_text()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=template)
    rows = []
    for n, line in enumerate(LINES):
        messages = json.loads(json.dumps(line.get("messages") or line["prompt"] + line["completion"]))
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = tokenizer.apply_chat_template(messages, tools=line.get("tools"), tokenize=False)
        told = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        answers = list(re.finditer(r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>", text, re.DOTALL))
        spans = [found.span() for k, found in enumerate(answers) if (n, k) not in UNLEARNT]
        learnt = [any(a <= start < b for a, b in spans) for start, _ in told["offset_mapping"]]
        rows.append((torch.tensor(told["input_ids"]), torch.tensor(learnt)))
    return rows


@pytest.mark.parametrize("pieces", [1, 2])
def test_transcripts_are_learnt_as_whole_rows_are(chat, tmp_path, pieces):
    samples, rows = read_samples(chat, tmp_path), label_rows(chat)
    budget = 1000 if pieces == 1 else longest(samples)
    with unrounded():
        ours = Ours.of(chat, "sft", {}, budget)
        batch = assemble(samples, agents=("main",), budget=budget)
        assert len(pack(batch, budget)) == pieces
        metrics, gradients = ours.gradients(batch)
        stock = AutoModelForCausalLM.from_pretrained(chat, dtype=torch.float64, attn_implementation="eager")
        stock.load_state_dict(ours.learner.model.state_dict())
        total, count = 0.0, sum(int(learnt.sum()) for _, learnt in rows)
        for ids, learnt in rows:
            logp = stock(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            loss = -(logp.gather(1, ids[1:, None])[:, 0] * learnt[1:]).sum() / count
            loss.backward()
            total += loss.item()
    assert metrics["filter_tokens/zero_weight"] == sum(
        len(turn.response_ids) for t, turn in enumerate(batch.turns) if batch.skipped[t] == "zero_weight"
    )
    assert int((batch.entries.weight > 0).sum()) == count
    near(metrics["actor/sft_loss"], total)
    compare(gradients, {n: w.grad for n, w in stock.named_parameters() if w.grad is not None}, 1e-9)


def test_a_turn_of_a_transcript_is_its_row_up_to_there(chat, tmp_path):
    """The prompt of a later turn extends the turn before it, and the whole is the template's own text."""
    for sample, (ids, _) in zip(read_samples(chat, tmp_path), label_rows(chat), strict=True):
        assert all(turn.ids == ids[: len(turn.ids)].tolist() for turn in sample.turns)
        assert ids[len(sample.turns[-1].ids) :].tolist() in ([], ids[-1:].tolist())  # the line end after the last turn
        for before, turn in zip(sample.turns, sample.turns[1:], strict=False):
            assert (turn.parent, turn.shared, turn.branch) == (before.id, len(before.ids), None)


# -- rollouts of every shape -------------------------------------------------------------------------------------------


def copied(samples):
    """As stored data is: nothing of how it was sampled is left."""
    found = []
    for sample in samples:
        names = {turn.id: turn.id for turn in sample.turns}
        found.append(Sample(sample.rollout, [copy_turn(t, names, t.rollout, t.attempt) for t in sample.turns]))
    return found


def weigh(kind, samples):
    """What rollouts count: mean 1 over those that count at all."""
    rewards = np.array([sample.rollout.reward() for sample in samples])
    counts = {"none": np.ones(len(rewards)), "reward": rewards, "exponential": np.exp(rewards / 0.5)}[kind]
    return counts / counts[counts > 0].mean()


@pytest.mark.parametrize("weighting", ["none", "reward", "exponential"])
@pytest.mark.parametrize("budget", [1000, 40])
def test_rollouts_are_imitated_as_rows_are(llama, weighting, budget):
    samples = copied(EXAMPLE)
    with unrounded():
        ours = Ours.of(llama, "sft", {"weighting": weighting, "beta": 0.5}, budget)
        batch = assemble(samples, agents=AGENTS, budget=budget)
        metrics, gradients = ours.gradients(batch)
        stock = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64, attn_implementation="eager")
        weights = dict(ours.learner.model.named_parameters())
        rows = Rows(stock, weights, {}, set(weights), 0.0)
        counts, terms, tokens = weigh(weighting, samples), [], 0.0
        for count, sample in zip(counts, samples, strict=True):
            for turn in sample.turns if count > 0 else ():
                if turn.agent in AGENTS and turn.finish != "abandoned":
                    tokens += len(turn.response_ids) / turn.choices
                    terms.append(count / turn.choices * -rows.turn(turn).logp.sum())
        loss = sum(terms) / tokens
        loss.backward()
    near(metrics["actor/sft_loss"], loss.item())
    compare(gradients, rows.gradients(), 1e-9)


PAIRS = forest(
    [
        [
            (1.0, [Move(responses=((1, 2, 0),)), Move(responses=((3, 1, 4),))]),
            (0.0, [Move(responses=((1, 2),)), Move()]),
        ],
        [(0.0, [Move(kind="fresh", responses=((5, 1),)), Move(kind="branch", keep=4)]), (0.5, [Move()])],
        [(2.0, [Move(responses=((3, 1), (3, 2)))]), (1.0, [Move(), Move(finish="abandoned"), Move(kind="again")])],
    ]
)


@pytest.mark.parametrize("lora", [0, 3])
@pytest.mark.parametrize("budget", [1000, 16])
@pytest.mark.parametrize("hold", [0.0, 0.7])
def test_preferences_are_what_autograd_makes_of_the_loss(llama, lora, budget, hold):
    """Pairs land in different micro-batches where the budget is small."""
    samples, beta = copied(PAIRS), 0.3
    with unrounded():
        ours = Ours.of(llama, "dpo", {"beta": beta, "sft_coef": hold}, budget, lora=lora)
        batch = assemble(samples, agents=AGENTS, budget=budget)
        metrics, gradients = ours.gradients(batch)
        stock = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64, attn_implementation="eager")
        weights = dict(ours.learner.model.named_parameters())
        trained = {n for n, w in weights.items() if w.requires_grad}
        rows, reference = Rows(stock, weights, {}, trained, 6 / lora if lora else 0.0), Rows(stock, {}, {}, set(), 0.0)

        def total(told, sample):
            turns = [turn for turn in sample.turns if turn.finish != "abandoned"]
            return sum(told.turn(turn).logp.sum() / turn.choices for turn in turns)

        def length(sample):
            return sum(len(turn.response_ids) / turn.choices for turn in sample.turns if turn.finish != "abandoned")

        margins, held = [], []
        for group in ("g0", "g1", "g2"):
            pair = sorted((s for s in samples if s.rollout.group == group), key=lambda s: -s.rollout.reward())
            apart = [total(rows, sample) - total(reference, sample).detach() for sample in pair]
            margins.append(beta * (apart[0] - apart[1]))
            held.append(-total(rows, pair[0]) / length(pair[0]))
        loss = -logsigmoid(torch.stack(margins)).mean()
        (loss + hold * torch.stack(held).mean()).backward()
    if budget == 16:
        assert len(pack(batch, budget)) > 1
    near(metrics["actor/dpo_loss"], loss.item())
    near(metrics["actor/dpo_margin"], torch.stack(margins).mean().item())
    assert metrics["actor/dpo_accuracy"] == sum(m.item() > 0 for m in margins) / 3
    compare(gradients, rows.gradients(), 1e-9)


def test_a_reward_is_no_part_of_plain_imitation(llama):
    samples = [Sample(s.rollout, s.turns) for s in copied(EXAMPLE)]
    other = [Sample(_reward(s.rollout, -3.0), s.turns) for s in samples]
    one, two = (assemble(some, agents=AGENTS, budget=1000) for some in (samples, other))
    for batch in (one, two):
        make(AlgorithmConfig(name="sft"), LearnerConfig()).assign_credit(batch)
    assert np.array_equal(one.entries.weight, two.entries.weight)


def _reward(rollout, value):
    return Rollout(
        id=rollout.id, group=rollout.group, member=rollout.member, task=rollout.task, status="succeeded", created=0.0,
        rewards=(Reward(value=value),),
    )  # fmt: skip
