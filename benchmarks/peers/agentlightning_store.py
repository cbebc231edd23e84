"""Agent Lightning 0.3.0's store, as the lap of `lap.py` asks it. Runs inside its own virtualenv (`store.py --setup`).

    agentlightning_store.py serve PORT   its server, in a process of its own, until it is ended
    agentlightning_store.py laps         laps in process, or through its client where the order names a URL

What was chosen for it, from its source; variants of the server were within the noise of each other:
- its in-memory store. The only durable one needs a MongoDB, and so do several server workers (`mp` mode wants a store
  that processes can share);
- launch mode `asyncio`, as its own `agl store` command does, but on uvloop (its launcher asks for plain asyncio) and
  with httptools for parsing, which it does not install;
- `thread_safe=False`: asyncio's locks, enough for a server with one loop, instead of its slower thread-safe ones;
- a span's size is a constant, where it would walk through every span it stores to guess its bytes;
- token ids are text in a span's attributes, as its model proxy writes them: lists of numbers are validated one by one;
- spans carry their sequence number, which saves a request per span;
- no metrics, no access log, its log at warnings only, and its many imports are kept from the garbage collector.

A turn and an event are both spans to it; a reward is a span as well. Its `add_many_spans` over HTTP is one request per
span, so batches of spans go the way it recommends for them: OTLP. For a single span both ways cost about the same.
"""

# pyright: reportMissingImports=false
# Its imports are those of its own virtualenv.
from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its imports would ask the Internet for prices

import aiohttp
import uvloop
from agentlightning import setup_logging
from agentlightning.semconv import LightningResourceAttributes
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Span
from agentlightning.utils.otlp import PROTOBUF_CT
from lap import LOGPROBS, PROMPT_IDS, REPORT, RESPONSE_IDS, TASK, Side, answer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TOKENS = {
    "llm.hosted_vllm.prompt_token_ids": json.dumps(PROMPT_IDS),
    "llm.hosted_vllm.response_token_ids": json.dumps([RESPONSE_IDS]),
    "logprobs.content": json.dumps(LOGPROBS),
}


class AgentLightning(Side):
    """Its store in this process, or its client of a server."""

    def __init__(self, store: LightningStore) -> None:
        self.store = store

    def made_rollout(self, number: int) -> Any:
        return EnqueueRolloutRequest(input=TASK | {"number": number}, mode="train")

    def made_event(self, leased: AttemptedRollout) -> Span:
        return _span(leased, 1, "agentlightning.annotation", REPORT)

    def made_turn(self, leased: AttemptedRollout) -> Span:
        return _span(leased, 2, "openai.chat.completion", TOKENS)

    async def enqueue(self, rollout: Any) -> None:
        await self.store.enqueue_rollout(rollout.input, mode=rollout.mode)

    async def lease(self, runner: str) -> Any:
        return await self.store.dequeue_rollout(worker_id=runner)

    async def add_event(self, span: Span, /) -> None:
        assert await self.store.add_span(span) is not None

    add_turn = add_event

    async def finish(self, leased: AttemptedRollout) -> None:
        await self.store.update_attempt(leased.rollout_id, leased.attempt.attempt_id, status="succeeded")

    async def list(self, limit: int) -> int:
        return len((await self.store.query_rollouts(limit=limit)).items)

    async def enqueue_many(self, rollouts: Sequence[Any]) -> None:
        await self.store.enqueue_many_rollouts(rollouts)

    async def lease_many(self, count: int) -> Sequence[Any]:
        return await self.store.dequeue_many_rollouts(limit=count, worker_id="runner-0")

    async def add_events(self, spans: Sequence[Span], /) -> None:
        assert len(await self.store.add_many_spans(spans)) == len(spans)

    add_turns = add_events

    async def close(self) -> None:
        if isinstance(self.store, LightningStoreClient):
            await self.store.close()


class OverHttp(AgentLightning):
    """Its client; batches of spans as OTLP, on a session of the same kind as its client's."""

    def __init__(self, url: str) -> None:
        self.client = LightningStoreClient(url)
        self.session = aiohttp.ClientSession(headers={"Content-Type": PROTOBUF_CT})
        super().__init__(self.client)

    async def add_events(self, spans: Sequence[Span], /) -> None:
        async with self.session.post(self.client.otlp_traces_endpoint(), data=_otlp(spans)) as answered:
            answered.raise_for_status()
            await answered.read()

    add_turns = add_events

    async def close(self) -> None:
        await self.session.close()
        await super().close()


def _span(leased: AttemptedRollout, number: int, name: str, attributes: dict[str, Any]) -> Span:
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=leased.rollout_id,
        attempt_id=leased.attempt.attempt_id,
        sequence_id=number,
        name=name,
        start_time=1.0,
        end_time=2.0,
    )


def _otlp(spans: Sequence[Span]) -> bytes:
    """What an OTLP exporter sends. Its encoding is part of the call, as JSON is part of the single ones."""
    request = ExportTraceServiceRequest()
    for span in spans:
        of_rollout = request.resource_spans.add()
        for key, value in (
            (LightningResourceAttributes.ROLLOUT_ID.value, span.rollout_id),
            (LightningResourceAttributes.ATTEMPT_ID.value, span.attempt_id),
            (LightningResourceAttributes.SPAN_SEQUENCE_ID.value, str(span.sequence_id)),
        ):
            of_rollout.resource.attributes.add(key=key).value.string_value = value
        sent = of_rollout.scope_spans.add().spans.add(
            trace_id=bytes.fromhex(span.trace_id), span_id=bytes.fromhex(span.span_id), name=span.name
        )
        for key, value in span.attributes.items():
            into = sent.attributes.add(key=key).value
            if isinstance(value, str):
                into.string_value = value
            else:
                into.double_value = float(value)
    return request.SerializeToString()


def _store() -> InMemoryLightningStore:
    return InMemoryLightningStore(thread_safe=False, span_size_estimator=lambda span: 4096)


async def _serve(port: int) -> None:
    gc.freeze()
    server = LightningStoreServer(_store(), host="127.0.0.1", port=port, launch_mode="asyncio")
    await server.run_forever()


async def _open(order: dict[str, Any]) -> Side:
    return OverHttp(order["url"]) if "url" in order else AgentLightning(_store())


if __name__ == "__main__":
    setup_logging("WARNING")
    if sys.argv[1] == "serve":
        uvloop.run(_serve(int(sys.argv[2])))
    else:
        answer(_open)
