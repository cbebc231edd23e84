"""A learner and the rows it must agree with, side by side on one batch.

both = Both(folder, case, samples, budget=64)      scored, credited, and the weights moved on
both.compare_scores(limit)                         proximal, ref and values, of every turn
both.compare_update(limit)                         loss, logprobs, entropies, values, metrics, every gradient
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from strop.algorithms import EntryTensors, make
from strop.config import AlgorithmConfig, LearnerConfig, LoraConfig, OptimConfig
from strop.learner.learner import Learner
from strop.learner.logprobs import read
from strop.learner.tree_attention import plan
from strop.trajectory import Sample, assemble
from tests.parity.forests import AGENTS, VOCAB
from tests.parity.rows import Coefficients, Rows, Weights, turn_loss

ALPHA = 6
COLUMNS = ("advantage", "weight", "proximal", "behaviour", "ref", "value", "ret")
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, grad_clip=0.5, betas=(0.8, 0.9))


@dataclass(frozen=True)
class Case:
    """What is trained, and how. Without `moved` the weights are still those that the step began with."""

    algorithm: str = "grpo"
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    critic: str = "own"
    lora: int = 0
    recompute: bool = False
    moved: bool = True
    updates: int = 1

    @property
    def coefficients(self) -> Coefficients:
        s = self.settings
        return Coefficients(
            clip=s["clip"],
            clip_high=s.get("clip_high", s["clip"]),
            entropy=s.get("entropy_coef", 0.0),
            kl=s["kl_coef"] if s.get("kl") == "loss" else 0.0,
            value=s.get("vf_coef", 1.0),
            value_clip=s.get("value_clip", 0.5),
            correction=s["correction_high"] if s.get("correction") == "token" else None,
        )


GRPO = {"clip": 0.1, "clip_high": 0.15, "entropy_coef": 0.02}
MORE = {"kl": "loss", "kl_coef": 0.1, "correction": "token", "correction_high": 1.2}
GSPO = {"loss": "gspo", "clip": 0.04, "aggregation": "sequence-mean", "entropy_coef": 0.02}
PPO = {"clip": 0.1, "lam": 0.9, "discount": 0.97, "vf_coef": 0.7, "value_clip": 0.05, "entropy_coef": 0.02}
CASES = {
    "grpo": Case(settings=GRPO),
    "grpo, at the weights that sampled": Case(settings=GRPO, moved=False),
    "grpo, kl and correction": Case(settings=GRPO | MORE),
    "gspo": Case(settings=GSPO),
    "ppo": Case("ppo", PPO),
    "ppo, one trunk": Case("ppo", PPO, critic="shared"),
    "grpo, lora": Case(settings=GRPO | MORE, lora=3),
    "gspo, lora": Case(settings=GSPO, lora=3),
    "ppo, lora": Case("ppo", PPO, lora=3),
    "ppo, one trunk, lora": Case("ppo", PPO, critic="shared", lora=3),
}


class Both:
    def __init__(
        self, folder: Path, case: Case, samples: Sequence[Sample], budget: int, dtype: torch.dtype = torch.float64
    ) -> None:
        config = LearnerConfig(
            device="cpu",
            token_budget=budget,
            minibatches=case.updates,
            gradient_checkpointing=case.recompute,
            lora=LoraConfig(rank=case.lora, alpha=ALPHA),
            optim=OPTIM,
            critic=OPTIM,
            critic_kind=case.critic,  # pyright: ignore[reportArgumentType]
        )
        self.case, self.dtype = case, dtype
        self.algorithm = make(AlgorithmConfig(name=case.algorithm, settings=case.settings), config)
        self.learner = Learner(folder, config, self.algorithm, dtype=dtype)
        self.stock = _stock(folder, dtype)
        self.batch = assemble(samples, agents=AGENTS, budget=budget)
        self.entries = self.batch.entries
        self._stir(seed=1, size=0.05)  # an adapter and a critic's head begin at 0, and would hide much
        self.learner.score(self.batch)
        self._remember()
        self.algorithm.assign_credit(self.batch)
        if case.moved:
            self._stir(seed=2, size=0.03)
        self.rows = self._rows()

    def _stir(self, seed: int, size: float) -> None:
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.trained().values():
                weight += size * torch.randn(weight.shape, generator=noise, dtype=torch.float64).to(weight.dtype)

    def _modules(self) -> dict[str, Weights]:
        critic = self.learner.critic
        return {
            "": dict(self.learner.model.named_parameters()),
            "critic.": dict(critic.named_parameters()) if critic is not None else {},
        }

    def trained(self) -> Weights:
        return {p + n: w for p, module in self._modules().items() for n, w in module.items() if w.requires_grad}

    def _rows(self) -> Rows:
        modules = self._modules()
        scale = ALPHA / self.case.lora if self.case.lora else 0.0
        return Rows(self.stock, modules[""], modules["critic."], set(self.trained()), scale)

    @torch.no_grad()
    def _remember(self) -> None:
        """What the rows say of every turn under the weights that the step began with, and under the reference's. The
        engine is made to have said a little different."""
        rows, reference = self._rows(), Rows(self.stock, {}, {}, set(), 0.0)
        told = [rows.turn(turn) for turn in self.batch.turns]
        self.before = {
            "proximal": _column([t.logp for t in told]),
            "ref": _column([reference.turn(turn).logp for turn in self.batch.turns]),
        }
        if "value" in self.algorithm.needs:
            self.before["value"] = _column([t.value for t in told if t.value is not None])
        self.entries.behaviour[:] = self.before["proximal"] + 0.3 * np.sin(np.arange(len(self.entries)))
        if self.case.moved and "proximal" not in self.algorithm.needs:
            self.entries.proximal[:] = self.before["proximal"]

    # -- comparisons ---------------------------------------------------------------------------------------------------

    def compare_scores(self, limit: float) -> None:
        for name in self.algorithm.needs:
            near(getattr(self.entries, name), self.before[name], limit, name)

    def compare_update(self, limit: float) -> dict[str, float]:
        """Returns the learner's metrics."""
        ours, metrics, seen = self.tree_gradients()
        weighted: list[int] = np.flatnonzero(self.entries.weight).tolist()
        assert sorted(seen) == weighted, "every entry with a weight is trained on, once, and no other"
        theirs, means = self.row_gradients()
        if not weighted:
            assert metrics["actor/skipped"] == 1.0
            assert not ours
            return metrics
        for column, name in enumerate(("logprob", "entropy", "value")):
            near(np.array([seen[entry][column] for entry in weighted]), self.told[name][weighted], limit, name)
        near(sum(self.entries.weight[entry] * seen[entry][3] for entry in weighted), self.total, limit, "loss")
        for name, mean in means.items():
            near(metrics[name], mean, limit, name)
        exact = self.entries.exact
        apart = np.abs(self.before["proximal"] - self.entries.behaviour)[exact]
        assert metrics["training/rollout_logprobs_checked"] == exact.sum()
        near(metrics["training/rollout_logprobs_diff_max"], apart.max(), limit, "mismatch")
        near(metrics["training/rollout_logprobs_diff_mean"], apart.mean(), limit, "mismatch")
        compare(ours, theirs, limit)
        return metrics

    def tree_gradients(self) -> tuple[Weights, dict[str, float], dict[int, tuple[float, ...]]]:
        """What the update would apply, its metrics, and what it saw of every entry on the way."""
        learner, seen = self.learner, dict[int, tuple[float, ...]]()
        caught: Weights = {}

        def catch() -> float:
            caught.update({n: w.grad.clone() for n, w in self.trained().items() if w.grad is not None})
            return 0.0

        def listen(logp: Tensor, entropy: Tensor, value: Tensor | None, entries: EntryTensors) -> Any:
            loss, more = type(self.algorithm).compute_loss(self.algorithm, logp, entropy, value, entries)
            rows = torch.from_numpy(self.batch.starts)[entries.turn] + entries.index
            columns = [logp, entropy, torch.zeros_like(logp) if value is None else value, loss]
            for entry, *numbers in zip(rows.tolist(), *(c.tolist() for c in columns), strict=True):
                assert entry not in seen
                seen[entry] = tuple(numbers)
            return loss, more

        optims = [optim for optim in (learner.optim, learner.critic_optim) if optim is not None]
        for optim in optims:
            optim.clip, optim.step = catch, lambda: None
        self.algorithm.compute_loss = listen
        metrics = learner.update(self.batch)
        learner._clear()
        del self.algorithm.compute_loss
        for optim in optims:
            del optim.clip, optim.step
        return caught, metrics, seen

    def row_gradients(self, turns: Sequence[int] | None = None, shares: int = 1) -> tuple[Weights, dict[str, float]]:
        """The same, a row at a time: gradients, the loss's parts, and of other metrics means by weight."""
        rows, entries = self.rows, self.entries
        told = {name: np.zeros(len(entries)) for name in ("logprob", "entropy", "value")}
        sums: dict[str, float] = {}
        total = 0.0
        for t in range(len(self.batch.turns)) if turns is None else turns:
            at = slice(int(self.batch.starts[t]), int(self.batch.starts[t + 1]))
            given = {name: torch.from_numpy(getattr(entries, name)[at]).to(self.dtype) for name in COLUMNS}
            if not given["weight"].any():
                continue
            said = rows.turn(self.batch.turns[t])
            if given["proximal"].isnan().any():
                given["proximal"] = said.logp.detach()
            loss, more = turn_loss(self.case.settings.get("loss", "dual_clip"), said, given, self.case.coefficients)
            (shares * loss).backward()
            total += loss.item()
            for name, value in more.items():
                sums[name] = sums.get(name, 0.0) + value
            columns = (said.logp, said.entropy, said.value)
            for name, column in zip(told, columns, strict=True):
                told[name][at] = 0.0 if column is None else column.detach().double().numpy()
        self.told, self.total = told, total
        whole = entries.weight.sum()
        metrics = {name: value if name.endswith("_loss") else value / whole for name, value in sums.items()}
        return rows.gradients(), metrics


