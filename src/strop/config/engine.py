"""What makes tokens: the embedded engine, vLLM, sglang."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from strop.config.describe import doc


class VllmConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vLLM server: one that is started for the run, or somebody else's."""

    url: Annotated[str, doc("a server that somebody else started; default: one is started and watched")] = ""
    python: Annotated[str, doc("the Python that has vLLM installed; default: the one that runs strop")] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], doc("what it computes in; auto: as the model's folder says")
    ] = "auto"
    tensor_parallel: Annotated[int, doc("tensor parallelism: GPUs that share each layer"), Meta(ge=1)] = 1
    gpu_memory: Annotated[
        float, doc("GPU memory utilization: share of a GPU's memory that it takes"), Meta(gt=0, le=1)
    ] = 0.9
    max_sequences: Annotated[int, doc("batch size of decoding: sequences at once at most"), Meta(ge=1)] = 256
    stream_interval: Annotated[int, doc("tokens per streamed message; more cost less and come later"), Meta(ge=1)] = 8
    servers: Annotated[int, doc("API server processes: with hundreds of agents one is the bottleneck"), Meta(ge=1)] = 1
    seeds: Annotated[
        bool,
        doc(
            "seeds per request: it then draws for each sequence apart, with a kernel each in every decoding step; "
            "without them seeds do nothing"
        ),
    ] = False
    weights: Annotated[
        Literal["files", "ipc", "nccl"],
        doc("weight transfer: files anywhere, ipc on the learner's GPU, nccl on GPUs of its own"),
    ] = "files"
    sleep: Annotated[bool, doc("sleep mode: give its GPU memory to the learner while it is paused")] = False
    lora_rank: Annotated[int, doc("largest rank of LoRA adapters: 8, 16, 32, ...; 0: none are loaded"), Meta(ge=0)] = 0
    args: Annotated[tuple[str, ...], doc("more arguments of `vllm serve`")] = ()
    env: Annotated[dict[str, str], doc("more variables for its environment")] = {}
    start_timeout: Annotated[float, doc("seconds it may take to answer once it is started"), Meta(gt=0)] = 900.0
    restarts: Annotated[int, doc("times in a row that it is started again when it dies"), Meta(ge=0)] = 5
    restart_timeout: Annotated[float, doc("seconds a request waits while it is started again"), Meta(ge=0)] = 300.0


class SglangConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An sglang server: one that is started for the run, or somebody else's."""

    url: Annotated[str, doc("a server that somebody else started; default: one is started and watched")] = ""
    python: Annotated[str, doc("the Python that has sglang installed; default: the one that runs strop")] = ""
    tensor_parallel: Annotated[int, doc("tensor parallelism: GPUs that share each layer"), Meta(ge=1)] = 1
    gpu_memory: Annotated[float, doc("share of a GPU's memory for weights and KV cache"), Meta(gt=0, le=1)] = 0.8
    max_sequences: Annotated[int, doc("batch size of decoding: sequences at once at most"), Meta(ge=1)] = 256
    deterministic: Annotated[
        bool, doc("batch-invariant sampling: same tokens whatever shares the batch; without it seeds do nothing")
    ] = False
    args: Annotated[tuple[str, ...], doc("more arguments of sglang.launch_server")] = ()
    env: Annotated[dict[str, str], doc("more variables for its environment")] = {}
    start_timeout: Annotated[float, doc("seconds it may take to answer once it is started"), Meta(gt=0)] = 900.0
    restarts: Annotated[int, doc("times in a row that it is started again when it dies"), Meta(ge=0)] = 5
    restart_timeout: Annotated[float, doc("seconds a request waits while it is started again"), Meta(ge=0)] = 300.0


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes tokens."""

    name: Annotated[
        str, doc("auto (vllm where it is installed and there is a GPU, otherwise embedded), embedded, vllm or sglang")
    ] = "auto"
    replicas: Annotated[
        int,
        doc(
            "data parallelism: vLLM or sglang servers of one model, on GPUs of their own, or with weights=ipc on the "
            "learner's; a rollout stays with one"
        ),
        Meta(ge=1),
    ] = 1
    max_sequences: Annotated[int, doc("batch size of decoding: sequences at once at most"), Meta(ge=1)] = 32
    kv_cache_gib: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        doc("KV cache size in GiB, which bounds sequences and context; default: max_sequences times the context"),
    ] = None
    prefill_chunk: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        doc("chunked prefill: prompt tokens run per decoding step; default: 512, on a GPU 8192, deterministic 128"),
    ] = None
    deterministic: Annotated[
        bool, doc("batch-invariant sampling: same tokens whatever shares the batch; fixed shapes, seeds per request")
    ] = False
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None, doc("CPU threads of the process that holds the weights; default: all cores")
    ] = None
    settings: Annotated[dict[str, Any], doc("settings of an engine that has no section of its own here")] = {}
    vllm: Annotated[VllmConfig, doc("where vLLM makes them")] = VllmConfig()
    sglang: Annotated[SglangConfig, doc("where sglang makes them")] = SglangConfig()
