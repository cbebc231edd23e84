"""Models small enough that a forward pass takes a millisecond."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.parity.forests import VOCAB

SIZE = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def one_thread():
    """Such small sums are not worth sharing, and threads would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Two heads share a key; logits have weights of their own."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=False)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    """Logits from the embeddings, and norms within attention."""
    torch.manual_seed(4)
    path = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=4, tie_word_embeddings=True)).save_pretrained(path)
    return path
