"""Prompts that are improved: whole runs against scripted models, and what commands make of them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import prompt_runs, runs
from tests.prompt_runs import AGENTS, Models, configure, metrics, refuse, train


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with prompt_runs.open_models() as models:
        yield models


@pytest.fixture(scope="module")
def improved(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("improved") / "run"
    before = models.counts["writer"]
    told = train(configure(models, folder, "gepa"))
    assert told["start"] < 0.4, told
    assert told["end"] > 0.9, told
    assert told["done"]
    last = metrics(folder)[-1]
    assert last["prompts/calls"] == models.counts["writer"] - before <= 400
    assert last["prompts/rollouts"] <= 4000
    return folder


def test_apo_finds_the_hints_within_its_budget(models: Models, tmp_path: Path) -> None:
    before = models.counts["writer"]
    told = train(configure(models, tmp_path / "run", "apo", beam_width=2, branch_factor=4))
    assert told["start"] < 0.4
    assert told["end"] > 0.9
    assert metrics(tmp_path / "run")[-1]["prompts/calls"] == models.counts["writer"] - before <= 400


def test_a_rollout_keeps_the_version_it_began_with(improved: Path) -> None:
    """What its agent sent is what is recorded with it; several versions were tried."""
    story = runs.story(improved)
    rollouts = [rollout for rollout in story.rollouts if rollout.mode == "train"]
    for rollout in rollouts:
        (turn,) = story.turns[rollout.id]
        assert turn.messages[0] == {"role": "system", "content": rollout.prompts["system"]}
    assert len({rollout.prompts["system"] for rollout in rollouts}) > 3
    consumed = [id for step in story.steps for id in step.rollouts]
    assert len(consumed) == len(set(consumed))
    assert set(consumed) <= {rollout.id for rollout in rollouts}


def test_the_last_evaluation_is_of_the_best_version(improved: Path) -> None:
    pool = json.loads((improved / "prompts.json").read_text())["versions"]
    best = max(pool, key=lambda one: sum(one["scores"].values()))
    story = runs.story(improved)
    last = story.steps[-1]
    evaluated = [one for one in story.rollouts if one.group.startswith(f"e{last.version}-")]
    assert {one.prompts["system"] for one in evaluated} == {best["prompts"]["system"]}
    first = [one for one in story.rollouts if one.group.startswith("e1.0-")]
    assert {one.prompts["system"] for one in first} == {"You answer questions about topics."}


def test_versions_diffs_and_winners_are_shown(improved: Path) -> None:
    shown = runs.finish(runs.strop("prompts", improved)).stdout
    assert "(best)" in shown
    assert "+Hint " in shown
    told = json.loads(runs.finish(runs.strop("prompts", improved, "--json")).stdout)
    best = told["versions"][told["best"]]
    assert all(told["best"] in numbers for task, numbers in told["winners"].items() if best["scores"][task] == 1.0)
    assert "all" in runs.finish(runs.strop("prompts", improved, "--tasks")).stdout
    assert "from version 0 to 1" in runs.finish(runs.strop("prompts", improved, "--diff", "0", "1")).stdout
    calls = json.loads(runs.finish(runs.strop("prompts", improved, "--calls", "--json")).stdout)
    assert sum("key" in call and bool(call["key"]) for call in calls) == metrics(improved)[-1]["prompts/calls"]
    assert "there is no version 99" in refuse("prompts", improved, "99")


def test_runs_rollouts_eval_and_export(improved: Path, tmp_path: Path) -> None:
    record = json.loads(runs.finish(runs.strop("runs", improved, "--json")).stdout)
    assert (record["state"], record["algorithm"], record["model"]) == ("done", "gepa", "follower")
    assert "succeeded" in runs.finish(runs.strop("rollouts", improved)).stdout
    options = ("--compare", "start", "--folder", tmp_path / "eval", "--json")
    told = json.loads(runs.finish(runs.strop("eval", improved, *options)).stdout)
    scores = [one["scores"]["val-core/test/reward/mean@1"]["value"] for one in told["evaluations"]]
    assert scores[0] > 0.9
    assert scores[1] < 0.4
    runs.finish(runs.strop("export", improved, tmp_path / "prompts"))
    pool = json.loads((improved / "prompts.json").read_text())["versions"]
    best = max(pool, key=lambda one: sum(one["scores"].values()))
    assert (tmp_path / "prompts" / "system.md").read_text() == best["prompts"]["system"]
    assert "train no weights" in refuse("replay", improved, "--step", "1")
    assert "no model of its own" in refuse("chat", improved)


def test_a_new_run_begins_with_the_prompts_of_another(models: Models, improved: Path, tmp_path: Path) -> None:
    done = runs.finish(runs.strop("train", "--from", improved, "--folder", tmp_path / "run", "--json"))
    assert json.loads(done.stdout)["start"] > 0.9


def test_a_run_that_is_done_says_so(models: Models, improved: Path) -> None:
    before = models.counts["writer"]
    assert "was done after" in runs.finish(runs.strop("train", "--resume", improved)).stdout
    assert models.counts["writer"] == before


def test_an_unmodified_agent_is_given_prompts_by_the_gateway(models: Models, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    toml = configure(models, tmp_path / "run", "gepa", agent=f"{tmp_path}/agents.py:marked")
    assert train(toml)["end"] > 0.9
    story = runs.story(tmp_path / "run")
    for rollout in story.rollouts:
        (turn,) = story.turns[rollout.id]
        assert turn.messages[0]["content"] == f"{rollout.prompts['system']}\nBe brief."


def test_the_budget_of_calls_binds(models: Models, tmp_path: Path) -> None:
    before = models.counts["writer"]
    told = train(configure(models, tmp_path / "run", "gepa", max_calls=7))
    assert told["done"]
    assert models.counts["writer"] - before == 7
    resumed = runs.finish(runs.strop("train", "--resume", tmp_path / "run", "--json"))
    assert json.loads(resumed.stdout)["steps"] == told["steps"]
    assert models.counts["writer"] - before == 7
    more = runs.strop("train", "--resume", tmp_path / "run", "--json", "--set=algorithm.settings.max_calls=12")
    assert json.loads(runs.finish(more).stdout)["steps"] > told["steps"]
    assert models.counts["writer"] - before == 12


@pytest.mark.slow
def test_the_budgets_of_tokens_money_and_rollouts_bind(models: Models, tmp_path: Path) -> None:
    train(configure(models, tmp_path / "tokens", "gepa", max_tokens=40_000, answer_tokens=1000))
    assert 20_000 < sum_of(tmp_path / "tokens", "tokens") <= 40_000
    prices = ("--set=gateway.outside.writer.price_in=1", "--set=gateway.outside.writer.price_out=10")
    train(configure(models, tmp_path / "cost", "apo", max_cost=0.02, answer_tokens=500), *prices)
    assert 0.01 < sum_of(tmp_path / "cost", "cost") <= 0.02
    train(configure(models, tmp_path / "rollouts", "apo", max_rollouts=100))
    rollouts = [one for one in runs.story(tmp_path / "rollouts").rollouts if one.mode == "train"]
    assert 20 <= len(rollouts) <= 100


def sum_of(folder: Path, what: str) -> float:
    """What calls came to, as calls.jsonl has it."""
    last: dict[tuple[int, int], float] = {}
    for one in prompt_runs.calls(folder):
        last[one["call"], one["attempt"]] = one.get(what, 0)
    return sum(last.values())


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_an_optimiser_model_that_talks_nonsense(models: Models, tmp_path: Path) -> None:
    """It is counted, and the run goes on."""
    models.control(nonsense=5)
    told = train(configure(models, tmp_path / "run", "gepa", max_calls=150))
    assert metrics(tmp_path / "run")[-1]["prompts/rejected/empty"] == 5
    assert told["end"] > told["start"]


def test_an_optimiser_model_that_is_busy(models: Models, tmp_path: Path) -> None:
    """It is asked again, each time counted; nothing is lost."""
    models.control(busy=3)
    before = models.counts
    told = train(configure(models, tmp_path / "run", "gepa", max_calls=30))
    after = models.counts
    refused = after["refused"] - before["refused"]
    assert refused == 3
    assert after["writer"] - before["writer"] == 30
    assert metrics(tmp_path / "run")[-1]["prompts/calls_failed"] == refused
    assert told["steps"] >= 30 - refused - 1


def test_an_optimiser_model_that_stays_away(models: Models, tmp_path: Path) -> None:
    """The run ends with a sentence, and goes on once it is back."""
    toml = configure(models, tmp_path / "run", "gepa", max_calls=40, patience=2)
    models.control(busy=1000)
    assert "gave no answer for 2 s" in refuse("train", "--config", toml)
    models.control()
    told = json.loads(runs.finish(runs.strop("train", "--resume", tmp_path / "run", "--json")).stdout)
    assert told["done"]


@pytest.mark.parametrize(("name", "at_once"), [("gepa", 1), ("apo", 4)])
def test_a_model_that_wants_its_limit_by_another_name(models: Models, tmp_path: Path, name: str, at_once: int) -> None:
    """max_completion_tokens: found out by itself, by the calls that are under way at once, which are counted."""
    models.control(strict=1)
    told = train(configure(models, tmp_path / "run", name, max_calls=12))
    models.control()
    assert told["prompts"]["calls"] == 12
    assert told["prompts"]["calls_failed"] == at_once
    assert "rejected/empty" not in told["prompts"]


@pytest.mark.parametrize("status", [400, 401, 402, 404])
def test_an_optimiser_model_that_refuses_everything(models: Models, tmp_path: Path, status: int) -> None:
    """The run ends at the first call, and goes on once it is put right."""
    models.control(status=status)
    before, folder = models.counts["writer"], tmp_path / "run"
    assert "cannot be used" in refuse("train", "--config", configure(models, folder, "gepa", max_calls=12))
    assert models.counts["writer"] - before == 1
    models.control()
    elsewhere = f"--set=gateway.outside.writer.url={models.url}/v1"
    options = ("--set=algorithm.settings.options={temperature = 0.5}", elsewhere)
    told = json.loads(runs.finish(runs.strop("train", "--resume", folder, "--json", *options)).stdout)
    assert told["prompts"]["calls"] == 12
    assert "gateway.outside" in refuse("train", "--resume", folder, "--set=gateway.outside.writer.model=other")


def test_a_bill_that_nobody_believes(models: Models, tmp_path: Path) -> None:
    """Negative numbers of tokens would leave more budget than there was."""
    models.control(usage=-5_000_000)
    train(configure(models, tmp_path / "run", "gepa", max_tokens=30_000, answer_tokens=1000))
    models.control()
    assert 0 < sum_of(tmp_path / "run", "tokens") <= 30_000


def test_calls_that_are_lost_are_missed(improved: Path, tmp_path: Path) -> None:
    """Without calls.jsonl everything could be asked, and paid for, once more."""
    copy = tmp_path / "run"
    shutil.copytree(improved, copy)
    (copy / "calls.jsonl").unlink()
    more = "--set=algorithm.settings.max_calls=500"
    assert "nobody knows what was spent" in refuse("train", "--resume", copy, more)


@pytest.mark.parametrize("agent", ["fragile", "unused", "misnamed"])
def test_agents_that_something_is_wrong_with(models: Models, tmp_path: Path, agent: str) -> None:
    """A version that an agent cannot bear is rejected; a prompt that nobody sends is said; and so is a reward that does
    not count, before anything is paid for."""
    (tmp_path / "agents.py").write_text(AGENTS)
    toml = configure(models, tmp_path / "run", "gepa", agent=f"{tmp_path}/agents.py:{agent}", max_calls=4)
    before = models.counts["writer"]
    command = runs.strop("train", "--config", toml, "--set=loop.eval_splits=[]")
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if agent == "misnamed":
        assert done.returncode == 2
        assert "algorithm.rewards counts reward, but the agent gave only right" in done.stderr
        assert models.counts["writer"] == before
        return
    assert done.returncode == 0, done.stderr
    assert ("no model was sent the prompt 'system'" in done.stdout) == (agent == "unused")
    assert models.counts["writer"] - before == 4
    if agent == "fragile":
        pool = json.loads((tmp_path / "run" / "prompts.json").read_text())["versions"]
        assert len(pool) == 1
        assert metrics(tmp_path / "run")[-1]["prompts/rejected/not_better"] == 4


def test_a_placeholder_that_is_lost(models: Models, tmp_path: Path) -> None:
    """No version without it is ever tried."""
    toml = configure(models, tmp_path / "run", "apo", max_calls=20)
    train(toml, "--set=prompts.system.text='You answer questions about {topics}.'")
    assert metrics(tmp_path / "run")[-1]["prompts/rejected/placeholder"] >= 4
    story = runs.story(tmp_path / "run")
    assert {one.prompts["system"] for one in story.rollouts} == {"You answer questions about {topics}."}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["prompts.system.placeholders=['room']"], "does not have its placeholder {room}"),
        (["prompts.system.text=''"], "neither is set"),
        (["prompts.system.file=nowhere.md"], "both are set"),
        (["prompts.main.text=x"], "has the name of a policy"),
        (["algorithm.settings.optimizer=nobody"], "gateway.outside does not have"),
        (["algorithm.settings.max_cost=1"], "has no prices"),
        (["gateway.outside.writer.key_env=NO_SUCH_KEY"], "the environment has no NO_SUCH_KEY"),
        (["algorithm.settings.validation=nowhere"], "no task has that split"),
        (["algorithm.settings.minibach=3"], "minibatch"),
        (["group_reward=x.py:f"], "compares rollouts"),
        (["algorithm.settings.options={n = 5}"], "may not set 'n'"),
        (["algorithm.settings.options={max_tokens = 'x'}"], "not a whole number"),
        (["policies.a.algorithm.name=grpo"], "a run does one of them"),
        (["algorithm.name=grpo", "algorithm.settings={}", "policy.frozen=true"], "nothing would be trained"),
    ],
)
def test_what_users_get_wrong(models: Models, tmp_path: Path, settings: list[str], said: str) -> None:
    toml = configure(models, tmp_path / "run", "gepa")
    assert said in refuse("train", "--config", toml, *(f"--set={one}" for one in settings))


def test_a_budget_that_is_too_small_for_a_step(models: Models, tmp_path: Path) -> None:
    toml = configure(models, tmp_path / "run", "apo", max_calls=6)
    assert "the first step takes 8" in refuse("train", "--config", toml)


def test_doctor_and_config(models: Models, improved: Path, tmp_path: Path) -> None:
    toml = configure(models, tmp_path / "run", "gepa")
    assert "probe" not in runs.finish(runs.strop("doctor", "--config", toml)).stdout
    assert 'text = "You answer' in runs.finish(runs.strop("config", improved)).stdout


def test_without_prompts_there_is_nothing_to_improve(models: Models, tmp_path: Path) -> None:
    toml = configure(models, tmp_path / "run", "gepa")
    toml.write_text(toml.read_text().replace("[prompts.system]\ntext", "[monitor]\nname"))
    assert "there are none" in refuse("train", "--config", toml)


def test_a_provider_that_cannot_be_used(models: Models, tmp_path: Path) -> None:
    toml = configure(models, tmp_path / "run", "gepa")
    toml.write_text(
        toml.read_text().replace(f'{models.url}/v1"\nmodel = "writer"', 'http://127.0.0.1:9/v1"\nmodel = "writer"')
    )
    assert "gave no answer" in refuse("train", "--config", toml, "--set=algorithm.settings.patience=1")


# -- a model that is served here ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with the model in the box, which stays as it is."""
    place = tmp_path_factory.mktemp("served")
    (place / "agents.py").write_text(AGENTS)
    toml = configure(models, place / "run", "gepa", agent=f"{place}/agents.py:local", minibatch=2)
    text = toml.read_text().replace('agents = ["*"]', 'agents = ["nobody"]').replace("steps = 400", "steps = 2")
    lines = [line for line in text.splitlines() if not line.startswith(("agents_in", "tasks"))]
    toml.write_text("\n".join(lines))
    train(toml, f"--tasks={Path(__file__).parents[1]}/small.py:tasks", "--set=loop.eval_greedy=false")
    return place / "run"


