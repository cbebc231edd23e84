"""APO: automatic prompt optimisation by textual gradients with a beam (Pryzant et al. 2023,
https://arxiv.org/abs/2305.03495; as Agent Lightning's APO has it).

    one round   every version of the beam is run on minibatches ─▶ the optimiser model criticises it by what happened
                (the gradient) ─▶ and edits it by the critique ─▶ an edit that is better on its minibatch is run on the
                validation tasks ─▶ the best `beam_width` of all are the next beam

An edit that is not better than its parent on the parent's own minibatch is dropped before it costs a validation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from strop.algorithms.prompt_optimizer import PromptOptimizer, Prompts, PromptSession, PromptTrial, describe_trial
from strop.types import Task

CRITIQUE = """\
A prompt steers an assistant. Below are the prompt and what happened on some tasks, with a score for each.

<prompt>
{prompt}
</prompt>

{trials}

Say what in the prompt led to low scores, or what it leaves unsaid that would raise them: at most five points, each with
the evidence in the tasks above. Do not write a new prompt."""

EDIT = """\
A prompt steers an assistant. Below are the prompt and a critique of it.

<prompt>
{prompt}
</prompt>

<critique>
{critique}
</critique>

Write the prompt anew so that it answers the critique. Keep what works.{keep} Write the new prompt between ``` and ```,
and nothing else."""


@dataclass(frozen=True)
class _Version:
    number: int
    prompts: Prompts
    score: float


@dataclass(frozen=True)
class _Edit:
    """A prompt of a version of the beam that is written anew: `tasks` are those it is criticised by and tried on."""

    parent: _Version
    name: str
    tasks: list[Task]


class APO(PromptOptimizer):
    """Automatic prompt optimisation: a beam of versions, each criticised by what happened and edited accordingly."""

    beam_width: Annotated[int, Meta(ge=1, description="beam width: versions that are edited further")] = 4
    branch_factor: Annotated[int, Meta(ge=1, description="edits of each of them per round")] = 4

    @property
    def min_calls(self) -> int:
        return 2 * self.branch_factor

    def optimize(self, session: PromptSession) -> None:
        beam = [self._validate(session, session.first, [])]
        rounds = 0
        while True:
            edits = self._choose_edits(session, beam, rounds)
            before = session.evaluate([(edit.parent.prompts, edit.tasks) for edit in edits])
            texts = self._write(session, edits, before)
            tried = [
                (edit, {**edit.parent.prompts, edit.name: text}, sum(trial.score for trial in trials))
                for edit, text, trials in zip(edits, texts, before, strict=True)
                if text is not None
            ]
            after = session.evaluate([(prompts, edit.tasks) for edit, prompts, _ in tried])
            better = list[tuple[Prompts, int]]()
            for (edit, prompts, score), trials in zip(tried, after, strict=True):
                if sum(trial.score for trial in trials) > score and prompts not in [known for known, _ in better]:
                    better.append((prompts, edit.parent.number))
                else:
                    session.reject("not_better")
            session.evaluate([(prompts, session.validation) for prompts, _ in better])  # all at once
            beam += [self._validate(session, prompts, [parent]) for prompts, parent in better]
            beam = sorted(beam, key=lambda version: (-version.score, version.number))[: self.beam_width]
            rounds += 1
            session.end_step()

    def _validate(self, session: PromptSession, prompts: Prompts, parents: list[int]) -> _Version:
        (trials,) = session.evaluate([(prompts, session.validation)])
        scores = {trial.task.id: trial.score for trial in trials}
        number = session.accept(prompts, scores, parents)
        return _Version(number, prompts, sum(scores.values()) / len(scores))

    def _choose_edits(self, session: PromptSession, beam: list[_Version], rounds: int) -> list[_Edit]:
        """Prompts take turns, and each edit has a minibatch of its own."""
        names, size = list(session.first), min(self.minibatch, len(session.train))
        return [
            _Edit(parent, names[(rounds + branch) % len(names)], session.random.sample(list(session.train), size))
            for parent in beam
            for branch in range(self.branch_factor)
        ]

    def _write(self, session: PromptSession, edits: list[_Edit], found: list[list[PromptTrial]]) -> list[str | None]:
        """The new texts; None where nothing came that could be tried."""
        critiques = session.ask(
            [
                CRITIQUE.format(prompt=edit.parent.prompts[edit.name], trials=_list_trials(trials))
                for edit, trials in zip(edits, found, strict=True)
            ]
        )
        answers = session.ask(
            [
                EDIT.format(prompt=edit.parent.prompts[edit.name], critique=critique, keep=_list_kept(session, edit))
                for edit, critique in zip(edits, critiques, strict=True)
            ]
        )
        texts = [read_block(answer) for answer in answers]
        return [
            None if session.find_fault(edit.name, text, edit.parent.prompts[edit.name]) else text
            for edit, text in zip(edits, texts, strict=True)
        ]


def _list_trials(trials: list[PromptTrial]) -> str:
    described = [describe_trial(trial) for trial in trials]
    return "\n\n".join(
        f"<task>\n{one['Inputs']}\n\n{one['Generated Outputs']}\n\n{one['Feedback']}\n</task>" for one in described
    )


def _list_kept(session: PromptSession, edit: _Edit) -> str:
    names = ", ".join(f"{{{name}}}" for name in session.placeholders[edit.name])
    return f" It must still have {names}, which is filled in later." if names else ""


def read_block(answer: str) -> str:
    """What stands between the first ``` and the last, or all of it where there are none.

    >>> read_block("Here it is:\\n```text\\nBook rooms.\\n```\\nGood luck.")
    'Book rooms.'
    """
    start, end = answer.find("```"), answer.rfind("```")
    if start == end:
        return answer.replace("```", "").strip() if start < 0 or answer.strip().endswith("```") else ""
    inner = answer[start + 3 : end]
    first, newline, rest = inner.partition("\n")
    return (rest if newline and " " not in first.strip() else inner).strip()
