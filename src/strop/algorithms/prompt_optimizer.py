"""The seam between prompt optimisers and a run: neither knows the other.

    PromptOptimizer.optimize(session)        an optimiser: a plain function that asks, and decides what it tries next
    session.evaluate(...)                    runs agents with versions of the prompts, and says what each got
    session.ask(...)                         asks the optimiser model
    session.accept(...), session.end_step()  a version that is kept; an iteration is over, and committed

Everything that an optimiser learns comes through the session, whose answers are durable, and `session.random`, which is
seeded. So it needs no state of its own on disk: a resumed run calls `optimize` again from the beginning, and the
session gives the same answers as before, without asking anybody, until it comes to where the run was killed.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from strop.algorithms.base import Improver
from strop.algorithms.rewards import select_last_rewards
from strop.config.prompts import find_missing
from strop.trajectory import Sample
from strop.types import Rollout, Task

Prompts = Mapping[str, str]
"""A version of a run's prompts: texts by name."""
Fault = Literal["empty", "unchanged", "too_long", "placeholder"]
"""Why a proposed text is not tried."""
MAX_LENGTH = 100_000
"""Characters of a prompt at most."""
Limit = Annotated[int, Meta(ge=0)]


class OptimizationOver(BaseException):
    """Nothing more can be asked: a budget is spent, all steps are made, the run is told to stop, or something is wrong.
    It is not an `Exception`, so that no optimiser takes it for a proposal that failed."""


@dataclass(frozen=True)
class PromptTrial:
    """A version of the prompts on one task: its rollouts, what each came to, and the mean of that."""

    task: Task
    score: float
    samples: Sequence[Sample]
    scores: Sequence[float]


class PromptSession(ABC):
    """What an optimiser works with. `first` is the version that the run begins with, number 0, which is not evaluated
    yet; `train` are the tasks that it may learn from, `validation` those that tell which version is best."""

    first: Prompts
    placeholders: Mapping[str, Sequence[str]]
    train: Sequence[Task]
    validation: Sequence[Task]
    random: random.Random

    @abstractmethod
    def evaluate(self, wanted: Sequence[tuple[Prompts, Sequence[Task]]]) -> list[list[PromptTrial]]:
        """Run the agent with versions of the prompts, each on its tasks, all at once. What was run before is not run
        again."""

    @abstractmethod
    def ask(self, questions: Sequence[str]) -> list[str]:
        """What the optimiser model says to each of these, all at once. One that cannot be answered is empty."""

    @abstractmethod
    def accept(self, prompts: Prompts, scores: Mapping[str, float], parents: Sequence[int]) -> int:
        """Keep a version, with its score on every validation task by its id; returns its number."""

    @abstractmethod
    def reject(self, reason: str) -> None:
        """Count a proposal that is not kept."""

    @abstractmethod
    def end_step(self) -> None:
        """An iteration is over. Raises `OptimizationOver` once there is no next one."""

    def find_fault(self, name: str, text: str, before: str) -> Fault | None:
        """What is wrong with a text that is proposed in the place of the one before, if anything is; counted."""
        fault: Fault | None = None
        if not text.strip():
            fault = "empty"
        elif text.strip() == before.strip():
            fault = "unchanged"
        elif len(text) > MAX_LENGTH:
            fault = "too_long"
        elif find_missing(text, self.placeholders[name]):
            fault = "placeholder"
        if fault is not None:
            self.reject(fault)
        return fault


