"""Weights on their way: folders that are looked at before anybody loads them, and what the holder gives out."""

import asyncio
import json
import os
import resource
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from strop.engines.receiver import LogprobProbe, ModelTensors, TensorSpec, WeightReceiver, WeightsRefused, probe_ids
from strop.engines.vllm.fused import fuse, is_fusable
from strop.engines.weight_files import read_probe, read_specs, read_tensors, refuse_bad
from strop.errors import EngineError
from strop.learner import gpu_transfer
from strop.learner.client import WeightClient
from strop.learner.model_weights import ModelWeights
from strop.learner.verbs import IpcHandles
from strop.weights.base import Sent, Transfer
from strop.weights.files import FolderTransfer
from strop.weights.ipc import IpcTransfer
from strop.weights.nccl import NcclTransfer
from strop.weights.publisher import Publisher
from strop.weights.shared import SharedMemory


def make_model(seed: int = 0, tied: bool = True) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


class Here(WeightClient):
    """The process that holds the weights is this one."""

    def __init__(self, held: ModelWeights) -> None:
        self.held = held

    async def _send_call(self, verb: str, args: tuple[Any, ...]) -> Any:
        return await asyncio.to_thread(getattr(self.held, verb), *args)


class Loads:
    """An engine that keeps a list of what it was told to load, or cannot."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.error: EngineError | None = None

    async def load(self, version: str, weights: object = None) -> None:
        if self.error:
            raise self.error
        self.loaded.append(version)


class Told(WeightReceiver):
    """A server's end that keeps what it was told, and finds `logprobs` in whatever it was given."""

    def __init__(self, tensors: ModelTensors, logprobs: list[float] | None = None) -> None:
        super().__init__("server", "strop", tensors, limit=1e-3, hint=" (a hint)")
        self.said: list[Any] = []
        self.logprobs = logprobs

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[None]:
        self.said.append("hold")
        try:
            yield
        finally:
            self.said.append("go on")

    async def score(self, ids: Sequence[int], *, model: str) -> list[float]:
        self.said.append(model)
        assert self.logprobs is not None
        return self.logprobs

    async def load_folder(self, folder: Path, version: str) -> None:
        self.said.append((folder, version))

    async def num_workers(self) -> int:
        return 2

    async def begin_transfer(self, place: object) -> None:
        self.said.append(place)

    async def start_update(self, *, fused: bool = False) -> None:
        self.said.append("start fused" if fused else "start")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    return tmp_path / "model"


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_written_folder_is_the_model(tmp_path: Path, source: Path) -> None:
    model = make_model(1)
    held = ModelWeights(model, source)
    held.write(tmp_path / "w" / "1.1")
    folder = tmp_path / "w" / "1.1"
    refuse_bad(folder, read_tensors(source))
    assert read_specs(folder) == held.specs()
    again = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
    assert (folder / "tokenizer_config.json").is_file()
    probe = read_probe(folder)
    assert probe == held.probe()
    assert probe is not None
    with torch.no_grad():
        logits = again(torch.tensor([probe.ids])).logits[0, :-1].float()
    want = torch.log_softmax(logits, -1).gather(-1, torch.tensor(probe.ids[1:])[:, None])[:, 0]
    assert probe.distance(want.tolist()) < 1e-5
    assert probe.distance(ModelWeights(make_model(2), source).probe().logprobs) > 0.1
    assert os.listdir(tmp_path / "w") == ["1.1"]


