"""A scripted task for prompt optimisers: five hints out of a pool of fifty raise the reward, and nobody knows which.

    python benchmarks/hints.py [--port N]     both scripted models, as one OpenAI-compatible server; prints its address

`follower` is the agent's model: it answers a question of a topic if the hint for that topic is in the system prompt,
and some questions without any. It reads the first ROOM hints of a prompt. `writer` is the optimiser model: it rewrites
the prompt that it is shown with three hints of the pool, drawn blindly, by the `seed` of the request or else by what it
was asked before. Nothing tells it which hints matter.

    POST /control {"busy": 3}          answer 429 so many times
    POST /control {"nonsense": 3}      say nothing that could be a prompt, so many times
    POST /control {"delay": 0.5}       seconds that an answer of the writer takes
    POST /control {"status": 402}      answer so, always
    POST /control {"strict": 1}        refuse `max_tokens`, as newer models do
    POST /control {"usage": -5000}     say that it took so many tokens
    GET  /counts                       requests by model, and those refused
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
from collections import Counter
from typing import Any

WORDS = """
amber basil cedar delta ember fjord grove haven inlet jetty karma lemon maple north ocean petal quilt river sable tulip
umber vapor willow xenon yarrow zephyr acorn birch coral dune eagle flint glade hazel iris jade kelp lotus moss nectar
olive pine quartz reed slate thyme ursa violet wheat yucca
"""
POOL = [f"Hint {n:02d}: {word}" for n, word in enumerate(WORDS.split())]
FIRST = "You answer questions about topics.\n"
ROOM = 12
NUM_NEEDED, FREE = 5, 0.3


def needed_hints(seed: int) -> list[str]:
    """The hints that matter, another five for every seed."""
    return random.Random(f"needed {seed}").sample(POOL, NUM_NEEDED)


def tasks(seed: int = 0, train: int = 50, validation: int = 50, test: int = 100) -> list[dict[str, Any]]:
    """Questions, of which a share is free and the others need one hint each, evenly."""
    hints, found = needed_hints(seed), list[dict[str, Any]]()
    for split, count in (("train", train), ("validation", validation), ("test", test)):
        for n in range(count):
            free = n < FREE * count
            topic = "" if free else hints[n % NUM_NEEDED]
            word = hashlib.blake2b(f"{seed} {split} {n}".encode(), digest_size=3).hexdigest()
            data = {"question": f"Topic <{_code(topic)}>: what is the word of {word}?", "answer": f"{word}!"}
            found.append({"id": f"{split}-{n}", "split": split, "data": data})
    return found


async def agent(task: Any, llm: Any) -> float:
    client = llm.async_client()
    messages = [
        {"role": "system", "content": llm.prompts["system"]},
        {"role": "user", "content": task.data["question"]},
    ]
    answer = await client.chat.completions.create(model=llm.model, messages=messages)
    await client.close()
    return float(answer.choices[0].message.content == task.data["answer"])


# -- the two models ----------------------------------------------------------------------------------------------------


def _code(topic: str) -> str:
    """A topic as questions name it: who reads them cannot tell the hint."""
    return hashlib.blake2b(topic.encode(), digest_size=4).hexdigest() if topic else "any"


_CODES = {_code(hint): hint for hint in POOL}


def follow(system: str, question: str) -> str:
    """What the agent's model says."""
    told = [line for line in system.splitlines() if line.startswith("Hint ")][:ROOM]
    code, word = re.findall(r"<(\w+)>|word of (\w+)\?", question)[0][0], re.findall(r"word of (\w+)\?", question)[0]
    return f"{word}!" if code == "any" or _CODES[code] in told else "I do not know."


def write(question: str, draw: random.Random) -> str:
    """What the optimiser model says: to a request for a critique some words, to any other a new prompt."""
    if "Do not write a new prompt" in question:
        return "The prompt may lack a hint that the questions need."
    found = re.search(r"<prompt>\n(.*?)\n</prompt>", question, re.DOTALL) or re.search(
        r"```\n(.*?)\n```", question, re.DOTALL
    )
    before = (found[1] if found else "").splitlines()
    hints = [line for line in before if line.startswith("Hint ")]
    new = draw.sample([hint for hint in POOL if hint not in hints], 3)
    while len(hints) + len(new) > ROOM:
        hints.pop(draw.randrange(len(hints)))
    return "\n".join(["```", FIRST.strip(), *hints, *new, "```"])


class Models:
    """An ASGI app. What it answers with depends on what it is asked only, where requests have a seed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()
        self._busy, self._nonsense, self._delay = 0, 0, 0.0
        self._status, self._strict, self._usage = 0, False, None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        status, answer = await self._answer(scope["path"], json.loads(body or b"{}"))
        data = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _answer(self, path: str, request: dict[str, Any]) -> tuple[int, Any]:
        if path == "/counts":
            return 200, dict(self.counts)
        if path == "/control":
            self._busy = request.get("busy", 0)
            self._nonsense, self._delay = request.get("nonsense", 0), request.get("delay", 0.0)
            self._status, self._strict = int(request.get("status", 0)), bool(request.get("strict"))
            self._usage = request.get("usage")
            return 200, {}
        messages = {message["role"]: message["content"] for message in request["messages"]}
        if request["model"] == "follower":
            self.counts["follower"] += 1
            return 200, _completion("follower", follow(messages.get("system", ""), messages["user"]))
        self.counts["writer"] += 1
        if self._busy > 0:
            self._busy -= 1
            self.counts["refused"] += 1
            return 429, {"error": {"message": "busy", "type": "rate_limit"}}
        if self._strict and "max_tokens" in request:
            self._status, self._strict = 400, True
        if self._status:
            self.counts["refused"] += 1
            message = "Use 'max_completion_tokens' instead." if self._strict else "no"
            status, self._status = self._status, 0 if self._strict else self._status
            return status, {"error": {"message": message}}
        if self._delay:
            await asyncio.sleep(self._delay)
        if self._nonsense > 0:
            self._nonsense -= 1
            return 200, _completion("writer", "")
        asked = messages["user"]
        place = request.get("seed", self._asked[asked])
        self._asked[asked] += 1
        answer = _completion("writer", write(asked, random.Random(f"{place} {asked}")), len(asked) // 4)
        if self._usage is not None:
            answer["usage"] |= {"prompt_tokens": self._usage}
        return 200, answer


def _completion(model: str, text: str, asked: int = 10) -> dict[str, Any]:
    usage = {
        "prompt_tokens": asked,
        "completion_tokens": 1 + len(text) // 4,
        "total_tokens": asked + 1 + len(text) // 4,
    }
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": model, "choices": [choice], "usage": usage}


def main() -> None:
    import uvicorn

    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--port", type=int, default=0)
    config = uvicorn.Config(Models(), host="127.0.0.1", port=given.parse_args().port, log_level="warning")
    server, listening = uvicorn.Server(config), config.bind_socket()
    listening.listen(1024)  # who reads the address may come at once
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    asyncio.run(server.serve(sockets=[listening]))


if __name__ == "__main__":
    main()
