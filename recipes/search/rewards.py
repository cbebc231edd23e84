"""What an answer is worth: by rule, or by rule first and then by a judge.

em, f1     the answer beside the golden ones, as HotpotQA counts
found      the share of the paragraphs needed that were seen, where the task says which those are
judge      whether a judge finds that the answer says the same; only with `judged`
reward     what is trained on unless algorithm.rewards says otherwise:
           f1, with 0.3 of it for `found` where that is known, so that a small model has something to begin with
"""

import os
import re
from functools import cache
from typing import Any

from strop import Episode, Task
from strop.errors import ConfigError
from strop.rewards import Judge, Verdict, exact_match, f1

FOUND = 0.3


def score(task: Task, episode: Episode) -> dict[str, float]:
    """For `reward = "recipes/search/rewards.py:score"`."""
    answer, golden = said(episode), task.data["answers"]
    worth = {"em": exact_match(answer, golden), "f1": f1(answer, golden)}
    if not task.data.get("titles"):
        return worth | {"reward": worth["f1"]}
    worth["found"] = found(task.data["titles"], episode)
    return worth | {"reward": (1 - FOUND) * worth["f1"] + FOUND * worth["found"]}


async def judged(task: Task, episode: Episode) -> dict[str, float]:
    """The same with a judge, whose verdict is the reward. It is asked only where the rule does not know."""
    verdict: Verdict = await judge().ask(task.data["question"], said(episode), task.data["answers"])
    return score(task, episode) | {"judge": float(verdict), "reward": float(verdict)}


def said(episode: Episode) -> str | None:
    """The answer; None where it was cut off or never came."""
    return episode.answer.strip() if episode.ended == "answered" else None


def found(titles: list[str], episode: Episode) -> float:
    """By the titles that the tools put at the beginning of a line: anywhere else the model may have written them."""
    results = "\n".join(call.result.text for call in episode.calls if call.result.ok)
    shown = (re.search(rf"^(?:Doc \d+ )?\(Title: {re.escape(title)}\)", results, re.MULTILINE) for title in titles)
    return sum(map(bool, shown)) / len(titles)


def rule(question: Any, answer: str, golden: list[str]) -> float | None:
    if not answer:
        return 0.0
    return 1.0 if exact_match(answer, golden) else None


@cache
def judge() -> Judge:
    """JUDGE_URL is any server that speaks OpenAI's chat completions, JUDGE_MODEL its model, JUDGE_KEY its key."""
    if not (model := os.environ.get("JUDGE_MODEL")):
        raise ConfigError("which judge? JUDGE_MODEL is its model, JUDGE_URL its server, JUDGE_KEY its key: set them")
    return Judge(
        model,
        base_url=os.environ.get("JUDGE_URL", "https://api.openai.com/v1"),
        key_env="JUDGE_KEY",
        rule=rule,
        cache=os.environ.get("JUDGE_CACHE", "judge.sqlite"),
    )
