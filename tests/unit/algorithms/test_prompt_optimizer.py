"""Prompt optimisers against a session in memory: what they ask, what they keep, and that they can be replayed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from strop.algorithms import PromptOptimizer, PromptSession, PromptTrial, find, names
from strop.algorithms.apo import APO, read_block
from strop.algorithms.gepa import GEPA
from strop.algorithms.prompt_optimizer import OptimizationOver, Prompts, describe_trial, score_rollout
from strop.errors import ConfigError
from strop.trajectory import Sample
from strop.types import Reward, Rollout, Task, Turn

LETTERS = "abcdefgh"


class Session(PromptSession):
    """A task is solved once its letter is in the prompt. The optimiser model adds a letter, drawn by the number of the
    call. `steps` is how many there are."""

    def __init__(self, steps: int = 60, first: str = "Say: ", placeholders: Sequence[str] = ()) -> None:
        self.first = {"system": first}
        self.placeholders = {"system": placeholders}
        self.train = [Task(id=f"t{letter}", data=letter) for letter in LETTERS]
        self.validation = [Task(id=f"v{letter}", split="validation", data=letter) for letter in LETTERS]
        self.random = random.Random(0)
        self.log: list[Any] = []
        self.accepted: list[tuple[Prompts, Mapping[str, float], Sequence[int]]] = []
        self.rejected: Counter[str] = Counter()
        self.steps = steps

    def evaluate(self, wanted: Sequence[tuple[Prompts, Sequence[Task]]]) -> list[list[PromptTrial]]:
        self.log.append(("evaluate", [(dict(prompts), [task.id for task in tasks]) for prompts, tasks in wanted]))
        return [[self._try(prompts, task) for task in tasks] for prompts, tasks in wanted]

    def _try(self, prompts: Prompts, task: Task) -> PromptTrial:
        score = float(task.data in prompts["system"].partition(":")[2])
        rollout = Rollout(id="r", group="r", member=0, task=task, status="succeeded", created=0.0,
                          rewards=(Reward(value=score),))  # fmt: skip
        return PromptTrial(task, score, [Sample(rollout, [])], [score])

    def ask(self, questions: Sequence[str]) -> list[str]:
        self.log.append(("ask", list(questions)))
        return [self._say(question) for question in questions]

    def _say(self, question: str) -> str:
        if "Do not write a new prompt" in question:
            return "It lacks a letter."
        opened = "<prompt>\n" if "<prompt>" in question else "```\n"
        before = question.partition(opened)[2].partition("\n")[0]
        return f"```\n{before}{self.random.choice(LETTERS)}\n```"

    def accept(self, prompts: Prompts, scores: Mapping[str, float], parents: Sequence[int]) -> int:
        self.accepted.append((dict(prompts), dict(scores), list(parents)))
        return len(self.accepted) - 1

    def reject(self, reason: str) -> None:
        self.rejected[reason] += 1

    def end_step(self) -> None:
        self.steps -= 1
        if not self.steps:
            raise OptimizationOver


def run(optimizer: PromptOptimizer, session: Session) -> Session:
    with pytest.raises(OptimizationOver):
        optimizer.optimize(session)
    return session


OPTIMIZERS = [GEPA(minibatch=4), GEPA(minibatch=2, proposals=3), APO(minibatch=4, beam_width=2, branch_factor=3)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["gepa", "gepa-3", "apo"])
def test_versions_get_better_and_know_where_they_come_from(optimizer: PromptOptimizer) -> None:
    session = run(optimizer, Session())
    prompts, scores, parents = session.accepted[0]
    assert (prompts, parents) == ({"system": "Say: "}, [])
    best = max(sum(scores.values()) for _, scores, _ in session.accepted)
    assert best >= 6
    for number, (prompts, scores, parents) in enumerate(session.accepted[1:], 1):
        assert set(scores) == {task.id for task in session.validation}
        assert all(parent < number for parent in parents)
        assert prompts["system"].startswith(session.accepted[parents[0]][0]["system"]), "it is an edit of its parent"
    assert session.rejected["not_better"] > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["gepa", "gepa-3", "apo"])
def test_the_same_answers_lead_to_the_same_questions(optimizer: PromptOptimizer) -> None:
    """What resuming rests on."""
    one, other = run(optimizer, Session(steps=12)), run(optimizer, Session(steps=12))
    assert one.log == other.log
    assert one.accepted == other.accepted


@pytest.mark.parametrize("optimizer", [GEPA(), APO(branch_factor=1)], ids=["gepa", "apo"])
@pytest.mark.parametrize(
    ("said", "fault"), [("", "empty"), ("```\nSay: \n```", "unchanged"), ("```\nx\n```", "placeholder")]
)
def test_what_could_not_be_used_is_never_tried(
    monkeypatch: pytest.MonkeyPatch, optimizer: PromptOptimizer, said: str, fault: str
) -> None:
    session = Session(steps=3, first="Say: {letter}" if fault == "placeholder" else "Say: ",
                      placeholders=["letter"] if fault == "placeholder" else [])  # fmt: skip
    monkeypatch.setattr(session, "_say", lambda question: said)
    run(optimizer, session)
    assert session.rejected == {fault: 3}
    assert len(session.accepted) == 1
    tried = {prompts["system"] for what, asked in session.log if what == "evaluate" for prompts, _ in asked}
    assert tried == {session.first["system"]}


def test_an_error_in_the_session_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package goes on after an Exception of a proposal: what ends a run is none."""

    def ask(questions: Sequence[str]) -> list[str]:
        raise OptimizationOver

    session = Session()
    monkeypatch.setattr(session, "ask", ask)
    run(GEPA(), session)
    assert session.steps >= 59


