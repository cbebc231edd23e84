"""What the learner's tests share: an algorithm that asks for everything, batches with credit, a count of memory."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strop.algorithms import Algorithm, make
from strop.config import AlgorithmConfig, LearnerConfig, OptimConfig
from strop.learner.learner import Learner
from strop.trajectory import assemble


class Critical(Algorithm):
    """Asks for everything there is, to show that an algorithm with a critic and a reference needs nothing changed."""

    needs = frozenset({"proximal", "ref", "value"})

    def assign_credit(self, batch):
        e = batch.entries
        e.ret[:] = 1.0
        e.advantage[:] = e.ret - e.value
        e.weight[:] = 1 / len(e)
        return {}

    def compute_loss(self, logp, entropy, value, entries):
        policy = -(logp - entries.proximal).exp() * entries.advantage + 0.1 * (logp - entries.ref) - 0.01 * entropy
        error = (value - entries.ret).pow(2)
        return policy + 0.5 * error, {"critic/vf_loss": error.detach()}


def learner(folder, algorithm=None, *, lr=1e-2, budget=1000, dtype=None, optim=None, base=None, **config):
    optim = optim or OptimConfig(lr=lr, grad_clip=1e9)
    config = LearnerConfig(token_budget=budget, optim=optim, critic=OptimConfig(lr=1e-2), device="cpu", **config)
    return Learner(folder, config, algorithm or make(AlgorithmConfig(), config), dtype=dtype, base=base)


def credited(learner, samples, budget=1000):
    batch = assemble(samples, agents=["main"], budget=budget)
    learner.score(batch)
    learner.algorithm.assign_credit(batch)
    return batch


def gradients(learner, batch):
    """What one update would apply, caught before it is; in what it is summed up in."""
    caught = {}

    def catch():
        learner.optim.masters.take_gradients()
        caught.update({n: w.grad.clone() for n, w in learner.optim.weights().items()})
        return 0.0

    learner.optim.clip, learner.optim.step = catch, lambda: None
    metrics = learner.update(batch)
    learner.optim.clear()
    del learner.optim.clip, learner.optim.step
    return caught, metrics


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations made since it began and that are still there, and the most at any time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage):
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        size = storage.nbytes()
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self.gone, storage._cdata, size)

    def gone(self, place, size):
        self.known.discard(place)
        self.now -= size
