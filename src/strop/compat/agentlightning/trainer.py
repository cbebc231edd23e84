"""Trainer and its algorithms: fit and dev are `strop.train`.

    trainer = agl.Trainer(algorithm=agl.VERL(config), n_runners=10)
    trainer.fit(agent, train_dataset=train, val_dataset=val)

A configuration for verl is read as far as `SETTINGS` goes; what it sets beside that is named in a line, and has no
meaning here. Our own settings stand in its table `strop`: {"strop": {"policy": {"model": "strop/nano"}}}, and win.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from strop.compat.agentlightning.agents import LitAgent
from strop.compat.agentlightning.resources import NamedResources, PromptTemplate
from strop.config import AlgorithmConfig
from strop.errors import ConfigError
from strop.run.api import train

if TYPE_CHECKING:
    from strop.monitor.summary import Summary

Json = dict[str, Any]
SETTINGS = {
    "actor_rollout_ref.model.path": "policy.model",
    "actor_rollout_ref.rollout.n": "loop.group_size",
    "actor_rollout_ref.rollout.temperature": "policy.train.temperature",
    "actor_rollout_ref.actor.optim.lr": "learner.optim.lr",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.settings.clip",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.settings.clip_high",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.settings.entropy_coef",
    "actor_rollout_ref.model.lora_rank": "learner.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "learner.lora.alpha",
    "algorithm.adv_estimator": "algorithm.name",
    "data.train_batch_size": "loop.groups",
    "data.max_response_length": "policy.train.max_tokens",
    "trainer.total_training_steps": "loop.steps",
    "trainer.save_freq": "loop.checkpoint_every",
    "trainer.test_freq": "loop.eval_every",
}
"""Where a setting of verl's goes."""
ESTIMATORS = {
    "grpo": "grpo",
    "gae": "ppo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
}
ELSEWHERE = {
    "trainer.total_epochs",
    "trainer.experiment_name",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef",
}
"""Those that are read as well."""
DEV_STEPS = 1
AGENT = "main"
"""Whose calls are that go to the model's plain address. They are trained whatever `trained_agents` says: nobody gave
them a name."""


