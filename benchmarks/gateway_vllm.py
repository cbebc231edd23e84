"""vLLM through Strop's gateway beside vLLM alone: how much of its throughput is left.

    python benchmarks/gateway_vllm.py --tokenizer FOLDER [--quick] [--python PYTHON] [--json FILE]

256 requests at once, each with 512 tokens of its own and 128 sampled ones, as completions of token ids with logprobs;
sides take turns, the first lap of each is not counted. Through the gateway every turn is parsed, and in SQLite before
its answer is sent. The model has SmolLM2-135M's shape and random weights, in bf16 on a GPU. The load comes from several
processes. `--python` is one that has vLLM, if this one has not; `--tiny` is for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.processes import PEERS, ROOT, say

RESULTS = ROOT / "benchmarks" / "results"
GOAL = 0.9
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path, tokenizer: Path, *, tiny: bool) -> int:
    """A random model with a real tokenizer. Returns the number of the tokenizer's tokens."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    packed = tokenizer / "tokenizer.json.gz"
    text = gzip.decompress(packed.read_bytes()) if packed.exists() else (tokenizer / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(text)
    shutil.copyfile(tokenizer / "tokenizer_config.json", folder / "tokenizer_config.json")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokens = Tokenizer.from_str(text.decode()).get_vocab_size()
    torch.manual_seed(0)
    size = (64, 128, 2, 4, 2) if tiny else (576, 1536, 30, 9, 3)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape = LlamaConfig(
        **dict(zip(names, size, strict=True)),
        vocab_size=tokens + -tokens % 64,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(shape)
    (model if tiny else model.to(torch.bfloat16)).save_pretrained(folder)
    return tokens


class Load:
    """Several processes that ask together."""

    def __init__(self, requests: int, prompt: int, answer: int, tokens: int, processes: int) -> None:
        self._share, self._processes = requests // processes, processes
        self._sizes = [str(size) for size in (self._share, prompt, answer, tokens)]
        self._asked = 0

    def lap(self, url: str, targets: list[Any]) -> tuple[int, float]:
        """Tokens, and seconds."""
        clients: list[subprocess.Popen[str]] = []
        for number in range(self._processes):
            first = self._asked + number * self._share
            command = [sys.executable, PEERS / "completions_load.py", url, str(first), *self._sizes]
            client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            clients.append(client)
            mine = targets[number * self._share :][: self._share] or targets
            print(json.dumps(mine), file=client.stdin, flush=True)
        for client in clients:
            assert client.stdout is not None
            if client.stdout.readline() != "ready\n":
                raise SystemExit("a process of the load has ended, see above")
        started = time.monotonic()
        for client in clients:
            print("go", file=client.stdin, flush=True)
        counts = [client.communicate()[0] for client in clients]
        seconds = time.monotonic() - started
        if not all(count.strip().isdigit() for count in counts):
            raise SystemExit("a process of the load has failed, see above")
        self._asked += self._share * self._processes
        return sum(map(int, counts)), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--python", default="")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--interval", type=int, default=None, help="engine.vllm.stream_interval")
    parser.add_argument("--json", type=Path, default=RESULTS / "gateway_vllm.json")
    args = parser.parse_args()
    requests, prompt, answer, laps = (8, 32, 16, 2) if args.tiny else (256, 512, 128, 2 if args.quick else 5)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = folder / "model"
        model.mkdir()
        tokens = make_model(model, args.tokenizer, tiny=args.tiny)
        settings: dict[str, Any] = {"python": args.python, "gpu_memory": 0.5}
        if args.interval:
            settings["stream_interval"] = args.interval
        if args.tiny:
            settings["dtype"] = "float32"
        command = [sys.executable, PEERS / "gateway_vllm.py", folder, model, json.dumps(settings)]
        env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        gateway = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert gateway.stdin
        assert gateway.stdout

        def order(what: dict[str, Any]) -> Any:
            print(json.dumps(what), file=gateway.stdin, flush=True)
            return json.loads(gateway.stdout.readline())  # pyright: ignore[reportOptionalMemberAccess]

        try:
            say("starting vLLM and the gateway")
            line = gateway.stdout.readline()
            if not line:
                log = folder / "vllm.log"
                raise SystemExit(log.read_text()[-3000:] if log.exists() else "the gateway has ended, see above")
            urls = json.loads(line)
            load = Load(requests, prompt, answer, tokens, processes=2 if args.tiny else 8)
            rates: dict[str, list[float]] = {"vLLM": [], "gateway": []}
            for number in range(laps + 1):
                for name in rates:
                    targets = order({"make": requests}) if name == "gateway" else [["/v1/completions", "none"]]
                    count, seconds = load.lap(urls["url"] if name == "gateway" else urls["vllm"], targets)
                    counted = order({"end": True}) if name == "gateway" else {}
                    say(f"lap {number}: {name} {count / seconds:,.0f} tokens/s ({count:,} tokens) {counted or ''}")
                    if number:
                        rates[name].append(count / seconds)
        finally:
            gateway.stdin.close()
            gateway.wait(60)
    middle = {name: statistics.median(found) for name, found in rates.items()}
    kept = middle["gateway"] / middle["vLLM"]
    result = {
        "settings": {"requests": requests, "prompt": prompt, "answer": answer, "laps": laps, **settings},
        "machine": {"python": platform.python_version(), "cores": os.cpu_count(), **accelerator()},
        "tokens_per_s": rates,
        "medians": middle,
        "kept": kept,
        "goal": GOAL,
    }
    args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"vLLM {middle['vLLM']:,.0f} tokens/s, through the gateway {middle['gateway']:,.0f}: {kept:.1%} "
        f"(goal {GOAL:.0%}: {'reached' if kept >= GOAL else 'NOT reached'})"
    )


def accelerator() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"torch": torch.__version__}
    from importlib.metadata import version

    return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "vllm": version("vllm")}


if __name__ == "__main__":
    main()
