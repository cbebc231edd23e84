"""vLLM's own tensors: those of a model, some of them joined by rows.

    q_proj, k_proj, v_proj ──▶ qkv_proj         gate_proj, up_proj ──▶ gate_up_proj        all others as they are

Given like this they are copied over as they stand. Given by the model's own names, vLLM takes every layer apart and
builds it anew, which takes some ten times as long as the copying. Only of models that were looked at: names and shapes
of others, and of quantised ones, may be anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ARCHITECTURES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
VOCABULARY = 64
"""vLLM makes the rows of embeddings a multiple of this."""


def is_fusable(model: Path, args: Sequence[str]) -> bool:
    """Whether vLLM's tensors of the model in this folder are known, for a server started with these arguments."""
    about: dict[str, Any] = json.loads((model / "config.json").read_text())
    return (
        (about.get("architectures") or [""])[0] in ARCHITECTURES
        and int(about.get("vocab_size") or 1) % VOCABULARY == 0
        and "quantization_config" not in about
        and not any("quant" in one or "load-format" in one for one in args)
    )


def fuse(names: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """What each of vLLM's tensors is made of; None if a part of one is missing.

    >>> fuse(["l.q_proj.weight", "l.k_proj.weight", "l.v_proj.weight", "norm.weight"])
    {'l.qkv_proj.weight': ('l.q_proj.weight', 'l.k_proj.weight', 'l.v_proj.weight'), 'norm.weight': ('norm.weight',)}
    >>> fuse(["l.gate_proj.weight"])
    """
    wholes = {part: whole for whole, parts in FUSED.items() for part in parts}
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        *stem, layer, kind = name.split(".")
        if (whole := wholes.get(layer)) is None:
            found[name] = (name,)
            continue
        found[".".join((*stem, whole, kind))] = tuple(".".join((*stem, part, kind)) for part in FUSED[whole])
    every = [part for parts in found.values() for part in parts]
    return found if sorted(every) == sorted(names) else None
