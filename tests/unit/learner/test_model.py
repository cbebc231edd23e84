import json
import shutil

import pytest
import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from strop.errors import ModelError
from strop.learner.model import load

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path)


def test_weights_that_are_not_there(folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path)


def test_weights_that_do_not_fit(folder, tmp_path):
    for file in folder.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match="do not fit"):
        load(tmp_path)


def test_experts_are_refused(tmp_path):
    Qwen2MoeConfig(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="mixture of experts"):
        load(tmp_path)


def test_sliding_windows_are_refused(tmp_path):
    MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)).save_pretrained(tmp_path / "sliding")
    with pytest.raises(ModelError, match="full attention"):
        load(tmp_path / "sliding")
    MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)).save_pretrained(tmp_path / "full")
    load(tmp_path / "full")


def test_logits_that_are_scaled_behind_our_back_are_refused(tmp_path):
    GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=8.0)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="other logits"):
        load(tmp_path)


def test_other_dense_models_load_without_dropout(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, attention_dropout=0.5)).save_pretrained(tmp_path)
    model = load(tmp_path, torch.float64)
    assert model.config.attention_dropout == 0.0
    assert model.dtype == torch.float64


def test_positions_that_depend_on_the_longest_path_are_refused(tmp_path):
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
    rope = {**factors, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, rope_parameters=rope)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="longrope"):
        load(tmp_path)
