"""Training and evaluating from Python: the same run that a TOML recipe makes, with functions in the place of names.

    summary = strop.train(agent, tasks, model="strop/nano", algorithm=strop.GRPO(clip=0.3), loop={"steps": 20})

A run has processes of its own, which find a function by its file; one that has no file of its own (of a notebook, or
made inside another function) is written into the run's folder. Everything happens in a thread with an event loop of its
own, so it works in a script, a notebook and a test. Ctrl-C ends a run behind the step at hand, twice at once.

`strop.resume` goes on with a run, `strop.export` writes its model as a plain folder.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from strop import config as configs
from strop.config import AlgorithmConfig, Config
from strop.errors import ConfigError, PlaceError
from strop.files import private_folder
from strop.imports import GIVEN
from strop.run.folder import RunFolder, find_free
from strop.runners.python import IN_AGENT
from strop.types import Task

if TYPE_CHECKING:
    from strop.algorithms import Algorithm
    from strop.monitor.evaluations import EvaluationReport
    from strop.monitor.summary import Summary

T = TypeVar("T")
Named = str | Callable[..., Any]
"""What names an agent or a reward on the command line, or the function itself."""
Tasks = str | Callable[..., Any] | Sequence[Task | Mapping[str, Any]]


def train(
    agent: Named = "",
    tasks: Tasks = "",
    *,
    model: str | None = None,
    reward: Named = "",
    algorithm: Algorithm | type[Algorithm] | AlgorithmConfig | str | None = None,
    folder: str | Path | None = None,
    seed: int | None = None,
    config: str | Path | Config | None = None,
    from_run: str | Path = "",
    overwrite: bool = False,
    quiet: bool = False,
    **sections: Any,
) -> Summary:
    """Train the model behind `agent` on `tasks`; returns what summary.json holds, once it is done.

    `config` is a TOML file or a Config to begin with; `sections` are its tables, as dicts: loop={"steps": 20}, and what
    stands beside them: group_reward=compare. Where neither says otherwise, a setting has the default that `strop
    config` shows; so has `folder`. A run that is there already stays: this one's folder gets a number behind its name
    then (the summary's `folder` says which), or with `overwrite` takes its place. `from_run`, a run's folder or
    "FOLDER:STEP", gives the weights to begin with and every setting that is not given, agent and tasks included.
    """
    from strop.monitor import console
    from strop.run import start_from
    from strop.run.loop import train as run
    from strop.run.settings import settle

    with _once():
        before, checkpoint = start_from.find_source(str(from_run)) if from_run else (None, None)
        if before and model:
            raise ConfigError(f"from_run={from_run!s} brings its model. Fix: leave out model={model!r}")
        base = config if isinstance(config, Config) else configs.load(
            toml=config, base=RunFolder.config(before) if before else None
        )  # fmt: skip
        wanted = Path(base.folder if folder is None else folder)
        stop = asyncio.Event()
        with (
            start_from.choose_place(wanted, overwrite=overwrite, beside=before) as place,
            console.choose(json=quiet, out=sys.stdout) as view,
        ):
            made = _config(agent, tasks, reward, model, algorithm, place, seed, base, sections)
            made = settle(start_from.drop_other_settings(made, RunFolder.config(before)) if before else made)
            _refuse_missing(made)
            _refuse_cluster(made)
            if place != wanted:
                view.note(f"{wanted} holds a run: this one is kept in {place}")
            if checkpoint is not None:
                made = start_from.begin_from(checkpoint, made)
            return _in_a_thread(run(made, view, stop=stop), stop)


def _refuse_missing(config: Config) -> None:
    from strop.run.data.prepare import needs_agents

    for name, given in (("agent", config.agent), ("tasks", config.tasks)):
        if not given and needs_agents(config):
            raise ConfigError(
                f"which {name}? Fix: give strop.train(agent, tasks) a function, or what `strop train` takes"
            )


def _refuse_cluster(config: Config) -> None:
    if config.cluster.address:
        raise ConfigError(
            f"cluster.address is {config.cluster.address!r}, and a run on a cluster is begun on the command line. Fix: "
            "use `strop train --cluster`, or set cluster.address to an empty text"
        )


def resume(folder: str | Path, *, quiet: bool = False, **sections: Any) -> Summary:
    """Go on with the run in `folder`, from its last checkpoint, to its end. What may change of its settings is given as
    to `train`, and kept in the folder: loop={"steps": 200}, learner={"optim": {"lr": 1e-5}}, evaluation, runner,
    monitor; the rest is refused."""
    from strop.monitor import console
    from strop.run import start_from
    from strop.run.loop import train as run

    with _once():
        config, changes = start_from.change_settings(Path(folder), **sections)
        if done := start_from.find_summary(Path(folder), changes):
            return done
        _refuse_cluster(config)
        stop = asyncio.Event()
        with console.choose(json=quiet, out=sys.stdout) as view:
            if changes and (warning := start_from.warn_of_rate(config)):
                view.note(warning)
            return _in_a_thread(run(config, view, resume=True, changes=changes, stop=stop), stop)


def export(
    source: str | Path,
    to: str | Path,
    *,
    best: bool = False,
    policy: str = "",
    adapter: bool = False,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> Path:
    """Write a trained model into the new folder `to`, in Hugging Face format; prompts as text files. `source` is a run,
    for its last checkpoint or its `best`, "RUN:STEP", or a checkpoint's folder; where that has several policies,
    `policy` names one. With `adapter` a LoRA adapter is written by itself, in PEFT's format. Returns the checkpoint
    that it was made of."""
    from strop.run.prompts.pool import read_prompts
    from strop.run.start_from import require_checkpoint

    if os.path.exists(to):  # said before anything heavy is imported
        raise PlaceError(f"{to} is there already. Fix: choose another place")
    checkpoint = require_checkpoint(str(source), best=best, policy=policy)
    if read_prompts(checkpoint) is not None:
        if adapter or dtype:
            raise ConfigError(f"{checkpoint} holds prompts, not a model. Fix: leave out --adapter and --dtype")
        shutil.copytree(checkpoint, to)
        return checkpoint
    from strop.learner.export import export as exported

    exported(checkpoint, to, merge=not adapter, dtype=dtype)
    return checkpoint


def evaluate(
    agent: Named = "",
    tasks: Tasks = "",
    *,
    model: str | Sequence[str] | None = None,
    reward: Named = "",
    samples: int = 1,
    splits: Sequence[str] = (),
    greedy: bool = False,
    folder: str | Path | None = None,
    seed: int | None = None,
    config: str | Path | Config | None = None,
    quiet: bool = False,
    **sections: Any,
) -> EvaluationReport:
    """How well `agent` does with a model, or with several on the same tasks and seeds: each is compared with the first.
    A model is a name, a folder, or a run's folder for its newest checkpoint. `folder` is where it is kept: runs/eval by
    default, or with a number behind it where that is there already."""
    from strop.monitor import console
    from strop.run.evaluate import evaluate as evaluated
    from strop.run.evaluate import refuse_taken

    models = [model] if isinstance(model, str) else list(model or ())
    first = models[0] if models else None
    folder = Path(folder) if folder is not None else find_free(Path("runs/eval"))
    beside = folder.with_name(f"{folder.name}-given")  # the folder itself must not be there yet
    with _once():
        refuse_taken(folder)
        given = _config(agent, tasks, reward, first, None, beside, seed, config, sections)
        with console.choose(json=quiet, out=sys.stdout) as view:
            return _in_a_thread(
                evaluated(given, models, folder=folder, view=view, splits=splits, samples=samples, greedy=greedy)
            )


# -- a configuration from what was given -------------------------------------------------------------------------------


def _config(
    agent: Named,
    tasks: Tasks,
    reward: Named,
    model: str | None,
    algorithm: Algorithm | type[Algorithm] | AlgorithmConfig | str | None,
    folder: str | Path | None,
    seed: int | None,
    config: str | Path | Config | None,
    sections: dict[str, Any],
) -> Config:
    """Writes what must be in a file into `folder`, which holds no run."""
    base = config if isinstance(config, Config) else configs.load(toml=config)
    folder = Path(base.folder if folder is None else folder)
    assert not RunFolder.is_taken(folder), f"{folder} holds a run"
    fields: dict[str, Any] = dict(sections)
    fields |= {"agent": _named(agent, folder, "agent"), "reward": _named(reward, folder, "reward")}
    fields["tasks"] = _listed(tasks, folder)
    if "group_reward" in fields:
        fields["group_reward"] = _named(fields["group_reward"], folder, "group_reward")
    if model is not None:
        fields["policy"] = {**fields.get("policy", {}), "model": model}
    if algorithm is not None:
        fields["algorithm"] = _chosen(algorithm, folder)
    fields = {name: value for name, value in fields.items() if value != ""}
    return configs.load(base=base, folder=str(folder), seed=seed, **fields)


def _chosen(algorithm: Algorithm | type[Algorithm] | AlgorithmConfig | str, folder: Path) -> dict[str, Any]:
    """The section of an algorithm: its name, and the settings that it was given."""
    from strop.algorithms import registered_name

    if isinstance(algorithm, str):
        return {"name": algorithm}
    if isinstance(algorithm, AlgorithmConfig):
        return msgspec.to_builtins(algorithm)
    kind = algorithm if isinstance(algorithm, type) else type(algorithm)
    chosen: dict[str, Any] = {"name": registered_name(kind) or _named(kind, folder, "algorithm")}
    settings = {} if isinstance(algorithm, type) else dict(algorithm.given)
    if "rewards" in settings:
        chosen["rewards"] = settings.pop("rewards")
    return {**chosen, "settings": settings}


def _named(thing: Named, folder: Path, what: str) -> str:
    """A function by the name that other processes find it by."""
    if isinstance(thing, str):
        return thing
    own = inspect.isfunction(thing) or inspect.isclass(thing)
    file = _source_file(thing) if own else None
    name = getattr(thing, "__qualname__", "<locals>")
    if not own:
        file, name = _global(thing)
    if file is not None and Path(file).is_file() and name.isidentifier():
        return f"{Path(file).absolute()}:{name}"
    return _written(thing, folder, what)


def _source_file(thing: Callable[..., Any]) -> str | None:
    try:
        return inspect.getsourcefile(thing)
    except (OSError, TypeError):  # a class of a notebook
        return None


def _global(thing: object) -> tuple[str | None, str]:
    """The file and the name of an object that stands at the top of a file, such as a ToolAgent; a script's own last."""
    for module in sorted(sys.modules.values(), key=lambda module: module is sys.modules.get("__main__")):
        file: str | None = getattr(module, "__file__", None)
        if file is not None and file.endswith(".py"):
            for name, value in list(vars(module).items()):
                if value is thing:
                    return file, name
    return None, ""


def _written(thing: Callable[..., Any], folder: Path, what: str) -> str:
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

    private_folder(folder)
    file = folder.absolute() / f"{what}{GIVEN}.py"
    try:
        data: bytes = cloudpickle.dumps(thing)  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be sent to other processes ({error}). Fix: put it at the top of a file of its own"
        ) from None
    file.with_suffix(".pkl").write_bytes(data)
    file.write_text(
        f'"""The {what} that was given as a function without a file."""\n\n'
        "import pickle\nfrom pathlib import Path\n\n"
        f'{what} = pickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())\n'
    )
    return f"{file}:{what}"


