"""Going on from an earlier run: a new one's folder, what --overwrite may delete, what a resumed run may change."""

import os
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from strop import config as configs
from strop.cli import main
from strop.config import Config, LoopConfig, StoreConfig
from strop.errors import ConfigError, PlaceError
from strop.models.checksums import write_sums
from strop.monitor.summary import summarize
from strop.run import new_folder, start_from
from strop.run.folder import RunFolder, find_free

CLUSTER = ("cluster.jsonl", "processes.jsonl", "learner-1.log", "learner-10.log", "gateway-0.log", "runner-3.log")


def begun(path: Path, config: Config | None = None) -> Path:
    """A run's folder, as one leaves it."""
    run = RunFolder.create(path)
    run.keep(config or Config(agent="a.py:agent", tasks="t.jsonl"))
    for name in ("store.sqlite", "store.sqlite-wal", "metrics.jsonl", "summary.json", "learner.log", *CLUSTER):
        (path / name).write_text("of the run")
    (path / "checkpoints" / "step-000002-1").mkdir()
    run.checkpoint("step-000001-1").mkdir()
    (run.set_aside("step-000001-1") / "model.safetensors").write_text("of the run, and damaged")
    for place in (path, path / "replica-2"):
        (place / "weights" / "1.2").mkdir(parents=True)
        (place / "vllm.log").write_text("of the run")
    run.name_best("step-000002-1")
    run.close()
    return path


def place_of(path: Path) -> Path:
    with start_from.choose_place(path, overwrite=False) as place:
        return place


def everything(path: Path) -> dict[str, str]:
    return {str(p.relative_to(path)): p.read_text() for p in path.rglob("*") if p.is_file()}


def test_a_new_run_never_touches_one_that_is_there(tmp_path: Path) -> None:
    demo = begun(tmp_path / "demo")
    before = everything(demo)
    assert place_of(demo) == tmp_path / "demo-2"
    begun(tmp_path / "demo-2")
    assert find_free(demo, RunFolder.is_taken) == tmp_path / "demo-3"
    assert everything(demo) == before
    assert place_of(tmp_path / "new") == tmp_path / "new"


def test_a_folder_where_a_run_is_about_to_begin_is_taken(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "demo")  # it has no configuration yet
    assert place_of(tmp_path / "demo") == tmp_path / "demo-2"
    run.close()
    assert place_of(tmp_path / "demo") == tmp_path / "demo"


def test_overwrite_deletes_a_run_and_nothing_of_the_users(tmp_path: Path) -> None:
    demo = begun(tmp_path / "demo")
    (demo / "notes.md").write_text("mine")
    (demo / "tasks.jsonl").write_text("mine")
    (demo / "checkpoints" / "kept").mkdir()
    (demo / "checkpoints" / "kept" / "model").write_text("mine")
    config = (demo / "config.json").read_bytes()
    kept = {"notes.md": "mine", "tasks.jsonl": "mine", "checkpoints/kept/model": "mine", "lock": ""}
    with start_from.choose_place(demo, overwrite=True) as place:
        assert place == demo
        assert {name: text for name, text in everything(demo).items() if not name.startswith(".overwritten/")} == kept
        run = RunFolder.create(demo)
        run.keep(Config(seed=7))
        assert not (demo / ".overwritten").exists()
        run.close()
    assert (demo / "config.json").read_bytes() != config
    assert everything(demo).keys() == {*kept, "config.json"}


@pytest.mark.parametrize("killed", [False, True])
def test_what_would_be_overwritten_stays_until_another_run_has_begun(tmp_path: Path, killed: bool) -> None:
    demo = begun(tmp_path / "demo")
    before = everything(demo)

    def fails() -> None:
        with start_from.choose_place(demo, overwrite=True):
            run = RunFolder.create(demo)
            (demo / "store.sqlite").write_text("the new one's")
            (demo / "checkpoints" / "step-000001-1").mkdir()
            run.close()
            raise ConfigError("no such model")

    if killed:  # nothing is put back
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(new_folder, "_put_back", lambda _: None)
            with pytest.raises(ConfigError):
                fails()
        assert place_of(demo) == tmp_path / "demo-2"
    with pytest.raises(ConfigError):
        fails()
    assert everything(demo) == before


