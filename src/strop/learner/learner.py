"""The learner: score a batch, then update the policy from it. It is blind to which algorithm it runs.

    score(batch)    one pass without gradients fills what the algorithm needs: proximal, ref, value
    credit(batch)   the algorithm's: advantages and weights (the loop calls it)
    update(batch)   optimizer steps over equal shares of the groups; checks every logprob of the batch on the way

The same inputs give the same bits on a CPU with the same number of threads. Several ranks (ranks.py) do all of it
together: each has a learner, is given the same batches and runs its share of their pieces.
Left out: a mismatch report for stale rollouts (it compares with the weights the step began with, which at staleness 0
are those that sampled).
"""

from __future__ import annotations

import copy
import gc
import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.algorithms import Algorithm, EntryTensors
from strop.config import LearnerConfig
from strop.errors import LearnerError, RankOutOfMemory
from strop.learner import checkpoint, lora, memory, rng, sharded_checkpoint
from strop.learner.critic import Critic, ValueHead
from strop.learner.device import send
from strop.learner.logprobs import TreeReader, find_head, gather_entries, read
from strop.learner.masks import EntryMasks
from strop.learner.masters import lower
from strop.learner.meter import UpdateMeter, measure_mismatch
from strop.learner.model import choose_way, load, place
from strop.learner.model_copy import WholeCopy
from strop.learner.optim import Optim
from strop.learner.ranks import ALONE, Ranks, pack_evenly
from strop.learner.sharded_checkpoint import fill_shards, has_shards, take_shards
from strop.learner.sharded_loading import copy_parts, outline, read_parts
from strop.learner.sharding import fill, gather, reshard, shard
from strop.learner.snapshot import ALIGN, SnapshotMemory
from strop.learner.trunk_graphs import TrunkGraphs
from strop.trajectory import Batch, Entries, MicroBatch, check
from strop.trajectory.batch import Floats, Ints

log = logging.getLogger(__name__)
T = TypeVar("T")


