"""TRL's GRPOTrainer with a LoRA adapter on the conversation of four_turns.py: a line of JSON for each moment and step.

    python benchmarks/peers/trl_lora.py --model FOLDER --folder DIR [--vllm]

Needs trl 1.16 with datasets and peft, beside torch, transformers and accelerate. The four turns are TRL's
`rollout_func`, the best case there is for it: every round is one call of TRL's own vLLM with all rows in it, token ids
go in and come out, and what the user says is masked (`env_mask`). Without --vllm the model's own `generate` answers, to
try this where there is no GPU.

As TRL has it by default: the adapter is merged into the weights and all of them are copied into vLLM at every step;
vLLM is in the trainer's process; old logprobs are read for every batch (`vllm_importance_sampling_correction`). The
base is in bfloat16. Gradient checkpointing, on by default, is off unless asked for, as on Strop's side.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import four_turns
import torch
import transformers
from datasets import Dataset
from datasets.table import InMemoryTable
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""All linear layers of the blocks, which is what Strop takes."""


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def tell_moment(moment: str) -> None:
    tell(moment=moment)


class Clock:
    """Seconds by phase of the step at hand, and whatever else is counted of it."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = now()
        try:
            yield
        finally:
            self.spent[phase] += now() - began


class Timed(GRPOTrainer):
    """With a clock around what is not the update: sampling, old logprobs and, below, the copy into vLLM."""

    clock: Clock

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # the update's own pass
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.clock.timed("old_log_prob"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class Steps(TrainerCallback):
    """Says each step, and what it took from the end of the one before."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.number, self.began = clock, 0, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = now()
        tell_moment("engine and learner are ready")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ended, spent = now(), dict(self.clock.spent)
        seconds = ended - self.began
        known = sum(spent.get(phase, 0.0) for phase in ("gen", "old_log_prob", "update_weights"))
        turns = spent.pop("turns")
        rollouts = turns / four_turns.TURNS
        told = {"tokens_per_turn": spent.pop("tokens") / turns, "turns": four_turns.TURNS, "rollouts": rollouts}
        told["reward"] = spent.pop("rewards") / rollouts
        self.number += 1
        tell(step=self.number, seconds=seconds, **told, **spent, update_actor=seconds - known)
        if self.number == 1:
            tell_moment("the first step is made")
        self.clock.spent.clear()
        self.began = now()


