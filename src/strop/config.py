"""Every setting of a run, one line of explanation each. TOML, `--set a.b=c` and Python all make the same `Config`.

    config = load(toml="run.toml", sets=["loop.steps=50", "learner.optim.lr=1e-4"])

Unknown keys are refused with the nearest valid name. A run keeps the full configuration it ran with as config.json.
"""

from __future__ import annotations

import difflib
import tomllib
import types as pytypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, field

from strop.errors import ConfigError
from strop.types import FAILURES, RETRIES, Cause, Failure, Retry, Sampling


def _doc(text: str) -> Meta:
    return Meta(description=text)


class SamplingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a trained policy samples; these win over what the agent asks for."""

    temperature: Annotated[float, _doc("softmax temperature; 0 is greedy"), Meta(ge=0)] = 1.0
    max_tokens: Annotated[int, _doc("most tokens one turn may sample; a request may ask for fewer"), Meta(ge=1)] = 256
    top_p: Annotated[float, _doc("only the likeliest tokens that together have this share"), Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, _doc("only so many of the likeliest tokens; 0: all"), Meta(ge=0)] = 0
    min_p: Annotated[float, _doc("only tokens at least this likely beside the likeliest"), Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, _doc("taken off the logits of tokens said before"), Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, _doc("the same, for each time they were said"), Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, _doc("divides the logits of tokens seen before; 1: none"), Meta(gt=0)] = 1.0

    def sampling(self) -> Sampling:
        return Sampling(**msgspec.structs.asdict(self))


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy being trained."""

    model: Annotated[
        str, _doc("strop/nano, smollm2-135m, a folder, a .gguf file, or ORG/MODEL on the Hugging Face hub")
    ] = "strop/nano"
    template: Annotated[str, _doc("a file with a Jinja chat template instead of the model's own")] = ""
    chat_template_kwargs: Annotated[
        dict[str, Any],
        _doc("variables of the chat template, such as enable_thinking = false; what a request gives goes before"),
    ] = {}
    tools: Annotated[
        Literal["auto", "template", "system"],
        _doc(
            "who writes tools into prompts: the chat template, with a built-in way for what it leaves out (auto); the "
            "template alone, and what it leaves out is refused (template); the built-in way, in the system prompt "
            "(system)"
        ),
    ] = "auto"
    agents: Annotated[tuple[str, ...], _doc("names of the agents whose turns are trained")] = ("main",)
    context: Annotated[
        Annotated[int, Meta(ge=2)] | None, _doc("longest prompt + answer in tokens; default: what the model allows")
    ] = None
    history: Annotated[
        Literal["sampled", "template"],
        _doc("what the model is shown of its own words: as it said them, or as the chat template writes them now"),
    ] = "sampled"
    train: Annotated[SamplingConfig, _doc("sampling while training")] = SamplingConfig()
    eval: Annotated[SamplingConfig, _doc("sampling while evaluating; greedy evaluation sets temperature 0")] = (
        SamplingConfig()
    )


Weight = Annotated[float, Meta(ge=-1e6, le=1e6)]


class FailuresConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a failed rollout counts as in its group: exclude (it does not), zero (0, or the group's lowest total where
    that is below 0), lowest (the group's lowest total), or a number."""

    agent_error: Annotated[
        Failure, _doc("the agent raised: exclude, zero (or the group's lowest if below), lowest, or a number")
    ] = FAILURES["agent_error"]
    timeout: Annotated[Failure, _doc("the agent took longer than runner.timeout")] = FAILURES["timeout"]
    bad_reward: Annotated[Failure, _doc("what it is worth could not be told")] = FAILURES["bad_reward"]
    lost_runner: Annotated[Failure, _doc("the process that ran the agent died")] = FAILURES["lost_runner"]
    engine_error: Annotated[Failure, _doc("the engine let the agent down")] = FAILURES["engine_error"]
    cancelled: Annotated[Failure, _doc("somebody called it off")] = FAILURES["cancelled"]
    late: Annotated[Failure, _doc("it was not done by loop.group_deadline")] = FAILURES["late"]

    def by_cause(self) -> dict[Cause, Failure]:
        return {cause: getattr(self, cause) for cause in FAILURES}


class AlgorithmConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rewards become a loss. Each algorithm declares its own settings in its own file, as a Struct `Settings`."""

    name: Annotated[str, _doc("which algorithm: a file of strop/algorithms")] = "grpo"
    rewards: Annotated[dict[str, Weight], _doc("weight of each named reward in a rollout's total")] = field(
        default_factory=lambda: {"reward": 1.0}
    )
    failures: Annotated[FailuresConfig, _doc("what failed rollouts count as")] = FailuresConfig()
    settings: Annotated[dict[str, Any], _doc("the algorithm's own settings")] = {}


Rate = Annotated[float, Meta(ge=0, lt=1)]


class OptimConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW."""

    lr: Annotated[float, _doc("learning rate after warm-up"), Meta(gt=0)] = 1e-6
    warmup: Annotated[int, _doc("optimizer steps over which the rate rises from 0"), Meta(ge=0)] = 0
    schedule: Annotated[
        Literal["constant", "linear", "cosine"] | None,
        _doc("how the rate falls to 0: constant (not at all), linear, cosine; default: linear if `decay` is set"),
    ] = None
    decay: Annotated[
        Annotated[int, Meta(ge=1)] | None, _doc("optimizer steps over which it falls; default: the whole run")
    ] = None
    betas: Annotated[tuple[Rate, Rate], _doc("AdamW's decay rates")] = (0.9, 0.999)
    weight_decay: Annotated[float, _doc("AdamW's decoupled weight decay"), Meta(ge=0)] = 0.0
    grad_clip: Annotated[float, _doc("gradients are scaled to at most this norm"), Meta(gt=0)] = 1.0


class LoraConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Train small matrices beside the model's, which stay as they are."""

    rank: Annotated[int, _doc("width of the matrices: 8, 16, 32, ...; 0: the whole model is trained"), Meta(ge=0)] = 0
    alpha: Annotated[int, _doc("what they add is scaled by alpha / rank"), Meta(ge=1)] = 32
    targets: Annotated[
        tuple[str, ...], _doc("the linear layers that get one, such as q_proj; default: all of the model's blocks")
    ] = ()


class LearnerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a batch becomes an update."""

    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("where it computes; auto: a GPU if there is one")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _doc("what it computes in; the trained weights are kept in float32; auto: bfloat16 on a GPU"),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "blocks", "flex"],
        _doc("how a token tree is attended to: by plain operations or FlexAttention; auto: flex on a GPU"),
    ] = "auto"
    compile: Annotated[
        bool, _doc("with flex, also compile what lies between two products of matrices: half a minute at the start")
    ] = True
    gradient_checkpointing: Annotated[
        bool, _doc("keep only what enters each block and compute the rest again: less memory, a third more time")
    ] = False
    offload: Annotated[bool, _doc("keep the optimizer's state in the CPU's memory while a GPU computes")] = False
    lora: Annotated[LoraConfig, _doc("train an adapter instead of the whole model")] = LoraConfig()
    optim: Annotated[OptimConfig, _doc("the optimizer")] = OptimConfig()
    critic: Annotated[OptimConfig, _doc("the critic's optimizer, for algorithms that have one")] = OptimConfig(lr=1e-5)
    critic_kind: Annotated[
        Literal["own", "shared"], _doc("a model of its own, or only a head on what the policy computes anyway")
    ] = "own"
    updates: Annotated[int, _doc("optimizer steps per step, each over an equal share of the groups"), Meta(ge=1)] = 1
    token_budget: Annotated[int, _doc("most tree tokens in one micro-batch"), Meta(ge=1)] = 4096
    logprob_limit: Annotated[
        float | None,
        _doc("engine and learner logprobs may differ by this before the run warns; default: 1e-4, in bfloat16 0.3"),
    ] = None


class VllmConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vLLM server: one that is started for the run, or somebody else's."""

    url: Annotated[str, _doc("a server that somebody else started; default: one is started and watched")] = ""
    python: Annotated[str, _doc("the Python that has vLLM installed; default: the one that runs strop")] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], _doc("what it computes in; auto: as the model's folder says")
    ] = "auto"
    tensor_parallel: Annotated[int, _doc("GPUs that share each layer"), Meta(ge=1)] = 1
    gpu_memory: Annotated[float, _doc("share of a GPU's memory that it takes"), Meta(gt=0, le=1)] = 0.9
    rows: Annotated[int, _doc("sequences decoded at once"), Meta(ge=1)] = 256
    stream_interval: Annotated[int, _doc("tokens per message; more cost less and come later"), Meta(ge=1)] = 8
    servers: Annotated[
        int, _doc("processes of it that take requests: with hundreds of agents one is what limits it"), Meta(ge=1)
    ] = 1
    weights: Annotated[
        Literal["files", "ipc", "nccl"],
        _doc("how new weights reach it: files anywhere, ipc on the learner's GPU, nccl on GPUs of its own"),
    ] = "files"
    sleep: Annotated[bool, _doc("give its GPU memory to the learner while it is paused")] = False
    lora_rank: Annotated[int, _doc("largest rank of LoRA adapters: 8, 16, 32, ...; 0: none are loaded"), Meta(ge=0)] = 0
    args: Annotated[tuple[str, ...], _doc("more arguments of `vllm serve`")] = ()
    env: Annotated[dict[str, str], _doc("more variables for its environment")] = {}
    start_timeout: Annotated[float, _doc("seconds it may take to answer once it is started"), Meta(gt=0)] = 900.0
    restarts: Annotated[int, _doc("times in a row that it is started again when it dies"), Meta(ge=0)] = 5
    patience: Annotated[float, _doc("seconds a request waits while it is started again"), Meta(ge=0)] = 300.0


class SglangConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An sglang server: one that is started for the run, or somebody else's."""

    url: Annotated[str, _doc("a server that somebody else started; default: one is started and watched")] = ""
    python: Annotated[str, _doc("the Python that has sglang installed; default: the one that runs strop")] = ""
    tensor_parallel: Annotated[int, _doc("GPUs that share each layer"), Meta(ge=1)] = 1
    gpu_memory: Annotated[float, _doc("share of a GPU's memory for weights and KV cache"), Meta(gt=0, le=1)] = 0.8
    rows: Annotated[int, _doc("sequences decoded at once"), Meta(ge=1)] = 256
    deterministic: Annotated[bool, _doc("the same tokens whatever shares the batch; without it seeds do nothing")] = (
        False
    )
    args: Annotated[tuple[str, ...], _doc("more arguments of sglang.launch_server")] = ()
    env: Annotated[dict[str, str], _doc("more variables for its environment")] = {}
    start_timeout: Annotated[float, _doc("seconds it may take to answer once it is started"), Meta(gt=0)] = 900.0
    restarts: Annotated[int, _doc("times in a row that it is started again when it dies"), Meta(ge=0)] = 5
    patience: Annotated[float, _doc("seconds a request waits while it is started again"), Meta(ge=0)] = 300.0


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes tokens."""

    name: Annotated[
        Literal["auto", "embedded", "vllm", "sglang"],
        _doc("auto: vllm where it is installed and there is a GPU, otherwise the embedded one"),
    ] = "auto"
    rows: Annotated[int, _doc("sequences decoded at once"), Meta(ge=1)] = 32
    memory: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _doc("GiB that keys and values may take, which bounds rows and context; default: rows times the context"),
    ] = None
    prefill_chunk: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _doc("prompt tokens run per step beside those being decoded; default: 512, on a GPU 8192, deterministic 128"),
    ] = None
    deterministic: Annotated[
        bool, _doc("same tokens whatever shares the batch: fixed shapes, prompts prefilled alone, seeds per request")
    ] = False
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None, _doc("CPU threads of the process that holds the weights; default: all cores")
    ] = None
    vllm: Annotated[VllmConfig, _doc("where vLLM makes them")] = VllmConfig()
    sglang: Annotated[SglangConfig, _doc("where sglang makes them")] = SglangConfig()


class RetriesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What leads back to the queue. A runner that was told to stop is not held against a rollout at all."""

    agent_error: Annotated[Retry, _doc("the agent raised, or its command failed")] = Retry(limit=0, wait=1.0)
    timeout: Annotated[Retry, _doc("the agent took longer than runner.timeout")] = Retry(limit=0)
    lost_runner: Annotated[Retry, _doc("the process that ran the agent died")] = RETRIES["lost_runner"]
    engine_error: Annotated[Retry, _doc("the engine let the agent down")] = RETRIES["engine_error"]

    def by_cause(self) -> dict[Cause, Retry]:
        """As a rollout carries them."""
        given: dict[Cause, Retry] = {
            "agent_error": self.agent_error,
            "timeout": self.timeout,
            "lost_runner": self.lost_runner,
            "engine_error": self.engine_error,
        }
        return {cause: retry for cause, retry in given.items() if retry.limit}


class RunnerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs agents."""

    workers: Annotated[int, _doc("agents at work at once"), Meta(ge=1, le=10_000)] = 16
    agents_in: Annotated[
        Literal["processes", "threads", "loop"],
        _doc(
            "where Python agents run: a process each, a thread each, or all in one event loop (async only); outside of "
            "processes they get everything through `llm`, no variables, and what they print is not kept"
        ),
    ] = "processes"
    python: Annotated[
        str, _doc("the Python of another environment that runs Python agents, with strop in it; default: this one")
    ] = ""
    timeout: Annotated[float, _doc("seconds an agent may take for one rollout"), Meta(gt=0)] = 300.0
    lease: Annotated[
        float, _doc("seconds without a sign of life after which a runner counts as lost"), Meta(gt=0, le=3600)
    ] = 30.0
    drain: Annotated[
        float, _doc("seconds that running agents get to end once a runner is told to stop"), Meta(ge=0)
    ] = 30.0
    retries: Annotated[RetriesConfig, _doc("what leads back to the queue")] = RetriesConfig()


class LoopConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long, how much, how often."""

    steps: Annotated[int, _doc("steps to train"), Meta(ge=0)] = 100
    groups: Annotated[int, _doc("tasks per step"), Meta(ge=1)] = 16
    members: Annotated[int, _doc("rollouts per task"), Meta(ge=1)] = 8
    groups_most: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _doc("tasks per step at most, where further ones replace those that teach nothing; default: none are replaced"),
    ] = None
    staleness: Annotated[
        int,
        _doc("steps that rollouts may lag behind; 0: they wait for the learner, above: both work at the same time"),
        Meta(ge=0),
    ] = 0
    eval_every: Annotated[int, _doc("steps between evaluations; 0: only before the first and after the last")] = 0
    eval_splits: Annotated[tuple[str, ...], _doc("splits of the tasks that are evaluated")] = ("test",)
    eval_samples: Annotated[int, _doc("samples per task in an evaluation: k of mean@k"), Meta(ge=1)] = 1
    eval_greedy: Annotated[bool, _doc("evaluate greedily as well as sampled, one sample per task")] = True
    checkpoint_every: Annotated[int, _doc("steps between checkpoints; the last step always has one"), Meta(ge=1)] = 10
    keep_checkpoints: Annotated[int, _doc("newest checkpoints kept; the best stays too"), Meta(ge=1)] = 2
    collapse_patience: Annotated[
        int,
        _doc("steps without anything learnt after which a run that has lost its reward is stopped; 0: never"),
        Meta(ge=0),
    ] = 5
    group_deadline: Annotated[
        float, _doc("seconds without any rollout's end after which groups are closed with what they have"), Meta(gt=0)
    ] = 1800.0


class StoreConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where everything is kept."""

    url: Annotated[str, _doc("postgresql://USER@HOST/DATABASE; default: SQLite in the run's folder")] = ""
    synchronous: Annotated[
        Literal["NORMAL", "FULL"], _doc("SQLite: NORMAL survives kill -9 of any process, FULL also power loss")
    ] = "NORMAL"


class OutsideConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A provider that answers for some agents, or for some models that agents ask for; its turns are never trained."""

    url: Annotated[str, _doc("where its model APIs are, with /v1: https://api.openai.com/v1")]
    model: Annotated[str, _doc("the model it is asked for; default: what the agent asks for")] = ""
    key_env: Annotated[str, _doc("the environment variable that holds its key")] = ""
    agents: Annotated[tuple[str, ...], _doc("names of the agents it answers")] = ()
    models: Annotated[tuple[str, ...], _doc("it also answers whoever asks for one of these models")] = ()
    dialects: Annotated[tuple[str, ...], _doc("the model APIs it speaks, by the end of their addresses")] = (
        "chat/completions",
        "completions",
        "responses",
        "messages",
    )
    per_minute: Annotated[int, _doc("requests begun per minute, the others wait; 0: no limit"), Meta(ge=0)] = 0
    at_once: Annotated[int, _doc("requests at once, the others wait; 0: no limit"), Meta(ge=0)] = 0
    timeout: Annotated[float, _doc("seconds a request may take, waiting and tries included"), Meta(gt=0)] = 600.0
    tokens: Annotated[int, _doc("tokens a run may spend on it, asked and answered; 0: no limit"), Meta(ge=0)] = 0
    money: Annotated[float, _doc("what it may cost a run, in the currency of its prices; 0: no limit"), Meta(ge=0)] = (
        0.0
    )
    price_in: Annotated[float, _doc("price of a million tokens that it is asked"), Meta(ge=0)] = 0.0
    price_out: Annotated[float, _doc("price of a million tokens that it answers"), Meta(ge=0)] = 0.0


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where agents reach the model."""

    host: Annotated[str, _doc("address to listen on")] = "127.0.0.1"
    port: Annotated[int, _doc("port to listen on; 0 picks a free one"), Meta(ge=0, le=65535)] = 0
    hosts: Annotated[
        tuple[str, ...], _doc("names that clients may call it by, beside its address and the machine's name: a proxy's")
    ] = ()
    in_flight: Annotated[int, _doc("most model calls at once; more are refused for a moment"), Meta(ge=1)] = 4096
    in_flight_per_attempt: Annotated[int, _doc("most model calls of one attempt at once"), Meta(ge=1)] = 256
    deadline: Annotated[float, _doc("seconds one model call may take"), Meta(gt=0)] = 1800.0
    pause_patience: Annotated[
        float, _doc("seconds a model call waits while the model is paused for new weights"), Meta(gt=0)
    ] = 900.0
    outside: Annotated[dict[str, OutsideConfig], _doc("outside models by name: url, model, key_env, agents, ...")] = {}


class MonitorConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who else is told of metrics."""

    writers: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...],
        _doc("programs that get metrics beside metrics.jsonl: tensorboard, wandb, mlflow"),
    ] = ()
    project: Annotated[str, _doc("W&B's project, MLflow's experiment"), Meta(min_length=1)] = "strop"
    name: Annotated[str, _doc("the run's name there; default: that of its folder")] = ""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run."""

    agent: Annotated[
        str, _doc("the agent: FILE.py:function, package.module:function, a command, or the http:// URL of a service")
    ] = ""
    agents: Annotated[dict[str, str], _doc("more agents by name, for tasks that pick one with `agent`")] = {}
    reward: Annotated[
        str, _doc("FILE.py:function that turns (task, answer) into rewards, the answer being what the agent returned")
    ] = ""
    group_reward: Annotated[
        str, _doc("FILE.py:function that turns (task, answers) of a whole group into one reward for each member")
    ] = ""
    tasks: Annotated[
        str | dict[str, str],
        _doc(
            "where tasks come from: a .jsonl, .csv or .parquet file, a folder, a Hugging Face data set, or "
            "FILE.py:function; or a table of them by split"
        ),
    ] = ""
    tasks_args: Annotated[
        dict[str, Any], _doc("keyword arguments for a tasks function or a Hugging Face data set")
    ] = {}
    hold_out: Annotated[
        float, _doc("share (below 1) or number of train tasks kept aside as split test"), Meta(ge=0)
    ] = 0.0
    folder: Annotated[str, _doc("the run's folder: store, metrics, checkpoints, summary")] = "runs/run"
    seed: Annotated[
        int, _doc("fixes the order of tasks and, in deterministic mode, every sampled token"), Meta(ge=0, lt=2**62)
    ] = 0
    policy: Annotated[PolicyConfig, _doc("the policy being trained")] = PolicyConfig()
    algorithm: Annotated[AlgorithmConfig, _doc("how rewards become a loss")] = AlgorithmConfig()
    learner: Annotated[LearnerConfig, _doc("how a batch becomes an update")] = LearnerConfig()
    engine: Annotated[EngineConfig, _doc("what makes tokens")] = EngineConfig()
    runner: Annotated[RunnerConfig, _doc("what runs agents")] = RunnerConfig()
    loop: Annotated[LoopConfig, _doc("how long, how much, how often")] = LoopConfig()
    store: Annotated[StoreConfig, _doc("where everything is kept")] = StoreConfig()
    gateway: Annotated[GatewayConfig, _doc("where agents reach the model")] = GatewayConfig()
    monitor: Annotated[MonitorConfig, _doc("who else is told of metrics")] = MonitorConfig()


def load(
    *,
    toml: str | Path | None = None,
    sets: Sequence[str] = (),
    base: Config | None = None,
    data: str | None = None,
    **fields: Any,
) -> Config:
    """Make a Config from defaults, then a TOML file, then keyword fields, then `a.b=c` settings; the last one wins.
    `data` is the place of that name among `tasks_args`, which otherwise stay."""
    raw: dict[str, Any] = msgspec.to_builtins(base or Config())
    if toml is not None:
        _merge(raw, _read_toml(Path(toml)))
    _merge(raw, msgspec.to_builtins({k: v for k, v in fields.items() if v is not None}))
    chosen = _from_sets(sets)
    # One argument by itself stands beside the others, unless it is for other tasks.
    _merge(raw, chosen, REPLACED if "tasks" in chosen else [name for name in REPLACED if name != "tasks_args"])
    if data is not None:
        raw["tasks_args"] = {**raw["tasks_args"], "data": str(Path(data).absolute()) if Path(data).exists() else data}
    return from_builtins(raw)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values for settings, by their whole names: {"loop.steps": 40}."""
    raw: dict[str, Any] = msgspec.to_builtins(config)
    for key, value in values.items():
        _merge(raw, _nest(key.split("."), value))
    return from_builtins(raw)


