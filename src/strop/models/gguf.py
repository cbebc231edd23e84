"""A GGUF file as a folder in Hugging Face format: config, weights, tokenizer, chat template.

The numbers are those of the file: float16 and float32 tensors as they are, everything else (bfloat16, quantised)
written out as float32. Reading takes the `gguf` package and no torch.

Left out, and refused by name: architectures other than Llama, Qwen2 and Qwen3, mixtures of experts, sliding windows,
stretched positions other than Llama 3's, tokenizers other than byte-level BPE.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from strop.errors import ModelError
from strop.imports import to_install
from strop.models import cache
from strop.models.gguf_tokenizer import build_tokenizer

FORMAT = 1
"""Part of the cache's key: a folder written by an earlier way of converting is not used again."""

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Array = NDArray[Any]


def convert(file: Path, say: Callable[[str], None], *, key: str | None = None) -> Path:
    """The folder that stands for `file`, converted the first time. `key` keeps it under a name of its own, to be found
    when the file is gone."""
    return cache.make_once(key or _key(file), lambda part: _convert(file, part, say))


def _key(file: Path) -> str:
    """A file that changes is another one. Weights may be many gigabytes: the header and the times must do."""
    about = file.stat()
    with file.open("rb") as opened:
        marks = hashlib.sha256(opened.read(1 << 20))
    marks.update(f"{about.st_size} {about.st_mtime_ns} {FORMAT}".encode())
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', file.stem)}-{marks.hexdigest()[:16]}"


def _convert(file: Path, folder: Path, say: Callable[[str], None]) -> None:
    try:
        gguf = importlib.import_module("gguf")
        safetensors = importlib.import_module("safetensors.numpy")
        safetensors_error: type[Exception] = importlib.import_module("safetensors").SafetensorError
    except ImportError:
        raise ModelError(f"{file} is a GGUF file. Fix: install what reads it with `{to_install('gguf')}`") from None
    say(f"converting {file}, once; the result is kept in {folder.parent}")
    try:
        reader = gguf.GGUFReader(file)
        fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not a GGUF file, or it is cut off ({error}). Fix: download it again") from None
    config = _config(file, fields, tensors, gguf)
    weights: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if name != "rope_freqs.weight":
            array = _array(tensor, gguf)
            if config["model_type"] == "llama" and (found := re.search(r"attn_([qk])\.weight$", name)):
                array = _by_halves(array, config[{"q": "num_attention_heads", "k": "num_key_value_heads"}[found[1]]])
            weights[_name(name, file)] = np.ascontiguousarray(array)
    config["dtype"] = str(weights["model.embed_tokens.weight"].dtype)
    try:
        safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except safetensors_error as error:  # a full disk is one
        raise OSError(str(error)) from error
    ends = _write_tokenizer(file, fields, folder, config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ends[0] if ends else None}, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def _config(file: Path, fields: dict[str, Any], tensors: dict[str, Any], gguf: Any) -> dict[str, Any]:
    kind = str(fields.get("general.architecture", "unknown"))
    about = {name.removeprefix(f"{kind}."): value for name, value in fields.items() if name.startswith(f"{kind}.")}
    wrong = ""
    if kind not in ARCHITECTURES:
        wrong = f"its architecture is {kind}, and only {', '.join(ARCHITECTURES)} are known here"
    elif about.get("expert_count"):
        wrong = "it is a mixture of experts"
    elif about.get("attention.sliding_window"):
        wrong = "it has layers that are not full attention"
    elif about.get("rope.scaling.type", "none") != "none":
        wrong = f"its positions are stretched ({about['rope.scaling.type']})"
    if wrong:
        raise ModelError(f"{file} cannot be converted: {wrong}. Fix: give the model's folder or its Hugging Face name")
    try:
        heads, hidden = about["attention.head_count"], about["embedding_length"]
        size = about.get("attention.key_length") or about.get("rope.dimension_count") or hidden // heads
        rope: dict[str, Any] = {"rope_theta": _shortest(about.get("rope.freq_base", 10000.0)), "rope_type": "default"}
        if stretched := tensors.get("rope_freqs.weight"):
            rope |= _llama3(_array(stretched, gguf), rope["rope_theta"], size, file)
        return {
            "architectures": [ARCHITECTURES[kind]],
            "model_type": kind,
            "vocab_size": int(tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": about["feed_forward_length"],
            "num_hidden_layers": about["block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": about.get("attention.head_count_kv", heads),
            "head_dim": size,
            "hidden_act": "silu",
            "max_position_embeddings": about["context_length"],
            "rms_norm_eps": _shortest(about["attention.layer_norm_rms_epsilon"]),
            "rope_parameters": rope,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "tie_word_embeddings": "output.weight" not in tensors,
        }
    except KeyError as error:
        raise ModelError(f"{file} does not say {error.args[0]}: it is broken. Fix: download it again") from None


def _shortest(number: float) -> float:
    """What was written before it was kept as a float32.

    >>> _shortest(9.999999747378752e-06)
    1e-05
    """
    return float(str(np.float32(number)))


def _llama3(given: Array, theta: float, size: int, file: Path) -> dict[str, Any]:
    """Llama 3.1's way to stretch positions, which GGUF has as one divisor per frequency. They are worked out again, so
    that no other way is taken for it."""
    factor, low, high, before = float(given.max()), 1.0, 4.0, 8192
    turns = before / (2 * np.pi * theta ** (np.arange(0, size, 2) / size))  # within the old context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if not np.allclose(given, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ModelError(
            f"{file} stretches positions in an unknown way. Fix: give the model's Hugging Face name instead"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": before,
    }


def _array(tensor: Any, gguf: Any) -> Array:
    kinds = gguf.GGMLQuantizationType
    if tensor.tensor_type in (kinds.F32, kinds.F16):
        return cast(Array, tensor.data)
    return cast(Array, gguf.dequantize(tensor.data, tensor.tensor_type))


def _by_halves(array: Array, heads: int) -> Array:
    """Llama's GGUF files have the two numbers that turn together side by side; Hugging Face has them half a head apart.

    >>> _by_halves(np.array([[1], [2], [3], [4]]), heads=1).ravel().tolist()
    [1, 3, 2, 4]
    """
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _name(name: str, file: Path) -> str:
    """
    >>> _name("blk.3.attn_q.weight", Path()), _name("output_norm.weight", Path())
    ('model.layers.3.self_attn.q_proj.weight', 'model.norm.weight')
    """
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    if found is None or found[2] not in NAMES:
        raise ModelError(
            f"{file} has a tensor {name}, which is not known. Fix: give the model's Hugging Face name instead"
        )
    layer = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{layer}{NAMES[found[2]]}.{found[3]}"


def _write_tokenizer(file: Path, fields: dict[str, Any], folder: Path, longest: int) -> list[int]:
    """Write the tokenizer with its template; returns the tokens that end an answer, the first one first."""
    about = {
        name.removeprefix("tokenizer.ggml."): value for name, value in fields.items() if name.startswith("tokenizer.")
    }
    (folder / "tokenizer.json").write_text(build_tokenizer(about, file).to_str(pretty=True))
    tokens: list[str] = about["tokens"]
    specials = {name: about.get(f"{key}_token_id") for name, key in _SPECIALS.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        **{name: tokens[id] for name, id in specials.items() if isinstance(id, int) and id < len(tokens)},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        (folder / "chat_template.jinja").write_text(template)
    ends = [about.get(f"{key}_token_id") for key in ("eos", "eot", "eom")]
    return list(dict.fromkeys(id for id in ends if isinstance(id, int)))


_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
