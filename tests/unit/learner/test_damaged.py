"""Checkpoints that are not what was written: named by the file, and nothing of them is used."""

import shutil
import subprocess

import pytest
import torch

from strop.cli import main
from strop.config import LoraConfig, PolicyConfig
from strop.errors import DamagedCheckpoint, ModelError
from strop.learner.export import export
from strop.models.checksums import SUMS
from strop.models.names import prepare_folder
from tests.damage import DAMAGES, bit_flipped, cut_off, emptied, garbage, missing
from tests.unit.learner.practice import learner

FILES = ["model.safetensors", "optimizer.pt", "strop.json"]


@pytest.fixture
def saved(folder, tmp_path):
    learner(folder).save(tmp_path / "c", {"step": 1})
    return tmp_path / "c"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_what_is_damaged_is_named_and_not_restored(folder, saved, name, damage):
    damage(saved / name)
    taught = learner(folder)
    before = {n: tensor.clone() for n, tensor in taught.optim.weights().items()}
    with pytest.raises(DamagedCheckpoint) as raised:
        taught.restore(saved)
    said = str(raised.value)
    assert said.startswith(f"{saved / name} is damaged")
    assert "weights_only" not in said
    assert "\n" not in said
    assert all(torch.equal(tensor, before[n]) for n, tensor in taught.optim.weights().items())


@pytest.mark.parametrize("damage", [cut_off, emptied, missing, garbage])
@pytest.mark.parametrize("name", FILES)
def test_without_checksums_what_cannot_be_read_is_named(folder, saved, name, damage):
    """As earlier versions wrote checkpoints."""
    (saved / SUMS).unlink()
    damage(saved / name)
    with pytest.raises(DamagedCheckpoint) as raised:
        learner(folder).restore(saved)
    assert str(raised.value).startswith(f"{saved / name} is damaged")
    assert "weights_only" not in str(raised.value)


def test_without_checksums_a_whole_checkpoint_is_restored(folder, saved):
    (saved / SUMS).unlink()
    assert learner(folder).restore(saved) == {"step": 1}


@pytest.mark.parametrize("damage", [cut_off, emptied, garbage])
def test_damaged_checksums_are_damage_too(folder, saved, damage):
    damage(saved / SUMS)
    with pytest.raises(DamagedCheckpoint, match=SUMS):
        learner(folder).restore(saved)


def test_checksums_of_some_files_only_are_damage_too(folder, saved):
    lines = (saved / SUMS).read_text().splitlines(keepends=True)
    (saved / SUMS).write_text("".join(lines[:2]))
    with pytest.raises(DamagedCheckpoint, match=SUMS):
        learner(folder).restore(saved)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_anyone_can_check_the_files(saved):
    subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=saved, check=True)
    noted = {line.split("  ")[1] for line in (saved / SUMS).read_text().splitlines()}
    assert noted == {file.name for file in saved.iterdir()} - {SUMS}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_not_exported_nor_served(saved, tmp_path, capsys, damage):
    damage(saved / "model.safetensors")
    with pytest.raises(DamagedCheckpoint):
        prepare_folder(PolicyConfig(model=str(saved)))
    assert main(["export", str(saved), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"strop: {saved}/model.safetensors is damaged")
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_damaged_model_without_checksums_is_not_exported(saved, tmp_path, capsys):
    (saved / SUMS).unlink()
    cut_off(saved / "model.safetensors")
    assert main(["export", str(saved), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"strop: {saved}/model.safetensors is damaged")


def test_what_only_training_needs_may_be_damaged_elsewhere(saved, tmp_path):
    for name in ("optimizer.pt", "strop.json"):
        bit_flipped(saved / name)
    export(saved, tmp_path / "out")
    assert SUMS not in {file.name for file in (tmp_path / "out").iterdir()}  # it would speak of other files
    prepare_folder(PolicyConfig(model=str(saved)))


def test_an_adapters_description_may_be_changed(folder, tmp_path):
    """The message about a model that was moved tells users to."""
    taught = learner(folder, lora=LoraConfig(rank=2, targets=("q_proj",)))
    taught.save(tmp_path / "a")
    description = tmp_path / "a" / "adapter_config.json"
    moved = shutil.copytree(folder, tmp_path / "moved")
    description.write_text(description.read_text().replace(str(folder), str(moved)))
    export(tmp_path / "a", tmp_path / "out")
    bit_flipped(tmp_path / "a" / "adapter_model.safetensors")
    for merge in (True, False):
        with pytest.raises(DamagedCheckpoint, match="adapter_model"):
            export(tmp_path / "a", tmp_path / "again", merge=merge)


def test_memory_that_is_short_is_no_damage(folder, saved, monkeypatch):
    """A checkpoint would be set aside for it."""

    def short(*_, **__):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "load", short)
    with pytest.raises(RuntimeError, match="can't allocate"):
        learner(folder).restore(saved)


def test_a_folder_that_is_no_checkpoint_is_told_from_a_damaged_one(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="is not a checkpoint"):
        export(tmp_path / "empty", tmp_path / "out")
