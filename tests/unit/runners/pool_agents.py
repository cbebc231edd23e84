"""Agents of the runners' tests. What one does is said by its task."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai


def agent(task: Any, llm: Any) -> Any:
    data = task.data
    match data["do"]:
        case "return":
            return data.get("value")
        case "nan":
            return float("nan")
        case "raise":
            raise ValueError("out of order")
        case "sleep":
            time.sleep(data["seconds"])
            return 1.0
        case "until":  # a file is there
            while not os.path.exists(data["file"]):
                time.sleep(0.01)
            return 1.0
        case "spin":  # holds the interpreter's lock without end
            return sum(range(10**12))
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit_once":
            try:
                os.mkdir(data["mark"])
            except FileExistsError:
                return 1.0
            os._exit(3)
        case "print":
            print(data.get("text", "hello from the agent"))
            os.write(2, b"and from its stderr\n")
            print("an end without a line break", end="")
            return 1.0
        case "print_and_die":
            print("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        case "print_and_hang":
            print("waiting for nothing")
            time.sleep(600)
        case "print_much":
            sys.stdout.write(data["line"] * data["lines"])
            return 1.0
        case "print_later":  # by a child that outlives it
            subprocess.Popen(["sh", "-c", "sleep 0.5; echo too late; touch $0", data["file"]])
            return 1.0
        case "child":
            child = subprocess.Popen(["sleep", "600"], start_new_session=data.get("session", False))
            with open(data["file"], "w") as file:
                file.write(str(child.pid))
            if "die" in data:
                os._exit(5)
            time.sleep(600)
        case "daemon":  # in a session of its own, without a parent and with an empty environment
            code = "import os, sys, time; os.fork() and os._exit(0); print(os.getpid(), file=open(sys.argv[1], 'w'))"
            code = f"{code}; time.sleep(600)"
            subprocess.run([sys.executable, "-c", code, data["file"]], start_new_session=True, env={}, check=True)
            time.sleep(data.get("seconds", 0))
            return 1.0
        case "fork":  # a copy of the worker that outlives it, with all it has open
            if os.fork() == 0:
                time.sleep(600)
            os._exit(4)
        case "address":
            return {"worker": os.getpid(), "url": len(llm.base_url), "same": llm.base_url == data["url"]}


here = 0
left: list[Any] = []


async def agent_async(task: Any, llm: Any) -> Any:
    global here
    data = task.data
    match data["do"]:
        case "return":
            return data.get("value", 2.0)
        case "raise":
            raise ValueError("out of order")
        case "exit":
            sys.exit(3)
        case "meet":  # wait for so many others
            here += 1
            while here < data["count"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return 1.0
        case "sleep":
            try:
                await asyncio.sleep(600)
            finally:
                Path(data["file"]).write_text("told to stop")  # noqa: ASYNC240
        case "deaf":  # does not hear that it is told to stop
            while not Path(data["file"]).exists():  # noqa: ASYNC240
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)
            return 1.0
        case "reward":
            llm.event("message", {"text": "first"})
            await asyncio.to_thread(llm.event, "message", {"text": "second"})
            llm.reward("format", 0.5)
            return 1.0
        case "bad_reward":
            llm.event("reward", {"name": "reward", "value": "good"})
        case "odd_event":
            llm.event("thought", {})
        case "surrogate":
            llm.event("message", {"text": "\ud800"})
        case "no_json":
            llm.event("message", {"text": object()})
        case "client":
            llm.client()
        case "print":  # in turns with all others
            for _ in range(data.get("times", 3)):
                print(data["text"])
                await asyncio.sleep(0.01)
            await asyncio.to_thread(print, "from a thread", data["text"], file=sys.stderr)
            return 1.0
        case "print_much":
            sys.stdout.write(data["line"] * data["lines"])
            return 1.0
        case "environment":
            os.environ["MINE"] = llm.rollout
            await asyncio.sleep(0.05)
            client = openai.AsyncOpenAI()
            found = {
                "url": str(client.base_url) == llm.base_url + "/" and client.api_key == llm.api_key,
                "mine": os.environ["MINE"] == llm.rollout and dict(os.environ)["MINE"] == os.getenv("MINE"),
                "task": json.loads(Path(os.environ["STROP_TASK"]).read_text())["id"] == task.id,  # noqa: ASYNC240
                "home": "PATH" in os.environ and os.environ.copy()["STROP_ROLLOUT"] == llm.rollout,
            }
            del os.environ["MINE"]
            return found | {"gone": "MINE" not in os.environ, "worker": os.getpid()}
        case "process":
            return {"worker": os.getpid()}
        case "until":
            while not Path(data["file"]).exists():  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(0.01)
            return {"worker": os.getpid()}
        case "block":  # the loop, and all others with it
            Path(data["file"]).touch()  # noqa: ASYNC240
            time.sleep(600)  # noqa: ASYNC251
        case "spin":  # holds the interpreter's lock without end
            return sum(range(10**12))
        case "kill_once":
            print("last words")
            try:
                os.mkdir(data["mark"])
            except FileExistsError:
                return 1.0
            while not Path(data["file"]).exists():  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":  # a task that writes down that it was ended

            async def stay() -> None:
                try:
                    await asyncio.sleep(600)
                finally:
                    Path(data["file"]).write_text("cancelled")  # noqa: ASYNC240

            left.append(asyncio.create_task(stay()))
            await asyncio.sleep(0)
            return 1.0
        case "child":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: ASYNC220
            Path(data["file"]).write_text(str(child.pid))  # noqa: ASYNC240
            if "kill" in data:
                os.kill(os.getpid(), signal.SIGKILL)
            return 1.0


def judge(task: Any, answer: Any) -> Any:
    print("judging", answer)
    return {"reward": 10 * answer}


not_a_function = 3
