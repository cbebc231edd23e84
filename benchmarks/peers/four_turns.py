"""A conversation of four turns of fixed length, and a model of random weights to have it with.

    user       (about 120 tokens)
    model      as many tokens as a turn may have: weights that know nothing hardly ever say that they are done
    ...        four times
    reward     a number in [0, 1) that depends on every word of the last answer, so that no two of a group are alike

What is measured with it depends on shapes alone: `model` has those of a Qwen2.5, its vocabulary included. The tokens
that nano's tokenizer does not have are words of their own in it, which nothing but sampling brings about: every id has
text, and no other. `agent` is what Strop trains, a plain OpenAI client; peers/trl_lora.py has the same conversation
with TRL.

The file needs nothing but the standard library until a model is made.
"""

from __future__ import annotations

import json
import random
import shutil
from hashlib import blake2b
from pathlib import Path
from typing import Any

TURNS = 4
SHAPES: dict[str, dict[str, int]] = {
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    "1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}
PLACES = ("the lighthouse", "the market", "the old mill", "the harbour", "the library", "the observatory")
THINGS = ("a key", "a letter", "three coins", "a broken clock", "a map", "an empty cage")


def questions(seed: int) -> list[str]:
    """What the user says, turn by turn. About 120 tokens of nano's tokenizer each."""
    draw = random.Random(seed)
    return [
        f"Chapter {turn}. We come to {draw.choice(PLACES)} and find {draw.choice(THINGS)} that was not there on day "
        f"{draw.randint(10, 99)}. Tell what happens until {draw.choice(PLACES)}, and leave nothing out."
        for turn in range(1, TURNS + 1)
    ]


def tasks(count: int, seed: int = 0) -> list[Any]:
    from strop.types import Task

    return [Task(id=f"story-{n}", data={"questions": questions(seed * 100_000 + n)}) for n in range(count)]


def agent(task: Any, llm: Any) -> float:
    client = llm.client()
    messages: list[Any] = []
    answer = ""
    for question in task.data["questions"]:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model=llm.model, messages=messages).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
    return reward(answer)


def reward(answer: str) -> float:
    """
    >>> reward("a") == reward("a"), reward("a") == reward("b"), 0 <= reward("a") < 1
    (True, False, True)
    """
    return int.from_bytes(blake2b(answer.encode(), digest_size=4).digest(), "big") / 2**32


def model(folder: str | Path, shape: str) -> Path:
    """Random weights of that shape in bfloat16 (float32 without a GPU), made where torch computes fastest."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    folder, there = Path(folder), torch.cuda.is_available()
    config = Qwen2Config(
        **SHAPES[shape],
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=shape == "1.5b",
        use_sliding_window=False,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if there else "cpu"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if there else torch.float32)
    made.save_pretrained(folder)
    source = Path(__file__).parents[2] / "src" / "strop" / "models" / "nano"
    shutil.copyfile(source / "chat_template.jinja", folder / "chat_template.jinja")
    about = json.loads((source / "tokenizer_config.json").read_text()) | {"model_max_length": 32768}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    for id in range(len(vocabulary), SHAPES[shape]["vocab_size"]):
        vocabulary[f"Ġw{id}"] = id
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    return folder
