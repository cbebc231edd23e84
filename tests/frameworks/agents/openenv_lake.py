"""A server of OpenEnv's own kind on a free port, which it prints: a walk to the door, told in words or by fields."""

import random
import sys

import uvicorn
from openenv.core.env_server import http_server, interfaces, types
from pydantic import Field

DOOR = 3


class Say(types.Action):
    message: str = Field(min_length=1)


class Go(types.Action):
    steps: int
    loudly: bool = False


class Seen(types.Observation):
    text: str


class Walk(interfaces.Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def reset(self, seed=None, episode_id=None, **given):
        self.at = random.Random(seed).randrange(DOOR)
        return Seen(text=f"You are at {self.at}.")

    def step(self, action, timeout_s=None, **given):
        steps = action.steps if isinstance(action, Go) else sum(letter in "0123456789" for letter in action.message)
        self.at += steps
        return Seen(text=f"You are at {self.at}.", reward=steps / 10, done=self.at >= DOOR)

    @property
    def state(self):
        return types.State(step_count=self.at)


if __name__ == "__main__":
    action = {"say": Say, "go": Go}[sys.argv[1]]
    app = http_server.create_fastapi_app(Walk, action, Seen, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
