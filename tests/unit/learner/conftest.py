import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.trajectory import Sample
from strop.types import Reward, Rollout, Sampling, Task, Turn

VOCAB = 24


@pytest.fixture(autouse=True)
def plain_instructions():
    """Some virtual machines announce AMX and do not let it be used: oneDNN's bfloat16 would end the process there."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    yield
    torch.backends.mkldnn.enabled = before


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A random Llama small enough to train in milliseconds; two heads share a key."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture
def episodes():
    """Groups of rollouts with a shared system prompt, two or three turns each; the first of each group is right."""

    def make(num_groups=3, num_members=4, seed=0, rewards=lambda g, m: float(m == 0), temperature=1.0):
        rng = random.Random(seed)
        draw = lambda low, high: [rng.randrange(VOCAB) for _ in range(rng.randrange(low, high))]  # noqa: E731
        samples, system = [], draw(5, 6)
        for g in range(num_groups):
            question = draw(3, 6)
            for m in range(num_members):
                id, context, turns = f"g{g}.{m}", system + question, []
                for k in range(rng.randrange(2, 4)):
                    response = draw(1, 7)
                    turns.append(
                        Turn(
                            id=f"{id}/1/{k}",
                            rollout=id,
                            attempt=1,
                            prompt_ids=context,
                            response_ids=response,
                            logprobs=[-1.0] * len(response),
                            versions=[(0, "1.0")],
                            finish="stop",
                            started=float(k),
                            ended=k + 0.5,
                            sampling=Sampling(temperature=temperature),
                        )
                    )
                    context = context + response + draw(1, 4)
                given = (Reward(value=rewards(g, m)),)
                rollout = Rollout(
                    id=id, group=f"g{g}", member=m, task=Task(id="t"), status="succeeded", created=0.0, rewards=given
                )
                samples.append(Sample(rollout, turns))
        return samples

    return make