def test_a_run_that_never_begins_leaves_nothing_but_what_logs_say(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    def refused(path: Path, *, overwrite: bool) -> None:
        with start_from.choose_place(path, overwrite=overwrite) as place:
            run = RunFolder.create(place)
            for name in ("store.sqlite", "store.sqlite-wal", "learner.log", "agent_given.py", "key", *CLUSTER):
                (place / name).touch()
            for folder in (place / "policies" / "a", place / "replica-2"):
                folder.mkdir(parents=True)
                (folder / "learner.log").touch()
            (place / "agents.log").write_text(said)
            run.close()

    said = ""
    for overwrite in (False, True):
        refused(runs / "new", overwrite=overwrite)
        assert not runs.exists()
    said = "it died"
    refused(runs / "new", overwrite=False)
    assert [path.name for path in (runs / "new").iterdir()] == ["agents.log"]
    begun(runs / "old")
    before = everything(runs / "old")
    refused(runs / "old", overwrite=True)
    assert everything(runs / "old") == before
    (runs / "half").mkdir()
    (runs / "half" / "store.sqlite").write_text("of a run whose settings are lost")
    refused(runs / "half", overwrite=False)
    assert (runs / "half" / "store.sqlite").exists()


def test_what_another_process_is_about_to_begin_stays(tmp_path: Path) -> None:
    with start_from.choose_place(tmp_path / "run", overwrite=False) as place:
        other = RunFolder.create(place)
    assert (tmp_path / "run" / "lock").exists()
    other.close()


def test_overwrite_follows_no_link_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("mine")
    demo = begun(tmp_path / "demo")
    (demo / "tensorboard").symlink_to(tmp_path / "elsewhere")
    with start_from.choose_place(demo, overwrite=True):
        run = RunFolder.create(demo)
        run.keep(Config())
        run.close()
    assert not (demo / "tensorboard").is_symlink()
    assert (tmp_path / "elsewhere" / "precious").read_text() == "mine"


@pytest.mark.parametrize("what", ["a model", "a project", "a live run", "a database", "the source"])
def test_overwrite_refuses_what_is_not_its_to_delete(tmp_path: Path, what: str) -> None:
    place = tmp_path / "place"
    if what in ("a model", "a project"):
        (place / ("checkpoints" if what == "a project" else "model")).mkdir(parents=True)
        (place / "config.json").write_text('{"model_type": "llama"}')
        (place / "learner.log").write_text("mine")
    else:
        begun(place, Config(store=StoreConfig(url="postgresql://me@here/db")) if what == "a database" else None)
    held = RunFolder.open(place) if what == "a live run" else None
    before = everything(place)
    with (
        pytest.raises(PlaceError),
        start_from.choose_place(place, overwrite=True, beside=place if what == "the source" else None),
    ):
        pass
    assert everything(place) == before
    if held:
        held.close()


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        *("loop.steps=40", "learner.optim.lr=1e-5", "learner.optim.decay=90", "loop.eval_every=5"),
        "loop.eval_samples=4",
        *("loop.checkpoint_every=3", "policy.eval.temperature=0.5", "monitor.writers=['tensorboard']"),
        *("runner.workers=2", "runner.timeout=5", "runner.retries.timeout.limit=1"),
    ],
)
def test_what_a_resumed_run_may_change(tmp_path: Path, setting: str) -> None:
    folder = begun(tmp_path / "run")
    config, changes = start_from.change_settings(folder, sets=[setting])
    assert list(changes) == [setting.partition("=")[0]]
    run = RunFolder.open(folder)
    run.change(changes, step=2)
    run.close()
    assert RunFolder.config(folder) == config  # the next resume has it
    assert start_from.change_settings(folder, sets=[setting]) == (config, {})  # said again it changes nothing


