"""TRL's GRPOTrainer on the task of adding.py, its own tool loop, one line of JSON per step and one for the whole.

    python benchmarks/peers/trl_side.py --model FOLDER [--vllm]

Needs trl 1.16 with datasets, beside torch, transformers and accelerate. Weights are kept in float32 and on a GPU
computed with in bfloat16, which is what TRL does by default; gradient checkpointing, which it also has by default, is
off: it would only cost time here.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import adding
import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return int(a) + int(b)


def reward(completions: list[Any], a: list[int], b: list[int], **_: Any) -> list[float]:
    """As adding.py has it, of what TRL has read."""
    rewards = list[float]()
    for messages, left, right in zip(completions, a, b, strict=True):
        calls = [call["function"] for message in messages for call in message.get("tool_calls") or []]
        read = [{"name": call.get("name"), "arguments": call.get("arguments")} for call in calls]
        last = messages[-1]
        answer = last.get("content") or "" if last["role"] == "assistant" else ""
        rewards.append(adding.reward(read, answer, left, right))
    return rewards


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Timed(GRPOTrainer):
    """With a clock around generation."""

    spent: Counter[str]

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        began = now()
        made = super()._generate(*args, **kwargs)
        self.spent["gen"] += now() - began
        self.spent["rollouts"] += len(made[1])
        return made


class Steps(TrainerCallback):
    def __init__(self, spent: Counter[str]) -> None:
        self.spent, self.steps, self.began = spent, list[dict[str, float]](), 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ended = now()
        self.steps.append({"seconds": ended - self.began, "ended": time.time(), **self.spent})
        self.spent.clear()
        self.began = ended

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "reward" in logs and self.steps:
            self.steps[-1]["reward"] = logs["reward"]
            print(json.dumps({"step": len(self.steps), **self.steps[-1]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vllm", action="store_true", help="vLLM colocated, otherwise transformers' generate")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", required=True, help="where TRL may write")
    given = parser.parse_args()
    cuda, rollouts = torch.cuda.is_available(), given.groups * given.members
    micro = min(given.micro_batch, rollouts)
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    fields = {name: field for name, field in qwen3_template["fields"].items() if name != "reasoning_content"}
    tokenizer.response_template = {**qwen3_template, "fields": fields}
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, attn_implementation="sdpa")
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    before = [{"role": m["role"], "content": m["content"] or adding.CALL} for m in adding.BEFORE]
    rows = adding.sums(given.groups * (given.steps + 1), given.seed)
    data = Dataset.from_list(
        [
            {"prompt": [*before, {"role": "user", "content": row["question"]}], "a": row["a"], "b": row["b"]}
            for row in rows
        ]
    )
    vllm = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 512}
    settings = GRPOConfig(
        output_dir=given.folder,
        max_steps=given.steps,
        learning_rate=given.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rollouts // micro,
        num_generations=given.members,
        max_completion_length=given.max_tokens,
        temperature=1.0,
        max_tool_calling_iterations=1,
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=given.seed,
        dataloader_pin_memory=False,
        use_vllm=given.vllm,
        **(vllm if given.vllm else {}),
    )
    spent: Counter[str] = Counter()
    steps = Steps(spent)
    trainer = Timed(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[steps],
        tools=[add],
    )
    trainer.spent = spent
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps({"steps": steps.steps, "versions": versions}), flush=True)


if __name__ == "__main__":
    main()