class PromptOptimizer(Improver):
    """Improves the texts of the table `prompts`. The optimiser model is one of `gateway.outside`; each call of it is
    reserved in the run's folder before it is sent, so that no budget is ever exceeded; one lost to a kill stays
    spent."""

    improves = "prompts"

    optimizer: Annotated[
        str, Meta(description="optimiser model: which of gateway.outside writes prompts (url, model, key_env, prices)")
    ] = "optimizer"
    options: Annotated[
        dict[str, Any], Meta(description="fields that go along with every call of it: temperature, reasoning_effort")
    ] = field(default_factory=dict[str, Any])
    answer_tokens: Annotated[
        int, Meta(ge=1, description="tokens that it may answer with, thinking included: max_tokens")
    ] = 4096
    patience: Annotated[
        float, Meta(gt=0, description="seconds for which a busy optimiser model is asked again (429, 5xx, lost calls)")
    ] = 900.0
    max_calls: Annotated[Limit, Meta(description="budget: calls of the optimiser model, retries too; 0: no limit")] = (
        200
    )
    max_tokens: Annotated[Limit, Meta(description="budget: its prompt and completion tokens; 0: no limit")] = 0
    max_cost: Annotated[
        float, Meta(ge=0, description="budget: what it may cost, in the currency of its prices; 0: no limit")
    ] = 0.0
    max_rollouts: Annotated[Limit, Meta(description="budget: rollouts that try versions; 0: no limit")] = 0
    perfect: Annotated[
        float | None,
        Meta(
            description="perfect score: a run ends once a version has it on every validation task, and a minibatch on "
            "which all have it teaches nothing; default: every reward that counts is 1"
        ),
    ] = None
    samples: Annotated[int, Meta(ge=1, description="rollouts per task and version; their mean is its score")] = 1
    minibatch: Annotated[int, Meta(ge=1, description="training tasks that a proposal is made from and tried on")] = 4
    validation: Annotated[
        str,
        Meta(
            description="the split that tells which version is best; default: validation, or the training tasks where "
            "there is none"
        ),
    ] = ""

    @property
    def min_calls(self) -> int:
        """How many calls of the optimiser model the first step takes."""
        return 1

    @property
    def perfect_score(self) -> float:
        """The score that no version can exceed."""
        return sum(weight for weight in self.rewards.values() if weight > 0) if self.perfect is None else self.perfect

    @abstractmethod
    def optimize(self, session: PromptSession) -> None:
        """Try versions until the session says that it is over. Runs in a thread of its own."""


def score_rollout(rollout: Rollout, weights: Mapping[str, float]) -> float:
    """What a rollout came to: the weighted sum of its rewards, with what its agents and turns got.

    >>> from strop.types import Reward, Task
    >>> score_rollout(Rollout(id="g0.0", group="g0", member=0, task=Task(id="t"), status="succeeded", created=0.0,
    ...     rewards=(Reward(value=0.5), Reward(name="style", value=1.0))), {"reward": 2.0})
    1.0
    """
    return sum(weights.get(reward.name, 0.0) * reward.value for reward in select_last_rewards(rollout))


def describe_trial(trial: PromptTrial, most: int = 6000) -> dict[str, str]:
    """A trial as an optimiser model reads it: the task, what was said, what came of it; of several rollouts, the worst
    one's."""
    sample = min(zip(trial.scores, trial.samples, strict=True), key=lambda one: one[0])[1]
    rollout, said, spoke = sample.rollout, list[str](), set[str]()
    for turn in sample.turns:
        roles = [str(message.get("role", "")) for message in turn.messages]
        known = len(roles) - roles[::-1].index("assistant") if turn.agent in spoke and "assistant" in roles else 0
        new = [one for one in turn.messages[known:] if one.get("role") not in ("system", "developer")]
        name = "assistant" if turn.agent == "main" else turn.agent
        said += [*(f"{one.get('role', '')}: {_show(one)}" for one in new), f"{name}: {_show(turn.answer)}"]
        spoke.add(turn.agent)
    rewards = ", ".join(f"{reward.name} {reward.value:g}" for reward in select_last_rewards(rollout))
    outcome = f"failed: {(rollout.detail or str(rollout.cause)).strip()[-500:]}" if rollout.cause else rewards
    return {
        "Inputs": _cut(str(rollout.task.data), most // 3),
        "Generated Outputs": _cut("\n".join(said) or "(the model was not called)", most),
        "Feedback": f"score {trial.score:g} ({outcome or 'no reward was given'})",
    }


def _show(message: Mapping[str, Any]) -> str:
    calls = [
        f"{call.get('function', {}).get('name')}({call.get('function', {}).get('arguments')})"
        for call in message.get("tool_calls") or ()
    ]
    return " ".join([str(message.get("content") or ""), *calls]).strip()


def _cut(text: str, most: int) -> str:
    """The text, without its middle where it is too long."""
    return text if len(text) <= most else f"{text[: most // 2]}\n[...]\n{text[-most // 2 :]}"
