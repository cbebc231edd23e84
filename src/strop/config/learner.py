"""How a batch becomes an update."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from strop.config.describe import doc

Rate = Annotated[float, Meta(ge=0, lt=1)]


class OptimConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW."""

    lr: Annotated[float, doc("learning rate after warmup"), Meta(gt=0)] = 1e-6
    warmup: Annotated[int, doc("warmup: optimizer steps over which the rate rises from 0"), Meta(ge=0)] = 0
    schedule: Annotated[
        Literal["constant", "linear", "cosine"] | None,
        doc("learning rate schedule: constant, or linear or cosine decay to 0; default: linear if `decay` is set"),
    ] = None
    decay: Annotated[
        Annotated[int, Meta(ge=1)] | None, doc("optimizer steps over which the rate decays; default: the whole run")
    ] = None
    betas: Annotated[tuple[Rate, Rate], doc("AdamW's decay rates")] = (0.9, 0.999)
    weight_decay: Annotated[float, doc("AdamW's decoupled weight decay"), Meta(ge=0)] = 0.0
    grad_clip: Annotated[float, doc("gradient clipping: largest norm"), Meta(gt=0)] = 1.0


class LoraConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA: low-rank matrices are trained beside the model's weights, which stay as they are."""

    rank: Annotated[int, doc("rank of the matrices: 8, 16, 32, ...; 0: full fine-tuning"), Meta(ge=0)] = 0
    alpha: Annotated[int, doc("scaling: what they add is multiplied by alpha / rank"), Meta(ge=1)] = 32
    targets: Annotated[
        tuple[str, ...],
        doc("target modules: linear layers that get one, such as q_proj; default: all of the model's blocks"),
    ] = ()


class LearnerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a batch becomes an update."""

    device: Annotated[Literal["auto", "cpu", "cuda"], doc("where it computes; auto: a GPU if there is one")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        doc("mixed precision: what it computes in, with float32 master weights; auto: bfloat16 on a GPU"),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "blocks", "flex"],
        doc("attention over token trees: plain operations (blocks) or FlexAttention; auto: flex on a GPU"),
    ] = "auto"
    compile: Annotated[
        bool, doc("torch.compile, with flex: faster elementwise operations for half a minute at the start")
    ] = True
    gradient_checkpointing: Annotated[
        bool, doc("recompute activations of each block in the backward pass: less memory, a third more time")
    ] = False
    offload: Annotated[bool, doc("optimizer offload: keep its state in the CPU's memory while a GPU computes")] = False
    ranks: Annotated[
        int,
        doc("processes that train one model together, on a GPU each: sharded (FSDP2); data parallelism for LoRA"),
        Meta(ge=1, le=64),
    ] = 1
    sequence_parallel: Annotated[
        int,
        doc(
            "ranks that run one micro-batch together, each some tokens and some heads (Ulysses): for very long rollouts"
        ),
        Meta(ge=1, le=64),
    ] = 1
    hang_timeout: Annotated[
        float,
        doc("heartbeat: seconds of silence after which a process that holds weights counts as hung, and is killed"),
        Meta(ge=5),
    ] = 120.0
    collective_timeout: Annotated[
        float,
        doc("seconds that a collective of the ranks, or any other one operation, may take; then its process is killed"),
        Meta(ge=5),
    ] = 1800.0
    lora: Annotated[LoraConfig, doc("train a LoRA adapter instead of the whole model")] = LoraConfig()
    optim: Annotated[OptimConfig, doc("the optimizer")] = OptimConfig()
    critic: Annotated[OptimConfig, doc("the critic's optimizer, for algorithms that have one")] = OptimConfig(lr=1e-5)
    critic_kind: Annotated[
        Literal["own", "shared"], doc("a model of its own, or a value head on the policy's hidden states")
    ] = "own"
    minibatches: Annotated[int, doc("optimizer steps per step, each over an equal share of the groups"), Meta(ge=1)] = 1
    token_budget: Annotated[int, doc("micro-batch size: tokens of token trees at most"), Meta(ge=1)] = 4096
    start_budget: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        doc("size that micro-batches begin with, where memory was found to hold less than token_budget"),
    ] = None
    logprob_limit: Annotated[
        float | None,
        doc("logprob mismatch of engine and learner above which the run warns; default: 1e-4, in bfloat16 0.3"),
    ] = None