def test_writing_again_replaces_the_folder(tmp_path: Path, source: Path) -> None:
    for seed in (1, 2):
        ModelWeights(make_model(seed), source).write(tmp_path / "1.1")
    assert torch.equal(load_file(tmp_path / "1.1" / "model.safetensors")["model.norm.weight"], torch.ones(32))
    assert read_probe(tmp_path / "1.1") == ModelWeights(make_model(2), source).probe()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_output_layer_may_be_left_out(tmp_path: Path, tied: bool) -> None:
    model = make_model(0, tied)
    model.save_pretrained(tmp_path / "model")
    tensors = dict(model.state_dict())
    whole = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(whole, folder_of(tmp_path, "whole"))
    del whole["lm_head.weight"]
    save_file(whole, folder_of(tmp_path, "without"))
    own = read_tensors(tmp_path / "model")
    refuse_bad(tmp_path / "whole", own)
    if tied:
        refuse_bad(tmp_path / "without", own)
    else:
        with pytest.raises(WeightsRefused, match=r"are not whole: lm_head.weight is missing"):
            refuse_bad(tmp_path / "without", own)


def folder_of(root: Path, name: str) -> Path:
    (root / name).mkdir()
    return root / name / "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_no_number_is_found_wherever_it_is(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    fine = {"a": torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype), "b": torch.tensor([], dtype=dtype)}
    model = ModelTensors({name: TensorSpec("any", tuple(tensor.shape)) for name, tensor in fine.items()}, tied=False)
    save_file(fine, folder_of(tmp_path, "w"))
    refuse_bad(tmp_path / "w", model)  # the largest number is one
    for place in ((0, 0), (2, 4)):
        bad = {"a": fine["a"].clone(), "b": fine["b"]}
        bad["a"][place] = value
        save_file(bad, tmp_path / "w" / "model.safetensors")
        with pytest.raises(WeightsRefused, match="a has values that are not finite numbers"):
            refuse_bad(tmp_path / "w", model)


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"[:9], b"\x04\0\0\0\0\0\0\0nope"])
def test_what_is_no_safetensors_is_said_to_be_none(tmp_path: Path, data: bytes) -> None:
    folder_of(tmp_path, "w").write_bytes(data)
    with pytest.raises(WeightsRefused, match="cannot be read as safetensors"):
        refuse_bad(tmp_path / "w", ModelTensors({}, tied=False))


# -- publishing --------------------------------------------------------------------------------------------------------


async def test_the_folder_that_is_served_stays_until_the_next_one_is(tmp_path: Path, source: Path) -> None:
    engine = Loads()
    files = Publisher(engine, FolderTransfer(tmp_path / "w", Here(ModelWeights(make_model(), source))))  # pyright: ignore
    for version in ("1.1", "1.2"):
        await files.publish(version)
        assert os.listdir(tmp_path / "w") == [version]
    engine.error = EngineError("no")
    with pytest.raises(EngineError, match="no"):
        await files.publish("1.3")
    assert "1.2" in os.listdir(tmp_path / "w")
    engine.error = None
    await files.publish("1.3")
    assert engine.loaded == ["1.1", "1.2", "1.3"]
    assert os.listdir(tmp_path / "w") == ["1.3"]


