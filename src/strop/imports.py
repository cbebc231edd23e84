"""`FILE.py:name` and `package.module:name`: how agents, tasks functions and algorithms are named and found."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from strop.errors import AgentError, ConfigError, StropError, TaskError
from strop.files import find_near


def resolve(spec: str, what: str) -> object:
    """The object that `spec` names. `what` is "agent", "tasks" or "algorithm" and picks the error: `AgentError`,
    `TaskError` or `ConfigError`.

    >>> resolve("strop.demo:agent", "agent").__name__
    'agent'
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        kind = "class" if what == "algorithm" else "function"
        raise _error(what, f"{spec!r} names no {kind}. Fix: write FILE.py:{kind} or package.module:{kind}")
    module = _file(place, what) if place.endswith(".py") else _module(place, what)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], 1)
        fix = f"write {place}:{near[0]}" if near else "check the name after the colon"
        raise _error(what, f"{place} has no {name!r}. Fix: {fix}")
    return getattr(module, name)


def require_file(place: str, what: str) -> Path:
    """The whole path of a file that stands before a colon. Raises the error of `what` where it is not there."""
    path = Path(place).absolute()
    if not path.is_file():
        near = find_near(path)
        fix = f"write {near}" if near and near.suffix == ".py" else "check the path before the colon"
        raise _error(what, f"there is no file {path}. Fix: {fix}")
    return path


def _file(place: str, what: str) -> ModuleType:
    path = require_file(place, what)
    _add_path(str(path.parent))
    # The name its neighbours import it by, so that it is not loaded twice and pickle finds its functions; unless
    # another module of that name is loaded already, which the file must not stand in for.
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    name = path.stem if loaded is None else f"strop_file_{path.stem}"
    if (again := sys.modules.get(name)) is not None and getattr(again, "__file__", None) == str(path):
        return again
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        if path.stem.endswith(GIVEN) and path.with_suffix(".pkl").is_file():
            setattr(module, path.stem.removesuffix(GIVEN), load_given(path.with_suffix(".pkl")))
        else:
            module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _broken(what, place, error) from error
    return module


GIVEN = "_given"
"""How the names of files end that `strop.train` writes a function or an object into, with what was pickled beside."""

_MOVED = {
    "strop.tools.agent": "strop.agent.tool_agent",
    "strop.tools.calling": "strop.agent.functions",
    **{f"strop.tools.{name}": f"strop.agent.{name}" for name in ("environment", "episode", "mcp", "schema", "tool")},
    "strop.tools.toolbox": "strop.agent.toolbox",
    "strop.runners.llm": "strop.agent.llm",
    "strop.rewards.forms": "strop.rewards.formats",
    "strop.rewards.answers": "strop.rewards.judge_cache",
    "strop.rewards.asking": "strop.rewards.judge_client",
    "strop.rewards.mathematics": "strop.rewards.math",
    "strop.rewards.pairs": "strop.rewards.pairwise",
    "strop.rewards.kept": "strop.rewards.worker",
}
_RENAMED = {
    ("strop.agent.episode", "Limits"): "EpisodeLimits",
    ("strop.agent.episode", "Call"): "ExecutedCall",
    ("strop.rewards.judge_cache", "Answers"): "JudgeCache",
}
"""What folders of earlier versions may hold a pickled reference to, and where and how it is called now."""


class _Unpickler(pickle.Unpickler):
    """Finds what has moved since it was pickled."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        module = _MOVED.get(module_name, module_name)
        return super().find_class(module, _RENAMED.get((module, global_name), global_name))


def load_given(file: Path) -> Any:
    """What `strop.train` was given and pickled, by this version or an earlier one."""
    with file.open("rb") as opened:
        return _Unpickler(opened).load()


def _module(place: str, what: str) -> ModuleType:
    _add_path(str(Path.cwd()))  # console scripts do not look in the current folder by themselves
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # Only if the module itself is missing: a missing import inside it is another matter.
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise _error(
                what, f"there is no module {error.name!r}. Fix: install it, or give FILE.py:function for a file"
            ) from error
        raise _broken(what, place, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(what, place, error) from error


def _add_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _broken(what: str, place: str, error: BaseException) -> StropError:
    said = one_line(error)
    return _error(what, f"importing {place} failed: {with_fix(said) if what == 'agent' else said}")


def with_fix(said: str, python: str = "") -> str:
    """What an agent's import said, and how to get what is missing. `python` is the one that said it; default: this.

    >>> with_fix("No module named 'crewai.agent'", "env/bin/python")
    "No module named 'crewai.agent'. Fix: env/bin/python -m pip install crewai, or set runner.python to one that has it"
    >>> with_fix("ZeroDivisionError: division by zero")
    'ZeroDivisionError: division by zero'
    """
    if (found := re.search(r"No module named '(\w+)", said)) is None:
        return said
    install = f"{python or sys.executable} -m pip install {found[1]}"
    return f"{said}. Fix: {install}, or set runner.python to one that has it"


PACKAGES = {
    "faiss": "faiss-cpu",
    "gguf": "gguf safetensors",
    "math_verify": "math-verify",
    "mcp": "'mcp>=2'",
    "mlflow": "mlflow-skinny",
    "psycopg": "'psycopg[binary]'",
    "ray": "'ray>=2.50'",
    "vllm": "'vllm>=0.24,<0.33'",
}
"""What is installed for a module, where that is not just its name."""


def to_install(module: str) -> str:
    """The command that brings a module we do without until it is needed. It names packages that others publish, never
    strop itself: that comes from a clone, and another package of its name on PyPI is not ours.

    >>> to_install("psycopg"), to_install("matplotlib")
    ("pip install 'psycopg[binary]'", 'pip install matplotlib')
    >>> to_install("torch")
    "pip install -e '.[train]' in strop's folder"
    """
    if module in ("torch", "transformers"):  # training needs more than these
        return "pip install -e '.[train]' in strop's folder"
    return f"pip install {PACKAGES.get(module, module)}"


def one_line(error: BaseException) -> str:
    """`<Type>: <message>` with line breaks folded.

    >>> one_line(ValueError("a\\nb"))
    'ValueError: a b'
    """
    try:
        message = " ".join(str(error).split())
    except Exception:  # it is the user's, and may raise in its turn
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _error(what: str, sentence: str) -> StropError:
    kinds = {"agent": AgentError, "algorithm": ConfigError}
    return kinds.get(what, TaskError)(f"{what}: {sentence}")
