"""A stand-in for the optimiser model, which costs money: an OpenAI-compatible server that answers with a way to ask,
drawn blindly from PHRASINGS. What a way of asking is worth, the model that is trained says.

    python recipes/joined/scripted.py [--port N]     prints its address
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from typing import Any

PHRASINGS = (
    "What is {symbols}?", "{symbols} = ?", "Compute {symbols}.", "Please work out {symbols}.",
    "Use the calculator: {symbols}.", "With the calculator, how much is {symbols}?", "Guess {symbols}.",
    "calculator {symbols}", "Do not guess: {symbols}.", "{symbols}", "How much is {symbols}?",
)  # fmt: skip


class Writer:
    def __init__(self) -> None:
        self._asked = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        request = json.loads(body or b"{}")
        self._asked += 1
        draw = random.Random(request.get("seed", self._asked))
        message = {"role": "assistant", "content": f"```\n{draw.choice(PHRASINGS)}\n```"}
        sizes = {"prompt_tokens": len(body) // 4, "completion_tokens": 20}
        answer = {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": "writer",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {**sizes, "total_tokens": sum(sizes.values())},
        }
        data = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})


def main() -> None:
    import uvicorn

    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--port", type=int, default=0)
    config = uvicorn.Config(Writer(), host="127.0.0.1", port=given.parse_args().port, log_level="warning")
    server, listening = uvicorn.Server(config), config.bind_socket()
    listening.listen(64)  # who reads the address may come at once
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    asyncio.run(server.serve(sockets=[listening]))


if __name__ == "__main__":
    main()
