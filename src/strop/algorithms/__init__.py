"""How rewards become a loss: one class in one file per algorithm, each under 170 lines, none of which knows torch.
Beside them the prompt optimisers (prompt_optimizer.py), which improve texts instead of weights.

    assign_credit(batch)                          fills entries.advantage, .ret and .weight before anything is packed
    compute_loss(logp, entropy, value, entries)   one number per entry; the batch loss is the sum of weight x loss

A new algorithm is a new file here, or a file of your own that `algorithm.name` names as FILE.py:Class; its settings are
the fields of its class. Nothing else here, in the learner or in the configuration changes.
"""

from strop.algorithms.base import Algorithm, EntryTensors, Improver
from strop.algorithms.prompt_optimizer import PromptOptimizer, PromptSession, PromptTrial
from strop.algorithms.registry import (
    every_setting,
    find,
    find_class,
    make,
    make_improver,
    names,
    own_settings,
    registered_name,
    registered_settings,
    setting_names,
)

__all__ = [
    "Algorithm",
    "EntryTensors",
    "Improver",
    "PromptOptimizer",
    "PromptSession",
    "PromptTrial",
    "every_setting",
    "find",
    "find_class",
    "make",
    "make_improver",
    "names",
    "own_settings",
    "registered_name",
    "registered_settings",
    "setting_names",
]
