"""An agent that does nothing but wait until all its fellows have begun, which shows that they run at once."""

from __future__ import annotations

import asyncio
import os
from typing import Any

FELLOWS = int(os.environ.get("FELLOWS", "1000"))
_begun: list[str] = []
_all_there = asyncio.Event()


async def agent(task: Any, llm: Any) -> float:
    _begun.append(task.id)
    if len(_begun) == FELLOWS:
        _all_there.set()
    await asyncio.wait_for(_all_there.wait(), 240)
    return 1.0
