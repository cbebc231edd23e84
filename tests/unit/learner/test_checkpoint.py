import errno
import io
import json
import os
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from strop import config as configs
from strop.cli import main
from strop.config import LoraConfig
from strop.errors import LearnerError, ModelError, PlaceError
from strop.learner import checkpoint, snapshot
from strop.learner.export import export
from strop.learner.summed_file import SummedFile
from strop.run.checkpoints import keep_checkpoints
from strop.run.folder import RunFolder
from strop.types import Step
from tests.limits import stretch
from tests.unit.learner.practice import Critical, credited, learner


def test_random_numbers_go_on_where_they_were(folder, tmp_path):
    taught = learner(folder)
    torch.rand(3), np.random.rand(5), random.random(), random.gauss(0, 1)
    taught.save(tmp_path / "c")
    drawn = torch.rand(2).tolist(), np.random.randn(3).tolist(), random.random(), random.gauss(0, 1)
    learner(folder).restore(tmp_path / "c")
    assert (torch.rand(2).tolist(), np.random.randn(3).tolist(), random.random(), random.gauss(0, 1)) == drawn


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(folder, tmp_path, monkeypatch):
    """Every file of it and their folder, then the name, then the folder of the name: else a step that was committed
    may name weights that a power cut took."""
    place, done, sync, rename = tmp_path / "c", [], os.fsync, os.rename

    def seen_sync(handle):
        done.append(("synced", os.fstat(handle).st_ino))
        sync(handle)

    def seen_rename(source, target, **kwargs):
        done.append(("named", os.stat(source).st_ino))
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "fsync", seen_sync)
    monkeypatch.setattr(os, "rename", seen_rename)
    learner(folder).save(place, {"step": 1})
    named = done.index(("named", place.stat().st_ino))
    before, after = done[:named], done[named + 1 :]
    files = list(place.iterdir())
    assert {"model.safetensors", "optimizer.pt", "strop.json", "config.json"} <= {file.name for file in files}
    assert {("synced", file.stat().st_ino) for file in [*files, place]} <= set(before)
    assert ("synced", tmp_path.stat().st_ino) in after


@pytest.mark.parametrize("kind", ["model", "masters", "adapter", "critic"])
def test_what_is_written_is_what_was_there_when_it_was_begun(folder, episodes, tmp_path, monkeypatch, kind):
    """Updates change weights, moments and random numbers in place while the thread that writes is still at it."""
    gate, save = threading.Event(), checkpoint.save

    def wait(*args, **kwargs):
        gate.wait(stretch(10))  # a test that failed does not hang
        save(*args, **kwargs)

    def build():
        if kind == "critic":
            return learner(folder, Critical())
        dtype = torch.bfloat16 if kind == "masters" else None
        return learner(folder, dtype=dtype, lora=LoraConfig(rank=2 if kind == "adapter" else 0))

    def go_on(taught):
        """The weights after two updates, which depend on every moment, the count of steps and the critic."""
        for seed in (7, 8):
            taught.update(credited(taught, episodes(seed=seed)))
        return taught.digest(), torch.rand(1).item()

    taught = build()
    taught.update(credited(taught, episodes()))
    monkeypatch.setattr(checkpoint, "save", wait)
    taught.begin_save(tmp_path / "c", {"step": 1})
    there = taught.digest()
    after = go_on(taught)
    assert taught.digest() != there
    assert not (tmp_path / "c").exists()
    gate.set()
    taught.finish_save()
    again = build()
    assert again.restore(tmp_path / "c") == {"step": 1}
    assert again.digest() == there
    assert go_on(again) == after


def test_one_checkpoint_is_written_at_a_time(folder, tmp_path):
    """The next one lies in the same memory."""
    taught = learner(folder)
    taught.begin_save(tmp_path / "c")
    with pytest.raises(AssertionError, match="at a time"):
        taught.begin_save(tmp_path / "d")
    taught.finish_save()
    taught.save(tmp_path / "d")
    assert (tmp_path / "d" / "model.safetensors").is_file()