def test_the_model_reads_the_prompt_of_its_rollout(served: Path) -> None:
    """Token for token: what was sent is in what the engine saw. No weights are trained, and none are kept."""
    from strop.gateway.template import Renderer
    from strop.models.names import resolve

    renderer = Renderer.from_folder(resolve("strop/nano"))
    story = runs.story(served)
    tried = [rollout for rollout in story.rollouts if rollout.mode == "train"]
    assert len({rollout.prompts["system"] for rollout in tried}) == 3
    for rollout in story.rollouts:
        (turn,) = story.turns[rollout.id]
        assert rollout.prompts["system"] in renderer.decode(turn.prompt_ids)
        assert {name for _, name in turn.versions} == {"1.0"}
    assert not list(served.glob("checkpoints/*/*.safetensors"))


@pytest.mark.slow
def test_weights_are_trained_on_top_of_prompts(served: Path, tmp_path: Path) -> None:
    """A new run takes the prompts over, gives them to every rollout, and trains the model."""
    sets = ("algorithm.name=grpo", "loop.steps=1", "loop.groups=2", "loop.group_size=2",
            "loop.eval_splits=[]")  # fmt: skip
    runs.finish(runs.strop("train", "--from", served, "--folder", tmp_path / "run", *(f"--set={one}" for one in sets)))
    story = runs.story(tmp_path / "run")
    assert len(story.steps) == 1
    assert (tmp_path / "run" / "checkpoints" / "best" / "model.safetensors").is_file()
    best = json.loads((served / "checkpoints" / "best" / "prompts.json").read_text())["prompts"]
    assert [rollout.prompts for rollout in story.rollouts] == [best] * 4