async def test_a_full_disk_is_told_and_nothing_is_left_of_it(tmp_path: Path, source: Path) -> None:
    engine = Loads()
    files = Publisher(engine, FolderTransfer(tmp_path / "w", Here(ModelWeights(make_model(), source))))  # pyright: ignore
    await files.publish("1.1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, limits[1]))
    try:
        with pytest.raises(
            EngineError, match=r"cannot be written to .*1\.2: File too large.*; the version before is still"
        ):
            await files.publish("1.2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert engine.loaded == ["1.1"]
    assert os.listdir(tmp_path / "w") == ["1.1"]


async def test_a_version_is_sent_while_the_server_is_held_and_then_verified(tmp_path: Path, source: Path) -> None:
    learner = ModelWeights(make_model(1), source)
    learner.write(tmp_path / "w" / "1.1")
    told = Told(read_tensors(source), learner.probe().logprobs)
    publisher = Publisher(Loads(), FolderTransfer(tmp_path / "w"))  # pyright: ignore
    assert await publisher.deliver("1.1", told) == "strop"
    assert told.said == ["hold", (tmp_path / "w" / "1.1", "1.1"), "go on", "strop"]
    assert told.logprobs is not None
    told.logprobs = [logprob - 0.5 for logprob in told.logprobs]
    with pytest.raises(EngineError, match=r"does not serve what was sent as version 1\.1: .* by 0\.5 .*\(a hint\)"):
        await publisher.deliver("1.1", told)


class Slow(Transfer):
    """Takes so many seconds for each of its receivers, one after the other."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = iter(seconds)

    async def send(self, version: str, receiver: WeightReceiver) -> Sent:
        await asyncio.sleep(next(self.seconds))
        return Sent("strop", None)


async def test_how_long_sending_took_is_that_of_the_slowest_server_and_not_of_the_version_before(source: Path) -> None:
    told = [Fusing(read_tensors(source)) for _ in range(2)]
    publisher = Publisher(Both(*told), Slow(0.02, 0.1, 0.0, 0.01))
    await publisher.publish("1.1")
    assert publisher.sending >= 0.1
    before = publisher.sending
    await publisher.publish("1.2")
    assert 0.01 <= publisher.sending < before


async def test_a_folder_is_looked_at_before_the_server_hears_of_it(tmp_path: Path, source: Path) -> None:
    model = make_model(1)
    model.model.norm.weight.data[3] = float("nan")
    ModelWeights(model, source).write(tmp_path / "w" / "1.2")
    told = Told(read_tensors(source))
    with pytest.raises(WeightsRefused, match=r"model.norm.weight has values that are not finite numbers"):
        await Publisher(Loads(), FolderTransfer(tmp_path / "w")).deliver("1.2", told)  # pyright: ignore
    assert told.said == ["hold", "go on"]


async def test_a_server_with_weights_of_its_own_cannot_share_the_learners(source: Path) -> None:
    told = Told(read_tensors(source))
    with pytest.raises(WeightsRefused, match="Fix: have weights sent as files"):
        await SharedMemory().send("1.1", told)
    with pytest.raises(WeightsRefused, match="does not take LoRA adapters"):
        await told.load_adapter("a", source)
    assert told.said == []


# -- without files: as far as they come without a GPU ------------------------------------------------------------------


@pytest.mark.parametrize("way", [IpcTransfer, NcclTransfer])
async def test_broken_weights_do_not_leave_the_learner(source: Path, way: Callable[[WeightClient], Transfer]) -> None:
    told, model = Told(read_tensors(source)), make_model(1)
    model.model.norm.weight.data[3] = float("inf")
    with pytest.raises(WeightsRefused, match=r"the weights are broken: model.norm.weight"):
        await way(Here(ModelWeights(model, source))).send("1.1", told)
    assert told.said == []


async def test_weights_in_the_hosts_memory_have_no_handles(source: Path) -> None:
    told = Told(read_tensors(source))
    with pytest.raises(WeightsRefused, match=r"weights on cpu have no handles.*set engine.vllm.weights to files"):
        await IpcTransfer(Here(ModelWeights(make_model(), source))).send("1.1", told)
    assert told.said == []


async def test_nccl_without_vllm_beside_the_learner_is_told(source: Path) -> None:
    told = Told(read_tensors(source))
    with pytest.raises(EngineError, match=r"cannot send weights by NCCL without vLLM beside it.*pip install"):
        await NcclTransfer(Here(ModelWeights(make_model(), source))).send("1.1", told)
    assert told.said == []


async def test_other_shapes_are_refused_by_nccl(source: Path) -> None:
    told = Told(ModelTensors({"model.norm.weight": TensorSpec("float32", (33,))}, tied=True))
    with pytest.raises(WeightsRefused, match="do not fit the model"):
        await NcclTransfer(Here(ModelWeights(make_model(), source))).send("1.1", told)
    assert told.said == []


async def test_a_learner_that_trained_on_does_not_send_the_new_weights_as_the_old_version(source: Path) -> None:
    held = ModelWeights(make_model(1), source)
    way = NcclTransfer(Here(held))
    way._sent = "1.1", held.probe()
    held.model.load_state_dict(make_model(2).state_dict())
    with pytest.raises(WeightsRefused, match=r"version 1.1 is not at hand any more, since the learner has trained on"):
        await way.send("1.1", Told(read_tensors(source)))


@pytest.mark.parametrize("way", [IpcTransfer, NcclTransfer])
async def test_a_learner_that_trains_on_while_it_sends_is_noticed(source: Path, way: type[Any]) -> None:
    """The engine was started again, and the learner's next update comes between the probe and the weights."""
    held = ModelWeights(make_model(1), source)

    class TrainsOn(Here):
        async def _send_call(self, verb: str, args: tuple[Any, ...]) -> Any:
            if verb in ("export_handles", "broadcast"):
                held.model.load_state_dict(make_model(2).state_dict())
                return IpcHandles(held.specs(), held.specs(), b"") if verb == "export_handles" else None
            return await super()._send_call(verb, args)

    class Updated(Told):
        async def update(self, specs: object, handles: bytes | None = None) -> None: ...

        async def finish_update(self) -> None: ...

    transfer, told = way(TrainsOn(held)), Updated(read_tensors(source))
    transfer._sent, transfer._met = ("1.1", held.probe()), {told: 1}
    with pytest.raises(WeightsRefused, match=r"version 1.1 is not at hand any more"):
        await transfer.send("1.1", told)


@pytest.mark.parametrize("way", [IpcTransfer, NcclTransfer])
async def test_a_server_that_wants_an_older_version_does_not_get_the_newest_under_its_name(
    source: Path, way: type[Any]
) -> None:
    """It missed a version, while the others got it."""
    learner = Here(ModelWeights(make_model(1), source))
    transfer, told = way(learner), Told(read_tensors(source))
    for version in ("1.1", "1.2"):
        await transfer.stage(version)
        transfer._sent = version, await learner.probe()
        await transfer.discard_others(version)
    with pytest.raises(WeightsRefused, match=r"version 1.1 is not at hand any more"):
        await transfer.send("1.1", told)
    assert told.said == []
    assert transfer._sent[0] == "1.2"


def test_a_probe_of_anything_but_numbers_is_infinitely_far() -> None:
    assert LogprobProbe([1, 2], [-1.0]).distance([float("nan")]) == float("inf")
    assert probe_ids(50) == probe_ids(50)
    assert max(probe_ids(50)) < 50


# -- handles of memory -------------------------------------------------------------------------------------------------


def make_large_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def test_joined_tensors_are_what_vllm_has_and_the_model_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's are rows of q, k and v, and of gate and up, in that order."""
    model, before = make_large_model(), make_large_model()
    parameters = dict(model.named_parameters())
    names = fuse(list(parameters))
    assert names is not None
    monkeypatch.setattr(gpu_transfer, "PIECE", 20_000)
    joined = gpu_transfer.join(parameters, names)
    assert list(joined) == list(names)
    for layer in range(3):
        own = before.model.layers[layer]
        for kind in ("weight", "bias"):
            parts = [getattr(getattr(own.self_attn, part), kind) for part in ("q_proj", "k_proj", "v_proj")]
            assert torch.equal(joined[f"model.layers.{layer}.self_attn.qkv_proj.{kind}"], torch.cat(parts))
        both = torch.cat([own.mlp.gate_proj.weight, own.mlp.up_proj.weight])
        assert torch.equal(joined[f"model.layers.{layer}.mlp.gate_up_proj.weight"], both)
    assert torch.equal(joined["model.embed_tokens.weight"], before.model.embed_tokens.weight)
    pieces = {tensor.untyped_storage().data_ptr() for tensor in joined.values()}
    assert 1 < len(pieces) < 6, "some tensors to a piece"
    for name, parameter in before.named_parameters():
        assert parameters[name] is model.get_parameter(name), "whoever holds a parameter holds it still"
        assert torch.equal(parameters[name], parameter)
    assert model.lm_head.weight.data_ptr() == joined["model.embed_tokens.weight"].data_ptr()


def test_what_is_trained_after_joining_is_seen_in_the_joined_tensors() -> None:
    model = make_large_model()
    parameters = dict(model.named_parameters())
    optim = torch.optim.AdamW(parameters.values(), lr=0.1)
    joined = gpu_transfer.join(parameters, fuse(list(parameters)) or {})
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    before = {name: tensor.clone() for name, tensor in joined.items()}
    optim.step()
    layer = model.model.layers[0]
    now = torch.cat([layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight])
    assert torch.equal(joined["model.layers.0.self_attn.qkv_proj.weight"], now)
    assert not torch.equal(before["model.layers.0.self_attn.qkv_proj.weight"], now)


def test_only_models_whose_tensors_in_vllm_are_known_are_fused(tmp_path: Path) -> None:
    def about(**changed: Any) -> Path:
        known = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128}
        (tmp_path / "config.json").write_text(json.dumps(known | changed))
        return tmp_path

    assert is_fusable(about(), ["--enforce-eager"])
    assert not is_fusable(about(vocab_size=130), [])
    assert not is_fusable(about(architectures=["GemmaForCausalLM"]), [])
    assert not is_fusable(about(quantization_config={"bits": 4}), [])
    assert not is_fusable(about(), ["--quantization", "fp8"])


class Cuda(Here):
    """Hands out handles as if there were a GPU; says what it was asked for."""

    def __init__(self, held: ModelWeights) -> None:
        super().__init__(held)
        self.asked: list[Any] = []

    async def _send_call(self, verb: str, args: tuple[Any, ...]) -> Any:
        self.asked.append((verb, *args))
        if verb != "export_handles":
            return await super()._send_call(verb, args)
        [fused] = args
        own = self.held.specs()
        sent = own if fused is None else {name: TensorSpec("float32", (1,)) for name in fused}
        return IpcHandles(own, sent, b"handles")


class Fusing(Told):
    """Takes its own tensors, unless it has others than it should."""

    knows = True

    def fuse(self, names: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
        return fuse(names)

    async def update(self, specs: Any, handles: bytes | None = None) -> None:
        own = "model.layers.0.self_attn.qkv_proj.weight" in specs
        self.said.append("own" if own else "the model's")
        if own and not self.knows:
            raise EngineError("no such parameter")

    async def finish_update(self) -> None:
        self.said.append("finish")


async def test_a_server_whose_tensors_are_known_is_given_those(source: Path) -> None:
    held = ModelWeights(make_model(1), source)
    learner, told = Cuda(held), Fusing(read_tensors(source), held.probe().logprobs)
    transfer = IpcTransfer(learner)
    assert await Publisher(Loads(), transfer).deliver("1.1", told) == "strop"
    assert told.said == ["hold", None, "start fused", "own", "finish", "go on", "strop"]
    assert (await transfer.send("1.2", told)).probe == held.probe()


async def test_a_server_that_refuses_them_is_given_the_models_from_then_on(source: Path) -> None:
    held = ModelWeights(make_model(1), source)
    told = Fusing(read_tensors(source), held.probe().logprobs)
    told.knows, transfer = False, IpcTransfer(Cuda(held))
    await transfer.send("1.1", told)
    assert told.said == [None, "start fused", "own", "start", "the model's", "finish"]
    told.said.clear()
    await transfer.send("1.2", told)
    assert told.said == [None, "start", "the model's", "finish"]


async def test_what_was_prepared_is_sent_and_nothing_is_asked_of_the_learner_again(source: Path) -> None:
    held = ModelWeights(make_model(1), source)
    learner, told = Cuda(held), Fusing(read_tensors(source), held.probe().logprobs)
    publisher = Publisher(Loads(), IpcTransfer(learner))
    publisher.prepare("1.1")  # nothing was sent yet: which tensors it takes is not known
    await asyncio.sleep(0)
    assert learner.asked == []
    await publisher.deliver("1.1", told)
    learner.asked.clear()
    publisher.prepare("1.2")
    await publisher.deliver("1.2", told)
    assert learner.asked == [("export_handles", told.fuse(list(held.specs()))), ("probe",)]
    assert told.said[-5:] == ["start fused", "own", "finish", "go on", "strop"]
    publisher.prepare("1.3")  # never sent
    learner.asked.clear()
    await publisher.deliver("1.4", told)
    assert [verb for verb, *_ in learner.asked] == ["export_handles", "probe"] * 2


async def test_broken_weights_that_were_prepared_are_refused_when_they_would_be_sent(source: Path) -> None:
    held = ModelWeights(make_model(1), source)

    class Broken(Cuda):
        async def _send_call(self, verb: str, args: tuple[Any, ...]) -> Any:
            if verb == "export_handles":
                held.refuse_broken()
            return await super()._send_call(verb, args)

    told, transfer = Fusing(read_tensors(source), held.probe().logprobs), IpcTransfer(Broken(held))
    await transfer.send("1.1", told)
    told.said.clear()
    held.model.model.norm.weight.data[3] = float("nan")
    transfer.prepare("1.2")
    with pytest.raises(WeightsRefused, match=r"the weights are broken: model.norm.weight"):
        await transfer.send("1.2", told)
    assert told.said == []


async def test_a_version_is_not_served_before_its_probe_agrees(source: Path) -> None:
    held = ModelWeights(make_model(1), source)
    told = Fusing(read_tensors(source), [one - 1 for one in held.probe().logprobs])
    with pytest.raises(EngineError, match=r"does not serve what was sent as version 1\.1"):
        await Publisher(Loads(), IpcTransfer(Cuda(held))).deliver("1.1", told)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_a_number_is_found_among_all(source: Path, bad: float) -> None:
    model = make_model()
    held = ModelWeights(model, source)
    held.refuse_broken()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = bad
    with pytest.raises(WeightsRefused, match=r"model.layers.0.mlp.up_proj.weight has values that are not finite"):
        held.refuse_broken()


def test_large_numbers_are_numbers(source: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(3e38)  # whose sum is infinite
    ModelWeights(model, source).refuse_broken()


class Both(Loads):
    """An engine of several servers, each of which is given a version while the others are."""

    def __init__(self, *receivers: Fusing) -> None:
        super().__init__()
        self.receivers = receivers

    async def load(self, version: str, weights: Any = None) -> None:
        await asyncio.gather(*(weights.deliver(version, receiver) for receiver in self.receivers))


async def test_servers_that_share_the_gpu_are_given_the_same_handles(source: Path) -> None:
    held = ModelWeights(make_model(1), source)
    learner = Cuda(held)
    told = [Fusing(read_tensors(source), held.probe().logprobs) for _ in range(2)]
    publisher = Publisher(Both(*told), IpcTransfer(learner))
    await publisher.publish("1.1")
    learner.asked.clear()
    publisher.prepare("1.2")
    await publisher.publish("1.2")
    assert [verb for verb, *_ in learner.asked] == ["export_handles", "probe"], "once for both"
    assert [one.said.count("own") for one in told] == [2, 2]
    learner.asked.clear()
    await publisher.deliver("1.2", told[1])  # its server was started again: the learner may have trained on
    assert [verb for verb, *_ in learner.asked] == ["probe", "export_handles", "probe", "probe"]
    held.model.load_state_dict(make_model(2).state_dict())
    with pytest.raises(WeightsRefused, match="trained on"):
        await publisher.deliver("1.2", told[1])