def test_they_are_found_by_name() -> None:
    assert {"gepa", "apo"} <= set(names())
    assert find("gepa").improves == find("apo").improves == "prompts"
    assert find("grpo").improves == "weights"
    with pytest.raises(ConfigError, match="minibatch"):
        GEPA(minibach=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("Here:\n```\nOne\ntwo\n```\nDone.", "One\ntwo"),
        ("```markdown\nOne\n```", "One"),
        ("plain", "plain"),
        ("```One```", "One"),
        ("```\nA fence ```inside``` stays\n```", "A fence ```inside``` stays"),
        ("```\nnever closed", ""),
        ("", ""),
    ],
)
def test_reading_a_block(answer: str, text: str) -> None:
    assert read_block(answer) == text


def test_what_a_rollout_that_failed_says() -> None:
    task = Task(id="t")
    failed = Rollout(id="r", group="r", member=0, task=task, status="failed", cause="agent_error", detail="a\nBoom",
                     created=0.0)  # fmt: skip
    assert "Boom" in describe_trial(PromptTrial(task, 0.0, [Sample(failed, [])], [0.0]))["Feedback"]


def test_of_several_rollouts_the_worst_is_shown() -> None:
    """By what counts, whatever it is called."""
    task = Task(id="t")
    made = [Rollout(id=f"r{n}", group="r", member=n, task=task, status="succeeded", created=0.0,
                    rewards=(Reward(name="ok", value=float(n)),)) for n in (1, 0)]  # fmt: skip
    assert [score_rollout(one, {"ok": 2.0}) for one in made] == [2.0, 0.0]
    trial = PromptTrial(task, 1.0, [Sample(one, []) for one in made], [2.0, 0.0])
    assert describe_trial(trial)["Feedback"] == "score 1 (ok 0)"


def test_what_an_optimiser_model_reads_of_a_rollout() -> None:
    turn = {"rollout": "r", "attempt": 1, "prompt_ids": [], "response_ids": [], "logprobs": [], "versions": []}
    user, call = {"role": "user", "content": "2 + 2?"}, {"function": {"name": "add", "arguments": "{}"}}
    system = {"role": "system", "content": "SECRET PROMPT"}
    first = Turn(id="r/1/0", messages=[system, user], answer={"content": "", "tool_calls": [call]}, finish="tool_calls",
                 started=0, ended=1, **turn)  # fmt: skip
    tools = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    second = Turn(id="r/1/1", messages=[system, user, {"role": "assistant"}, *tools], answer={"content": "It is 4."},
                  finish="stop", started=2, ended=3, **turn)  # fmt: skip
    rollout = Rollout(id="r", group="r", member=0, task=Task(id="t", data={"q": "2 + 2?"}), status="succeeded",
                      created=0.0, rewards=(Reward(value=0.5), Reward(name="style", value=1.0)))  # fmt: skip
    told = describe_trial(PromptTrial(rollout.task, 0.5, [Sample(rollout, [first, second])], [0.5]))
    assert told["Generated Outputs"] == "user: 2 + 2?\nassistant: add({})\ntool: 4\ntool: 5\nassistant: It is 4."
    assert told["Feedback"] == "score 0.5 (reward 0.5, style 1)"
    assert "SECRET" not in str(told)
