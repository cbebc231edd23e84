"""What an outside model may cost a run.

    [gateway.outside.judge]
    max_cost = 20.0
    price_in = 2.5
    price_out = 10.0

A provider says what a request cost only once it has answered it: a budget may be overdrawn by what is in flight. A run
that is opened again goes on with what it had left, since what was spent is in its turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from strop.config import OutsideConfig
from strop.gateway.dialects.base import ApiError, Json
from strop.store.base import Store
from strop.types import Turn

LETTERS = 4
"""Characters per token, where a provider does not say how many tokens there were."""


class Budget:
    """Of one outside model. 0 sets no limit."""

    def __init__(self, name: str, config: OutsideConfig) -> None:
        self._name, self._config = name, config
        self.tokens = 0
        self.money = 0.0

    @property
    def limited(self) -> bool:
        return bool(self._config.max_tokens or self._config.max_cost)

    def check(self) -> None:
        """`ApiError` once it is used up."""
        config, name = self._config, self._name
        if config.max_tokens and self.tokens >= config.max_tokens:
            raise _used_up(name, f"{self.tokens:,} of {config.max_tokens:,} tokens are spent", "max_tokens")
        if config.max_cost and self.money >= config.max_cost:
            raise _used_up(name, f"{self.money:.2f} of {config.max_cost:.2f} are spent", "max_cost")

    def charge(self, turns: Iterable[Turn]) -> None:
        """`turns` are those of one request, whose cost stands in each."""
        turns = list(turns)
        if not turns:
            return
        asked, answered = cost(turns)
        self.tokens += asked + answered
        self.money += (asked * self._config.price_in + answered * self._config.price_out) / 1e6


def cost(turns: list[Turn]) -> tuple[int, int]:
    """Tokens asked and answered, as the provider counted them or else by their length.

    >>> turn = Turn(id="r/1/0", rollout="r", attempt=1, prompt_ids=[], response_ids=[], logprobs=[], versions=[],
    ...     requested={"outside": {"usage": {"input_tokens": 9, "output_tokens": 4}}},
    ...     finish="stop", started=0, ended=1)
    >>> cost([turn])
    (9, 4)
    """
    usage: Json = turns[0].requested.get("outside", {}).get("usage") or {}
    asked = _number(usage, "prompt_tokens", "input_tokens")
    answered = _number(usage, "completion_tokens", "output_tokens")
    cached = _number(usage, "cache_read_input_tokens") + _number(usage, "cache_creation_input_tokens")
    if asked or answered:
        return asked + cached, answered
    return len(str(turns[0].messages)) // LETTERS, sum(len(str(turn.answer)) for turn in turns) // LETTERS


def _number(usage: Json, *names: str) -> int:
    return next((n for name in names if isinstance(n := usage.get(name), int) and n >= 0), 0)


def _used_up(name: str, spent: str, setting: str) -> ApiError:
    return ApiError(
        f"the budget of the outside model {name} is used up: {spent}. Fix: raise gateway.outside.{name}.{setting} "
        "and resume the run",
        status=402,
        kind="insufficient_quota",
        code="budget_used_up",
    )


async def recall(store: Store, budgets: Mapping[str, Budget]) -> None:
    """Charge what a run has spent before. Looks through all of its turns, if anything is limited."""
    limited = {name: budget for name, budget in budgets.items() if budget.limited}
    after: str | None = None
    while limited and (page := await store.list(after=after)):
        after = page[-1].id
        for rollout in page:
            for attempt in await store.attempts(rollout.id):
                requests: dict[str, list[Turn]] = {}
                for turn in await store.turns(rollout.id, attempt=attempt.number):
                    if turn.outside and turn.policy in limited:
                        start = int(turn.id.rpartition("/")[2]) - turn.choice
                        requests.setdefault(f"{turn.policy}/{start}", []).append(turn)
                for turns in requests.values():
                    limited[turns[0].policy].charge(turns)
