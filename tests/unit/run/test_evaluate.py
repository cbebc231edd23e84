"""Evaluation before anything is loaded: which weights are found for a configuration's policies, and how it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop import config as configs
from strop.cli import main
from strop.config import Config, resolve_policies
from strop.errors import ConfigError, PlaceError
from strop.models import hub
from strop.run import evaluate
from strop.run.folder import RunFolder

TWO = configs.load(
    sets=[
        *("agent=strop.demo:agent", "tasks=t.jsonl", "policies.writer.history=template", "learner.lora.rank=4"),
        *("policies.critic.algorithm.rewards={style=2}", "policies.critic.learner.lora.rank=8"),
    ]
)


def checkpoint(folder: Path, *parts: str) -> Path:
    """A run's folder with one checkpoint, of one model or with a part for each of several policies."""
    for place in [folder / "checkpoints" / "step-000002-1" / part for part in parts or ("",)]:
        place.mkdir(parents=True)
        (place / "strop.json").write_text("{}")
    return folder / "checkpoints" / "step-000002-1"


def test_several_policies_have_the_parts_of_a_checkpoint(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "run", "writer", "critic")
    for name in (tmp_path / "run", f"{tmp_path / 'run'}:2", place):
        assert evaluate.find_model(TWO, str(name), best=False) == str(place)
    own = configs.describe_models(TWO)
    assert evaluate.find_model(TWO, own, best=False) == ""
    assert evaluate.give_models(TWO, "", tmp_path) is TWO


def test_one_model_is_not_that_of_several_policies(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"smollm2-135m is one model, .* \(writer, critic\)\. Fix: "):
        evaluate.find_model(TWO, "smollm2-135m", best=False)
    checkpoint(tmp_path / "run")
    with pytest.raises(PlaceError, match=r"has no part of the policy writer\. Fix: "):
        evaluate.find_model(TWO, str(tmp_path / "run"), best=False)


def test_several_policies_are_not_one_model(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", "writer", "critic")
    with pytest.raises(PlaceError, match=r"one model is asked for\. Fix: "):
        evaluate.find_model(Config(), str(tmp_path / "run"), best=False)


def test_a_table_of_one_policy_is_the_short_form(tmp_path: Path) -> None:
    one, place = configs.load(sets=["policies.writer.model=smollm2-135m"]), checkpoint(tmp_path / "run")
    assert evaluate.find_model(one, str(tmp_path / "run"), best=False) == str(place)
    assert evaluate.find_model(one, "strop/nano", best=False) == "strop/nano"
    given = evaluate.give_models(one, "strop/nano", tmp_path)
    assert Path(resolve_policies(given)["writer"].policy.model, "config.json").is_file()


def test_what_is_compared_with_is_looked_for_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create("runs/demo")
    run.keep(Config(agent="strop.demo:agent", tasks="strop.demo:tasks"))
    checkpoint(run.path)
    run.close()
    monkeypatch.setattr(hub, "fetch", lambda name, say: pytest.fail(f"{name} was asked for"))
    for other, fix in {"strt": "--compare start", "runs/dmo": "runs/demo, or"}.items():
        given = ["--model", "strop/nano", "--compare", other]
        assert main(["eval", "runs/demo", *given]) == 2
        assert f". Fix: write {fix}" in capsys.readouterr().err
    assert not Path("runs/eval").exists()


def test_what_only_training_needs_is_left_out_of_each_policy() -> None:
    left = evaluate.configure_evaluation(TWO, ("test",))
    assert left.algorithm.rewards == {"reward": 0.5, "style": 1.0}
    for own in resolve_policies(left).values():
        assert own.learner.lora.rank == 0
        assert own.algorithm == left.algorithm


def test_as_deployed_every_policy_is_shown_what_a_server_would_show() -> None:
    assert [one.policy.history for one in resolve_policies(TWO).values()] == ["template", "sampled"]
    deployed = evaluate.show_as_deployed(TWO)
    assert [one.policy.history for one in resolve_policies(deployed).values()] == ["template", "template"]


def test_a_server_of_any_policy_is_refused(tmp_path: Path) -> None:
    served = configs.load(
        base=TWO, sets=["policies.critic.engine.name=vllm", "policies.critic.engine.vllm.url=http://x"]
    )
    with pytest.raises(ConfigError, match=r"policies\.critic\.engine\.vllm\.url is a server with weights of its own"):
        evaluate._refuse(served, 1, tmp_path / "eval")
