"""How each program that shows metrics is told of them. `writers` opens these and brings them points."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# (they need not be installed, and their types are partly unknown)
from __future__ import annotations

import os
import re
import secrets
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Point = tuple[int, Mapping[str, float]]
"""A step, and metrics by name."""


class Begin(NamedTuple):
    """What a writer begins with. `id` is the name it gave itself earlier, if the run is resumed."""

    library: Any
    project: str
    name: str
    folder: Path
    settings: Mapping[str, Any]
    id: str | None


class Tracker(ABC):
    """Told first of everything that is past, then of points in order of steps; an evaluation has the step it was after.

    `where` is where a person finds them, `id` what has to be remembered in order to go on.
    """

    where: str
    id: str | None = None

    @abstractmethod
    def write_past(self, points: Sequence[Point]) -> None: ...

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    @abstractmethod
    def close(self, *, failed: bool) -> None: ...


class TensorBoard(Tracker):
    """Event files in the run's folder, through the package's own writer: torch is not needed."""

    def __init__(self, begin: Begin) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.where = str(begin.folder / "tensorboard")
        self._settings = begin.settings
        self._file = EventFileWriter(self.where)

    def write_past(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # What SummaryWriter does for purge_step=0: earlier files count no more from here on.
        self._file.add_event(Event(wall_time=time.time(), step=0, file_version="brain.Event:2"))
        self._file.add_event(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))
        self._file.add_event(Event(wall_time=time.time(), step=0, summary=_hyperparameters(self._settings)))
        for step, metrics in points:
            self._add(step, metrics)
        self._file.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, metrics)
        self._file.flush()

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._file.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self, *, failed: bool) -> None:
        self._file.close()


def _hyperparameters(settings: Mapping[str, Any]) -> Any:
    """The summary that TensorBoard's page of hyperparameters reads."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    start = SessionStartInfo(start_time_secs=time.time())
    for name, value in settings.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[name].number_value = value
        else:
            start.hparams[name].string_value = "" if value is None else str(value)
    content = HParamsPluginData(version=0, session_start_info=start).SerializeToString()
    data = SummaryMetadata.PluginData(plugin_name="hparams", content=content)
    metadata = SummaryMetadata(plugin_data=data)
    return Summary(value=[Summary.Value(tag="_hparams_/session_start_info", metadata=metadata)])


class Wandb(Tracker):
    """One run of Weights & Biases. WANDB_MODE, WANDB_ENTITY and the others of its variables count."""

    def __init__(self, begin: Begin) -> None:
        wandb = begin.library
        self.id = begin.id or secrets.token_hex(4)
        self._run = wandb.init(
            project=begin.project,
            name=begin.name,
            id=self.id,
            resume="allow",
            dir=begin.folder,
            config=dict(begin.settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.where = str(begin.folder / "wandb") if self._run.offline else str(self._run.url)

    def write_past(self, points: Sequence[Point]) -> None:
        for step, metrics in points:
            if step >= self._run.starting_step:  # what it has already it would refuse
                self.write(step, metrics)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)  # the same step again adds to it

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Mlflow(Tracker):
    """One run of MLflow. Its names allow fewer characters: `mean@1` becomes `mean_at_1`."""

    def __init__(self, begin: Begin) -> None:
        from mlflow.entities import Param

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its own 7 take minutes, and we try again too
        given = os.environ.get("MLFLOW_TRACKING_URI")
        if not given:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = given or (begin.folder / "mlruns").as_uri()
        with warnings.catch_warnings(action="ignore"):
            self._client = begin.library.MlflowClient(tracking_uri=uri)
            experiment = self._client.get_experiment_by_name(begin.project)
            where = experiment.experiment_id if experiment else self._client.create_experiment(begin.project)
        if begin.id:
            self.id = begin.id
            self._client.update_run(self.id, status="RUNNING")
        else:
            self.id = self._client.create_run(where, run_name=begin.name).info.run_id
            params = [Param(name, str(value)[:6000]) for name, value in begin.settings.items()]
            for first in range(0, len(params), 100):  # as many as a request may have
                self._client.log_batch(self.id, params=params[first : first + 100])
        self.where = f"{uri} (run {self.id})"

    def write_past(self, points: Sequence[Point]) -> None:
        there: dict[str, set[int]] = {}
        known = self._client.get_run(self.id).data.metrics
        for step, metrics in points:
            for name in metrics:
                if name not in there:
                    key = rename_for_mlflow(name)
                    history = self._client.get_metric_history(self.id, key) if key in known else []
                    there[name] = {point.step for point in history}
            self.write(step, {name: value for name, value in metrics.items() if step not in there[name]})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        if metrics:
            batch = [Metric(rename_for_mlflow(name), value, now, step) for name, value in metrics.items()]
            self._client.log_batch(self.id, metrics=batch)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def rename_for_mlflow(name: str) -> str:
    """
    >>> rename_for_mlflow("val-core/test/reward/mean@1"), rename_for_mlflow("reward/näher+")
    ('val-core/test/reward/mean_at_1', 'reward/näher_')
    """
    return re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"))