def _from_sets(sets: Sequence[str]) -> dict[str, Any]:
    """All `a.b=c` as one table, so that several entries of a table that is given whole stand together."""
    together: dict[str, Any] = {}
    for item in sets:
        key, eq, value = item.partition("=")
        if not eq:
            raise ConfigError(f"--set {item!r} has no '=': write it as section.name=value")
        _merge(together, _nest(key.strip().split("."), _literal(value.strip())), replaced=())
    return together


def from_builtins(raw: dict[str, Any]) -> Config:
    """Check and convert plain data; what is wrong is named with its path and the nearest valid name."""
    return section(raw, Config, "")


S = TypeVar("S", bound=Struct)


def section(raw: dict[str, Any], struct: type[S], path: str) -> S:
    """One section of the configuration, for rooms that declare their own; `path` is where it stands, with its dot."""
    _refuse_unknown(raw, struct, path)
    try:
        return msgspec.convert(raw, struct)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = path + where.rstrip("`")
        raise ConfigError(f"{name or 'the configuration'} does not fit: {what}; see `strop config`") from None


def to_json(config: Config) -> bytes:
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def from_json(data: bytes) -> Config:
    return from_builtins(msgspec.json.decode(data))


class Setting(Struct, frozen=True):
    """One line of `strop config`: where it is, what it is, what it means."""

    key: str
    value: Any
    doc: str


DECLARED: list[Callable[[], Iterable[Setting]]] = []
"""Settings that other packages declare and add here, to be found when a name is not: algorithms know this module, not
the other way round."""


