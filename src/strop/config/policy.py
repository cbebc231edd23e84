"""The policy being trained, and how it samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from strop.config.describe import doc
from strop.types import Sampling


class SamplingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a trained policy samples; these win over what the agent asks for."""

    temperature: Annotated[float, doc("softmax temperature; 0 is greedy"), Meta(ge=0)] = 1.0
    max_tokens: Annotated[int, doc("sampled tokens per turn at most; a request may ask for fewer"), Meta(ge=1)] = 256
    top_p: Annotated[
        float, doc("nucleus sampling: only the likeliest tokens that together have this probability"), Meta(gt=0, le=1)
    ] = 1.0
    top_k: Annotated[int, doc("top-k sampling: only so many of the likeliest tokens; 0: all"), Meta(ge=0)] = 0
    min_p: Annotated[
        float, doc("min-p sampling: only tokens at least this likely relative to the likeliest"), Meta(ge=0, le=1)
    ] = 0.0
    presence_penalty: Annotated[
        float, doc("subtracted from the logits of tokens sampled before"), Meta(ge=-2, le=2)
    ] = 0.0
    frequency_penalty: Annotated[float, doc("the same, for each time they were sampled"), Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, doc("divides the logits of tokens seen before; 1: none"), Meta(gt=0)] = 1.0

    def sampling(self) -> Sampling:
        return Sampling(**msgspec.structs.asdict(self))


class PastConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Opponents from the past: earlier versions of a policy answer, one of them in each group of rollouts."""

    of: Annotated[
        str,
        doc(
            "self-play: answer with checkpoints of this policy, as they come, or of this run's folder; never trained; "
            "in evaluations the policy's own model answers"
        ),
    ] = ""
    size: Annotated[int, doc("checkpoints in the pool: the newest so many, all in memory"), Meta(ge=1, le=64)] = 4
    sample: Annotated[
        Literal["recency", "score", "uniform"],
        doc(
            "which of them answers: newer ones more often (recency), those against whom less was won (score), or all "
            "alike (uniform)"
        ),
    ] = "recency"


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy being trained."""

    model: Annotated[
        str, doc("strop/nano, smollm2-135m, a folder, a .gguf file, or ORG/MODEL on the Hugging Face hub")
    ] = "strop/nano"
    template: Annotated[str, doc("a file with a Jinja chat template instead of the model's own")] = ""
    chat_template_kwargs: Annotated[
        dict[str, Any],
        doc("variables of the chat template, such as enable_thinking = false; those of a request take precedence"),
    ] = {}
    tools: Annotated[
        Literal["auto", "template", "system"],
        doc(
            "who writes tools into prompts: the chat template, with a built-in way for what it leaves out (auto); the "
            "template alone, and what it leaves out is refused (template); the built-in way, in the system prompt "
            "(system)"
        ),
    ] = "auto"
    agents: Annotated[tuple[str, ...], doc("names or patterns (tool-*) of the agents whose turns are trained")] = (
        "main",
    )
    frozen: Annotated[bool, doc("it answers its agents and is never trained: an opponent, a partner, a teacher")] = (
        False
    )
    past: Annotated[PastConfig, doc("opponents from the past")] = PastConfig()
    context: Annotated[
        Annotated[int, Meta(ge=2)] | None, doc("context length: prompt and answer in tokens; default: the model's")
    ] = None
    history: Annotated[
        Literal["sampled", "template"],
        doc("earlier answers in a prompt: the sampled tokens, or as the chat template renders them now"),
    ] = "sampled"
    train: Annotated[SamplingConfig, doc("sampling while training")] = SamplingConfig()
    eval: Annotated[SamplingConfig, doc("sampling while evaluating; greedy evaluation sets temperature 0")] = (
        SamplingConfig()
    )