@pytest.mark.parametrize(
    "setting",
    [
        *("loop.groups=3", "loop.group_size=2", "loop.staleness=1", "seed=4", "agent=b.py:agent", "tasks=u.jsonl"),
        *("policy.model=smollm2-135m", "policy.train.temperature=0.5", "algorithm.name=rloo", "folder=elsewhere"),
        *("algorithm.settings.clip=0.1", "learner.lora.rank=8", "learner.optim.betas=[0.1, 0.2]", "store.url=x"),
    ],
)
def test_what_a_resumed_run_keeps(tmp_path: Path, setting: str) -> None:
    folder = begun(tmp_path / "run")
    with pytest.raises(ConfigError) as refused:
        start_from.change_settings(folder, sets=[setting, "loop.steps=3"])
    assert f"keeps its {setting.partition('=')[0]}" in str(refused.value)
    assert f"--from {folder}" in str(refused.value)


TWO = configs.load(
    sets=["agent=a.py:agent", "tasks=t.jsonl", "policies.writer.agents=['w*']", "policies.critic.learner.optim.lr=0.5"]
)


@pytest.mark.parametrize(
    ("setting", "before"),
    [
        ("policies.critic.learner.optim.lr=0.1", 0.5),
        ("policies.writer.learner.optim.lr=0.1", Config().learner.optim.lr),
        ("policies.writer.learner.critic.warmup=3", Config().learner.critic.warmup),
        ("policies.writer.eval.temperature=0.5", Config().policy.eval.temperature),
        ("learner.optim.lr=0.1", Config().learner.optim.lr),
    ],
)
def test_what_a_resumed_run_may_change_of_one_of_several_policies(tmp_path: Path, setting: str, before: float) -> None:
    folder = begun(tmp_path / "run", TWO)
    config, changes = start_from.change_settings(folder, sets=[setting])
    name, _, value = setting.partition("=")
    assert changes == {name: (before, float(value))}
    run = RunFolder.open(folder)
    run.change(changes, step=2)
    run.close()
    assert RunFolder.config(folder) == config
    assert start_from.change_settings(folder, sets=[setting]) == (config, {})
    assert RunFolder.config(folder, 2) == replace(TWO, folder=str(folder))  # steps that were made before have the old


@pytest.mark.parametrize(
    "setting",
    [
        *("policies.critic.model=smollm2-135m", "policies.writer.agents=['x']", "policies.critic.learner.lora.rank=8"),
        *(
            "policies.critic.algorithm.name=rloo",
            "policies.writer.train.temperature=0.5",
            "policies.writer.engine.threads=1",
        ),
    ],
)
def test_what_each_of_several_policies_keeps(tmp_path: Path, setting: str) -> None:
    folder = begun(tmp_path / "run", TWO)
    with pytest.raises(ConfigError, match=f"keeps its {setting.partition('=')[0]}; "):
        start_from.change_settings(folder, sets=[setting])


