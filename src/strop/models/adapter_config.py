"""What PEFT writes beside an adapter: which model it belongs to, and how it is put into it. Without torch."""

from __future__ import annotations

import json
from pathlib import Path

from strop.config import LoraConfig

FILE = "adapter_config.json"


def read_adapter(folder: Path) -> tuple[Path, LoraConfig]:
    """The folder of the model that an adapter belongs to, and how the adapter is put into it."""
    said = json.loads((folder / FILE).read_text())
    config = LoraConfig(rank=said["r"], alpha=int(said["lora_alpha"]), targets=tuple(said["target_modules"]))
    return Path(said["base_model_name_or_path"]), config