class VERL:
    """An algorithm by verl's configuration."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)

    def settings(self, num_tasks: int) -> tuple[Json, list[str]]:
        """Our settings, and the names of those that have no meaning here.

        >>> VERL({"algorithm": {"adv_estimator": "gae"}, "trainer": {"nnodes": 1}}).settings(8)
        ({'algorithm': {'name': 'ppo'}}, ['trainer.nnodes'])
        """
        flat = dict(_flatten({name: value for name, value in self.config.items() if name != "strop"}))
        made: Json = {}
        for name, value in flat.items():
            if name in SETTINGS and not (name.endswith("_freq") and value <= 0):
                _put(made, SETTINGS[name], _estimator(value) if name.endswith("adv_estimator") else value)
        if flat.get("actor_rollout_ref.actor.use_kl_loss"):
            _put(made, "algorithm.settings.kl", "loss")
            _put(made, "algorithm.settings.kl_coef", flat.get("actor_rollout_ref.actor.kl_loss_coef", 0.001))
        if (epochs := flat.get("trainer.total_epochs")) and "trainer.total_training_steps" not in flat:
            groups = flat.get("data.train_batch_size", 1)
            _put(made, "loop.steps", max(1, epochs * num_tasks // groups))
        if name := flat.get("trainer.experiment_name"):
            made["folder"] = f"runs/{name}"
        for name, value in _flatten(self.config.get("strop", {})):
            _put(made, name, value)
        return made, [name for name in flat if name not in SETTINGS and name not in ELSEWHERE]


def _estimator(name: str) -> str:
    if name not in ESTIMATORS:
        known = ", ".join(ESTIMATORS)
        raise ConfigError(f"algorithm.adv_estimator is {name!r}. Fix: choose one of {known}, or use strop.train")
    return ESTIMATORS[name]


class Trainer:
    """What agents are trained with. Of its arguments `algorithm`, `n_runners` (or `n_workers`), `max_rollouts` (or
    `max_tasks`), the prompts of `initial_resources` and the adapter's `agent_match` count; others are named in a
    line."""

    def __init__(
        self,
        *,
        algorithm: VERL | None = None,
        n_runners: int | None = None,
        n_workers: int | None = None,
        max_rollouts: int | None = None,
        max_tasks: int | None = None,
        initial_resources: NamedResources | None = None,
        **others: Any,
    ) -> None:
        if algorithm is not None and not isinstance(algorithm, VERL):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"{type(algorithm).__name__} is not run here. Fix: use VERL(config), or strop.train with an algorithm "
                "of ours (GRPO, PPO, APO, GEPA, ...)"
            )
        self.algorithm = algorithm or VERL({})
        self._workers, self._most = n_runners or n_workers, max_rollouts or max_tasks
        self._prompts = {
            name: {"text": one.template}
            for name, one in (initial_resources or {}).items()
            if isinstance(one, PromptTemplate)
        }
        adapter: Any = others.get("adapter")
        self._match = cast("Json", adapter).get("agent_match") if isinstance(adapter, dict) else None
        self._others = sorted(name for name in others if not (self._match and name == "adapter"))

    def fit(
        self,
        agent: LitAgent[Any],
        train_dataset: Iterable[Any] | None = None,
        val_dataset: Iterable[Any] | None = None,
    ) -> Summary:
        """Train the agent on `train_dataset`, and evaluate it on `val_dataset`; returns what `strop.train` does."""
        return self._train(agent, train_dataset, val_dataset, {})

    def dev(
        self,
        agent: LitAgent[Any],
        train_dataset: Iterable[Any] | None = None,
        val_dataset: Iterable[Any] | None = None,
    ) -> Summary:
        """A step, to see whether the agent works."""
        return self._train(agent, train_dataset, val_dataset, {"steps": DEV_STEPS})

    def _train(
        self, agent: LitAgent[Any], train_dataset: Iterable[Any] | None, val_dataset: Iterable[Any] | None, loop: Json
    ) -> Summary:
        tasks = make_tasks(train_dataset, "train")[: self._most]
        if not tasks:
            raise ConfigError("there are no tasks. Fix: give train_dataset")
        settings, unread = self.algorithm.settings(len(tasks))
        kept = make_tasks(val_dataset, "test")
        settings["loop"] = {**({} if kept else {"eval_splits": []}), **settings.get("loop", {}), **loop}
        if self._workers:
            settings["runner"] = {"workers": self._workers, **settings.get("runner", {})}
        if self._prompts:
            settings["prompts"] = {**self._prompts, **settings.get("prompts", {})}
        if "algorithm" in settings:
            settings["algorithm"] = msgspec.convert(settings["algorithm"], AlgorithmConfig)
        if pattern := getattr(agent, "trained_agents", None) or self._match:
            settings["policy"] = {"agents": [AGENT, *match_agents(pattern)], **settings.get("policy", {})}
        if without := [*self._others, *unread]:
            print(f"strop: these have no meaning here: {', '.join(without)}", file=sys.stderr)
        return train(agent, [*tasks, *kept], **settings)


def match_agents(pattern: str) -> list[str]:
    """Our patterns for the names that a regular expression is found in. Raises `ConfigError` for one that says more.

    >>> match_agents("write|^check$"), match_agents("tool-.*")
    (['*write*', 'check'], ['*tool-*'])
    """
    made: list[str] = []
    for part in pattern.split("|"):
        begins, ends = part.startswith("^"), part.endswith("$") and not part.endswith("\\$")
        inner = part[begins : len(part) - ends].replace(".*", "*").replace(".", "?")
        more = set(inner) & set("\\[](){}+^$") or set(part.replace(".*", "")) & set("?*")
        if more or not inner.strip("*"):
            raise ConfigError(
                f"trained_agents is {pattern!r}, which says more than names. Fix: name the agents in the table strop "
                'of the configuration: {"strop": {"policy": {"agents": [...]}}}'
            )
        whole = f"{'' if begins else '*'}{inner}{'' if ends else '*'}"
        made.append(whole.replace("**", "*"))
    return made


def make_tasks(rows: Iterable[Any] | None, split: str) -> list[Json]:
    """Rows of a data set as tasks; a row is the task's data.

    >>> make_tasks([{"question": "?"}], "train")
    [{'id': 'train-0', 'split': 'train', 'data': {'question': '?'}}]
    """
    return [{"id": f"{split}-{place}", "split": split, "data": row} for place, row in enumerate(rows or ())]


def _flatten(table: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(cast("Mapping[str, Any]", value), f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _put(table: Json, name: str, value: Any) -> None:
    *tables, last = name.split(".")
    for one in tables:
        table = table.setdefault(one, {})
    table[last] = value