def test_a_resumed_run_gets_no_policy_more(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", TWO)
    with pytest.raises(ConfigError, match=r"keeps its policies\.third"):
        start_from.change_settings(folder, sets=["policies.third.learner.optim.lr=0.5"])


def parts(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "strop.json").write_text("{}")
    return folder


def test_one_model_is_one_part_of_a_checkpoint_of_several_policies(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", TWO)
    checkpoint = parts(folder / "checkpoints" / "step-000002-1", "critic", "writer")
    with pytest.raises(PlaceError, match=r"\(critic, writer\), and one model is asked for\. Fix: .*--policy critic"):
        start_from.require_checkpoint(str(folder), best=False)
    with pytest.raises(PlaceError, match=r"and none of them is 'judge'\. Fix: name one"):
        start_from.require_checkpoint(str(folder), best=False, policy="judge")
    assert start_from.require_checkpoint(str(folder), best=False, policy="writer") == checkpoint / "writer"
    assert start_from.require_checkpoint(str(checkpoint), best=False, policy="writer") == checkpoint / "writer"
    assert start_from.require_checkpoint(str(checkpoint / "critic"), best=False) == checkpoint / "critic"
    with pytest.raises(PlaceError, match=r"is one model, without parts .*\. Fix: leave out --policy"):
        start_from.require_checkpoint(str(checkpoint / "critic"), best=False, policy="critic")


def test_several_policies_begin_from_a_checkpoint_with_a_part_for_each(tmp_path: Path) -> None:
    config = replace(TWO, folder=str(tmp_path / "new"))
    with pytest.raises(PlaceError, match=r"has no part of the policy critic\. Fix: "):
        start_from.begin_from(parts(tmp_path / "step-000002-1", "writer"), config)
    with pytest.raises(PlaceError, match=r"has no part of the policy writer\. Fix: "):
        start_from.begin_from(parts(tmp_path, "one") / "one", config)


def test_what_was_changed_when_can_be_read(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    run = RunFolder.open(folder)
    run.change({"learner.optim.lr": (1e-6, 1e-5)}, step=2)
    run.change({"learner.optim.lr": (1e-5, 1e-4), "loop.steps": (100, 9)}, step=6)
    run.close()
    rates = [RunFolder.config(folder, step=n).learner.optim.lr for n in (1, 2, 3, 6, 7)]
    assert rates == [1e-6, 1e-6, 1e-5, 1e-5, 1e-4]
    assert RunFolder.config(folder).loop.steps == 9
    first = msgspec.json.decode((folder / "changes.jsonl").read_bytes().splitlines()[0])
    assert (first["after_step"], first["changed"]) == (2, {"learner.optim.lr": [1e-6, 1e-5]})


def test_more_steps_than_the_rate_lasts_for_are_warned_of(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    assert not start_from.warn_of_rate(start_from.change_settings(folder, sets=["loop.steps=500"])[0])
    config, _ = start_from.change_settings(folder, sets=["loop.steps=500", "learner.optim.decay=400"])
    assert "learner.optim.decay" in start_from.warn_of_rate(config)


def done(folder: Path, steps: int = 9, *, whole: bool = True) -> Path:
    """A run that made its steps, and its last evaluation too if it is `whole`."""
    run = RunFolder.create(folder)
    run.keep(Config(agent="a.py:agent", tasks="t.jsonl", loop=LoopConfig(steps=steps)))
    checkpoint = run.checkpoint("step-000009-1")
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_text("weights")
    write_sums(checkpoint)
    (folder / "store.sqlite").write_text("of the run")
    run.close()
    told = summarize(RunFolder.config(folder), folder, [], {(0, "test"): {"reward": 0.5}}, seconds=1.0, done=whole)
    told.steps, told.checkpoint = 9, checkpoint.name
    (folder / "summary.json").write_bytes(msgspec.json.encode(told))
    return folder


@pytest.mark.parametrize("more", [[], ["--steps", "9"], ["--steps", "5"]])
def test_a_finished_run_says_so_at_once(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = done(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "strop.run.loop", None)  # nothing is loaded
    assert main(["train", "--resume", str(folder), *more]) == 0
    assert capsys.readouterr().out == f"all 9 steps of {folder} are done. Fix: --steps 19 for more\n"
    assert main(["train", "--resume", str(folder), *more, "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert (told["steps"], told["done"], told["folder"]) == (9, True, str(folder))
    assert not (folder / "changes.jsonl").exists()


def test_a_run_with_something_left_goes_on(tmp_path: Path) -> None:
    def left(folder: Path, *sets: str) -> bool:
        return start_from.find_summary(folder, start_from.change_settings(folder, sets=sets)[1]) is None

    folder = done(tmp_path / "run")
    assert not left(folder)
    assert left(folder, "loop.steps=10")
    assert left(folder, 'loop.eval_splits=["long"]')  # which is to be evaluated
    assert left(done(tmp_path / "evaluation", whole=False))
    assert left(done(tmp_path / "steps", steps=20), "loop.steps=9")  # it may have gone on behind its summary
    run = RunFolder.open(folder)
    assert left(folder)  # somebody is at work, which is an error
    run.close()
    (folder / "checkpoints" / "step-000009-1" / "model.safetensors").write_text("damage")
    assert left(folder)  # it is made anew
    lost = done(tmp_path / "lost")
    (lost / "store.sqlite").unlink()
    assert left(lost)
    changed = done(tmp_path / "changed")
    run = RunFolder.open(changed)
    run.change({"loop.eval_samples": (1, 2)}, step=9)
    run.close()
    os.utime(changed / "summary.json", (1, 1))
    assert left(changed)


def test_logs_of_a_run_that_never_began_are_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text("it has no vLLM")
    with new_folder.overwrite(tmp_path):
        assert (tmp_path / "vllm.log").exists()
    (tmp_path / "thesis.tex").touch()
    with (
        pytest.raises(PlaceError, match="holds no run, and --overwrite deletes runs only"),
        new_folder.overwrite(tmp_path),
    ):
        pass


# -- checkpoints by name -----------------------------------------------------------------------------------------------


def test_checkpoints_by_step(tmp_path: Path) -> None:
    folder = begun(tmp_path / "a:2")  # a name may hold what looks like a step
    (folder / "checkpoints" / "step-000010-1").mkdir()
    (folder / "checkpoints" / "step-000010-2").mkdir()
    for name, found in (("", "10-2"), (":2", "02-1"), (":10", "10-2"), (":best", "02-1")):
        run, checkpoint = start_from.find_source(f"{folder}{name}")
        assert (run, checkpoint.name) == (folder, f"step-0000{found}")
    with pytest.raises(PlaceError, match="steps 2, 10"):
        start_from.find_source(f"{folder}:3")
    with pytest.raises(PlaceError, match="holds no run"):
        start_from.find_source(str(tmp_path / "nowhere:3"))
    RunFolder.create(tmp_path / "new").close()
    with pytest.raises(PlaceError, match="no checkpoint yet"):
        start_from.find_source(str(tmp_path / "new:3"))


def test_a_policy_that_is_frozen_from_now_on_keeps_what_it_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its adapter is merged into its model, and it has none any more."""
    monkeypatch.setattr("strop.learner.export.export", lambda part, place: place.mkdir(parents=True))
    for name in ("left", "right"):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
        (tmp_path / "checkpoint" / name / "strop.json").write_text("{}")
    sets = [f"policies.{name}.learner.lora.rank=4" for name in ("left", "right")]
    config = configs.load(sets=[*sets, "policies.right.frozen=true", f"folder={tmp_path / 'run'}"])
    begun = start_from.begin_from(tmp_path / "checkpoint", config)
    configs.refuse_frozen_adapters(begun)
    models = {name: Path(own.policy.model) for name, own in configs.resolve_policies(begun).items()}
    assert models == {name: tmp_path / "run" / "start" / name for name in ("left", "right")}
    assert begun.policies["left"]["learner"] == {"lora": {"rank": 4}}


def test_the_one_policy_that_is_trained_is_the_whole_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    config = configs.load(sets=["policies.left.model=x", "policies.right.model=y", "policies.right.frozen=true"])
    (tmp_path / "config.json").write_bytes(configs.to_json(config))
    assert start_from.choose_policy(tmp_path, tmp_path / "checkpoint", "left") == tmp_path / "checkpoint"
    with pytest.raises(PlaceError, match=r"policies\.right is not trained, .* Fix: use its model, y"):
        start_from.choose_policy(tmp_path, tmp_path / "checkpoint", "right")
    with pytest.raises(PlaceError, match=r"no policy 'nobody'\. Fix: name one of left, right"):
        start_from.choose_policy(tmp_path, tmp_path / "checkpoint", "nobody")


def test_another_algorithm_leaves_behind_what_it_does_not_know() -> None:
    """What was set by hand stays, so that a misspelt name is refused."""
    before = configs.load(algorithm={"name": "grpo", "settings": {"clip": 0.3, "aggregation": "rollout-mean"}})
    after = configs.load(
        base=before, sets=["algorithm.name=sft", "algorithm.settings.runs=a", "algorithm.settings.tpo=3"]
    )
    found = start_from.drop_other_settings(after, before)
    assert found.algorithm.settings == {"aggregation": "rollout-mean", "runs": "a", "tpo": 3}
    assert start_from.drop_other_settings(before, before) is before
