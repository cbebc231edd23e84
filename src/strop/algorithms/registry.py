"""Algorithms by name. A registered one is a file of this folder, called like the file, with one class in it; any other
is FILE.py:Class or package.module:Class. There is no list to add to."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from strop.algorithms.base import Algorithm, Improver
from strop.algorithms.configurable import PATH
from strop.config import (
    DECLARED,
    AlgorithmConfig,
    Config,
    LearnerConfig,
    PolicyConfig,
    Setting,
    field_types,
    refuse_unknown,
    rename_old,
    walk,
)
from strop.config import settings as common_settings
from strop.errors import ConfigError
from strop.imports import resolve


def make(config: AlgorithmConfig, learner: LearnerConfig, policy: PolicyConfig | None = None) -> Algorithm:
    """The algorithm that a policy's weights are trained with. Raises `ConfigError`."""
    algorithm = make_improver(config)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"algorithm.name is {config.name!r}, which improves {algorithm.improves}, and a policy's weights are to be "
            "trained. Fix: name an algorithm for weights, or set it at the top, where it improves [prompts]"
        )
    algorithm.prepare(learner, policy or PolicyConfig())
    return algorithm


def find(name: str) -> type[Improver]:
    """The class of a registered algorithm, of FILE.py:Class or of package.module:Class. Raises `ConfigError`."""
    if ":" in name:
        found = resolve(name, "algorithm")
        if not (isinstance(found, type) and issubclass(found, Improver)):
            raise ConfigError(
                f"{name} is not an algorithm. Fix: make it a subclass of strop.algorithms.Algorithm, or of "
                "strop.algorithms.PromptOptimizer"
            )
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise ConfigError(f"{name} is not whole. Fix: give it {' and '.join(missing)}")
        return found
    if name in _files() and (found := _registered(name)) is not None:
        return found
    near = difflib.get_close_matches(name, names(), 1)
    fix = f"write {near[0]}" if near else f"name one of {', '.join(names())}, or FILE.py:Class"
    raise ConfigError(f"{name!r} is not an algorithm. Fix: {fix}")


def names() -> list[str]:
    """Every registered algorithm."""
    return [name for name in _files() if _registered(name) is not None]


def registered_name(algorithm: type[Improver]) -> str | None:
    """The name that a class is registered by, if it is."""
    package, _, name = algorithm.__module__.rpartition(".")
    return name if package == __package__ and _registered(name) is algorithm else None


def find_class(class_name: str) -> type[Improver] | None:
    """The registered algorithm whose class is called so."""
    return next((found for name in names() if (found := find(name)).__name__ == class_name), None)


def _files() -> list[str]:
    return [found.name for found in iter_modules([str(Path(__file__).parent)])]


def _registered(name: str) -> type[Improver] | None:
    """The class of a file of this folder. The other files are parts that algorithms share."""
    file = import_module(f"{__package__}.{name}")
    found = [
        each
        for each in vars(file).values()
        if isinstance(each, type)
        and issubclass(each, Improver)
        and each.__module__ == file.__name__
        and not isabstract(each)
        and hasattr(each, "improves")
    ]
    assert len(found) < 2, f"{file.__name__} has {len(found)} algorithms: one class in one file"
    return found[0] if found else None


# -- settings ----------------------------------------------------------------------------------------------------------


def setting_names(name: str) -> list[str]:
    """What the settings of an algorithm are called."""
    return list(_setting_types(find(name)))


def own_settings(config: AlgorithmConfig) -> Iterator[Setting]:
    """The settings of one algorithm, with their values."""
    algorithm = make_improver(config)
    wanted = {PATH + name for name in _setting_types(type(algorithm))}
    yield from (setting for setting in walk(algorithm, PATH) if setting.key in wanted)


def every_setting(config: Config) -> Iterator[Setting]:
    """All settings of a run, the algorithm's own after the others. Of an algorithm whose file is gone, those that were
    given."""
    yield from common_settings(config)
    try:
        yield from own_settings(config.algorithm)
    except ConfigError:
        if ":" not in config.algorithm.name:
            raise
        yield from (Setting(PATH + name, value, "") for name, value in config.algorithm.settings.items())


def registered_settings() -> Iterator[Setting]:
    """The settings of every registered algorithm, with their defaults; those of one name come once for each that has
    it."""
    for name in names():
        yield from own_settings(AlgorithmConfig(name=name))


DECLARED.append(registered_settings)


def make_improver(config: AlgorithmConfig) -> Improver:
    """The algorithm or the prompt optimiser of a configuration. Raises `ConfigError`."""
    algorithm = find(config.name)
    settings = rename_old(config.settings, PATH, quiet=True)  # loading has said so
    try:
        types = _setting_types(algorithm)
        _refuse_others(config.name, [name for name in settings if name not in types])
        refuse_unknown(settings, types, PATH)
        return algorithm(rewards=config.rewards, **settings)
    except ConfigError:
        raise
    except Exception as error:
        if ":" not in config.name:
            raise
        raise ConfigError(
            f"{config.name} cannot be made ({type(error).__name__}: {error}). Fix: let it take `rewards`, and give "
            "every other field a type and a default"
        ) from error


def _refuse_others(algorithm: str, unknown: list[str]) -> None:
    """Raises `ConfigError` for a setting that only other algorithms have."""
    for name in unknown:
        if others := [other for other in names() if name in _setting_types(find(other))]:
            raise ConfigError(
                f"{algorithm} has no setting {PATH}{name}, which is one of {', '.join(others)}. Fix: leave it out"
            )


def _setting_types(algorithm: type[Improver]) -> dict[str, Any]:
    return {name: type for name, type in field_types(algorithm).items() if name != "rewards"}  # algorithm.rewards