class Rollouts:
    """TRL's `rollout_func`: four rounds, all rows at once."""

    def __init__(self, clock: Clock, tokenizer: Any, turn_tokens: int) -> None:
        self.clock, self.tokenizer, self.turn_tokens = clock, tokenizer, turn_tokens
        self.ends = tokenizer.eos_token_id

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        with self.clock.timed("gen"):
            rows = [self.begin(prompt[-1]["content"]) for prompt in prompts]
            for turn in range(four_turns.TURNS):
                answers = self.ask(trainer, [row["prompt"] + row["ids"] for row in rows])
                for row, (ids, logprobs) in zip(rows, answers, strict=True):
                    self.add(row, ids, logprobs, last=turn == four_turns.TURNS - 1)
        return {
            "prompt_ids": [row["prompt"] for row in rows],
            "completion_ids": [row["ids"] for row in rows],
            "logprobs": [row["logprobs"] for row in rows],
            "env_mask": [row["mask"] for row in rows],
            "answer": [row["answer"] for row in rows],
        }

    def begin(self, story: str) -> dict[str, Any]:
        questions: list[str] = json.loads(story)
        first = [{"role": "user", "content": questions[0]}]
        prompt = self.tokenizer.apply_chat_template(first, add_generation_prompt=True, tokenize=False)
        return {"questions": questions, "prompt": self.encode(prompt), "ids": [], "logprobs": [], "mask": [], "turn": 0}

    def add(self, row: dict[str, Any], ids: list[int], logprobs: list[float], *, last: bool) -> None:
        """An answer, and after it what the template puts there and the user's next words."""
        row["answer"] = self.tokenizer.decode(ids, skip_special_tokens=True)
        row["turn"] += 1
        self.clock.spent["tokens"] += len(ids)
        self.clock.spent["turns"] += 1
        self.extend(row, ids, logprobs, 1)
        if last:
            return
        said = row["questions"][row["turn"]]
        closed = "" if ids[-1] == self.ends else self.tokenizer.eos_token
        between = self.encode(f"{closed}\n<|im_start|>user\n{said}{self.tokenizer.eos_token}\n<|im_start|>assistant\n")
        self.extend(row, between, [0.0] * len(between), 0)

    def extend(self, row: dict[str, Any], ids: list[int], logprobs: list[float], sampled: int) -> None:
        row["ids"] += ids
        row["logprobs"] += logprobs
        row["mask"] += [sampled] * len(ids)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def ask(self, trainer: Any, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        if not trainer.use_vllm:
            return self.generate(trainer.model, prompts)
        _, ids, logprobs, _ = trainer.vllm_generation.generate(prompts=prompts, images=None, num_generations=1)
        return [(list(own), [place[0] for place in places]) for own, places in zip(ids, logprobs, strict=True)]

    def generate(self, model: Any, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        longest = max(map(len, prompts))
        padded = [[self.tokenizer.pad_token_id] * (longest - len(one)) + one for one in prompts]
        mask = [[0] * (longest - len(one)) + [1] * len(one) for one in prompts]
        with torch.no_grad():
            made = model.generate(
                input_ids=torch.tensor(padded, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                max_new_tokens=self.turn_tokens,
                do_sample=True,
                top_k=0,
            )
        return [(one, [0.0] * len(one)) for one in made[:, longest:].tolist()]


def reward(clock: Clock) -> Any:
    def score(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        rewards = [four_turns.reward(one) for one in answer]
        clock.spent["rewards"] += sum(rewards)
        return rewards

    return score


def configure(given: argparse.Namespace, cuda: bool) -> GRPOConfig:
    rollouts = given.groups * given.members
    micro = min(given.micro_batch, rollouts)
    vllm = {
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": given.gpu_memory,
        "vllm_max_model_length": given.context,
    }
    return GRPOConfig(
        output_dir=given.folder,
        max_steps=given.steps,
        learning_rate=given.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rollouts // micro,
        num_generations=given.members,
        max_completion_length=given.turn_tokens,
        temperature=1.0,
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=given.checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=given.seed,
        dataloader_pin_memory=False,
        use_vllm=given.vllm,
        **(vllm if given.vllm else {}),
    )


def make_data(count: int, seed: int) -> Dataset:
    """A row has the whole story in its prompt, which only `Rollouts` reads. Given a fingerprint, since some versions of
    dill cannot make one of an arrow table."""
    stories = [json.dumps(four_turns.questions(seed * 100_000 + n)) for n in range(count)]
    rows = [{"prompt": [{"role": "user", "content": story}]} for story in stories]
    return Dataset(InMemoryTable.from_pylist(rows), fingerprint="four-turns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", required=True, help="where TRL may write")
    parser.add_argument("--vllm", action="store_true", help="vLLM colocated, otherwise transformers' generate")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--turn-tokens", type=int, default=192)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--gpu-memory", type=float, default=0.2)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    cuda, clock = torch.cuda.is_available(), Clock()
    # AutoTokenizer would split words as Qwen does, whatever the file says.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(given.model, padding_side="left")
    dtype = torch.bfloat16 if cuda else torch.float32
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype, attn_implementation="sdpa")
    tell_moment("the model is loaded")
    trainer = Timed(
        model=model,
        reward_funcs=reward(clock),
        args=configure(given, cuda),
        train_dataset=make_data(given.groups * (given.steps + 1), given.seed),
        processing_class=tokenizer,
        callbacks=[Steps(clock)],
        peft_config=LoraConfig(r=given.rank, lora_alpha=2 * given.rank, target_modules=TARGETS, lora_dropout=0.0),
        rollout_func=Rollouts(clock, tokenizer, given.turn_tokens),
    )
    trainer.clock = clock
    trainer.remove_callback(transformers.PrinterCallback)
    if given.vllm:
        copy_weights = trainer.vllm_generation.sync_weights

        def sync_weights() -> None:
            with clock.timed("update_weights"):
                copy_weights()

        trainer.vllm_generation.sync_weights = sync_weights
    trainer.train()


if __name__ == "__main__":
    main()