def test_without_memory_for_a_copy_it_is_written_at_once(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(snapshot, "available_memory", lambda: 1000)
    taught = learner(folder)
    taught.begin_save(tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").is_file()
    assert "training waits until checkpoints are written" in caplog.text
    taught.finish_save()
    learner(folder).restore(tmp_path / "c")


def test_what_keeps_a_checkpoint_from_being_written_is_raised_at_its_end(folder, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    taught = learner(folder)
    with monkeypatch.context() as patch:
        patch.setattr(SummedFile, "write", refuse)
        taught.begin_save(tmp_path / "c")
        with pytest.raises(LearnerError, match=r"c cannot be written: No space left on device\. Fix: free some space"):
            taught.finish_save()
    assert not list(tmp_path.iterdir())
    taught.save(tmp_path / "c")  # there is space again


def test_an_exported_model_is_a_plain_folder_without_the_training(folder, episodes, tmp_path):
    taught = learner(folder, dtype=torch.bfloat16)
    taught.update(credited(taught, episodes()))
    taught.save(tmp_path / "c", {"step": 1})
    export(tmp_path / "c", tmp_path / "whole")
    export(tmp_path / "c", tmp_path / "half", dtype="bfloat16")
    names = {file.name for file in (tmp_path / "c").iterdir()} - {"optimizer.pt", "strop.json", "SHA256SUMS"}
    assert {file.name for file in (tmp_path / "whole").iterdir()} == names
    trained = taught.optim.weights()
    for folder, dtype in ((tmp_path / "whole", torch.float32), (tmp_path / "half", torch.bfloat16)):
        stock = AutoModelForCausalLM.from_pretrained(folder)
        assert stock.dtype == dtype
        assert all(torch.equal(p, trained[n].to(dtype)) for n, p in stock.named_parameters())


def test_what_cannot_be_exported_is_said(folder, tmp_path):
    learner(folder).save(tmp_path / "c")
    with pytest.raises(ModelError, match="not a checkpoint"):
        export(tmp_path, tmp_path / "out")
    with pytest.raises(PlaceError, match="there already"):
        export(tmp_path / "c", folder)
    with pytest.raises(ModelError, match=r"without an adapter\. Fix: leave out --adapter"):
        export(tmp_path / "c", tmp_path / "out", merge=False)
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_made_is_named(folder, tmp_path, capsys):
    learner(folder).save(tmp_path / "c")
    (tmp_path / "file").touch()
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "file" / "out")]) == 2
    said = capsys.readouterr().err
    assert said == f"strop: {tmp_path}/file/out cannot be written: Not a directory. Fix: choose another place\n"


