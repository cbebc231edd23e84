"""Strop trains the model behind any agent.

These names are the public ones; everything else may change. Nothing here needs torch.
"""

from strop.agent.environment import Environment, EnvironmentAgent
from strop.agent.episode import Episode, Transition
from strop.agent.llm import LLM
from strop.agent.tool import tool
from strop.agent.tool_agent import ToolAgent
from strop.config import Config
from strop.engines.scripted import Scripted
from strop.errors import StropError
from strop.run.api import GRPO, PPO, RLOO, DrGRPO, GiGPO, ReinforcePP, evaluate, export, resume, train
from strop.store.opening import open_store
from strop.types import Event, Policy, Retry, Reward, Rollout, Sampling, Task, Turn

__version__ = "0.1.0"

__all__ = [
    "GRPO",
    "LLM",
    "PPO",
    "RLOO",
    "Config",
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
