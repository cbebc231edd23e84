"""Strop trains the model behind any agent.

These names are the public ones; everything else may change. Nothing here needs torch.
"""

from strop.api import GRPO, PPO, RLOO, DrGRPO, GiGPO, ReinforcePP, evaluate, train
from strop.config import Config
from strop.engines.scripted import Scripted
from strop.errors import StropError
from strop.runners.llm import LLM
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
    "Turn",
    "__version__",
    "evaluate",
    "open_store",
    "train",
]
