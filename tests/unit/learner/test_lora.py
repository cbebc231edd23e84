"""An adapter is trained, the model is not; whoever runs the model runs it still."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from strop.config import EngineConfig, LoraConfig
from strop.engines.embedded.core import Core
from strop.errors import ConfigError, LearnerError, ModelError
from strop.learner import lora
from strop.learner.export import export
from strop.learner.logprobs import compute_logprobs
from strop.learner.model import load
from strop.run.evaluate import find_weights
from strop.run.start_from import find_checkpoint
from strop.trajectory import pack
from strop.types import Sampling
from tests.unit.learner.practice import Critical, credited, gradients, learner

peft = pytest.importorskip("peft")
LORA = LoraConfig(rank=4, alpha=8)
IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])


def stirred(model):
    """The same model with an adapter that does something."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def test_only_the_adapter_is_trained(folder, episodes):
    taught = learner(folder, lora=LORA)
    base = {n: p.detach().clone() for n, p in taught.model.named_parameters() if not p.requires_grad}
    found, _ = gradients(taught, credited(taught, episodes()))
    assert set(found) == {n for n, _ in taught.model.named_parameters() if "lora_" in n}
    layers = 2 * 7  # of every block: queries, keys, values, output, gate, up, down
    assert len(found) == 2 * layers
    for _ in range(3):
        taught.update(credited(taught, episodes()))
    after = dict(taught.model.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())
    assert all(after[name].abs().max() > 0 for name in found)


def test_an_adapter_learns_what_its_merged_model_then_knows(folder, episodes):
    taught = learner(folder, lora=LORA)
    samples = episodes(num_groups=1)

    def mean(model):
        batch = credited(taught, samples)
        (piece,) = pack(batch, 1000)
        right = (batch.entries.rollout == 0)[piece.entry]
        with torch.no_grad():
            return compute_logprobs(model, piece, batch.entries)[0].numpy()[right].mean()

    before = mean(taught.model)
    for _ in range(10):
        taught.update(credited(taught, samples))
    assert mean(taught.model) > before + 0.3


def test_the_reference_is_the_model_without_its_adapter(folder, episodes):
    taught = learner(folder, Critical(), lora=LORA)
    assert taught.ref is None
    for _ in range(3):
        taught.update(credited(taught, episodes()))
    batch = credited(taught, episodes())
    (piece,) = pack(batch, 1000)
    with torch.no_grad():
        base = compute_logprobs(load(folder), piece, batch.entries)[0].double().numpy()
        now = compute_logprobs(taught.model, piece, batch.entries)[0].double().numpy()
    assert np.array_equal(batch.entries.ref[piece.entry], base)
    assert np.array_equal(batch.entries.proximal[piece.entry], now)
    assert not np.allclose(base, now)
    assert taught.optim.weights()  # turning it off and on left it trainable


def test_a_critic_of_its_own_is_an_adapter_too(folder, episodes):
    taught = learner(folder, Critical(), lora=LORA)
    assert {n.split(".")[0] for n in taught.critic_optim.weights()} == {"trunk", "head"}
    assert all("lora_" in n or n.startswith("head.") for n in taught.critic_optim.weights())
    errors = [taught.update(credited(taught, episodes()))["critic/vf_loss"] for _ in range(12)]
    assert errors[-1] < errors[0] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_hold_the_adapter_and_resume_bitwise(folder, episodes, tmp_path, dtype):
    def train(taught, seeds):
        for seed in seeds:
            taught.update(credited(taught, episodes(seed=seed)))
        return taught

    build = lambda: learner(folder, Critical(), lora=LORA, dtype=dtype)  # noqa: E731
    straight = train(build(), range(3))
    train(build(), range(2)).save(tmp_path / "c", {"step": 2})
    files = {file.name for file in (tmp_path / "c").iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "strop.json"}
    assert not files & {"config.json", "model.safetensors"}
    resumed = build()
    torch.manual_seed(9)  # another adapter to begin with must not matter
    stirred(resumed.model)
    assert resumed.restore(tmp_path / "c") == {"step": 2}
    assert train(resumed, [2]).digest() == straight.digest()


def test_the_wrong_kind_of_checkpoint_is_refused_with_a_sentence(folder, episodes, tmp_path):
    adapter, whole = learner(folder, lora=LORA), learner(folder)
    adapter.save(tmp_path / "adapter")
    whole.save(tmp_path / "whole")
    with pytest.raises(ModelError, match=r"learner\.lora\.rank"):
        whole.restore(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"learner\.lora\.rank"):
        adapter.restore(tmp_path / "whole")
    with pytest.raises(ModelError, match="another shape"):
        learner(folder, lora=LoraConfig(rank=2)).restore(tmp_path / "adapter")


