"""Models that learners are measured with: shapes that people train, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "1.5b": (
        "Qwen2Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
        },
    ),
    "135m": (
        "LlamaConfig",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
        },
    ),
}
"""Qwen2.5-1.5B and SmolLM2-135M."""


def model_for(device: str, folder: Path, shape: str = "1.5b") -> Path:
    """The folder of the model: one that ships, or a random one that is made on the GPU and put into `folder`."""
    if device == "cpu":
        from strop.models.names import resolve

        return resolve("strop/nano")
    import torch
    import transformers

    torch.manual_seed(0)
    kind, sizes = SHAPES[shape]
    config: Any = getattr(transformers, kind)(**sizes, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
    with torch.device("cuda"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder
