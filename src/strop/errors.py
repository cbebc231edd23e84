"""One error tree. What a user did wrong reads as one sentence with the fix in it; the command line prints just that.

Broken invariants of our own are `assert`s and crash with a traceback: they are not in this tree.
"""

from strop.printable import escape_text


class StropError(Exception):
    """Base of every error that is meant for people. `code` is the exit code of the command line."""

    code = 1

    def __str__(self) -> str:
        return escape_text(super().__str__())  # it may tell what an agent said


class ConfigError(StropError):
    """A setting that cannot be: unknown key, wrong type, impossible combination."""

    code = 2


class TaskError(StropError):
    """Tasks that cannot be read, or none at all."""

    code = 2


class AgentError(StropError):
    """The agent cannot be found or loaded. What it raises while it runs is recorded on the rollout instead."""

    code = 2


class ToolError(StropError):
    """A tool that an agent needs cannot be had: its package is missing, or its server does not answer."""

    code = 2


class ModelError(StropError):
    """A model name that cannot be had, or weights that do not fit."""

    code = 2


class DamagedCheckpoint(ModelError):
    """A file of a checkpoint is missing, or not what was written."""


class PlaceError(StropError):
    """A folder, port or file that cannot be used."""

    code = 2


class HeadLost(PlaceError):
    """The head of the cluster that a run is on is gone: nothing can be asked of it any more."""


class BadReward(StropError):
    """A reward that is not a finite number, or too large."""


class StoreError(StropError):
    """The store refused: unknown id, illegal transition, a foreign or expired attempt."""


class BadExclusion(StoreError):
    """An exclusion that names no turn, or whose reason cannot stand in a metric's name."""


class UnknownId(StoreError):
    """No such rollout, attempt, turn or step."""


class IllegalTransition(StoreError):
    """A status may not follow another; both are named."""


class Fenced(StoreError):
    """A write by an attempt that has ended or was replaced. It is refused and never trained."""


class TurnTaken(StoreError):
    """Another turn has this id: another gateway has answered the same attempt meanwhile."""


class NewerStore(StoreError):
    """The database was written by a newer strop."""


class Unavailable(StoreError):
    """The store cannot be reached or cannot write now. Nothing is wrong with what was asked: asking again may help."""


class RunEnded(StoreError):
    """The run whose store was served here is done: nothing will be queued any more."""


class EngineError(StropError):
    """The engine cannot make tokens: it died, or the request cannot be served."""


class ContextOverflow(EngineError):
    """The prompt does not fit the model's context."""


class LearnerError(StropError):
    """Training cannot go on: no signal, NaN weights, the process died."""


class RankOutOfMemory(LearnerError):
    """One of several ranks, while the others wait for it: all of them have to begin again, with less at a time."""


class LearnerDied(LearnerError):
    """A process that holds weights is gone. Its run can be resumed."""