def _listed(tasks: Tasks, folder: Path) -> str:
    """Tasks by the name that they can be loaded by again, when the run is resumed."""
    if isinstance(tasks, str):
        return tasks
    if callable(tasks):
        return _named(tasks, folder, "tasks")
    private_folder(folder)
    file = folder.absolute() / "tasks.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))
    return str(file)


# -- running -----------------------------------------------------------------------------------------------------------

_running = threading.Lock()


@contextmanager
def _once() -> Generator[None]:
    """One at a time: a second call comes from a script that is read again, to find the agent in it."""
    if IN_AGENT in os.environ or not _running.acquire(blocking=False):
        raise ConfigError(
            "strop is at work already in this process. Fix: wait for it; in a script, put the call that starts it "
            'under if __name__ == "__main__":, since processes that run the agent read the script too'
        )
    try:
        yield
    finally:
        _running.release()


def _in_a_thread(work: Coroutine[Any, Any, T], stop: asyncio.Event | None = None) -> T:
    """The result of `work`, in an event loop of its own. Ctrl-C sets `stop`, and cancels where there is none or it was
    set before."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="strop", daemon=True)
    thread.start()

    async def begin() -> asyncio.Task[T]:
        return asyncio.create_task(work)

    try:
        result = asyncio.run_coroutine_threadsafe(begin(), loop).result()
        while not result.done():
            try:
                thread.join(0.1)
            except KeyboardInterrupt:
                first = stop is not None and not stop.is_set()
                loop.call_soon_threadsafe(stop.set if stop is not None and first else result.cancel)
        if result.cancelled():
            raise KeyboardInterrupt
        return result.result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
