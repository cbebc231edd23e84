"""A run: its loop, its store, its metrics, and all other sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from strop.config.algorithm import AlgorithmConfig
from strop.config.cluster import ClusterConfig
from strop.config.describe import Setting, doc, walk
from strop.config.engine import EngineConfig
from strop.config.gateway import GatewayConfig
from strop.config.learner import LearnerConfig
from strop.config.policy import PolicyConfig
from strop.config.prompts import PromptConfig
from strop.config.runner import RunnerConfig


class LoopConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long, how much, how often."""

    steps: Annotated[int, doc("steps to train"), Meta(ge=0)] = 100
    groups: Annotated[int, doc("groups per step: tasks, each sampled group_size times"), Meta(ge=1)] = 16
    group_size: Annotated[int, doc("rollouts per task, which are compared with each other"), Meta(ge=1)] = 8
    max_groups: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        doc(
            "dynamic sampling: groups per step at most, where more replace those whose members all got the same; "
            "default: none are replaced"
        ),
    ] = None
    staleness: Annotated[
        int,
        doc(
            "off-policy steps: how old the weights of a rollout may be; 0: sampling waits for the learner (on-policy), "
            "above: both work at the same time"
        ),
        Meta(ge=0),
    ] = 0
    start_ahead: Annotated[
        float,
        doc(
            "with staleness 0, agents of the next step start while the learner works, up to their first model call, "
            "which waits for the new weights: where learning took the step before no longer than so many seconds; 0: "
            "never"
        ),
        Meta(ge=0),
    ] = 2.0
    eval_every: Annotated[int, doc("steps between evaluations; 0: only before the first and after the last")] = 0
    eval_splits: Annotated[tuple[str, ...], doc("splits of the tasks that are evaluated")] = ("test",)
    eval_samples: Annotated[int, doc("samples per task in an evaluation: k of mean@k"), Meta(ge=1)] = 1
    eval_greedy: Annotated[bool, doc("evaluate greedily as well as sampled, one sample per task")] = True
    checkpoint_every: Annotated[int, doc("steps between checkpoints; the last step always has one"), Meta(ge=1)] = 10
    keep_checkpoints: Annotated[int, doc("newest checkpoints kept; the best stays too"), Meta(ge=1)] = 2
    collapse_patience: Annotated[
        int,
        doc(
            "early stopping: steps without a learning signal after which a run that has lost its reward ends; 0: never"
        ),
        Meta(ge=0),
    ] = 5
    group_deadline: Annotated[
        float,
        doc("seconds without a finished rollout after which groups are closed with those that they have"),
        Meta(gt=0),
    ] = 1800.0


class StoreConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where everything is kept."""

    url: Annotated[str, doc("postgresql://USER@HOST/DATABASE; default: SQLite in the run's folder")] = ""
    synchronous: Annotated[
        Literal["NORMAL", "FULL"], doc("SQLite: NORMAL survives kill -9 of any process, FULL also power loss")
    ] = "NORMAL"


class MonitorConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experiment trackers."""

    writers: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...],
        doc("experiment trackers that get metrics beside metrics.jsonl: tensorboard, wandb, mlflow"),
    ] = ()
    project: Annotated[str, doc("W&B's project, MLflow's experiment"), Meta(min_length=1)] = "strop"
    name: Annotated[str, doc("the run's name there; default: that of its folder")] = ""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run."""

    agent: Annotated[
        str, doc("the agent: FILE.py:function, package.module:function, a command, or the http:// URL of a service")
    ] = ""
    agents: Annotated[dict[str, str], doc("more agents by name, for tasks that pick one with `agent`")] = {}
    reward: Annotated[
        str, doc("FILE.py:function that turns (task, answer) into rewards, the answer being what the agent returned")
    ] = ""
    group_reward: Annotated[
        str, doc("FILE.py:function that turns (task, answers) of a whole group into one reward for each member")
    ] = ""
    tasks: Annotated[
        str | dict[str, str],
        doc(
            "where tasks come from: a .jsonl, .csv or .parquet file, a folder, a Hugging Face data set, or "
            "FILE.py:function; or a table of them by split"
        ),
    ] = ""
    tasks_args: Annotated[dict[str, Any], doc("keyword arguments for a tasks function or a Hugging Face data set")] = {}
    hold_out: Annotated[
        float, doc("validation split: share (below 1) or number of train tasks that become split test"), Meta(ge=0)
    ] = 0.0
    folder: Annotated[str, doc("the run's folder: store, metrics, checkpoints, summary")] = "runs/run"
    seed: Annotated[
        int, doc("fixes the order of tasks and, in deterministic mode, every sampled token"), Meta(ge=0, lt=2**62)
    ] = 0
    policy: Annotated[PolicyConfig, doc("the policy being trained")] = PolicyConfig()
    policies: Annotated[
        dict[str, dict[str, Any]],
        doc(
            "several policies by name: each a table like `policy`, with `agents`, the names or patterns of the agents "
            "it answers for and is trained on, and tables `algorithm`, `learner`, `engine` of its own"
        ),
    ] = {}
    prompts: Annotated[
        dict[str, PromptConfig],
        doc("prompts by name: text, placeholders, find; agents get them, and a prompt optimiser improves them"),
    ] = {}
    algorithm: Annotated[AlgorithmConfig, doc("how rewards become a loss")] = AlgorithmConfig()
    learner: Annotated[LearnerConfig, doc("how a batch becomes an update")] = LearnerConfig()
    engine: Annotated[EngineConfig, doc("what makes tokens")] = EngineConfig()
    runner: Annotated[RunnerConfig, doc("what runs agents")] = RunnerConfig()
    loop: Annotated[LoopConfig, doc("how long, how much, how often")] = LoopConfig()
    store: Annotated[StoreConfig, doc("where everything is kept")] = StoreConfig()
    gateway: Annotated[GatewayConfig, doc("where agents reach the model")] = GatewayConfig()
    cluster: Annotated[ClusterConfig, doc("the Ray cluster that a run is spread over")] = ClusterConfig()
    monitor: Annotated[MonitorConfig, doc("experiment trackers")] = MonitorConfig()


def settings(config: Config | None = None) -> Iterator[Setting]:
    """Every setting with its value and its line of explanation, in the order of the file."""
    yield from walk(config or Config(), "")
