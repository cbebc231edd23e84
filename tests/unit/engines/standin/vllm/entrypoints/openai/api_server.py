"""Answers as vLLM 0.32 does. The token after n is n + 1, and the logprob of n is -n / 1000 - shift; loading weights
sets the shift to the first value of `norm.weight`, and an adapter has one of its own. As keys are cached by an
adapter's name, another one by the same name has the shift of the first. How it misbehaves is said by variables, or by
numbers in prompts."""

import asyncio
import json
import os
import re
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

HANGS = 90
"""A prompt that ends with it gets one token and no more."""
SILENT = 91
"""A prompt that ends with it gets none."""
DIES = 92
"""A prompt that ends with it ends the server before a token came."""
FAILS = 93
"""A prompt that ends with it gets an error in place of tokens."""

arguments = sys.argv[1:]
counter = Path(os.environ["STANDIN_FOLDER"]) / "starts"
log = Path(os.environ["STANDIN_FOLDER"]) / "asked.jsonl"
takes_adapters = "--enable-lora" in arguments and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in os.environ
shift = 0.0
adapters: dict[str, float] = {}
cached: dict[str, float] = {}
locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
paused = False
updating = False
active = 0  # answers in the making


def shift_of(folder: str) -> float:
    data = next(Path(folder).glob("*model.safetensors")).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    start = json.loads(data[8 : 8 + size])["norm.weight"]["data_offsets"][0]
    return struct.unpack_from("<f", data, 8 + size + start)[0]


def holds() -> bool:
    return (log.parent / "holds").exists()


def logprob(id: int, model: str) -> float:
    return -id / 1000 - (cached.setdefault(model, adapters[model]) if model in adapters else shift)


async def generate(request: Request) -> Response:
    body = await request.json()
    stream = {"stream": body["stream"]} if "stream" in body else {}
    note({"generate": body["sampling_params"], "model": body["model"], "paused": paused} | stream)
    ids, params, model = body["token_ids"], body["sampling_params"], body["model"]
    if model not in (value("--served-model-name"), *adapters):
        return JSONResponse({"error": {"message": f"The model `{model}` does not exist."}}, status_code=404)
    if "prompt_logprobs" in params and ids[-1] == FAILS:
        return JSONResponse({"error": {"message": "EngineCore encountered an issue"}}, status_code=500)
    if "prompt_logprobs" in params:
        places = [None, *({str(id): {"logprob": logprob(id, model)}} for id in ids[1:])]
        return JSONResponse({"prompt_logprobs": places, "choices": []})
    if params["temperature"] > 50:
        return JSONResponse({"error": {"message": "temperature is too high"}}, status_code=400)
    if ids[-1] == DIES:
        os._exit(7)
    if not body["stream"]:
        return await answer_whole(request, events(ids[-1], params, model))
    return StreamingResponse(events(ids[-1], params, model), media_type="text/event-stream")


