"""Asks for completions of token ids, so many at once, and says how many tokens came back.

    completions_load.py URL FIRST REQUESTS PROMPT ANSWER VOCABULARY < [[path, key], ...]

All requests are begun at the same time, once a line says so on standard input. Prompts are drawn at random; request
FIRST + i gets the same one wherever it is sent.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

import msgspec
import uvloop

from strop.net.client import Client


async def main(url: str, first: int, requests: int, prompt: int, answer: int, vocabulary: int) -> None:
    targets = json.loads(sys.stdin.readline())
    bodies: list[bytes] = []
    for number in range(first, first + requests):
        draw = random.Random(number)
        ids = [draw.randrange(vocabulary) for _ in range(prompt)]
        body = {"prompt": ids, "max_tokens": answer, "logprobs": 0, "model": "strop"}
        if targets[0][1] == "none":  # vLLM without a tokenizer has no text to give
            body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "temperature": 1.0}
        bodies.append(msgspec.json.encode(body))
    client = Client(url)
    print("ready", flush=True)
    sys.stdin.readline()

    async def ask(number: int) -> int:
        path, key = targets[number % len(targets)]
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        done = await client.request("POST", path, bodies[number], headers=headers, timeout=600.0)
        assert done.status == 200, done.body[:300]
        return msgspec.json.decode(done.body)["usage"]["completion_tokens"]

    print(sum(await asyncio.gather(*map(ask, range(requests)))), flush=True)
    await client.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], *map(int, sys.argv[2:7])))