@pytest.mark.slow
def test_prompts_are_improved_on_top_of_weights(models: Models, served: Path, tmp_path: Path) -> None:
    """And the other way round: the model of a run that trained it, with prompts."""
    sets = ("algorithm.name=grpo", "loop.steps=1", "loop.groups=2", "loop.group_size=2",
            "loop.eval_splits=[]")  # fmt: skip
    trained = tmp_path / "trained"
    runs.finish(runs.strop("train", "--from", served, "--folder", trained, *(f"--set={one}" for one in sets)))
    settings = "{optimizer = 'writer', max_calls = 2, minibatch = 2, branch_factor = 1}"
    sets = ("algorithm.name=apo", f"algorithm.settings={settings}", "loop.steps=1")
    again = tmp_path / "again"
    runs.finish(runs.strop("train", "--from", trained, "--folder", again, *(f"--set={one}" for one in sets)))
    config = json.loads((again / "config.json").read_text())
    assert config["policy"]["model"] == str(again / "start")
    weights = [place / "model.safetensors" for place in (again / "start", trained / "checkpoints" / "best")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_talking_to_it(served: Path, tmp_path: Path) -> None:
    """Its best prompt is the system message."""
    done = subprocess.run(
        runs.strop("chat", served, "--folder", tmp_path / "chat", "--json", "--max-tokens", "4"),
        input="hello\n", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    best = json.loads((served / "checkpoints" / "best" / "prompts.json").read_text())["prompts"]
    (turns,) = runs.story(tmp_path / "chat").turns.values()
    assert turns[0].messages[0] == {"role": "system", "content": best["system"]}
