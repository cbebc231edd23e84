"""The way back of a run whose checkpoints or store were damaged, with a real store, a real folder and a learner of a
model so small that a step takes milliseconds."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from strop.errors import PlaceError, StoreError
from strop.models.checksums import SUMS
from strop.monitor.metrics import MetricsFile
from strop.run.checkpoints import finish_checkpoint
from strop.run.loop import advance
from strop.run.resume import go_back
from tests.damage import DAMAGES, bit_flipped, cut_off, garbage, missing
from tests.unit.run.tiny_run import STEPS, closed, collected, opened, resumed, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def trained(tmp_path: Path, model: Path) -> tuple[Path, list[str]]:
    """The folder of a run that was killed after four steps, and the fingerprints of their weights."""
    run = await opened(tmp_path / "run", model)
    run.metrics = MetricsFile(run.folder.metrics, [], {})
    while run.step < STEPS:
        await advance(run, await collected(run))
    await finish_checkpoint(run)
    digests = [str(step.digest) for step in await run.store.steps()]
    assert len(set(digests)) == STEPS
    await closed(run)
    return tmp_path / "run", digests


def checkpoint(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:06d}-1"


# -- checkpoints -------------------------------------------------------------------------------------------------------


async def test_whole_checkpoints_are_not_spoken_of(trained, model) -> None:
    folder, digests = trained
    assert await resumed(folder, model) == (["1.1", "1.2", "1.3", "1.4"], digests, [])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
async def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(trained, model, name, damage) -> None:
    folder, digests = trained
    damage(checkpoint(folder, 4) / name)
    versions, again, (note,) = await resumed(folder, model)
    assert versions == ["1.1", "1.2", "1.3", "2.4"]
    assert again == digests  # bit for bit
    assert note.startswith(f"{checkpoint(folder, 4) / name} is damaged")
    assert "(kept as step-000004-1.damaged): going back to the checkpoint of step 3; step 4 is trained again" in note
    assert "nothing is lost" in note
    assert checkpoint(folder, 4).with_name("step-000004-1.damaged").is_dir()
    assert (await resumed(folder, model))[2] == []  # it was made anew


async def test_with_every_checkpoint_damaged_the_run_begins_where_it_began(trained, model) -> None:
    folder, digests = trained
    for number in range(1, STEPS + 1):
        bit_flipped(checkpoint(folder, number) / "model.safetensors")
    versions, again, (note,) = await resumed(folder, model)
    assert versions == ["2.1", "2.2", "2.3", "2.4"]
    assert again == digests
    assert "going back to the model that the run began with; steps 1 to 4 are trained again" in note
    assert all(f"step-{number:06d}-1.damaged" in note for number in range(1, STEPS + 1))


async def test_a_checkpoint_of_which_only_the_folder_is_left_is_set_aside(trained, model) -> None:
    folder, digests = trained
    for file in checkpoint(folder, 4).iterdir():
        file.unlink()
    versions, again, (note,) = await resumed(folder, model)
    assert (versions, again) == (["1.1", "1.2", "1.3", "2.4"], digests)
    assert note.startswith(f"{checkpoint(folder, 4)} is not a checkpoint (kept as step-000004-1.damaged): going back")


async def test_a_newest_checkpoint_that_is_gone_is_missed(trained, model) -> None:
    folder, digests = trained
    checkpoint(folder, 4).rename(folder / "elsewhere")
    versions, again, (note,) = await resumed(folder, model)
    assert (versions, again) == (["1.1", "1.2", "1.3", "2.4"], digests)
    assert note.startswith(f"{checkpoint(folder, 4)} is missing: going back to the checkpoint of step 3")


async def test_checkpoints_of_earlier_versions_are_gone_on_from(trained, model) -> None:
    folder, digests = trained
    for number in range(1, STEPS + 1):
        (checkpoint(folder, number) / SUMS).unlink()
    assert await resumed(folder, model) == (["1.1", "1.2", "1.3", "1.4"], digests, [])
    garbage(checkpoint(folder, 4) / "optimizer.pt")
    versions, again, (note,) = await resumed(folder, model)
    assert (versions, again) == (["1.1", "1.2", "1.3", "3.4"], digests)
    assert "weights_only" not in note


# -- the store ---------------------------------------------------------------------------------------------------------


def bit_in_the_middle(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def earlier(folder: Path, *, steps: int) -> None:
    """The store as it was some steps ago, as after a log that was lost."""
    with sqlite3.connect(folder / "store.sqlite") as db:
        db.execute("DELETE FROM steps WHERE number > ?", (steps,))
        db.execute("DELETE FROM consumed WHERE number > ?", (steps,))
    db.close()


async def test_steps_that_are_gone_from_the_store_are_missed(trained, model) -> None:
    folder, _ = trained
    earlier(folder, steps=2)
    with pytest.raises(StoreError) as raised:
        await resumed(folder, model)
    said = str(raised.value)
    assert f"the store of {folder} ends with step 2, but 2 steps, 3 to 4, are known to have been made" in said
    assert f"strop train --from {folder}" in said
    assert checkpoint(folder, 4).is_dir()  # nothing was deleted


@pytest.mark.parametrize("damage", [bit_in_the_middle, cut_off, missing])
async def test_a_damaged_log_of_the_store_is_missed(tmp_path, model, damage) -> None:
    """SQLite takes a log up to the first frame that is not as it was written, and says nothing of the rest."""
    run = await opened(tmp_path / "run", model)
    run.metrics = MetricsFile(run.folder.metrics, [], {})
    while run.step < STEPS:
        await advance(run, await collected(run))
    await finish_checkpoint(run)
    killed = Path(shutil.copytree(tmp_path / "run", tmp_path / "killed"))  # as the files are in this moment
    await closed(run)
    damage(killed / "store.sqlite-wal")
    with pytest.raises(StoreError, match=r"is damaged|ends with step \d, but .* known to have been made"):
        await resumed(killed, model)
    assert checkpoint(killed, STEPS).is_dir()


async def test_metrics_alone_tell_of_steps(trained, model) -> None:
    folder, _ = trained
    earlier(folder, steps=3)
    with pytest.raises(StoreError, match="ends with step 3, but step 4 is known to have been made"):
        await resumed(folder, model)


async def test_checkpoints_alone_tell_of_all_but_the_last(trained, model) -> None:
    folder, _ = trained
    (folder / "metrics.jsonl").unlink()
    earlier(folder, steps=2)
    with pytest.raises(StoreError, match="ends with step 2, but step 3 is known to have been made"):
        await resumed(folder, model)


async def test_a_whole_line_that_is_gone_is_missed(trained, model) -> None:
    """Steps 3 and 4 were made again in lineage 2, and the store is back at what it was before: no number is missing."""
    folder, _ = trained
    for number in (3, 4):
        bit_flipped(checkpoint(folder, number) / "model.safetensors")
    await resumed(folder, model)
    with sqlite3.connect(folder / "store.sqlite") as db:
        for table, column in (("steps", "lineage"), ("consumed", "lineage"), ("lineages", "number")):
            db.execute(f"DELETE FROM {table} WHERE {column} = 2")
        db.execute("UPDATE steps SET superseded = 0")
    db.close()
    with pytest.raises(StoreError, match=r"knows nothing of step-000003-2, step-000004-2"):
        await resumed(folder, model)
    assert (folder / "checkpoints" / "step-000004-2").is_dir()


async def test_a_checkpoint_whose_step_was_never_committed_is_no_loss(trained, model) -> None:
    """Killed between checkpoint and commit: metrics know nothing of it."""
    folder, digests = trained
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:3]) + b'{"step":4,"ac')  # a line cut off tells nothing
    earlier(folder, steps=3)
    assert await resumed(folder, model) == (["1.1", "1.2", "1.3"], digests[:3], [])


async def test_whoever_moves_the_witnesses_away_goes_on_without_those_steps(trained, model) -> None:
    folder, digests = trained
    earlier(folder, steps=2)
    for path in (folder / "metrics.jsonl", checkpoint(folder, 4)):
        path.rename(folder / f"{path.name}-aside")
    assert await resumed(folder, model) == (["1.1", "1.2"], digests[:2], [])


async def test_a_line_that_was_replaced_is_no_loss(trained, model) -> None:
    """Going back leaves fewer steps in the present line than metrics had; the store knows the others too."""
    folder, digests = trained
    bit_flipped(checkpoint(folder, 4) / "model.safetensors")
    run = await opened(folder, model)
    await go_back(run)  # and is killed before anything is replayed
    await closed(run)
    assert (await resumed(folder, model))[:2] == (["1.1", "1.2", "1.3", "3.4"], digests)


@pytest.mark.parametrize("how", ["gone", "empty"])
async def test_a_store_that_is_not_there_is_not_made_anew(trained, model, how) -> None:
    folder, _ = trained
    store, log = folder / "store.sqlite", folder / "store.sqlite-wal"
    store.unlink()
    log.write_bytes(b"everything")
    if how == "empty":
        store.touch()
    with pytest.raises(
        PlaceError, match=rf"store.sqlite is {how}, which has all that the run recorded\. Fix: put it back"
    ):
        await opened(folder, model)
    assert log.read_bytes() == b"everything"
