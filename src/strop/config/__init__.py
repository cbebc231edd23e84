"""Every setting of a run, one line of explanation each. TOML, `--set a.b=c` and Python all make the same `Config`.

    config = load(toml="run.toml", sets=["loop.steps=50", "learner.optim.lr=1e-4"])

Unknown keys are refused with the nearest valid name. A run keeps the full configuration it ran with as config.json.
"""

from strop.config.algorithm import AlgorithmConfig, FailuresConfig
from strop.config.checks import DECLARED, convert, refuse_unknown
from strop.config.cluster import ClusterConfig
from strop.config.container import ContainerConfig
from strop.config.describe import Setting, doc, field_types, walk
from strop.config.engine import EngineConfig, SglangConfig, VllmConfig
from strop.config.gateway import GatewayConfig, OutsideConfig
from strop.config.learner import LearnerConfig, LoraConfig, OptimConfig
from strop.config.loading import changed, from_builtins, from_json, load, to_json
from strop.config.policies import (
    MAIN,
    answers_outside,
    default_policy,
    describe_algorithms,
    describe_models,
    find_policy,
    refuse_frozen_adapters,
    replace_models,
    resolve_policies,
    serves_no_agent,
    trained_policies,
    weigh_rewards,
)
from strop.config.policy import PastConfig, PolicyConfig, SamplingConfig
from strop.config.prompts import PromptConfig
from strop.config.renamed import RENAMED, RenamedSetting, find_new_names, rename_old
from strop.config.run import Config, LoopConfig, MonitorConfig, StoreConfig, settings
from strop.config.runner import RetriesConfig, RunnerConfig

__all__ = [
    "DECLARED",
    "MAIN",
    "RENAMED",
    "AlgorithmConfig",
    "ClusterConfig",
    "Config",
    "ContainerConfig",
    "EngineConfig",
    "FailuresConfig",
    "GatewayConfig",
    "LearnerConfig",
    "LoopConfig",
    "LoraConfig",
    "MonitorConfig",
    "OptimConfig",
    "OutsideConfig",
    "PastConfig",
    "PolicyConfig",
    "PromptConfig",
    "RenamedSetting",
    "RetriesConfig",
    "RunnerConfig",
    "SamplingConfig",
    "Setting",
    "SglangConfig",
    "StoreConfig",
    "VllmConfig",
    "answers_outside",
    "changed",
    "convert",
    "default_policy",
    "describe_algorithms",
    "describe_models",
    "doc",
    "field_types",
    "find_new_names",
    "find_policy",
    "from_builtins",
    "from_json",
    "load",
    "refuse_frozen_adapters",
    "refuse_unknown",
    "rename_old",
    "replace_models",
    "resolve_policies",
    "serves_no_agent",
    "settings",
    "to_json",
    "trained_policies",
    "walk",
    "weigh_rewards",
]