class Learner:
    """Holds the trained weights. `model`'s parameters stay in place for life: an embedded engine may share them.

    It computes where and in what the configuration says, or in the `dtype` given. `steps` is how many a whole run has.
    An algorithm that asks for `value` gets a critic (`critic.py`, or the module given: called as critic(piece), it
    gives a value per entry). The same loss trains it, with an optimizer of its own. One that asks for `ref` gets a copy
    of the model as it begins or, where an adapter is trained, the model without it. Several learners may train adapters
    on one `base`, whose weights they share. With several `ranks` all of a model is sharded over them; of an adapter
    every rank has the whole. `whole` is then what the embedded engine serves, where it does.
    """

    def __init__(
        self,
        folder: str | Path,
        config: LearnerConfig,
        algorithm: Algorithm,
        *,
        seed: int = 0,
        steps: int = 0,
        dtype: torch.dtype | None = None,
        critic: nn.Module | None = None,
        base: PreTrainedModel | None = None,
        ranks: Ranks = ALONE,
        serves: bool = True,
    ) -> None:
        torch.manual_seed(seed)
        self.folder = Path(folder)
        self.config = config
        self.budget = min(config.start_budget or config.token_budget, config.token_budget)
        self.algorithm = algorithm
        self.ranks = ranks
        self.sharded = not ranks.alone and not config.lora.rank
        device, configured = place(config)
        self.dtype = dtype = dtype or configured
        self.way = choose_way(config, device, sharded=self.sharded, split=ranks.sequence)
        # Read in float32 at least, which is what is trained; computed in another dtype it is rounded below.
        wide = torch.promote_types(dtype, torch.float32)
        outlined = outline(folder, wide) if self.sharded else None
        if base is None:
            self.model = outlined or load(folder, wide)
        else:
            assert config.lora.rank, "weights that are somebody else's too are not trained"
            self.model = lora.share_weights(base)
        if ranks.sequence is not None:
            ranks.sequence.refuse_heads(int(self.model.config.num_attention_heads))
        if device.type == "cuda":
            self._foresee(torch.cuda.mem_get_info(device)[0])
        if config.lora.rank:
            lora.attach(self.model, config.lora)
        if outlined is None:
            nn.Module.to(self.model, device)
        if critic is None and "value" in algorithm.needs:
            critic = ValueHead(self.model) if config.critic_kind == "shared" else Critic(self.model, self.way)
        if critic is not None:
            (critic.head if outlined is not None and isinstance(critic, Critic) else critic).to(device)
        self.critic = critic
        self.whole = WholeCopy(self.model, dtype, device) if self.sharded and serves else None
        masters = None if self.sharded else lower(self.model, dtype)
        own_copy = "ref" in algorithm.needs and not config.lora.rank
        self.ref = copy.deepcopy(self.model).requires_grad_(False) if own_copy else None
        self.reader = TreeReader(self.model)
        self._ref_reader = TreeReader(self.ref) if self.ref is not None else self.reader
        critic_masters = None
        if self.sharded:
            self._shard(outlined is not None)
        elif isinstance(self.critic, Critic):
            critic_masters = lower(self.critic.trunk, dtype)
        how: dict[str, Any] = {"offload": config.offload and not self.sharded, "whole": steps * config.minibatches}
        how["ranks"] = ranks
        self.optim = Optim(self.model, config.optim, masters, **how)
        self.graphs = self._make_graphs(device)
        self.critic_optim = None
        if self.critic is not None:
            self.critic_optim = Optim(self.critic, config.critic, critic_masters, **how)
        self._masks: EntryMasks | None = None  # of the batch at hand
        self._snapshots = SnapshotMemory(device)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None

    def _shard(self, outlined: bool) -> None:
        """All that has the size of a model. What has no values yet gets them then."""
        shard(self.reader, self.ranks, self.dtype, offload=self.config.offload)
        if self.ref is not None:
            shard(self._ref_reader, self.ranks, self.dtype, offload=self.config.offload)
        if isinstance(self.critic, Critic):
            wide = [self.critic.head]
            shard(self.critic, self.ranks, self.dtype, wide=wide, offload=self.config.offload)
        if outlined:
            read_parts(self.model, self.folder, self.ranks)
            own = dict(self.model.named_parameters())
            for copied in (self.ref, self.critic.trunk if isinstance(self.critic, Critic) else None):
                if copied is not None:
                    copy_parts(own, copied)
        if self.whole is not None:
            self.whole.refresh()

    def _make_graphs(self, device: torch.device) -> TrunkGraphs | None:
        """Where all of a model is trained on a GPU and what it computes can be kept."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        apart = self.config.offload or self.way.recompute or self.way.attention != "flex"
        if device.type != "cuda" or apart or self.config.lora.rank or not self.ranks.alone:
            return None
        if set(trained) != set(self.optim.masters.of):
            return None
        return TrunkGraphs(self.model, self.optim.masters)

    def _foresee(self, available: int) -> None:
        reference, critic = "ref" in self.algorithm.needs, "value" in self.algorithm.needs
        foreseen = memory.plan(self.model.config, self.config, available, reference=reference, critic=critic)
        if foreseen.advice:
            log.warning("this may run out of memory: %s", foreseen.advice)

    # -- masks ---------------------------------------------------------------------------------------------------

    def find_masks(self, batch: Batch) -> list[int]:
        """What grammars allowed, for `score` and `update`. Returns the turns of which it cannot be said: they must
        carry no loss."""
        self._masks = EntryMasks.of(batch, self.folder, find_head(self.model).out_features, self._masks)
        for t, turn in enumerate(batch.turns):
            if turn.sampling.grammar is not None and batch.skipped[t] is not None:
                batch.entries.exact[batch.rows(t)] = False  # they are read as if they had none
        return self._masks.lost if self._masks is not None else []

    def _require_masks(self, batch: Batch) -> None:
        lost = [t for t in self.find_masks(batch) if batch.skipped[t] is None]
        if lost:
            raise LearnerError(
                f"turn {batch.turns[lost[0]].id} is held to a grammar that cannot be followed to its end. Fix: leave "
                "it out, as find_masks says"
            )

    # -- score ---------------------------------------------------------------------------------------------------

    def score(self, batch: Batch) -> dict[str, float]:
        """Fill proximal, ref and value of every entry, as far as the algorithm asks for them; returns how long each
        took, as metrics."""
        if not self.algorithm.needs or not len(batch.turns):
            return {}
        self._require_masks(batch)
        return self._in_memory(batch, None, lambda: self._score(batch, self._pack(batch, None)))

    @torch.no_grad()
    def _score(self, batch: Batch, pieces: Sequence[MicroBatch]) -> dict[str, float]:
        needs, entries = self.algorithm.needs, batch.entries
        took: dict[str, float] = {}
        began = time.perf_counter()
        shared = self._share(pieces)
        if "proximal" in needs or isinstance(self.critic, ValueHead):
            found = [self._score_policy(piece, entries) for piece, _ in shared]
            if "proximal" in needs:
                self._fill(entries.proximal, shared, [logp for logp, _ in found])
            if isinstance(self.critic, ValueHead):
                self._fill(entries.value, shared, [value for _, value in found])
            began = _lap(took, "timing_s/old_log_prob", began)
        if "ref" in needs:
            with lora.without_adapter(self.model) if self.ref is None else nullcontext():
                logps = [self._ref_reader(piece, entries, self.way, self._masks)[1] for piece, _ in shared]
            self._fill(entries.ref, shared, logps)
            began = _lap(took, "timing_s/ref", began)
        if "value" in needs and self.critic is not None and not isinstance(self.critic, ValueHead):
            self._fill(entries.value, shared, [self.critic(piece) for piece, _ in shared])
            _lap(took, "timing_s/values", began)
        return took

    def _run(self, piece: MicroBatch, entries: Entries) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden states of a piece's entries, their logprobs and entropies."""
        hidden = self.graphs.run(piece, self.way) if self.graphs is not None else None
        if hidden is None:
            return self.reader(piece, entries, self.way, self._masks)
        states = hidden.index_select(0, send(piece.at, hidden.device))
        return states, *read(self.model, states, piece, entries, masks=self._masks, compile=self.way.compile)

    def _score_policy(self, piece: MicroBatch, entries: Entries) -> tuple[Tensor, Tensor]:
        """Proximal logprobs, and the values of a shared trunk or as many zeros."""
        states, logp, _ = self._run(piece, entries)
        return logp, self._read_values(piece, states) if isinstance(self.critic, ValueHead) else torch.zeros_like(logp)

    def _read_values(self, piece: MicroBatch, states: Tensor) -> Tensor:
        """A value for every entry, of the critic's own pass or of the policy's `states`."""
        assert self.critic is not None
        if isinstance(self.critic, ValueHead):
            return gather_entries(self.critic(states), piece, self.way)
        return self.critic(piece)

    def _fill(self, column: Floats, shared: Sequence[tuple[MicroBatch, bool]], found: Sequence[Tensor]) -> None:
        """Put what all ranks found for the entries of their pieces into a column; read last, so that a GPU never waits
        for it."""
        pairs = zip(shared, found, strict=True)
        merged = self._merge(len(column), [(piece, values) for (piece, own), values in pairs if own])
        column[:] = np.where(np.isnan(merged), column, merged)

    def _merge(self, count: int, found: Sequence[tuple[MicroBatch, Tensor]]) -> Floats:
        """What all ranks found for entries, each for those of its own pieces; NaN of the others."""
        column = np.full(count, np.nan)
        for piece, values in found:
            column[piece.entry] = _array(values)
        return self.ranks.merge(column)

    def read_entries(self, piece: MicroBatch, entries: Entries) -> Tensor:
        """Logprobs of a piece's entries under the present weights. All ranks run it together."""
        found = self.reader(piece, entries, self.way)[1]
        self._reshard()
        return found

    # -- update --------------------------------------------------------------------------------------------------

    def update(self, batch: Batch) -> dict[str, float]:
        """Train on the batch and return metrics. With no weight anywhere nothing is done, and `actor/skipped` is 1."""
        began = time.perf_counter()
        self.reserve_snapshot()
        self._require_masks(batch)
        shares = _shares(batch, self.config.minibatches)
        meter = UpdateMeter()
        # The learner's logprobs under the weights that sampled. If score did not bring them, the first optimizer step's
        # forward pass does for its own turns; the others are read before any weight changes.
        now = batch.entries.proximal.copy()
        unread: list[list[tuple[MicroBatch, Tensor]]] = []  # logprobs on the device: reading them would wait for it
        if np.isnan(now).any():
            first = shares[0] if shares else np.empty(0, np.int64)
            rest = np.setdiff1d(np.arange(len(batch.turns)), first)
            if len(rest):
                unread.append(self._in_memory(batch, rest, lambda: self._read(batch, rest, meter)))
        try:
            for turns in shares:
                passed = self._optimizer_step(batch, turns, len(shares), meter)
                unread.append([(each.piece, each.logp) for each in passed])
        finally:
            self._clear()  # whatever went wrong on the way leaves no gradient behind
        for found in unread:  # the first of a token is the one under the weights that sampled
            now = np.where(np.isnan(now), self._merge(len(now), found), now)
        if self.whole is not None:
            self.whole.stale = True
        metrics = meter.metrics(self.ranks) | measure_mismatch(batch, now, self._logprob_limit())
        metrics["actor/skipped"] = float(not shares)
        metrics["timing_s/update_actor"] = time.perf_counter() - began
        metrics["perf/token_budget"] = float(self.budget)
        return metrics

    def _logprob_limit(self) -> float:
        given = self.config.logprob_limit
        return given if given is not None else 1e-4 if torch.finfo(self.dtype).bits >= 32 else 0.3

    @torch.no_grad()
    def _read(self, batch: Batch, turns: Ints, meter: UpdateMeter) -> list[tuple[MicroBatch, Tensor]]:
        pieces = self._pack(batch, turns)
        found = [(piece, self._run(piece, batch.entries)[1], own) for piece, own in self._share(pieces)]
        meter.laid_out(batch, turns, pieces)
        return [(piece, logp) for piece, logp, own in found if own]

    def _optimizer_step(self, batch: Batch, turns: Ints, shares: int, meter: UpdateMeter) -> list[_Passed]:
        pieces, passed = self._in_memory(batch, turns, lambda: self._gradients(batch, turns, shares))
        optims = {"actor": self.optim} | ({"critic": self.critic_optim} if self.critic_optim is not None else {})
        norms = {whose: optim.clip() for whose, optim in optims.items()}
        loss = float(sum(piece.loss for piece in passed))  # the one time that a GPU is waited for
        total = self.ranks.sum_dicts({"loss": loss})["loss"]
        if not math.isfinite(total):
            raise LearnerError(
                f"the loss is {total}: the run can be resumed from its last checkpoint; if it happens again, begin one "
                "with a lower learner.optim.lr"
            )
        for whose, optim in optims.items():
            norm = float(norms[whose])
            if not math.isfinite(norm):
                setting = "learner.optim.lr" if whose == "actor" else "learner.critic.lr"
                raise LearnerError(
                    f"the norm of the {whose}'s gradient is {norm}: it was not applied. Fix: lower {setting}"
                )
            meter.last(f"{whose}/lr", optim.lr)
            meter.most(f"{whose}/grad_norm", norm)
        for optim in optims.values():
            optim.step()
        meter.laid_out(batch, turns, pieces)
        for each in passed:
            meter.add(each.measured, each.weight)
        return passed

    def _gradients(self, batch: Batch, turns: Ints, shares: int) -> tuple[list[MicroBatch], list[_Passed]]:
        """Add up the gradients of some turns, which are laid out in the pieces returned. The weights of a share sum to
        about 1 / shares: scaling them back keeps the gradient's norm, and so its clipping, the same whatever the number
        of shares."""
        passed: list[_Passed] = []
        pieces = self._pack(batch, turns)
        for piece, own in self._share(pieces):
            states, logp, entropy = self._run(piece, batch.entries)
            value = self._read_values(piece, states) if self.critic is not None else None
            view = _view(batch, piece, logp)
            per_entry, measured = self.algorithm.compute_loss(logp, entropy, value, view)
            if per_entry.shape != logp.shape:
                raise LearnerError(
                    f"{type(self.algorithm).__name__}.compute_loss gave a loss of shape {tuple(per_entry.shape)} for "
                    f"{len(logp)} entries. Fix: return one loss for each of them"
                )
            loss = (view.weight * per_entry).sum()
            ((shares if own else 0) * loss).backward()
            measured = {"actor/entropy": entropy.detach(), **measured}
            if own:
                passed.append(_Passed(piece, loss.detach(), logp.detach(), view.weight, measured))
        return pieces, passed

    def _in_memory(self, batch: Batch, turns: Ints | None, passes: Callable[[], T]) -> T:
        """What `passes` gives. Where a GPU's memory does not hold them they are begun again in smaller pieces, and so
        is whatever follows: `budget` stays lower."""
        while True:
            with suppress(torch.OutOfMemoryError):
                done = passes()
                self._reshard()
                return done
            self._clear()
            if not self.ranks.alone:  # the others are in the middle of a pass that needs this rank
                longest = _longest(batch, turns)
                less = f"learner.start_budget={max(self.budget // 2, longest)}, "
                raise RankOutOfMemory(
                    f"rank {self.ranks.index} of {self.ranks.count} ran out of memory with micro-batches of "
                    f"{self.budget} tokens. Fix: resume with {less if self.budget > longest else ''}"
                    "learner.gradient_checkpointing=true, or more learner.ranks"
                )
            recorded, self.graphs = self.graphs, None
            if recorded is not None:
                recorded.refuse()
            gc.collect()
            torch.cuda.empty_cache()
            if recorded is not None:
                log.warning("out of memory: going on without CUDA graphs, which keep some")
                continue
            longest = _longest(batch, turns)
            if self.budget <= longest:
                raise LearnerError(
                    f"the GPU's memory does not hold an update of {longest} tokens, the longest turn with all before "
                    "it. Fix: resume on a larger GPU, or begin a run with learner.gradient_checkpointing, "
                    "learner.offload or learner.lora.rank set"
                )
            self.budget = max(self.budget // 2, longest)
            log.warning("out of memory: going on with micro-batches of %d tokens", self.budget)

    def release_memory(self) -> None:
        """Let other processes have the GPU's memory that nothing is in: it is kept for the next pass otherwise."""
        torch.cuda.empty_cache()

    def _reshard(self) -> None:
        """Have no more than this rank's part of what is sharded: a pass without gradients leaves some put together."""
        if self.sharded:
            for each in (self.reader, self._ref_reader, self.critic):
                if each is not None:
                    reshard(each)

    def _pack(self, batch: Batch, turns: Ints | None) -> list[MicroBatch]:
        longest = _longest(batch, turns)  # one longer than what was once too much is tried all the same
        pieces = pack_evenly(batch, max(self.budget, longest), turns, self.ranks.num_groups)
        check(pieces, batch, turns)
        return pieces

    def _share(self, pieces: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        return self.ranks.share(pieces, int(self.model.config.hidden_size))

    def _clear(self) -> None:
        self.optim.clear()
        if self.critic_optim is not None:
            self.critic_optim.clear()

    # -- state ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, meta: dict[str, Any] | None = None) -> None:
        """Write a checkpoint folder, whole or not at all; it is also a plain Hugging Face folder, or a PEFT one."""
        self.begin_save(folder, meta)
        self.finish_save()

    def begin_save(self, folder: str | Path, meta: dict[str, Any] | None = None) -> None:
        """The same beside what follows: returns once there is a copy of all that is written. `finish_save` comes before
        the next one."""
        assert self._saving is None, "one checkpoint is written at a time"
        state: dict[str, Any] = {"optim": self.optim.state(), "random": rng.state()}
        if self.critic_optim is not None:
            state |= {"critic": self.critic_optim.weights(), "critic_optim": self.critic_optim.state()}
        weights: dict[str, Tensor] = self.optim.weights()
        if self.sharded:
            copies = sharded_checkpoint.copy_parts(weights, self.ranks)
            rest, shards = take_shards(state, self.ranks)
            how: dict[str, Any] = {"adapter": None, "meta": meta or {}, "source": self.folder}
            save_shards = partial(sharded_checkpoint.save, Path(folder), copies, shards, self.ranks)
            self._saving = self._writer.submit(save_shards, state=rest, **how)
            return
        if not self.ranks.leads:
            return
        copied = self._snapshots.copy((weights, state))
        weights, state = copied or (weights, state)
        adapter = lora.describe(self.model, self.folder) if self.config.lora.rank else None
        how = {"adapter": adapter, "meta": meta or {}, "source": self.folder}
        self._saving = self._writer.submit(checkpoint.save, folder, weights=weights, state=state, **how)
        if copied is None:
            wait([self._saving])  # the next update would change what is written

    def finish_save(self) -> None:
        """Returns once what was begun is there, whole. Raises what kept it from being."""
        if not (self.ranks.leads or self.sharded):
            return
        assert self._saving is not None, "nothing was begun"
        try:
            self._saving.result()
        finally:
            self._saving = None

    def reserve_snapshot(self) -> None:
        """Have memory for the copy of the first checkpoint, before there is one: weights, two moments of each, and
        what else there is, which is little."""
        if not self.ranks.alone:
            return
        optims = [self.optim] + ([self.critic_optim] if self.critic_optim is not None else [])
        trained = [tensor for optim in optims for tensor in optim.trained]
        self._snapshots.reserve(sum(3 * tensor.nbytes + 4 * ALIGN for tensor in trained) + 2**20)

    def restore(self, folder: str | Path) -> dict[str, Any]:
        """Take weights and optimizer state from a checkpoint, in place, and return the meta it was saved with."""
        state, meta = checkpoint.restore(folder, weights=self.optim.weights(), adapter=bool(self.config.lora.rank))
        if has_shards(Path(folder)):
            state = fill_shards(state, Path(folder), self._find_shards())
        self.optim.load(state["optim"])
        if self.critic_optim is not None:
            for name, tensor in self.critic_optim.weights().items():
                fill(tensor, state["critic"][name])
            self.critic_optim.load(state["critic_optim"])
        rng.restore(state["random"])
        if self.whole is not None:
            self.whole.stale = True
            self._reshard()
        return meta

    def _find_shards(self) -> dict[str, Tensor]:
        """What ranks write parts of, by the names that it has in a checkpoint; each as what it is of."""
        found = {f"optim/adam/state/{key}": tensor for key, tensor in self.optim.moments().items()}
        if self.critic_optim is not None:
            found |= {f"critic/{name}": tensor for name, tensor in self.critic_optim.weights().items()}
            found |= {f"critic_optim/adam/state/{key}": tensor for key, tensor in self.critic_optim.moments().items()}
        return found

    @property
    def plain(self) -> Any:
        """The model as others know it: without an adapter in it, what the adapter does being part of the weights."""
        return lora.Merged(self.model) if self.config.lora.rank else self.model

    def digest(self) -> str:
        """A fingerprint of every parameter of the policy, bit for bit."""
        digest = hashlib.blake2b(digest_size=16)
        for name, parameter in self.model.named_parameters():
            digest.update(name.encode())
            digest.update(gather(parameter.detach()).cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class _Passed:
    """What a piece's pass left, all of it where it was computed."""

    piece: MicroBatch
    loss: Tensor
    logp: Tensor
    weight: Tensor
    measured: dict[str, Tensor]


def _lap(took: dict[str, float], name: str, began: float) -> float:
    """Count what passed since `began`; what was computed has been read, so the GPU is done with it."""
    now = time.perf_counter()
    took[name] = now - began
    return now


def _longest(batch: Batch, turns: Ints | None) -> int:
    return max((len(batch.paths[t]) for t in (range(len(batch.turns)) if turns is None else turns)), default=0)


def _shares(batch: Batch, updates: int) -> list[Ints]:
    """The turns of each optimizer step: equal shares of the groups that carry weight, in order."""
    entries = batch.entries
    weighted = entries.weight > 0
    groups = np.unique(entries.group[weighted])
    if not len(groups):
        return []
    parts = np.array_split(groups, min(updates, len(groups)))
    return [np.unique(entries.turn[weighted & np.isin(entries.group, part)]) for part in parts]


def _view(batch: Batch, piece: MicroBatch, like: Tensor) -> EntryTensors:
    rows = batch.entries.take(piece.entry)
    columns: dict[str, Tensor] = {}
    for field in fields(EntryTensors):
        column = getattr(rows, field.name)
        columns[field.name] = send(column, like.device, like.dtype if column.dtype.kind == "f" else None)
    return EntryTensors(**columns)


def _array(column: Tensor) -> Floats:
    return column.detach().cpu().double().numpy()
