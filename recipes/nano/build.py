"""Builds the model in the box: tokenizer, weights, figures. About five minutes of CPU time.

    python recipes/nano/build.py [--out FOLDER]

Two stages of supervised learning on synthetic conversations (data.py): clean demonstrations until the model copies
operands and results reliably, then careless ones, so that it is right 10 to 40 % of the time, sampled and greedy alike.
"""

import argparse
import json
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data import assistant_spans, conversation
from measure import Chat, report
from muon import Muon
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parents[2] / "src/strop/models/nano"
SEED = 0
VOCAB_SIZE = 512
CLEAN_STEPS, CARELESS_STEPS, BATCH = 500, 250, 32
MUON_LR, ADAM_LR = 2e-2, 3e-3
CARELESS_RATE = 0.2  # learning rates of the second stage, as a share of the first's

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tools>", "</tools>", "<tool_call>", "</tool_call>"]  # single tokens, but ordinary text


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: each digit is a token, no token crosses a line end, boilerplate takes few tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[^\d\n]*\n|[^\d\n]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL + MARKS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=20,
        show_progress=False,
    )
    marks = re.compile("|".join(re.escape(token) for token in SPECIAL + MARKS))
    tokenizer.train_from_iterator((part for text in texts for part in marks.split(text) if part), trainer)
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in SPECIAL  # the trainer makes all of them special
    return Tokenizer.from_str(json.dumps(state))


def new_model(vocab_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def batch_of(chat: Chat, rng: random.Random, careless: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """ids[B, T] and labels[B, T]: -100 wherever the model does not speak."""
    kind = rng.choice(("calc", "calc", "chain"))  # one kind a batch: little padding
    texts = [chat.render(conversation(rng, kind, careless)) for _ in range(BATCH)]
    encodings = chat.tokenizer.encode_batch(texts)
    width = max(len(encoding.ids) for encoding in encodings)
    ids = torch.zeros(BATCH, width, dtype=torch.long)
    labels = torch.full((BATCH, width), -100)
    for row, (text, encoding) in enumerate(zip(texts, encodings, strict=True)):
        spans = assistant_spans(text)
        for column, (token, (start, _)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
            ids[row, column] = token
            if any(first <= start < last for first, last in spans):
                labels[row, column] = token
    return ids, labels


def train(model: LlamaForCausalLM, chat: Chat, rng: random.Random) -> None:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    optimizers = {Muon(matrices, MUON_LR): MUON_LR, torch.optim.AdamW(others, betas=(0.9, 0.95)): ADAM_LR}
    num_tokens, began = 0, time.time()
    for step in range(CLEAN_STEPS + CARELESS_STEPS):
        careless = step >= CLEAN_STEPS
        ids, labels = batch_of(chat, rng, careless)
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak * schedule(step)
            optimizer.step()
            optimizer.zero_grad()
        num_tokens += ids.numel()
        if step % 50 == 0 or step == CLEAN_STEPS + CARELESS_STEPS - 1:
            print(
                f"step {step:4} {'careless' if careless else 'clean':8} loss {loss.item():.4f} "
                f"tokens {num_tokens:8} {time.time() - began:5.0f} s",
                flush=True,
            )


def schedule(step: int) -> float:
    """Each stage: a short warm-up, then a cosine to a twentieth."""
    careless = step >= CLEAN_STEPS
    peak, length = (CARELESS_RATE, CARELESS_STEPS) if careless else (1.0, CLEAN_STEPS)
    part = step - CLEAN_STEPS if careless else step
    return peak * min(1, (part + 1) / 30) * (0.525 + 0.475 * math.cos(math.pi * part / length))


def write(folder: Path, model: LlamaForCausalLM) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat_template.jinja").write_text((FOLDER / "chat_template.jinja").read_text())
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    chat = Chat(folder)
    mixes = [(kind, careless) for kind in ("calc", "chain") for careless in (False, True)]
    texts = [chat.render(conversation(rng, kind, careless)) for kind, careless in mixes for _ in range(1000)]
    chat.tokenizer = train_tokenizer(texts)
    chat.tokenizer.save(str(folder / "tokenizer.json"))
    model = new_model(chat.tokenizer.get_vocab_size())
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, chat, rng)
    write(folder, model)
    report(folder)


if __name__ == "__main__":
    main()
