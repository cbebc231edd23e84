"""An agent that says what it is told is durable: as a Python function and as a program of its own, for the tests that
kill everything around it. Each write that was acknowledged, and each that was refused, is a line in $STROP_TEST_ACKS.
"""

import json
import os
import random
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def note(*words: object) -> None:
    """One line, written whole, whoever is killed next."""
    with open(os.environ["STROP_TEST_ACKS"], "ab", buffering=0) as file:
        file.write((json.dumps(words) + "\n").encode())


def post(url: str, key: str, body: object) -> int:
    """Until somebody answers. The same body again is the same write: it carries an id."""
    data, deadline = json.dumps(body).encode(), time.monotonic() + 60
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
                answer.read()
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                error.read()
            if error.code < 500:
                return error.code
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody answers at {url}")
        time.sleep(0.05)


def work(rollout: str, attempt: int, events_url: str, key: str) -> float:
    rng = random.Random(f"{rollout}/{attempt}/{os.getpid()}")
    slow = rollout.endswith(("3.0", "7.0"))  # longer than a lease, to be overtaken by a second attempt
    base, run_key = os.environ["STROP_TEST_URL"], os.environ["STROP_TEST_KEY"]
    for k in range(3):
        event = {"id": f"{os.getpid()}-{k}", "kind": "message", "data": {"k": k, "attempt": attempt}}
        status = post(events_url, key, event)
        note("event" if status == 200 else "refused_event", rollout, attempt, event["id"], status)
        turn = {
            "id": f"{rollout}/{attempt}/{k}",
            "rollout": rollout,
            "attempt": attempt,
            "prompt_ids": list(range(50 + k)),
            "response_ids": [k, attempt],
            "logprobs": [-0.5, -0.25 * k],
            "versions": [[0, "1.0"]],
            "finish": "stop",
            "started": k,
            "ended": k + 1,
        }
        status = post(f"{base}/v1/turns", run_key, [turn])
        note("turn" if status == 200 else "refused_turn", rollout, attempt, turn["id"], status)
        time.sleep(rng.uniform(0.8, 1.5) if slow else rng.uniform(0.0, 0.12))
    return float(attempt)


def agent(task, llm) -> dict[str, float]:
    attempt = int(llm.events_url.rsplit("/", 2)[1])
    return {"reward": work(llm.rollout, attempt, llm.events_url, llm.api_key)}


def main() -> None:
    assert json.loads(Path(os.environ["STROP_TASK"]).read_bytes()) == json.load(sys.stdin)
    url = os.environ["STROP_EVENTS_URL"]
    attempt = int(url.rsplit("/", 2)[1])
    print(work(os.environ["STROP_ROLLOUT"], attempt, url, os.environ["OPENAI_API_KEY"]))


if __name__ == "__main__":
    main()