def test_a_checkpoint_of_another_model_is_refused(folder, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    learner(folder).save(tmp_path / "c")
    with pytest.raises(ModelError, match="another model"):
        learner(tmp_path / "other").restore(tmp_path / "c")


def test_the_command_takes_a_runs_newest_checkpoint(folder, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(PlaceError, match="no checkpoint yet"):
        RunFolder.last_checkpoint(run)
    for name in ("step-000009-1", "step-000007-2"):  # lineage 2 began again after step 6
        learner(folder).save(run / "checkpoints" / name)
    assert main(["export", str(run), str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"].endswith("step-000007-2")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size
    assert main(["export", str(run), str(tmp_path / "out")]) != 0
    assert "is there already" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "best"), "--best"]) != 0
    assert "no checkpoint yet" in capsys.readouterr().err
    RunFolder(run, io.BytesIO()).name_best("step-000009-1")
    assert main(["export", str(run), str(tmp_path / "best"), "--best", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"].endswith("step-000009-1")


def test_the_newest_checkpoints_stay_and_the_best(tmp_path):
    """By evaluation; where nothing was evaluated, by the rewards in training."""
    (tmp_path / "checkpoints").mkdir()
    run = SimpleNamespace(
        config=configs.load(sets=["loop.keep_checkpoints=2"]),
        folder=RunFolder(tmp_path, io.BytesIO()),
        steps=[],
        scores={},
        opponents=(),
        writing=None,
    )

    def stand(number, reward):
        name = f"step-{number:06d}-1"
        run.folder.checkpoint(name).mkdir()
        metrics = {"critic/rewards/mean": reward}
        run.steps.append(Step(lineage=1, number=number, rollouts=[], metrics=metrics, checkpoint=name, time=0.0))
        keep_checkpoints(run)
        left = sorted(int(p.name[5:11]) for p in (tmp_path / "checkpoints").iterdir() if p.name != "best")
        return left, int(RunFolder.best_checkpoint(tmp_path).name[5:11])

    assert stand(1, 0.3) == ([1], 1)
    assert stand(2, 0.5) == ([1, 2], 2)  # 0.5 is what the weights of step 1 got, and the best guess for those of 2
    assert stand(3, 0.9) == ([2, 3], 3)
    assert stand(4, 0.6) == ([2, 3, 4], 2)
    run.config = configs.load(sets=["loop.keep_checkpoints=2", "loop.eval_every=5", "algorithm.rewards.exact=2"])
    run.scores |= {(number, "test"): {"reward": 0.5, "exact": 0.1 * (number == 3)} for number in range(1, 7)}
    assert stand(5, 0.9) == ([3, 4, 5], 3)
    assert stand(6, 0.9) == ([3, 5, 6], 3)
    run.scores[6, "test"] = {"reward": 0.5, "exact": 0.2}
    keep_checkpoints(run)
    assert not run.folder.checkpoint("step-000003-1").exists()  # an evaluation is no guess: the second best may go
    run.folder.checkpoint("step-000003-1").mkdir()
    run.scores[6, "test"] = {"reward": 0.5, "exact": 0.0}
    del run.scores[3, "test"]
    assert stand(7, 0.9) == ([6, 7], 6)


def test_where_some_checkpoints_were_evaluated_the_best_of_those_is_the_best(tmp_path):
    """Whatever the settings say of evaluations: a run that was resumed has been evaluated at its former end as well."""
    (tmp_path / "checkpoints").mkdir()
    folder, steps, scores = RunFolder(tmp_path, io.BytesIO()), [], {}
    config = configs.load(sets=["loop.keep_checkpoints=1", "loop.eval_every=0"])
    run = SimpleNamespace(config=config, folder=folder, steps=steps, scores=scores, opponents=(), writing=None)

    def stand(number, reward, score=None):
        folder.checkpoint(name := f"step-{number:06d}-1").mkdir()
        metrics = {"critic/rewards/mean": reward}
        steps.append(Step(lineage=1, number=number, rollouts=[], metrics=metrics, checkpoint=name, time=0.0))
        scores.update({(number, "test"): {"reward": score}} if score is not None else {})
        keep_checkpoints(run)
        return sorted(folder.checkpoints().values()), int(RunFolder.best_checkpoint(tmp_path).name[5:11])

    assert stand(1, 0.2) == ([1], 1)
    assert stand(2, 0.9) == ([1, 2], 2)
    assert stand(3, 0.1, score=0.5) == ([1, 3], 3)  # 1: the best in training, which 3 was not compared with
    assert stand(4, 0.95, score=0.0) == ([1, 3, 4], 3)
    assert stand(5, 1.0) == ([1, 3, 5], 3)


def test_the_best_checkpoint_outlives_a_guess(tmp_path):
    """What the newest weights are worth is not known yet: nothing better is given up for them."""
    (tmp_path / "checkpoints").mkdir()
    folder, steps = RunFolder(tmp_path, io.BytesIO()), []
    config = configs.load(sets=["loop.keep_checkpoints=1"])
    run = SimpleNamespace(config=config, folder=folder, steps=steps, scores={}, opponents=(), writing=None)
    for number, (reward, due) in enumerate([(0.1, True), (0.9, False), (0.5, False), (0.95, True), (0.2, False)], 1):
        name = f"step-{number}" if due else None
        if name:
            folder.checkpoint(name).mkdir()
        metrics = {"critic/rewards/mean": reward}
        steps.append(Step(lineage=1, number=number, rollouts=[], metrics=metrics, checkpoint=name, time=0.0))
        keep_checkpoints(run)
    assert RunFolder.best_checkpoint(tmp_path).name == "step-1"  # 0.9; those of step 4 got 0.2
