"""How a batch becomes an update."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from strop.config.describe import doc

Rate = Annotated[float, Meta(ge=0, lt=1)]


class OptimConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW."""

    lr: Annotated[float, doc("learning rate after warm-up"), Meta(gt=0)] = 1e-6
    warmup: Annotated[int, doc("optimizer steps over which the rate rises from 0"), Meta(ge=0)] = 0
    schedule: Annotated[
        Literal["constant", "linear", "cosine"] | None,
        doc("how the rate falls to 0: constant (not at all), linear, cosine; default: linear if `decay` is set"),
    ] = None
    decay: Annotated[
        Annotated[int, Meta(ge=1)] | None, doc("optimizer steps over which it falls; default: the whole run")
    ] = None
    betas: Annotated[tuple[Rate, Rate], doc("AdamW's decay rates")] = (0.9, 0.999)
    weight_decay: Annotated[float, doc("AdamW's decoupled weight decay"), Meta(ge=0)] = 0.0
    grad_clip: Annotated[float, doc("gradients are scaled to at most this norm"), Meta(gt=0)] = 1.0


class LoraConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Train small matrices beside the model's, which stay as they are."""

    rank: Annotated[int, doc("width of the matrices: 8, 16, 32, ...; 0: the whole model is trained"), Meta(ge=0)] = 0
    alpha: Annotated[int, doc("what they add is scaled by alpha / rank"), Meta(ge=1)] = 32
    targets: Annotated[
        tuple[str, ...], doc("the linear layers that get one, such as q_proj; default: all of the model's blocks")
    ] = ()


class LearnerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a batch becomes an update."""

    device: Annotated[Literal["auto", "cpu", "cuda"], doc("where it computes; auto: a GPU if there is one")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        doc("what it computes in; the trained weights are kept in float32; auto: bfloat16 on a GPU"),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "blocks", "flex"],
        doc("how a token tree is attended to: by plain operations or FlexAttention; auto: flex on a GPU"),
    ] = "auto"
    compile: Annotated[
        bool, doc("with flex, also compile what lies between two products of matrices: half a minute at the start")
    ] = True
    gradient_checkpointing: Annotated[
        bool, doc("keep only what enters each block and compute the rest again: less memory, a third more time")
    ] = False
    offload: Annotated[bool, doc("keep the optimizer's state in the CPU's memory while a GPU computes")] = False
    lora: Annotated[LoraConfig, doc("train an adapter instead of the whole model")] = LoraConfig()
    optim: Annotated[OptimConfig, doc("the optimizer")] = OptimConfig()
    critic: Annotated[OptimConfig, doc("the critic's optimizer, for algorithms that have one")] = OptimConfig(lr=1e-5)
    critic_kind: Annotated[
        Literal["own", "shared"], doc("a model of its own, or only a head on what the policy computes anyway")
    ] = "own"
    updates: Annotated[int, doc("optimizer steps per step, each over an equal share of the groups"), Meta(ge=1)] = 1
    token_budget: Annotated[int, doc("most tree tokens in one micro-batch"), Meta(ge=1)] = 4096
    logprob_limit: Annotated[
        float | None,
        doc("engine and learner logprobs may differ by this before the run warns; default: 1e-4, in bfloat16 0.3"),
    ] = None