@contextmanager
def small(block: int = 8, rows: int = 5) -> Iterator[None]:
    """Attention and logits in pieces that are small enough for small trees to have many: queries per block of
    attention, entries per chunk of logits."""
    assert read.__kwdefaults__ is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "__defaults__", (block,))
        patch.setitem(read.__kwdefaults__, "chunk", rows * VOCAB)
        yield


def longest(samples: Sequence[Sample]) -> int:
    """The smallest budget that drops no rollout."""
    return max(len(turn.ids) for sample in samples for turn in sample.turns)


def near(ours: Any, theirs: Any, limit: float, name: str) -> None:
    """Relative to the largest of the numbers."""
    ours, theirs = np.atleast_1d(ours), np.atleast_1d(theirs)
    apart = np.abs(ours - theirs).max() if len(theirs) else 0.0
    assert apart <= limit * max(1e-2, np.abs(theirs).max()), f"{name} differs by {apart:.1e}"


def compare(ours: Weights, theirs: Weights, limit: float) -> None:
    """Gradients or weights: every tensor, relative to its own largest number (of gradients that cancel out but for
    rounding, to a millionth of the largest of all)."""
    assert ours.keys() == theirs.keys()
    floor = 1e-6 * max(tensor.abs().max().item() for tensor in theirs.values())
    for name, tensor in theirs.items():
        apart = (ours[name] - tensor).abs().max().item()
        assert apart <= limit * max(floor, tensor.abs().max().item()), f"{name} differs by {apart:.1e}"


@cache
def _stock(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def _column(parts: Sequence[Tensor]) -> np.ndarray:
    return torch.cat(list(parts)).double().numpy() if parts else np.empty(0)
