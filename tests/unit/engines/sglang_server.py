"""A server that speaks sglang's protocol as the source of sglang 0.5.23 defines it (sglang itself needs a GPU):

    srt/entrypoints/http_server.py      the addresses, and `data: {...}` messages that end with `data: [DONE]`
    srt/managers/io_struct.py           what requests hold
    srt/managers/tokenizer_manager.py   what messages hold: `output_ids` with all tokens so far, or with the new ones
                                        under --incremental-streaming-output; `meta_info` with [logprob, id, text] per
                                        token, cut the same way; what an abort looks like
    srt/managers/schedule_batch.py      finish reasons

Its tokens are made up: after a prompt that ends with n come n + 1, n + 2 and so on, and the logprob of token t is
-(t / 100) times the first number of the weights' final norm. The first token of a prompt has it misbehave.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from safetensors.numpy import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

HANGS, BREAKS, NAN, REFUSED, DIES, BUSY, MIXED_UP, NO_LOGPROB, CUT = 101, 102, 103, 104, 105, 106, 107, 108, 109


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "port", "context-length", "weight-version", "tensor-parallel-size"):
        parser.add_argument(f"--{name}")
    for name in ("max-running-requests", "mem-fraction-static", "sampling-defaults", "version"):
        parser.add_argument(f"--{name}")
    for name in ("incremental-streaming-output", "skip-tokenizer-init", "enable-deterministic-inference", "old-names"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(arguments)


class Sglang:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.weights = given.weight_version or "default"
        self.scale = 1.0 if given.model_path is None else scale_of(Path(given.model_path))
        self.drawing = asyncio.Event()  # cleared while paused
        self.drawing.set()
        self.aborted: dict[str, asyncio.Event] = {}
        self.seen: list[dict[str, Any]] = []  # bodies of requests
        self.calls: list[str] = []  # of control

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        ids, sampling = body["input_ids"], body["sampling_params"]
        if body.get("logprob_start_len") == 0:
            places = [[None if i == 0 else -(t / 100) * self.scale, t, None] for i, t in enumerate(ids)]
            return JSONResponse({"output_ids": [1], "meta_info": {"input_token_logprobs": places}})
        if ids[0] == BUSY:
            return JSONResponse({"error": {"message": "the queue is full"}}, 503)
        return StreamingResponse(self.messages(body["rid"], ids, sampling), media_type="text/event-stream")

    async def messages(self, rid: str, ids: list[int], sampling: dict[str, Any]) -> AsyncIterator[bytes]:
        kind, drawn, finish = ids[0], list[int](), None
        abort = self.aborted[rid] = asyncio.Event()
        if kind == REFUSED:
            yield data({"error": {"message": "bad request", "type": "invalid_request_error", "code": 400}})
            yield b"data: [DONE]\n\n"
            return
        while finish is None:
            await self.drawing.wait()
            drawn.append(ids[-1] + len(drawn) + 1)
            if kind in (HANGS, BREAKS, DIES, CUT) and len(drawn) == 3:
                if kind == DIES:
                    os._exit(9)
                if kind == CUT:
                    return
                if kind == HANGS:
                    await abort.wait()
                    finish = {"type": "abort", "message": "Abort in waiting queue"}
                else:
                    finish = {"type": "abort", "message": "out of memory", "status_code": 500, "err_type": "X"}
                yield self.message(rid, drawn[:2], drawn[1:2], finish)
                break
            if drawn[-1] in (sampling["stop_token_ids"] or []):
                finish = {"type": "stop", "matched": drawn[-1]}
            elif kind == NAN:
                finish = {"type": "stop", "matched": "NaN happened"}
            elif len(drawn) == sampling["max_new_tokens"]:
                finish = {"type": "length", "length": len(drawn)}
            yield self.message(rid, drawn, drawn[-1:], finish, kind)
            await asyncio.sleep(0.001)
        yield b"data: [DONE]\n\n"

    def message(self, rid: str, drawn: list[int], new: list[int], finish: Any, kind: int = 0) -> bytes:
        shown = new if self.given.incremental_streaming_output else drawn
        places: list[Any] = [[-(t / 100) * self.scale, t + (kind == MIXED_UP), None] for t in shown]
        if kind == NO_LOGPROB:
            places[-1][0] = None
        about = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": 1,
            "weight_version": self.weights,
            "completion_tokens": len(drawn),
            "output_token_logprobs": places,
            "input_token_logprobs": [],
        }
        return data({"output_ids": shown, "meta_info": about})

    async def control(self, request: Request) -> Response:
        path, body = request.url.path, await request.body()
        about = json.loads(body) if body else {}
        self.calls.append(path)
        match path.removeprefix("/"):
            case "abort_request":
                self.aborted[about["rid"]].set()
            case "pause_generation":
                assert about == {"mode": "retract"}
                self.drawing.clear()
            case "continue_generation":
                self.drawing.set()
            case "update_weights_from_disk":
                assert about["flush_cache"]
                folder = Path(about["model_path"])
                if (folder / "refuse").exists():
                    done = {"success": False, "message": "it does not fit", "num_paused_requests": 0}
                    return JSONResponse(done, 400)
                self.scale, self.weights = scale_of(folder), about["weight_version"]
                return JSONResponse({"success": True, "message": "", "num_paused_requests": 0})
            case other:
                raise AssertionError(other)
        return JSONResponse({})

    async def about(self, request: Request) -> Response:
        path = request.url.path
        if path == "/seen":
            return JSONResponse({"bodies": self.seen, "calls": self.calls, "argv": sys.argv, "env": dict(os.environ)})
        if self.given.old_names and not path.startswith("/get_"):
            return Response(status_code=404)
        if path.endswith("server_info"):
            length = self.given.context_length
            version = self.given.version or "0.5.23"
            return JSONResponse({"version": version, "context_length": int(length) if length else None})
        return JSONResponse({"model_path": self.given.model_path, "weight_version": self.weights})

    def app(self) -> Starlette:
        async def health(request: Request) -> Response:
            return Response()

        controls = ("abort_request", "pause_generation", "continue_generation", "update_weights_from_disk")
        abouts = ("server_info", "model_info", "get_server_info", "get_model_info", "seen")
        routes = [Route("/generate", self.generate, methods=["POST"])]
        routes += [Route(f"/{name}", self.control, methods=["POST"]) for name in controls]
        routes += [Route(f"/{name}", self.about) for name in abouts]
        routes += [Route(f"/{name}", health) for name in ("health", "health_generate")]
        return Starlette(routes=routes)


def data(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def scale_of(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")["model.norm.weight"][0])


def main() -> None:
    given = options(sys.argv[1:])
    if os.environ.get("REFUSE_TO_START"):
        raise SystemExit("ValueError: not enough GPU memory")
    uvicorn.run(Sglang(given).app(), host=given.host or "127.0.0.1", port=int(given.port), log_level="warning")


if __name__ == "__main__":
    main()
