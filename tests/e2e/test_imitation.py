"""Imitation as users meet it: from a run, from transcripts, killed and resumed, replayed, gone on from."""

import json
import subprocess
from pathlib import Path

import pytest

from strop.run.history import read
from tests import runs

SETTINGS = """
agent = "strop.demo:agent"
tasks = "{tasks}"
[policy]
model = "strop/nano"
context = 192
train = {{ max_tokens = 48 }}
eval = {{ max_tokens = 48 }}
[learner]
token_budget = 2048
optim = {{ lr = 3e-4, warmup = 3 }}
[engine]
max_sequences = 16
prefill_chunk = 64
deterministic = true
threads = 1
[runner]
workers = 4
[loop]
checkpoint_every = 2
eval_greedy = false
"""
CHAT = [
    {"role": "user", "content": "What is 3 * 4?"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "3 * 4"}'}},
    ]},
    {"role": "tool", "tool_call_id": "a", "content": "12"},
    {"role": "assistant", "content": "3 * 4 = 12."},
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to learn from."""
    folder = tmp_path_factory.mktemp("source") / "rl"
    runs.finish(runs.demo(folder, *runs.SMALL, "loop.steps=2", "loop.groups=8", "loop.eval_every=0"))
    return folder


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    """A run that learnt from it."""
    folder = source.parent / "sft"
    runs.finish(imitate(folder, source))
    return folder


def imitate(folder: Path, source: Path, *sets: str, name: str = "sft") -> list[str]:
    toml = folder.with_suffix(".toml")
    toml.write_text(SETTINGS.format(tasks=f"{Path(runs.__file__).parent / 'small.py'}:tasks"))
    given = [f"algorithm.name={name}", f"algorithm.settings.runs={source}", "algorithm.settings.batch_size=4"]
    given += ["loop.steps=5", *sets]
    return runs.strop(
        "train", "--config", toml, "--folder", folder, "--json", *(f"--set={one}" for one in given)
    )  # fmt: skip


def test_a_run_learns_from_anothers_rollouts(whole: Path, source: Path) -> None:
    told, before = runs.story(whole), runs.story(source)
    trained = [rollout for rollout in told.rollouts if rollout.mode == "train"]
    assert [len(step.rollouts) for step in told.steps] == [4] * 5
    assert sorted(rollout.id for rollout in trained) == sorted(id for step in told.steps for id in step.rollouts)
    assert all(f"copied from {source}" in str(rollout.detail) for rollout in trained)
    assert {rollout.task.split for rollout in trained} == {"train"}
    texts = {str([turn.ids for turn in turns]) for turns in before.turns.values()}
    for rollout in trained:
        turns = told.turns[rollout.id]
        assert str([turn.ids for turn in turns]) in texts
        assert all(turn.versions == [(0, "data")] and turn.sampling.exact for turn in turns)
    for metrics in (step.metrics for step in told.steps):
        assert metrics["actor/sft_loss"] > 0
        assert not [name for name in metrics if name.startswith(("critic/", "training/rollout"))]
    assert told.steps[-1].metrics["actor/sft_loss"] < told.steps[0].metrics["actor/sft_loss"]
    record = read(whole).record
    assert (record.state, record.on, record.algorithm) == ("done", "test", "sft")
    assert (whole / "curve.png").is_file()


@pytest.mark.fault
@pytest.mark.parametrize("moment", ["in the third step", "after the fourth"])
def test_killed_and_resumed_it_makes_the_same_weights(whole: Path, source: Path, tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "sft"
    ripe = runs.during_step(folder, 3, ended=1) if "third" in moment else runs.committed(folder, lineage=1, step=4)
    killed = runs.kill_when(imitate(folder, source), ripe)
    runs.finish(runs.strop("train", "--resume", folder, "--json"))
    runs.same(whole, folder)
    if killed:
        assert runs.metrics(folder) == runs.metrics(whole)
    consumed = [id for step in runs.story(folder).steps for id in step.rollouts]
    assert len(consumed) == len(set(consumed)) == 20


def test_a_step_is_replayed_to_the_same_bits(whole: Path) -> None:
    done = runs.finish(runs.strop("replay", whole, "--step", "5", "--json"))
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["same_weights"] is True
    assert told["differ"] == {}


def test_transcripts_need_neither_agent_nor_tasks(tmp_path: Path) -> None:
    lines = [{"messages": [CHAT[0], {"role": "assistant", "content": f"It is {n}."}]} for n in range(6)]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps(line) for line in [{"messages": CHAT}, *lines]))
    folder = tmp_path / "run"
    given = ["algorithm.name=sft", f"algorithm.settings.transcripts={tmp_path / 'chat.jsonl'}", "loop.groups=2"]
    given += ["loop.group_size=2", "algorithm.settings.epochs=2", "engine.deterministic=true", "learner.optim.lr=1e-3"]
    command = runs.strop("train", "--folder", folder, "--json", *(f"--set={one}" for one in given))
    runs.finish(command)
    runs.finish([*command, "--overwrite"])
    told = runs.story(folder)
    assert [len(step.rollouts) for step in told.steps] == [4, 4, 4, 2]  # 14 conversations, of 7 each time
    tasks = [rollout.task.id for rollout in told.rollouts]
    assert sorted(tasks[:7]) == sorted(tasks[7:]) == [f"chat.jsonl, line {n}" for n in range(1, 8)]
    assert tasks[:7] != tasks[7:]
    losses = [step.metrics["actor/sft_loss"] for step in told.steps]
    assert losses[-1] < losses[0]
    assert read(folder).record.on == "training loss"
    more = runs.finish(runs.strop("train", "--resume", folder, "--steps", "6", "--json"))
    assert json.loads(more.stdout.splitlines()[-1])["steps"] == 6
    runs.finish(runs.strop("export", folder, tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_preferences_are_learnt_from_groups(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dpo"
    runs.finish(imitate(folder, source, "algorithm.settings.pairs=all", "learner.optim.lr=1e-4", name="dpo"))
    told = runs.story(folder)
    for step in told.steps:
        assert len(step.rollouts) == 8  # four pairs
        assert not step.dropped
    by_group: dict[str, list[float]] = {}
    for rollout in told.rollouts:
        if rollout.mode == "train":
            by_group.setdefault(rollout.group, []).append(rollout.reward() or 0.0)
    assert all(better > worse for better, worse in by_group.values())
    first, last = (told.steps[n].metrics for n in (0, -1))
    assert first["actor/dpo_loss"] == pytest.approx(0.6931, abs=1e-4)  # nothing has moved yet
    assert last["actor/dpo_loss"] < first["actor/dpo_loss"]


def test_reinforcement_goes_on_from_imitation(whole: Path, tmp_path: Path) -> None:
    """The settings of the other algorithm stay behind."""
    sets = ["algorithm.name=grpo", "loop.steps=1", "loop.groups=2", "loop.group_size=2", "loop.eval_splits=[]"]
    folder = tmp_path / "rl"
    runs.finish(runs.strop("train", "--from", whole, "--folder", folder, "--json", *(f"--set={one}" for one in sets)))
    told = runs.story(folder)
    assert {name for turns in told.turns.values() for turn in turns for _, name in turn.versions} == {"1.0"}
    assert "algorithm.settings" not in (folder / "config.json").read_text()


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["algorithm.settings.min_reward=2"], "there is nothing to learn from: of 96 rollouts in "),
        (["algorithm.settings.runs=nowhere"], "nowhere"),
        (["loop.staleness=1"], "loop.staleness is 1, and sft learns from stored data"),
        (["algorithm.settings.epochs=1"], "and loop.steps is 5. Fix: leave one of them out"),
    ],
)
def test_what_cannot_be_learnt_from_is_said_at_once(source: Path, tmp_path: Path, sets: list[str], says: str) -> None:
    done = subprocess.run(imitate(tmp_path / "sft", source, *sets), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert says in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "sft").exists()
