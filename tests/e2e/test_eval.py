"""`strop eval` with the model in the box: real agents, real sampling, the very same tasks and seeds."""

import asyncio
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strop.cli import parser
from strop.config import Config, MonitorConfig, load, to_json
from strop.errors import ConfigError, PlaceError, TaskError
from strop.monitor.evaluations import EvaluationReport
from strop.run import evaluate
from tests import runs
from tests.e2e.test_bad_input import AGENTS, sentence
from tests.runs import SMALL

NANO = Path(evaluate.__file__).parents[1] / "models" / "nano"
GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "evaluating.md").read_text()
TASKS = Path(runs.__file__).parent / "small.py"
FIXED = ["engine.deterministic=true", "engine.threads=1", "policy.context=192", "policy.eval.max_tokens=48"]
DEMO = [
    *("strop.demo:agent", "--tasks", f"{TASKS}:tasks"),
    *(f"--set={s}" for s in [*FIXED, "runner.workers=4"]),
]


def strop_eval(place: Path, *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = runs.strop("eval", *arguments)
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    runs.finish(runs.demo(folder, *SMALL, "loop.steps=2", "loop.eval_every=0", "learner.optim.lr=2e-3"))
    return folder


@pytest.mark.slow
def test_a_model_with_itself(tmp_path: Path) -> None:
    """Nothing differs but the samples of a task among each other."""
    done = strop_eval(tmp_path, *DEMO, "--model", "strop/nano", "--compare", "strop/nano", "-k", "2", "--json")
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "runs/eval/evaluation.json").read_text())
    one, other = report["evaluations"]
    assert one["rewards"] == other["rewards"]
    assert one["rewards"]["test"].keys() == {"reward", "right_call"}
    assert all(len(samples) == 2 for samples in one["rewards"]["test"]["reward"].values())
    (pair,) = report["comparisons"]
    assert {f"val-core/test/reward/{name}" for name in ("mean@2", "pass@1", "pass@2", "best@2")} < set(
        pair["differences"]
    )
    for difference in pair["differences"].values():
        assert difference == {"value": 0.0, "low": 0.0, "high": 0.0, "zero_within": True}
    assert "the very same on every task" in report["verdict"]
    first, second = (runs.story(tmp_path / f"runs/eval/{n}-trained") for n in (1, 2))
    assert first.tokens() == second.tokens()
    said = {r.id: first.turns[r.id][0].response_ids for r in first.rollouts}
    assert any(said[id] != said[f"{id}.1"] for id in said if f"{id}.1" in said)


def test_a_run_with_what_it_began_with(trained: Path, tmp_path: Path) -> None:
    """Agent, tasks, seed and sampling are the run's own: its start scores what it scored in the run."""
    done = strop_eval(tmp_path, trained, "--compare", "start", "-k", "2")
    for words in (
        "8 tasks of test, 2 samples each",
        "mean@2",
        "pass@2",
        "differences, task by task",
        "minus strop/nano",
    ):
        assert words in done.stdout, done.stdout
    assert "with 95 % confidence" in done.stdout
    report = json.loads((tmp_path / "runs/eval/evaluation.json").read_text())
    assert report["verdict"] in done.stdout.replace("\n", " ")
    now, start = report["evaluations"]
    assert now["weights"] == str(trained / "checkpoints/step-000002-1")
    assert now["rewards"] != start["rewards"]
    told = runs.story(trained)
    before = {r.task.id: r.reward() for r in told.rollouts if r.group == "e1.0-test-sampled"}
    assert {task: samples[0] for task, samples in start["rewards"]["test"]["reward"].items()} == before
    again = json.loads(strop_eval(tmp_path, trained, "--greedy", "--best", "--json").stdout)
    assert again["folder"] == "runs/eval-2"  # nothing is written over
    assert list(again["evaluations"][0]["rewards"]) == ["test-greedy"]


