"""A model that knows nothing: random weights behind the tokenizer of the model in the box, with a context that is long
enough for what coding agents send. Its answers are noise; everything else about an episode is as with any model.

    python recipes/coding-agent/model.py FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from strop.models.names import resolve

CONTEXT = 65_536
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def make(folder: Path, **changes: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve("strop/nano"))
    torch.manual_seed(0)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, **SIZE | ends | changes)
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