async def answer_whole(request: Request, stream: AsyncGenerator[str]) -> Response:
    """What would be streamed, in one piece. Who goes away is not answered, and that is noted."""

    async def collect() -> list[dict[str, Any]]:
        return [json.loads(event[6:]) async for event in stream if not event.startswith("data: [DONE]")]

    collecting, leaving = asyncio.create_task(collect()), asyncio.create_task(request.receive())
    await asyncio.wait([collecting, leaving], return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not collecting.done():
        collecting.cancel()
        note({"dropped": True})
        return Response(status_code=499)
    pieces = collecting.result()
    if "error" in pieces[0]:
        return JSONResponse(pieces[0], status_code=500)
    choices = [piece["choices"][0] for piece in pieces]
    ids = [id for choice in choices for id in choice["token_ids"]]
    content = [one for choice in choices for one in choice["logprobs"]["content"]]
    whole = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": choices[-1]["finish_reason"]}
    return JSONResponse({"choices": [{"index": 0} | whole]})


async def events(last: int, params: dict[str, Any], model: str) -> AsyncGenerator[str]:
    global active
    active += 1
    try:
        async for event in draw(last, params, model):
            yield event
    finally:
        active -= 1


async def draw(last: int, params: dict[str, Any], model: str) -> AsyncGenerator[str]:
    if last == FAILS:
        yield f"data: {json.dumps({'error': {'message': 'EngineCore encountered an issue'}})}\n\n"
    if last == SILENT:
        await asyncio.Event().wait()
    told = (params.get("structured_outputs") or {}).get("grammar", "") if holds() else ""
    forced = [int(id) for id in re.findall(r"<\[(\d+)\]>", told)]  # of grammars that allow one text
    for n in range(params["max_tokens"] if last != FAILS else 0):
        id = forced[n] if forced else last % 80 + 1 + n
        stop = id in params["stop_token_ids"]
        finish = "stop" if stop else "length" if n + 1 == params["max_tokens"] else None
        content = [{"token_id": id, "logprob": logprob(id, model), "top_logprobs": []}]
        choice = {"index": 0, "finish_reason": finish, "token_ids": [id], "logprobs": {"content": content}}
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        if stop:
            break
        if last == HANGS:
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
    yield "data: [DONE]\n\n"


async def collective_rpc(request: Request) -> Response:
    global shift
    body = await request.json()
    note({"reload": body["kwargs"]["weights_path"], "paused": paused, "active": active})
    while (Path(body["kwargs"]["weights_path"]) / "slow").exists():  # noqa: ASYNC110 - tests take it away
        await asyncio.sleep(0.02)
    shift = shift_of(body["kwargs"]["weights_path"])
    return JSONResponse({"results": [None]})


async def load_adapter(request: Request) -> Response:
    body = await request.json()
    name, folder = body["lora_name"], body["lora_path"]
    note({"load": name, "folder": folder})
    async with locks[name]:
        if name in adapters:
            return JSONResponse({"error": {"message": "it has already been loaded"}}, status_code=400)
        while (Path(folder) / "slow").exists():  # noqa: ASYNC110 - tests take it away
            await asyncio.sleep(0.02)
        adapters[name] = shift_of(folder)
    return JSONResponse({})


async def unload_adapter(request: Request) -> Response:
    name = (await request.json())["lora_name"]
    note({"unload": name})
    async with locks[name]:
        if adapters.pop(name, None) is None:
            return JSONResponse({"error": {"message": "it cannot be found"}}, status_code=404)
    return JSONResponse({})


async def set_paused(request: Request) -> Response:
    global paused
    paused = request.url.path == "/pause"
    note({"path": request.url.path, "query": dict(request.query_params)})
    return JSONResponse({})


async def update_weights(request: Request) -> Response:
    """As 0.24: an update is started, takes tensors, and is finished; one that fails has ended."""
    global updating
    path, data = request.url.path, await request.body()
    wrong = updating if path.startswith("/start") else not updating
    updating = not path.startswith("/finish") and not wrong and b"no such tensor" not in data
    note({"path": path, "failed": wrong or b"no such tensor" in data})
    return JSONResponse({}, status_code=500 if wrong or b"no such tensor" in data else 200)


async def fine(request: Request) -> Response:
    if request.url.path not in ("/health", "/version", "/openapi.json", "/v1/models", "/server_info"):
        note({"path": request.url.path, "query": dict(request.query_params)})
    if request.url.path == os.environ.get("STANDIN_OUT_OF_MEMORY"):
        return JSONResponse({"error": {"message": "CUDA Error: out of memory at cumem_allocator.cpp"}}, 500)
    answers: dict[str, Any] = {
        "/version": {"version": os.environ.get("STANDIN_VERSION", "0.32.0")},
        "/openapi.json": {
            "paths": {route.path: {} for route in routes if route.path != os.environ.get("STANDIN_LACKS")}
        },
        "/v1/models": {
            "data": [
                {"id": name, "max_model_len": int(value("--max-model-len"))}
                for name in (value("--served-model-name"), *adapters)
            ]
        },
        "/server_info": {"vllm_config": {"lora_config": describe_adapters() if takes_adapters else None}},
    }
    return JSONResponse(answers.get(request.url.path, {}))


def describe_adapters() -> dict[str, Any]:
    names = ("--max-lora-rank", "--max-loras", "--max-cpu-loras")
    return {name[2:].replace("-", "_"): int(value(name)) for name in names}


def note(what: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(what) + "\n")


def value(name: str) -> str:
    return arguments[len(arguments) - arguments[::-1].index(name)]  # the last one counts


routes = [
    Route("/inference/v1/generate", generate, methods=["POST"]),
    Route("/collective_rpc", collective_rpc, methods=["POST"]),
    *(
        Route(path, update_weights, methods=["POST"])
        for path in ("/start_weight_update", "/update_weights", "/finish_weight_update")
    ),
    Route("/pause", set_paused, methods=["POST"]),
    Route("/resume", set_paused, methods=["POST"]),
    *(Route(path, fine, methods=["POST"]) for path in ("/sleep", "/wake_up")),
    *(Route(path, fine) for path in ("/health", "/version", "/openapi.json", "/v1/models", "/server_info")),
]
if takes_adapters:
    routes.append(Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]))
    routes.append(Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]))

if __name__ == "__main__":
    started = int(counter.read_text()) + 1 if counter.exists() else 1
    counter.write_text(str(started))
    if started > int(os.environ.get("STANDIN_STARTS", "99")):
        print("RuntimeError: there is no GPU left")
        sys.exit(1)
    # vLLM has processes of its own as well, in groups of their own.
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (Path(os.environ["STANDIN_FOLDER"]) / "engine.pid").write_text(str(engine.pid))
    uvicorn.run(Starlette(routes=routes), host=value("--host"), port=int(value("--port")), log_level="error")