@pytest.mark.slow
def test_deployed_behind_a_template_that_rewrites_history(tmp_path: Path) -> None:
    """The agent's second call shows the model its first answer; this template shows it otherwise."""
    shutil.copytree(NANO, tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("{{- '}\\n</tool_call>' -}}", "{{- '} \\n</tool_call>' -}}"))
    done = strop_eval(tmp_path, *DEMO, "--model", "model", "--as", "both", "--json")
    report = json.loads(done.stdout)
    trained, deployed = report["evaluations"]
    assert (trained["history"], deployed["history"]) == ("sampled", "template")
    assert trained["branches"] == {}
    assert deployed["branches"]["template_rewrote"] > 0
    (warning,) = report["warnings"]
    assert f"{deployed['branches']['template_rewrote']} of {deployed['turns']} model calls" in warning
    told = runs.story(tmp_path / "runs/eval/1-deployed")
    assert any(turn.branch == "template_rewrote" for turns in told.turns.values() for turn in turns)


def test_nobody_is_told_of_an_evaluation() -> None:
    """It would be one more run in W&B or MLflow, without a single metric."""
    config = Config(monitor=MonitorConfig(writers=("wandb", "mlflow")))
    assert evaluate.configure_evaluation(config, ("test",)).monitor.writers == ()


def test_the_guide_as_written() -> None:
    commands = [line for line in GUIDE.splitlines() if line.startswith("strop eval")]
    assert len(commands) > 3
    for command in commands:
        parser().parse_args(shlex.split(command, comments=True)[1:])


@pytest.mark.slow
def test_the_guide_from_python(tmp_path: Path) -> None:
    program = GUIDE.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "strop/nano" in done.stdout, done.stderr
    assert (tmp_path / "runs/eval/evaluation.json").exists()


# -- what users get wrong ----------------------------------------------------------------------------------------------


def asked(*models: str, **more: Any) -> EvaluationReport:
    config = load(base=Config(agent="strop.demo:agent", tasks=f"{TASKS}:tasks"), sets=FIXED)
    return asyncio.run(evaluate.evaluate(config, models, **more))


def test_unknown_split(tmp_path: Path) -> None:
    said = sentence(strop_eval(tmp_path, *DEMO, "--split", "dev", code=2), 2)
    assert "no task of split 'dev', only test, train" in said
    assert "--split" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("k", [0, -3])
def test_no_samples(tmp_path: Path, k: int) -> None:
    with pytest.raises(ConfigError, match=f"{k} samples per task"):
        asked("strop/nano", folder=tmp_path / "eval", samples=k)
    assert "give at least 1" in sentence(strop_eval(tmp_path, *DEMO, "-k", str(k), code=2), 2)


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for best in (False, True):
        with pytest.raises(PlaceError, match="has no checkpoint yet"):
            asked("strop/nano", str(tmp_path / "run"), folder=tmp_path / "eval", best=best)


def test_a_folder_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match="choose another --folder"):
        asked(folder=tmp_path)


def test_what_only_runs_have(tmp_path: Path) -> None:
    assert "name the run" in sentence(strop_eval(tmp_path, *DEMO, "--compare", "start", code=2), 2)
    assert "leave it out" in sentence(strop_eval(tmp_path, *DEMO, "--best", code=2), 2)
    assert "which agent?" in sentence(strop_eval(tmp_path, code=2), 2)
    assert "holds no run" in sentence(strop_eval(tmp_path, ".", code=2), 2)
    assert "not a run's folder" in sentence(strop_eval(tmp_path, "runs/nothing", code=2), 2)


def test_a_run_without_an_agent(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_bytes(to_json(Config()))
    said = sentence(strop_eval(tmp_path, "run", "--compare", "start", code=2), 2)
    assert "run has no agent" in said
    assert "Fix: name one with --set agent=" in said


def test_tasks_that_change(tmp_path: Path) -> None:
    """A comparison on other tasks would be none."""
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "tasks.py").write_text(
        "from pathlib import Path\n"
        "def tasks():\n"
        "    seen = Path(__file__).with_name('seen')\n"
        "    again = seen.exists()\n"
        "    seen.touch()\n"
        "    return [{'id': 'a', 'split': 'test', 'data': 2 if again else 1}]\n"
    )
    config = Config(agent=f"{tmp_path}/agents.py:fine", tasks=f"{tmp_path}/tasks.py:tasks")
    wanted = evaluate.evaluate(config, ["strop/nano", "strop/nano"], folder=tmp_path / "eval")
    with pytest.raises(TaskError, match="gave other tasks the second time"):
        asyncio.run(wanted)
