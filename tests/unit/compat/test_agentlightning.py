"""What agents of Agent Lightning import: called as ours are, and what they say is recorded."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import openai
import pytest

import strop.compat.agentlightning as agl
from strop.compat.agentlightning.launch import read_variables
from strop.compat.agentlightning.trainer import match_agents
from strop.errors import AgentError, BadReward, ConfigError
from strop.testing import run
from strop.types import Task
from tests.runs import story

ASKED = {"question": "3 * 4?", "answer": "12"}


def ask(llm: agl.LLM, question: str) -> str:
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages: Any = [{"role": "user", "content": question}]
    temperature = llm.sampling_parameters.get("temperature", 0.7)
    said = client.chat.completions.create(model=llm.model, messages=messages, temperature=temperature)
    return said.choices[0].message.content or ""


@agl.rollout
def returns(task: dict[str, str], llm: agl.LLM) -> float:
    return float(ask(llm, task["question"]) == task["answer"])


@agl.rollout
async def emits(task: dict[str, str], llm: agl.LLM, rollout: agl.Rollout) -> None:
    agl.emit_reward(float(ask(llm, task["question"]) == task["answer"]))
    agl.emit_message(f"{rollout.mode} {rollout.attempt.attempt_id}")
    agl.emit_object({"n": 1}, attributes={"of": "mine"})
    agl.emit_annotation({"seen": True})
    agl.emit_exception(ValueError("no matter"))


class Calc(agl.LitAgent[Any]):
    def training_rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        llm: Any = resources["main_llm"]
        assert self.tracer.get_langchain_handler() is None
        assert llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id) == llm.endpoint
        return float(ask(llm, task["question"]) == task["answer"])

    def validation_rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        return -self.training_rollout(task, resources, rollout)


class Legacy(agl.LitAgent[Any]):
    """As it was written before 0.2."""

    async def training_rollout_async(self, task: Any, rollout_id: str, resources: agl.NamedResources) -> None:
        llm: Any = resources["main_llm"]
        await self.evaluate(rollout_id, ask(llm, task["question"]))

    @staticmethod
    @agl.reward
    async def evaluate(rollout_id: str, said: str) -> float:
        assert rollout_id
        return float(said == "12")


@pytest.mark.parametrize("agent", [returns, emits, Calc(), Legacy()], ids=["returns", "emits", "class", "legacy"])
@pytest.mark.parametrize(("said", "reward"), [("12", 1.0), ("13", 0.0)])
def test_an_agent_gets_its_reward(agent: Any, said: str, reward: float) -> None:
    done = run(agent, ASKED, answers=[said])
    assert done.reward() == reward
    assert [turn.answer["content"] for turn in done.turns] == [said]


def test_what_is_said_is_recorded() -> None:
    events = run(emits, ASKED, answers=["12"]).events
    assert [event.kind for event in events] == ["reward", "message", "span", "span", "error"]
    message, thing, annotation, error = [event.data for event in events[1:]]
    assert message["text"] == "train 1"
    assert (thing["object"], thing["attributes"]) == ({"n": 1}, {"of": "mine"})
    assert annotation["attributes"] == {"seen": True}
    assert error["message"] == "ValueError: no matter"


def test_validation_has_a_method_of_its_own() -> None:
    assert run(Calc(), Task(id="t", split="test", data=ASKED), answers=["12"]).reward() == -1.0


def test_several_rewards_and_the_one_that_counts() -> None:
    @agl.rollout
    def agent(task: Any, llm: agl.LLM) -> None:
        ask(llm, "?")
        with pytest.raises(BadReward, match="Fix: name one of them"):
            agl.emit_reward({"exact": 1.0, "short": 0.5})
        agl.emit_reward({"exact": 1.0, "short": 0.5}, primary_key="short")

    done = run(agent, ASKED, answers=["12"])
    assert {reward.name: reward.value for reward in done.rewards} == {"exact": 1.0, "short": 0.5, "reward": 0.5}


def test_without_a_rollout_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STROP_EVENTS_URL", raising=False)
    assert agl.emit_reward(0.5) == 0.5


def test_a_thread_that_the_agent_starts(tmp_path: Path) -> None:
    """It has no context of ours: the variables of the process say whose it is."""
    (tmp_path / "threaded.py").write_text(
        "import threading\nimport strop.compat.agentlightning as agl\n\n@agl.rollout\ndef agent(task, llm):\n"
        "    thread = threading.Thread(target=agl.emit_reward, args=(0.25,))\n    thread.start()\n    thread.join()\n"
    )
    assert run(f"{tmp_path / 'threaded.py'}:agent", ASKED, answers=[]).reward() == 0.25


def test_arguments_that_nobody_gives() -> None:
    with pytest.raises(AgentError, match=r"Fix: write it as .*task, llm"):
        agl.rollout(lambda task: 1.0)

    @agl.rollout
    def agent(task: Any, prompt_template: agl.PromptTemplate) -> float:
        return 1.0

    with pytest.raises(AgentError, match=r"Fix: set prompts\.NAME\.text"):
        run(agent, ASKED, answers=[])
    with pytest.raises(AgentError, match="no method rollout"):
        run(agl.LitAgent(), ASKED, answers=[])


def test_names_that_are_missing_say_so_when_they_are_used() -> None:
    from strop.compat.agentlightning import InMemoryLightningStore, LitAgentRunner  # type: ignore[attr-defined]

    with pytest.raises(AgentError, match=r"InMemoryLightningStore is not here\. Fix: use strop\.open_store"):
        InMemoryLightningStore()
    with pytest.raises(AgentError, match="LitAgentRunner is not here"):
        LitAgentRunner[int](None)
    with pytest.raises(AttributeError):
        _ = agl.NoSuchThing


def test_files_that_import_it_by_its_own_name() -> None:
    script = (
        "import strop.compat.agentlightning.installed\n"
        "import agentlightning as agl\n"
        "from agentlightning.litagent import rollout\n"
        "from agentlightning.tracer.agentops import AgentOpsTracer\n"
        "import strop.compat.agentlightning as ours\n"
        "assert rollout is agl.rollout is ours.rollout\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_variables_of_a_launched_agent() -> None:
    data = {"a": {"b": [1, {"c": "x"}]}}
    assert read_variables({"ALL": "input"}, data) == {"ALL": '{"a": {"b": [1, {"c": "x"}]}}'}
    assert read_variables({"C": "input.a.b.1.c"}, data) == {"C": "x"}
    with pytest.raises(AgentError, match=r"no 'input\.z' for Z\. Fix: "):
        read_variables({"Z": "input.z"}, data)


# -- the trainer -------------------------------------------------------------------------------------------------------

CONFIG = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 2, "max_prompt_length": 4096, "max_response_length": 8},
    "actor_rollout_ref": {
        "rollout": {"n": 4, "name": "vllm"},
        "actor": {"optim": {"lr": 1e-6}, "use_kl_loss": True, "kl_loss_coef": 0.01, "clip_ratio_high": 0.3},
        "model": {"path": "Qwen/Qwen2.5-1.5B-Instruct"},
    },
    "trainer": {"experiment_name": "calc", "save_freq": -1, "test_freq": 5, "total_epochs": 2, "nnodes": 1},
}


def test_verls_settings_and_ours() -> None:
    settings, unread = agl.VERL({**CONFIG, "strop": {"policy": {"model": "strop/nano"}}}).settings(num_tasks=5)
    assert settings == {
        "algorithm": {"name": "grpo", "settings": {"clip_high": 0.3, "kl": "loss", "kl_coef": 0.01}},
        "policy": {"model": "strop/nano", "train": {"max_tokens": 8}},
        "loop": {"groups": 2, "group_size": 4, "eval_every": 5, "steps": 5},
        "learner": {"optim": {"lr": 1e-6}},
        "folder": "runs/calc",
    }
    assert {"trainer.nnodes", "actor_rollout_ref.rollout.name", "data.max_prompt_length"} <= set(unread)
    with pytest.raises(ConfigError, match="Fix: choose one of grpo"):
        agl.VERL({"algorithm": {"adv_estimator": "remax"}}).settings(1)


def test_a_trainer_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**CONFIG, "strop": {"policy": {"model": "strop/nano"}, "folder": str(tmp_path / "run"), "quiet": True}}
    trainer = agl.Trainer(algorithm=agl.VERL(config), n_runners=2, hooks=[])
    summary = trainer.dev(returns, [ASKED, {"question": "1 + 1?", "answer": "2"}], [ASKED])
    assert (summary.steps, summary.model) == (1, "strop/nano")
    assert "these have no meaning here: hooks, " in capsys.readouterr().err
    with pytest.raises(ConfigError, match="Fix: give train_dataset"):
        trainer.fit(returns)


@pytest.mark.parametrize(
    "pattern", ["write", "write|^check$", "^re", "e$", "^rewrite$", "w.*e", "wr.te", "write|check"]
)
def test_patterns_of_trained_agents(pattern: str) -> None:
    """A regular expression that is searched for in names means the same as our patterns for it."""
    ours = match_agents(pattern)
    for name in ("write", "rewrite", "write-2", "check", "checked", "recheck", "wrote", "we", "main"):
        assert any(fnmatchcase(name, one) for one in ours) == bool(re.search(pattern, name)), name


@pytest.mark.parametrize("pattern", ["agent_\\d+", "(a|b)", "[ab]", "a+", "a*", "colou?r", "", ".*", "a|"])
def test_patterns_that_say_more_than_names(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"says more than names\. Fix: "):
        match_agents(pattern)


class Writer(agl.LitAgent[Any]):
    """Two agents of one rollout, of which one is trained."""

    def rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        llm: Any = resources["main_llm"]
        said = [ask(llm.as_agent(name), task["question"]) for name in ("write", "check")]
        return float(len(said[0]))


@pytest.mark.parametrize("told", ["agent", "adapter"])
def test_a_trainer_trains_the_agents_it_was_told(tmp_path: Path, told: str) -> None:
    config = {**CONFIG, "strop": {"policy": {"model": "strop/nano"}, "folder": str(tmp_path / "run"), "quiet": True}}
    agent, adapter = (Writer(trained_agents="write"), None) if told == "agent" else (Writer(), {"agent_match": "write"})
    agl.Trainer(algorithm=agl.VERL(config), adapter=adapter).dev(agent, [ASKED, ASKED])
    told_by = story(tmp_path / "run")
    tokens = Counter({turn.agent: 0 for turns in told_by.turns.values() for turn in turns})
    for turn in (turn for id in told_by.steps[0].rollouts for turn in told_by.turns[id]):
        tokens[turn.agent] += len(turn.response_ids)
    assert set(tokens) == {"write", "check"}
    assert told_by.steps[0].metrics["training/rollout_logprobs_checked"] == tokens["write"]