def test_merged_or_not_it_says_the_same_elsewhere(folder, tmp_path):
    taught = learner(folder, lora=LORA)
    stirred(taught.model)
    taught.save(tmp_path / "c", {"step": 1})
    with torch.no_grad():
        ours = taught.model(input_ids=IDS).logits
    export(tmp_path / "c", tmp_path / "merged")
    export(tmp_path / "c", tmp_path / "adapter", merge=False)
    with pytest.raises(ConfigError, match="leave out --dtype, or --adapter"):
        export(tmp_path / "c", tmp_path / "other", merge=False, dtype="bfloat16")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(load_file(folder / "model.safetensors"))
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    with torch.no_grad():
        assert torch.allclose(stock(input_ids=IDS).logits, ours, atol=1e-5)
        assert torch.allclose(theirs(input_ids=IDS).logits, ours, atol=1e-5)
        assert not torch.allclose(load(folder)(input_ids=IDS).logits, ours, atol=1e-2)
    for name in ("merged", "adapter"):
        assert not {"optimizer.pt", "strop.json"} & {file.name for file in (tmp_path / name).iterdir()}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)


def test_an_adapter_is_merged_to_be_evaluated(folder, tmp_path):
    taught = learner(folder, lora=LORA)
    stirred(taught.model)
    taught.save(tmp_path / "run" / "checkpoints" / "step-000001-1", {"step": 1})
    name = str(find_checkpoint(str(tmp_path / "run")))
    assert find_weights(name, tmp_path / "spare") == tmp_path / "spare"
    assert find_weights(str(folder), tmp_path / "unused") == folder.resolve()
    with torch.no_grad():
        ours = taught.model(input_ids=IDS).logits
        assert torch.allclose(load(tmp_path / "spare")(input_ids=IDS).logits, ours, atol=1e-5)


def test_what_engines_elsewhere_get_has_plain_names_and_stays_in_place(folder):
    taught = learner(folder, lora=LORA)
    plain = taught.plain
    first = dict(plain.named_parameters())
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    base = dict(load(folder).named_parameters())
    assert list(first) == list(base)
    assert all(torch.equal(tensor, base[name]) for name, tensor in first.items())  # the adapter does nothing yet
    stirred(taught.model)
    second = dict(plain.named_parameters())
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    model = load(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(second[name])
        assert torch.allclose(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, atol=1e-5)
    assert taught.plain.config is taught.model.config
    assert learner(folder).plain.__class__ is LlamaForCausalLM


def test_targets(folder):
    taught = learner(folder, lora=LoraConfig(rank=2, targets=("q_proj", "down_proj")))
    assert {n.split(".")[-4] for n in taught.optim.weights()} == {"q_proj", "down_proj"}
    with pytest.raises(LearnerError, match="q_proj"):
        learner(folder, lora=LoraConfig(rank=2, targets=("query",)))
    with pytest.raises(LearnerError, match="lm_head"):
        learner(folder, lora=LoraConfig(rank=2, targets=("lm_head",)))


@pytest.fixture(scope="module")
def broad(tmp_path_factory):
    """A model whose matrices are large enough for the embedded engine to lay them out."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=64, hidden_size=192, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("broad")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def said(core, prompts):
    """Ids and logprobs that the engine gives, greedily."""
    answers = {k: ([], []) for k in range(len(prompts))}
    for k, prompt in enumerate(prompts):
        core.add(k, prompt, Sampling(temperature=0.0, max_tokens=6), ())
    while core.busy:
        for k, chunk in core.step():
            answers[k][0].extend(chunk.ids)
            answers[k][1].extend(chunk.logprobs)
    return [answers[k] for k in range(len(prompts))]


def test_the_embedded_engine_serves_the_adapter_as_it_changes(broad):
    taught = learner(broad, lora=LoraConfig(rank=8))
    core = Core(taught.model, EngineConfig(max_sequences=4), context=64)
    prompts = [[k + 1, 7, 9, 11 + k] for k in range(4)]
    before = said(core, prompts)
    stirred(taught.model)
    core.load("1.1")
    after = said(core, prompts)
    assert [ids for ids, _ in before] != [ids for ids, _ in after]
    for prompt, (ids, logps) in zip(prompts, after, strict=True):
        with torch.no_grad():
            logits = taught.model(input_ids=torch.tensor([prompt + ids])).logits[0]
        wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(logps), wanted, atol=1e-4)
    with lora.without_adapter(taught.model):
        core.load("1.2")
        assert [ids for ids, _ in said(core, prompts)] == [ids for ids, _ in before]
