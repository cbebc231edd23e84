"""Plays the demo's own agent against a model and reports how often it succeeds, sampled and greedy.

    python recipes/nano/measure.py src/strop/models/nano

Each task runs `strop.demo.agent` in a thread of its own; when every live agent waits for an answer, the whole batch is
generated at once.
"""

import json
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from openai.types.chat import ChatCompletionMessage
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedModel

from strop import demo
from strop.types import Task

MAX_NEW_TOKENS = 48


class Chat:
    """The tokenizer and the chat template of a model folder."""

    def __init__(self, folder: Path) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self.template = environment.from_string((folder / "chat_template.jinja").read_text())
        file = folder / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(file)) if file.exists() else Tokenizer(BPE())  # empty until trained

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        return self.template.render(messages=messages, tools=demo.TOOLS, add_generation_prompt=add_generation_prompt)


class Player:
    """Stands in for `llm`: collects the calls of many agents and answers them in batches."""

    model = "nano"

    def __init__(self, model: PreTrainedModel, chat: Chat, greedy: bool) -> None:
        self.network, self.chat, self.greedy = model, chat, greedy
        self.changed = threading.Condition()
        self.num_live = 0
        self.waiting: list[tuple[list[dict[str, Any]], list[Any]]] = []
        self.num_prompt_tokens: list[int] = []
        self.num_sampled_tokens: list[int] = []

    def client(self) -> Any:
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self.create)))

    def create(self, messages: list[dict[str, Any]], **_: Any) -> Any:
        reply: list[Any] = []
        with self.changed:
            self.waiting.append((list(messages), reply))
            self.changed.notify_all()
            self.changed.wait_for(lambda: reply)
        return SimpleNamespace(choices=[SimpleNamespace(message=reply[0])])

    def play(self, tasks: list[Task]) -> list[dict[str, float]]:
        rewards: list[dict[str, float]] = [{} for _ in tasks]

        def run(index: int) -> None:
            rewards[index] = demo.agent(tasks[index], self)
            with self.changed:
                self.num_live -= 1
                self.changed.notify_all()

        self.num_live = len(tasks)
        for index in range(len(tasks)):
            threading.Thread(target=run, args=(index,), daemon=True).start()
        with self.changed:
            while self.num_live:
                self.changed.wait_for(lambda: len(self.waiting) == self.num_live)
                batch, self.waiting = self.waiting, []
                for text, (_, reply) in zip(self.generate([messages for messages, _ in batch]), batch, strict=True):
                    reply.append(parse(text))
                self.changed.notify_all()
        return rewards

    def generate(self, conversations: list[list[dict[str, Any]]]) -> list[str]:
        if not conversations:
            return []
        tokenizer = self.chat.tokenizer
        rows = [tokenizer.encode(self.chat.render(messages, True)).ids for messages in conversations]
        width, pad, end = (
            max(map(len, rows)),
            tokenizer.token_to_id("<|endoftext|>"),
            tokenizer.token_to_id("<|im_end|>"),
        )
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        with torch.inference_mode():
            out = self.network.generate(
                ids,
                attention_mask=mask,
                **({"do_sample": False} if self.greedy else {"do_sample": True, "top_k": 0}),
                max_new_tokens=MAX_NEW_TOKENS,
                eos_token_id=end,
                pad_token_id=pad,
            )
        answers = [row[: row.index(end) + 1] if end in row else row for row in out[:, width:].tolist()]
        self.num_prompt_tokens += [len(row) for row in rows]
        self.num_sampled_tokens += [len(row) for row in answers]
        return [tokenizer.decode(row, skip_special_tokens=True) for row in answers]


def parse(text: str) -> ChatCompletionMessage:
    """Text of the model -> OpenAI message; a call that is not JSON stays text."""
    calls = []
    for number, match in enumerate(re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)):
        try:
            call = json.loads(match)
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        except (ValueError, KeyError, TypeError):
            return ChatCompletionMessage(role="assistant", content=text)
        calls.append({"id": f"call_{number}", "type": "function", "function": function})
    content = text.split("<tool_call>")[0].strip() if calls else text
    return ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": content or None, "tool_calls": calls or None}
    )


def success(model: PreTrainedModel, chat: Chat, tasks: list[Task], greedy: bool) -> dict[str, float]:
    """Mean rewards and token counts over 1 (greedy) or 4 (sampled) plays of each task."""
    player = Player(model, chat, greedy)
    rewards = [reward for _ in range(1 if greedy else 4) for reward in player.play(tasks)]
    called = [reward for reward in rewards if reward["right_call"]]
    return {
        "reward": sum(reward["reward"] for reward in rewards) / len(rewards),
        "right_call": sum(reward["right_call"] for reward in rewards) / len(rewards),
        "reward_after_a_right_call": sum(reward["reward"] for reward in called) / max(1, len(called)),
        "first_prompt_tokens": max(player.num_prompt_tokens[: len(tasks)]),
        "longest_prompt_tokens": max(player.num_prompt_tokens),
        "sampled_tokens_per_turn": sum(player.num_sampled_tokens) / len(player.num_sampled_tokens),
    }


def report(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = Chat(folder)
    torch.manual_seed(0)
    for kind in ("calc", "chain"):
        for split in ("test", "long"):
            chosen = [task for task in demo.tasks(kind) if task.split == split]
            for greedy in (False, True):
                figures = {key: round(value, 3) for key, value in success(model, chat, chosen, greedy).items()}
                print(f"{kind} {split} {'greedy' if greedy else 'sampled'}", figures, flush=True)


if __name__ == "__main__":
    report(Path(sys.argv[1]))
