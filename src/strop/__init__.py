"""Strop trains the model behind any agent.

These names are the public ones; everything else may change. Nothing here needs torch.
"""

from typing import TYPE_CHECKING, Any

from strop.agent.environment import Environment, EnvironmentAgent
from strop.agent.episode import Episode, Transition
from strop.agent.llm import LLM
from strop.agent.tool import tool
from strop.agent.tool_agent import ToolAgent
from strop.config import Config
from strop.engines.scripted import Scripted
from strop.errors import StropError
from strop.run.api import evaluate, export, resume, train
from strop.store import open_store
from strop.types import Event, Policy, Retry, Reward, Rollout, Sampling, Task, Turn
from strop.version import __version__

if TYPE_CHECKING:  # read when they are asked for, since they need numpy, which agents do not
    from strop.algorithms.apo import APO
    from strop.algorithms.distill import Distill
    from strop.algorithms.dpo import DPO
    from strop.algorithms.dr_grpo import DrGRPO
    from strop.algorithms.gepa import GEPA
    from strop.algorithms.gigpo import GiGPO
    from strop.algorithms.grpo import GRPO
    from strop.algorithms.ppo import PPO
    from strop.algorithms.reinforce_pp import ReinforcePP
    from strop.algorithms.rloo import RLOO
    from strop.algorithms.sft import SFT

__all__ = [
    "APO",
    "DPO",
    "GEPA",
    "GRPO",
    "LLM",
    "PPO",
    "RLOO",
    "SFT",
    "Config",
    "Distill",
    "DrGRPO",
    "Environment",
    "EnvironmentAgent",
    "Episode",
    "Event",
    "GiGPO",
    "Policy",
    "ReinforcePP",
    "Retry",
    "Reward",
    "Rollout",
    "Sampling",
    "Scripted",
    "StropError",
    "Task",
    "ToolAgent",
    "Transition",
    "Turn",
    "__version__",
    "evaluate",
    "export",
    "open_store",
    "resume",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    """Registered algorithms, by the names of their classes."""
    if name[0].isupper():
        from strop.algorithms import find_class

        if (found := find_class(name)) is not None:
            globals()[name] = found
            return found
    raise AttributeError(f"module 'strop' has no attribute {name!r}")
