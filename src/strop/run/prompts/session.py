"""A run as a prompt optimiser sees it: what it asks for is queued, waited for and committed here.

The optimiser is a plain function in a thread of its own; every question of it is answered by the run's event loop. All
answers are durable: rollouts in the store, under names that follow from the order of the questions, and what the
optimiser model said in calls.jsonl. An optimiser that is called again after a kill, with the same random numbers, asks
the same questions, and gets everywhere the answer that is there, up to the first that nobody has. Steps that were
committed before are compared by their digests on the way, and are not committed again.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import numpy as np

from strop.algorithms import PromptOptimizer, PromptSession, PromptTrial
from strop.algorithms.metrics import summarize
from strop.algorithms.prompt_optimizer import OptimizationOver, Prompts, score_rollout
from strop.errors import StoreError
from strop.gateway.marked_prompts import PromptPattern
from strop.monitor.metrics import check
from strop.run.collect import check_rewards, stop_if_all_failed, wait_until_ended
from strop.run.folder import name_step
from strop.run.learn import describe_samples
from strop.run.prompts.model import BudgetSpent, NothingLeft, OptimizerModel
from strop.run.prompts.pool import PromptCheckpoint, PromptPool, PromptVersion, write_pool, write_prompts
from strop.run.rollouts import read_samples
from strop.run.scoring import evaluate_if_due
from strop.run.state import Run
from strop.trajectory import Sample
from strop.trajectory.assemble import find_cause
from strop.types import Rollout, Step, Task, stable_hash, version

T = TypeVar("T")


class RunSession(PromptSession):
    """The session of one run. `over` says why it ended, once it has, and `error` what went wrong, if anything did."""

    def __init__(self, run: Run, optimizer: PromptOptimizer, model: OptimizerModel, past: Sequence[Step]) -> None:
        self._run, self._settings, self._model, self._past = run, optimizer, model, past
        self._loop = asyncio.get_running_loop()
        config = run.config
        self.first = {name: prompt.text for name, prompt in config.prompts.items()}
        self.placeholders = {name: prompt.list_placeholders() for name, prompt in config.prompts.items()}
        self.train, self.validation = choose_tasks(run.tasks, optimizer.validation)
        self.random = random.Random(stable_hash(config.seed, "prompts"))
        self.pool = PromptPool()
        self.over = ""
        self.error: Exception | None = None
        self.rollouts = 0
        self._steps = 0
        self._groups = 0
        self._trials: dict[tuple[str, str], PromptTrial] = {}
        self._consumed: list[Sample] = []
        self._scores: list[float] = []
        self._lowest = math.inf
        self._failures = config.algorithm.failures.by_cause()
        self._rejected: Counter[str] = Counter()
        self._answering: Future[Any] | None = None
        self._aborted = False
        self._began = time.monotonic()

    # -- what the optimiser calls, in its thread -------------------------------------------------------------------

    def evaluate(self, wanted: Sequence[tuple[Prompts, Sequence[Task]]]) -> list[list[PromptTrial]]:
        return self._wait_for(self._evaluate(wanted))

    def ask(self, questions: Sequence[str]) -> list[str]:
        return self._wait_for(self._ask(questions))

    def accept(self, prompts: Prompts, scores: Mapping[str, float], parents: Sequence[int]) -> int:
        number = len(self.pool.versions)
        step = self._steps + 1 if number else 0
        self.pool.add(
            PromptVersion(number=number, step=step, parents=list(parents), prompts=dict(prompts), scores=dict(scores))
        )
        if number == 0 and not self._past:
            write_pool(self._run.folder.path, self.pool)  # there is something to look at before the first step is done
        return number

    def reject(self, reason: str) -> None:
        self._rejected[reason] += 1

    def end_step(self) -> None:
        self._wait_for(self._end_step())

    def abort(self) -> None:
        """The run ends, whatever the optimiser is at."""
        self._aborted = True
        if self._answering is not None:
            self._answering.cancel()

    def _wait_for(self, answer: Coroutine[Any, Any, T]) -> T:
        """What the run's event loop says. Anything that goes wrong there ends the optimiser."""
        if self._aborted:
            answer.close()
            raise OptimizationOver
        self._answering = asyncio.run_coroutine_threadsafe(answer, self._loop)
        if self._aborted:  # meanwhile
            self._answering.cancel()
        try:
            return self._answering.result()
        except (BudgetSpent, NothingLeft) as why:
            self.over = f"the budget is spent ({why})" if isinstance(why, BudgetSpent) else str(why)
        except Exception as error:
            self.error = error
        # From here on nothing is answered: an optimiser that clears up on its way out must not end a step that it was
        # in the middle of.
        self._aborted = True
        raise OptimizationOver

    # -- what answers it, in the run's event loop -------------------------------------------------------------------

    async def _ask(self, questions: Sequence[str]) -> list[str]:
        self._run.view.phase("asking the optimiser model", 0, len(questions))
        return await self._model.ask(questions)

    async def _evaluate(self, wanted: Sequence[tuple[Prompts, Sequence[Task]]]) -> list[list[PromptTrial]]:
        plan: dict[tuple[str, str], list[Rollout]] = {}
        for prompts, tasks in wanted:
            for task in tasks:
                if (key := _key(prompts, task)) not in self._trials and key not in plan:
                    plan[key] = self._make_rollouts(prompts, task, len(plan))
        self._refuse_beyond(sum(map(len, plan.values())))
        self._groups += len(plan)
        rollouts = [rollout for group in plan.values() for rollout in group]
        self.rollouts += len(rollouts)
        phase = f"step {self._steps + 1}: trying prompts"
        ended = {one.id: one for one in await wait_until_ended(self._run, rollouts, phase)} if rollouts else {}
        if ended and not self.pool.versions:  # of the first version: what fails later is the fault of a proposal
            await stop_if_all_failed(self._run, list(ended.values()), phase)
            check_rewards(self._run, list(ended.values()))
        read = {one.rollout.id: one for one in await read_samples(self._run.store, [*ended.values()])}
        if read and not self.pool.versions:
            self._note_unused(list(read.values()))
        self._lowest = min([self._lowest, *(self._total(one) for one in read.values() if not one.rollout.cause)])
        for key, group in plan.items():
            samples = [read[rollout.id] for rollout in group]
            self._trials[key] = self._judge(group[0].task, samples)
            self._consumed += samples
        found = [[self._trials[_key(prompts, task)] for task in tasks] for prompts, tasks in wanted]
        self._scores += [trial.score for trials in found for trial in trials]
        return found

    def _note_unused(self, samples: Sequence[Sample]) -> None:
        """A prompt that no model is ever sent cannot be improved by what happens; said before anything is paid for."""
        said = "\n".join(str(message.get("content")) for one in samples for t in one.turns for message in t.messages)
        for name, text in self.first.items():
            if said and PromptPattern(text, self.placeholders[name]).find(said) is None:
                self._run.view.note(
                    f"no model was sent the prompt {name!r} in the first {len(samples)} rollouts, so that improving it "
                    f"may change nothing. Fix: have the agent use llm.prompts[{name!r}], or mark it in what it sends"
                )

    def _judge(self, task: Task, samples: Sequence[Sample]) -> PromptTrial:
        """What a version came to on a task. A rollout that failed counts as `algorithm.failures` says of its cause,
        beside everything that was tried so far: failing is never better than what others did."""
        kept: list[tuple[float, Sample]] = []
        for sample in samples:
            cause = find_cause(sample.rollout)
            counts = self._failures.get(cause, "exclude") if cause else None
            if counts is None:
                kept.append((self._total(sample), sample))
            elif counts != "exclude":
                lowest = {"zero": min(0.0, self._lowest), "lowest": self._lowest}
                kept.append((lowest[counts] if isinstance(counts, str) else counts, sample))
        if not kept:  # nothing is known of it
            kept = [(min(0.0, self._lowest), sample) for sample in samples]
        scores, of = [score for score, _ in kept], [sample for _, sample in kept]
        return PromptTrial(task, fmean(scores), of, scores)

    def _total(self, sample: Sample) -> float:
        return score_rollout(sample.rollout, self._settings.rewards)

    def _make_rollouts(self, prompts: Prompts, task: Task, place: int) -> list[Rollout]:
        """Rollouts of a version on a task. Versions are compared with the same seeds."""
        name, config = f"g{self._groups + place:06d}", self._run.config
        return [
            Rollout(
                id=f"{name}.{member}",
                group=name,
                member=member,
                task=task,
                seed=stable_hash(config.seed, "prompts", task.id, member),
                retries=config.runner.retries.by_cause(),
                created=time.time(),
                prompts=dict(prompts),
            )
            for member in range(self._settings.samples)
        ]

    def _refuse_beyond(self, count: int) -> None:
        most = self._settings.max_rollouts
        if most and self.rollouts + count > most:
            raise BudgetSpent(
                f"algorithm.settings.max_rollouts: {self.rollouts:,} of {most:,} rollouts are spent, and the next "
                f"trial takes {count:,}"
            )

    async def _end_step(self) -> None:
        number, run = self._steps + 1, self._run
        rollouts = [sample.rollout.id for sample in self._consumed]
        if number <= len(self._past):
            self._compare(self._past[number - 1], rollouts)
        else:
            await self._commit(number, rollouts)
        self._steps, self._consumed, self._scores = number, [], []
        self._began = time.monotonic()
        if number > len(self._past):
            await evaluate_if_due(run)
        if number < len(self._past):
            return
        if self.pool.versions and min(self.pool.best.scores.values()) >= self._settings.perfect_score:
            raise NothingLeft("the best version is perfect on every validation task")
        if run.finished or run.stop.is_set():
            raise NothingLeft("all steps are made" if run.finished else "the run was told to stop")

    def _compare(self, step: Step, rollouts: Sequence[str]) -> None:
        """A step that was committed before comes out the same, or nothing that follows can be trusted."""
        if step.digest != self.pool.digest() or sorted(step.rollouts) != sorted(rollouts):
            raise StoreError(
                f"step {step.number} of {self._run.folder.path} comes out differently than it did: the optimiser or "
                "its package has changed since. Fix: resume with the versions that the run began with, or begin a new "
                "run from its prompts with `strop train --from`"
            )

    async def _commit(self, number: int, rollouts: list[str]) -> None:
        run, best = self._run, self.pool.best
        name = name_step(run.lineage, number)
        at = PromptCheckpoint(
            version=version(run.lineage, number), prompts=best.prompts, number=best.number, score=best.score
        )
        write_pool(run.folder.path, self.pool)
        write_prompts(run.folder.checkpoint(name), at)
        metrics = self._measure()
        check(metrics)
        step = Step(
            lineage=run.lineage,
            number=number,
            rollouts=rollouts,
            metrics=metrics,
            checkpoint=name,
            digest=self.pool.digest(),
            time=time.time(),
        )
        await run.store.commit_step(step)
        run.step, run.versions, run.prompts = number, [step.version], best.prompts
        run.steps.append(step)
        run.spent.clear()
        run.folder.name_best(name)
        run.folder.prune([str(one.checkpoint) for one in run.steps[-run.config.loop.keep_checkpoints :]])
        run.view.step(number, metrics)
        if run.metrics is not None:
            run.metrics.write(number, metrics)

    def describe_rest(self) -> str:
        """What was spent since the last step, which the optimiser was in the middle of; empty where that is nothing."""
        told = self._run.steps[-1].metrics if self._run.steps else {}
        calls = self._model.ledger.spent.calls - int(told.get("prompts/calls", 0))
        rollouts = len(self._consumed)
        return (
            f"; {calls} calls and {rollouts} rollouts of an unfinished step are spent too" if calls or rollouts else ""
        )

    def _measure(self) -> dict[str, float]:
        spent, best, seconds = self._model.ledger.spent, self.pool.best, time.monotonic() - self._began
        metrics = describe_samples(self._consumed) if self._consumed else {}
        metrics |= summarize("critic/rewards", np.array(self._scores)) if self._scores else {}
        metrics |= {f"prompts/rejected/{reason}": float(count) for reason, count in self._rejected.items()}
        return metrics | {
            "prompts/best": best.score,
            "prompts/best_version": float(best.number),
            "prompts/versions": float(len(self.pool.versions)),
            "prompts/front": float(len(self.pool.find_front())),
            "prompts/calls": float(spent.calls),
            "prompts/calls_failed": float(self._model.ledger.errors),
            "prompts/calls_lost": float(self._model.ledger.lost),
            "prompts/tokens": float(spent.tokens),
            "prompts/cost": spent.cost,
            "prompts/rollouts": float(self.rollouts),
            "timing_s/step": seconds,
            "perf/rollouts": len(self._consumed) / max(seconds, 1e-9),
        }


def choose_tasks(tasks: Sequence[Task], split: str) -> tuple[list[Task], list[Task]]:
    """What an optimiser learns from, and what tells which version is best: the split of that name, or the training
    tasks where there is none."""
    train = [task for task in tasks if task.split == "train"]
    kept = [task for task in tasks if task.split == (split or "validation")]
    return train, kept or train


def _key(prompts: Prompts, task: Task) -> tuple[str, str]:
    return msgspec.json.encode(dict(prompts), order="sorted").decode(), task.id
