"""GEPA: reflective evolution of prompts with a Pareto front over tasks (Agrawal et al. 2025,
https://arxiv.org/abs/2507.19457), by the PyPI package `gepa` through its adapter.

    one iteration   a parent is drawn from the versions that win a validation task ─▶ run on a minibatch ─▶ the
                    optimiser model reads what happened and rewrites one prompt ─▶ run on the same minibatch ─▶ if that
                    is better: run on every validation task, and kept

Selection, fronts, merging and the reflection prompt are the package's. What is ours: rollouts, budgets, and that
nothing is lost. Its own state on disk is not used; see `prompt_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from msgspec import Meta

from strop.algorithms.prompt_optimizer import (
    OptimizationOver,
    PromptOptimizer,
    PromptSession,
    PromptTrial,
    describe_trial,
)
from strop.errors import ConfigError
from strop.types import Task


class GEPA(PromptOptimizer):
    """Reflective prompt evolution: versions are rewritten from what happened in rollouts, and those stay that win some
    task."""

    proposals: Annotated[int, Meta(ge=1, description="proposals per iteration, each from a parent of its own")] = 1
    selection: Annotated[
        Literal["pareto", "current_best", "epsilon_greedy", "top_k_pareto"],
        Meta(description="candidate selection: which version is rewritten next"),
    ] = "pareto"
    components: Annotated[
        Literal["round_robin", "all"], Meta(description="which of several prompts is rewritten: one by one, or all")
    ] = "round_robin"
    merge: Annotated[bool, Meta(description="merge two versions of the front that rewrote different prompts")] = False

    def optimize(self, session: PromptSession) -> None:
        try:
            from gepa.api import optimize  # pyright: ignore[reportUnknownVariableType]
            from gepa.strategies.proposal_sampling import IndependentSampling
        except ImportError:
            raise ConfigError(
                'algorithm.name is gepa, and the package gepa is not installed. Fix: pip install "gepa>=0.1.4"'
            ) from None
        run = _Adapter(session)
        tasks: list[Any] = list(session.train)
        optimize(
            seed_candidate=dict(session.first),
            trainset=tasks,
            valset=list(session.validation),
            adapter=cast(Any, run),
            reflection_strategy=_make_reflection(session),
            candidate_selection_strategy=self.selection,
            reflection_minibatch_size=min(self.minibatch, len(tasks)),
            perfect_score=self.perfect_score,
            module_selector=self.components,
            use_merge=self.merge,
            stop_callbacks=cast(Any, _never),  # the session ends it
            logger=cast(Any, _Quiet()),
            callbacks=[cast(Any, _Watcher(session))],
            track_best_outputs=False,
            seed=session.random.randrange(2**31),
            sampling_strategy=IndependentSampling(self.proposals) if self.proposals > 1 else None,
        )


class _Adapter:
    """A run as the package sees it. It knows tasks by their place in a list, and never looks into them."""

    propose_new_texts = None

    def __init__(self, session: PromptSession) -> None:
        self._session = session

    def evaluate(self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(self, items: list[tuple[dict[str, str], list[Task]]]) -> list[Any]:
        from gepa.core.adapter import EvaluationBatch

        found = self._session.evaluate([(candidate, batch) for candidate, batch in items])
        return [
            EvaluationBatch(
                outputs=[trial.task.id for trial in trials],
                scores=[trial.score for trial in trials],
                trajectories=cast(Any, trials),
            )
            for trials in found
        ]

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        trials: list[PromptTrial] = eval_batch.trajectories
        records = [describe_trial(trial) for trial in trials]
        return dict.fromkeys(components_to_update, records)


def _make_reflection(session: PromptSession) -> Any:
    """The package's own reflection, without what is nonsense: an answer that no agent could use is not tried."""
    from gepa.proposer.reflective_mutation.reflection_lm import StatelessReflectionLM

    class Reflection(StatelessReflectionLM):
        def reflect_many(self, jobs: list[Any]) -> list[Any]:
            found = super().reflect_many(jobs)
            for (candidate, _, _), (proposal, _) in zip(jobs, found, strict=True):
                proposal.new_texts = {
                    name: text
                    for name, text in proposal.new_texts.items()
                    if session.find_fault(name, text, candidate[name]) is None
                }
            return found

    return Reflection(lm=cast(Any, _Model(session)))


class _Model:
    def __init__(self, session: PromptSession) -> None:
        self._session = session

    def __call__(self, prompt: Any) -> str:
        return self._session.ask([str(prompt)])[0]

    def batch_complete(self, messages_list: list[list[dict[str, Any]]]) -> list[str]:
        return self._session.ask([str(messages[-1]["content"]) for messages in messages_list])


class _Watcher:
    """What the package tells of: versions that enter its pool, proposals that do not, iterations that are over."""

    def __init__(self, session: PromptSession) -> None:
        self._session = session

    def on_valset_evaluated(self, event: Any) -> None:
        validation = self._session.validation
        places: dict[int, float] = event["scores_by_val_id"]
        scores = {validation[place].id: score for place, score in places.items()}
        number = self._session.accept(event["candidate"], scores, [p for p in event["parent_ids"] if p is not None])
        if number != event["candidate_idx"]:  # an Exception here would be logged, and forgotten
            raise OptimizationOver from AssertionError(f"version {number} is {event['candidate_idx']} for the package")

    def on_candidate_rejected(self, event: Any) -> None:
        self._session.reject("not_better")

    def on_merge_rejected(self, event: Any) -> None:
        self._session.reject("not_better")

    def on_iteration_end(self, event: Any) -> None:
        self._session.end_step()


class _Quiet:
    def log(self, message: str) -> None:
        pass


def _never(state: Any) -> bool:
    return False
