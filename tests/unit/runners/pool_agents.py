"""Agents of the pool's tests. What one does is said by its task."""

import os
import signal
import subprocess
import time
from typing import Any


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
            print("hello from the agent")
            os.write(2, b"and from its stderr\n")
            return 1.0
        case "child":
            child = subprocess.Popen(["sleep", "600"])
            with open(data["file"], "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        case "fork":  # a copy of the worker that outlives it, with all it has open
            if os.fork() == 0:
                time.sleep(600)
            os._exit(4)
        case "address":
            return {"worker": os.getpid(), "url": len(llm.base_url), "same": llm.base_url == data["url"]}


async def agent_async(task: Any, llm: Any) -> float:
    return 2.0
