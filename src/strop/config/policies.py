"""The policies of a run by name, each with the whole configuration that it would have as the only one.

    [policy]                      what all of them begin with
    model = "strop/nano"

    [policies.writer]             laid over [policy]; answers for, and is trained on, the agent "writer"
    [policies.critic]
    agents = ["critic*"]
    model = "smollm2-135m"
    learner.optim.lr = 1e-5       laid over [learner]; [algorithm] and [engine] the same way

Without a table of policies there is one, called main, made of the tables at the top. An agent's name belongs to the
first policy with a pattern that it matches. One that matches none is answered by `main`, if a policy is called that,
and its turns are recorded but not trained; otherwise it is refused, and the run with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from strop.config.checks import POLICY_SECTIONS, convert, refuse_unknown
from strop.config.describe import field_types
from strop.config.loading import merge
from strop.config.run import Config
from strop.errors import ConfigError

MAIN = "main"
"""The name of the one policy of a run that names none."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_WILD = re.compile(r"[*?\[]")

S = TypeVar("S", bound=Struct)


def resolve_policies(config: Config) -> dict[str, Config]:
    """The configuration of every policy, by name, in the order they are given in. Raises `ConfigError`."""
    if not config.policies:
        found = _freeze_for_prompts({MAIN: config})
        _refuse_all_frozen(config, found)
        _refuse_past(found)
        return found
    found = _freeze_for_prompts({name: _resolve(config, name, table) for name, table in config.policies.items()})
    _refuse_all_frozen(config, found)
    _refuse_shared_servers(found)
    _refuse_past(found)
    _refuse_overlaps({name: one.policy.agents for name, one in found.items() if not serves_no_agent(one)})
    return found


def serves_no_agent(config: Config) -> bool:
    """Whether a policy is there for no agent: a teacher, which only says how likely others' tokens are."""
    return config.policy.frozen and not config.policy.agents


def trained_policies(config: Config) -> dict[str, Config]:
    """The same without those that are frozen."""
    return {name: own for name, own in resolve_policies(config).items() if not own.policy.frozen}


def answers_outside(config: Config) -> str:
    """The model of the outside provider that answers for every agent, where no weights are trained: then no model is
    loaded."""
    found = [one for one in config.gateway.outside.items() if "*" in one[1].agents and one[1].probability == 1]
    if not found or (config.loop.steps and trained_policies(config)):
        return ""
    return found[0][1].model or found[0][0]


def refuse_values(policies: Any) -> None:
    """Raises `ConfigError` where a policy is given as something else than a table."""
    for name, table in cast("dict[str, Any]", policies).items() if isinstance(policies, dict) else ():
        if not isinstance(table, dict):
            raise ConfigError(
                f"policies.{name} is not a table of settings. Fix: set policies.{name}.model, for example"
            )


def find_policy(agent: str, policies: Mapping[str, Config]) -> str | None:
    """Whose agent that is: the first policy with a pattern that it matches."""
    matching = (name for name, own in policies.items() if any(fnmatchcase(agent, one) for one in own.policy.agents))
    return next(matching, None)


def default_policy(names: Mapping[str, Any]) -> str:
    """Who answers agents that no pattern matches, where anybody may ask: `strop chat` and `strop serve`."""
    return MAIN if MAIN in names else next(iter(names))


def describe_models(config: Config) -> str:
    """A run's model in a few words, or the models by policy; teachers, which no agent asks, are left out."""
    if outside := answers_outside(config):
        return outside
    policies = resolve_policies(config)
    asked = {name: one for name, one in policies.items() if not serves_no_agent(one)} or policies
    models = {name: one.policy.model for name, one in asked.items()}
    return next(iter(models.values())) if len(models) == 1 else _by_policy(models)


def describe_algorithms(config: Config) -> str:
    """The name of a run's algorithm, or the names by policy where they differ."""
    if config.algorithm.improves == "prompts":
        return config.algorithm.name
    names = {name: one.algorithm.name for name, one in trained_policies(config).items()} or {"": "nothing is trained"}
    return next(iter(names.values())) if len(set(names.values())) == 1 else _by_policy(names)


def replace_models(config: Config, models: Mapping[str, str]) -> Config:
    """The configuration with another model for each of these policies, by name."""
    if not config.policies:
        return replace(config, policy=replace(config.policy, model=models[MAIN]))
    given = {name: {"model": model} for name, model in models.items()}
    return replace(config, policies={name: table | given.get(name, {}) for name, table in config.policies.items()})


def weigh_rewards(config: Config) -> dict[str, float]:
    """What a rollout's rewards count for in the total of the whole run: the mean of what they count for each policy."""
    policies = [one.algorithm.rewards for one in (trained_policies(config) or resolve_policies(config)).values()]
    names = dict.fromkeys(name for rewards in policies for name in rewards)
    return {name: sum(rewards.get(name, 0.0) for rewards in policies) / len(policies) for name in names}


def _by_policy(words: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {word}" for name, word in words.items())


def _resolve(config: Config, name: str, table: dict[str, Any]) -> Config:
    path = f"policies.{name}."
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a policy is called {name!r}. Fix: use letters, digits, '_' and '-', 64 at most")
    own = {key: value for key, value in table.items() if key not in POLICY_SECTIONS}
    sections: dict[str, Any] = {"policy": _lay_over(config.policy, own, path)}
    if "agents" not in own:
        sections["policy"] = replace(sections["policy"], agents=(name,))
    if sections["policy"].past.of:
        sections["policy"] = replace(sections["policy"], frozen=True)
    for key in POLICY_SECTIONS:
        sections[key] = _lay_over(getattr(config, key), table.get(key, {}), f"{path}{key}.")
    if sections["algorithm"].name != config.algorithm.name:  # whose settings are another algorithm's
        sections["algorithm"] = replace(sections["algorithm"], settings=table["algorithm"].get("settings", {}))
    return replace(config, policies={}, **sections)


def _lay_over(base: S, table: Any, path: str) -> S:
    if not isinstance(table, dict):
        raise ConfigError(f"{path[:-1]!r} is a section, not a value. Fix: set {path}<name> instead")
    given = cast(dict[str, Any], table)
    refuse_unknown(given, field_types(type(base)), path)
    raw: dict[str, Any] = msgspec.to_builtins(base)
    merge(raw, given)
    return convert(raw, type(base), path[:-1])


def _freeze_for_prompts(policies: dict[str, Config]) -> dict[str, Config]:
    """Where prompts are improved, weights stay as they are."""
    return {
        name: replace(own, policy=replace(own.policy, frozen=True)) if own.algorithm.improves == "prompts" else own
        for name, own in policies.items()
    }


def _refuse_all_frozen(config: Config, policies: Mapping[str, Config]) -> None:
    if config.algorithm.improves == "prompts":
        return
    if config.loop.steps and all(own.policy.frozen for own in policies.values()):
        which = "policy.frozen is" if not config.policies else "all policies are frozen: `frozen` is"
        raise ConfigError(f"{which} true, so that nothing would be trained. Fix: leave it out, or set loop.steps=0")


def _refuse_past(policies: Mapping[str, Config]) -> None:
    """Past versions are those of a policy that is trained, on the same model, or of another run's checkpoints, which
    are looked for when the run begins."""
    for name, own in policies.items():
        if not (of := own.policy.past.of):
            continue
        if len(policies) == 1:
            raise ConfigError(
                "policy.past needs another policy, which is trained against it. Fix: set policies.NAME.past.of of an "
                "opponent instead"
            )
        if own.loop.staleness:
            raise ConfigError(
                f"policies.{name}.past.of is {of!r}, and loop.staleness is {own.loop.staleness}: opponents would "
                "change in the middle of a group. Fix: set one of them back"
            )
        if of in policies and policies[of].policy.frozen:
            raise ConfigError(
                f"policies.{name}.past.of is {of!r}, which is never trained and so has no past. Fix: name a policy "
                "that is"
            )


def refuse_frozen_adapters(config: Config) -> None:
    """What stands in [learner] is for the policies that are trained; what a frozen one has of its own is a mistake,
    unless it is from an earlier run in which it was trained (`--from`)."""
    for name, own in resolve_policies(config).items() if config.policies else ():
        learner: dict[str, Any] = config.policies[name].get("learner", {})
        if own.policy.frozen and learner.get("lora", {}).get("rank"):
            because = "answers with past versions" if own.policy.past.of else "is frozen"
            raise ConfigError(
                f"policies.{name} {because}, and policies.{name}.learner.lora.rank would train nothing. Fix: leave one "
                "of them out"
            )


def _refuse_shared_servers(policies: Mapping[str, Config]) -> None:
    """A server of the user's own has one model. Policies share it that are this model, or adapters on it for vLLM."""
    first: dict[str, str] = {}
    for name, own in policies.items():
        other = first.setdefault(_find_server(own), name)
        if other != name and _find_server(own) and not _may_share(own, policies[other]):
            raise ConfigError(
                f"policies.{other} and policies.{name} have one server, {_find_server(own)}, and each would replace "
                "the weights of the other there. Fix: give each a server of its own (policies.NAME.engine), or have "
                "vLLM serve both as adapters on one model (learner.lora.rank)"
            )


def _find_server(config: Config) -> str:
    engine = config.engine
    if engine.name == "sglang":
        return engine.sglang.url
    return engine.vllm.url if engine.name in ("auto", "vllm") and not engine.deterministic else ""


def _may_share(one: Config, other: Config) -> bool:
    """Whether a server has nothing to replace: they are one model, and new weights are adapters or never come."""

    def keeps_model(own: Config) -> bool:
        adapters = own.engine.name != "sglang" and own.engine.vllm.servers == 1
        return own.policy.frozen or (adapters and own.learner.lora.rank > 0)

    return one.policy.model == other.policy.model and keeps_model(one) and keeps_model(other)


def _refuse_overlaps(agents: Mapping[str, tuple[str, ...]]) -> None:
    """The first match wins; a name that would never reach its policy is refused, and a policy without any."""
    before: list[tuple[str, str]] = []
    for policy, patterns in agents.items():
        if not patterns:
            raise ConfigError(
                f"policies.{policy}.agents is empty, so it would answer nobody. Fix: name its agents, leave the "
                f"line out for the agent {policy!r}, or set policies.{policy}.frozen for a teacher"
            )
        for pattern in patterns:
            for other, earlier in before:
                if earlier == pattern:
                    raise ConfigError(
                        f"policies.{policy}.agents has {pattern!r}, and so has policies.{other}. Fix: leave it out of "
                        "one of them"
                    )
                if _covers(earlier, pattern):
                    raise ConfigError(
                        f"policies.{policy}.agents has {pattern!r}, which {earlier!r} of policies.{other} matches "
                        f"first. Fix: leave one of them out, or put policies.{policy} before policies.{other}"
                    )
        before += [(policy, pattern) for pattern in patterns]


def _covers(earlier: str, pattern: str) -> bool:
    """Whether every name that `pattern` matches is known to match `earlier`.

    >>> _covers("crit*", "critic"), _covers("crit*", "critic-*"), _covers("critic-*", "crit*"), _covers("a?", "a*")
    (True, True, False, False)
    """
    plain = not _WILD.search(pattern) or not re.search(r"[?\[]", earlier)  # what only a * may stand for is whole
    return pattern == earlier or (plain and fnmatchcase(pattern, earlier))
