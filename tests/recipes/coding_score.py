"""The recipe's reward, which besides says of one turn that it is not to be trained, as any reward function may."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "coding-agent"))

import reward


def score(task, answer, llm):
    llm.exclude(f"{llm.rollout}/1/0", "first_look")
    return reward.score(task, answer)
