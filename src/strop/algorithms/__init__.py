"""How rewards become a loss: one file per algorithm, each under 120 lines, none of which knows torch.

    credit(batch)                              fills entries.advantage, .ret and .weight before anything is packed
    loss(logp, entropy, value, entries)        one number per entry; the batch loss is the sum of weight x loss

A new algorithm is a new file with a Struct `Settings` and a function `make`; nothing else here, in the learner or in
the configuration changes.
"""

from strop.algorithms.base import Algorithm, View, every_setting, make, names, own_settings, settings

__all__ = ["Algorithm", "View", "every_setting", "make", "names", "own_settings", "settings"]