def settings(config: Config | None = None) -> Iterator[Setting]:
    """Every setting with its value and its line of explanation, in the order of the file."""
    yield from walk(config or Config(), "")


def walk(struct: Struct, prefix: str) -> Iterator[Setting]:
    for name, hint in _hints(type(struct)).items():
        value = getattr(struct, name)
        if isinstance(value, Struct):
            yield from walk(value, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, value, _description(hint))


def _hints(struct: type[Struct]) -> dict[str, Any]:
    hints = get_type_hints(struct, include_extras=True)
    return {name: hints[name] for name in struct.__struct_fields__}


def _description(hint: Any) -> str:
    said = next((m.description for m in get_args(hint)[1:] if isinstance(m, Meta) and m.description), "")
    choices = get_args(get_args(hint)[0]) if get_origin(get_args(hint)[0]) is Literal else ()
    return f"{said} ({', '.join(choices)})" if choices else said


def _struct_of(hint: Any) -> type[Struct] | None:
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(inner) in (Union, pytypes.UnionType):
        return None
    return inner if isinstance(inner, type) and issubclass(inner, Struct) else None


def _refuse_unknown(raw: dict[str, Any], struct: type[Struct], path: str) -> None:
    hints = _hints(struct)
    for key, value in raw.items():
        if key not in hints:
            tail = _first_leaf(key, value)
            near = _nearest(tail, path, hints)
            hint = (
                f"did you mean {' or '.join(map(repr, near))}?" if near else f"valid names there: {', '.join(hints)}."
            )
            raise ConfigError(f"there is no setting {path + tail!r}; {hint}")
        inner = _struct_of(hints[key])
        if inner is not None:
            if not isinstance(value, dict):
                raise ConfigError(f"{path + key!r} is a section, not a value: set {path}{key}.<name> instead")
            _refuse_unknown(cast(dict[str, Any], value), inner, f"{path}{key}.")


def _first_leaf(key: str, value: Any) -> str:
    """
    >>> _first_leaf("optim", {"lr": 1e-4})
    'optim.lr'
    """
    while isinstance(value, dict) and value:
        name, value = next(iter(cast(dict[str, Any], value).items()))
        key = f"{key}.{name}"
    return key


def _nearest(tail: str, path: str, hints: Iterable[str]) -> list[str]:
    """What somebody may have meant by `tail`, which is no setting below `path`: the same last word wherever it stands,
    those that end in all of `tail` first, then those below `path`; or the name most like it, there or anywhere."""
    keys = [setting.key for setting in (*settings(), *(one for declared in DECLARED for one in declared()))]
    last = tail.rpartition(".")[2]
    same = [key for key in dict.fromkeys(keys) if key.rpartition(".")[2] == last]
    if same:
        same.sort(key=lambda key: (not key.endswith(f".{tail}"), not key.startswith(path)))
        whole = [key for key in same if key.endswith(f".{tail}") and key.startswith(path)]
        return (whole or same)[:2]
    words = {key.rpartition(".")[2]: key for key in reversed(keys)} | {name: path + name for name in hints}
    return [words[word] for word in difflib.get_close_matches(last, words, 1)]


REPLACED = ("rewards", "tasks_args", "agents", "tasks")
"""Tables that are given whole: a default in them would not go away otherwise."""


def _merge(into: dict[str, Any], new: dict[str, Any], replaced: Sequence[str] = REPLACED) -> None:
    for key, value in new.items():
        here = into.get(key)
        if isinstance(here, dict) and key not in replaced:
            if not isinstance(value, dict):
                raise ConfigError(f"{key!r} is a section, not a value: set {key}.<name> instead")
            _merge(cast(dict[str, Any], here), cast(dict[str, Any], value), replaced)
        else:
            into[key] = value


def _nest(path: list[str], value: Any) -> dict[str, Any]:
    return {path[0]: _nest(path[1:], value)} if len(path) > 1 else {path[0]: value}


def _literal(text: str) -> Any:
    """TOML's or JSON's reading of a value, or the text itself: 1e-4, grpo, ["test"], {"reward": 1} all work."""
    if text in ("none", "None", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
