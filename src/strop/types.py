"""The records that all packages share. Each has a worked example; read them in order and you have read the data flow.

    Task ──enqueue──▶ Rollout ──lease──▶ Attempt ──model calls──▶ Turn ─┐
                                            └──reports──────────▶ Event ├─▶ Step (one commit) ─▶ Policy version
                                                                 Reward ┘

All records are frozen msgspec Structs: comparable, hashable where their fields are, and encoded as JSON by
`msgspec.json`. Times are seconds since the epoch (UTC). Ids are strings that sort in the order things were made.
Records of texts and numbers alone are none of the garbage collector's business (`gc=False`).
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]
Mode = Literal["train", "eval", "greedy"]
"""How a rollout samples: the policy's settings for training, for evaluation, or for evaluation at temperature 0."""
Finish = Literal["stop", "length", "tool_calls", "abandoned", "error"]
Cause = Literal[
    "agent_error", "timeout", "lost_runner", "engine_error", "bad_reward", "interrupted", "cancelled", "late"
]
"""Why an attempt or a rollout did not succeed. `interrupted` is nobody's fault (a runner was told to stop, a run was
killed and opened again) and always leads back to the queue; `cancelled` and `late` are the loop's own decisions."""
MAX_REWARD = 1e9
"""Rewards lie between minus this and this. The learner squares what they come to in float32, which ends at 3e38: a
thousand rewards of a rollout, squared and summed over a million tokens, are 1e30."""
Failure = Literal["exclude", "zero", "lowest"] | Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
"""What a failed rollout counts as beside the others of its group: not at all; as 0, or as their lowest total where that
is below 0; as their lowest total; or as a number."""
EventKind = Literal["reward", "exclude", "message", "span", "error"]

TERMINAL: frozenset[Status] = frozenset({"succeeded", "failed", "cancelled"})

TRANSITIONS: dict[Status, frozenset[Status]] = {
    "queued": frozenset({"running", "cancelled"}),
    "running": frozenset({"succeeded", "failed", "cancelled", "queued"}),  # back to queued: another attempt is left
    "succeeded": frozenset(),
    "failed": frozenset({"queued"}),  # tried again when a run is resumed that never got to a step
    "cancelled": frozenset(),
}
"""Which status a rollout may take next. Anything else is refused by name."""


class Task(Struct, frozen=True, kw_only=True):
    """One problem. `agent` picks an agent by name where a recipe brings several.

    >>> Task(id="calc-17", split="test", data={"question": "What is 3 * 4?", "answer": 12})
    Task(id='calc-17', split='test', data={'question': 'What is 3 * 4?', 'answer': 12}, agent=None)
    """

    id: str
    split: str = "train"
    data: Any = None
    agent: str | None = None


class AnswerGrammar(Struct, frozen=True, kw_only=True):
    """What an answer must be (`strop.models.grammar`): the text of a grammar, and the tokens of which one ends it.
    `version` is of what the text was made with, and is read by.

    >>> AnswerGrammar(text="...", ends=(2,), version="llguidance@1.7.6").ends
    (2,)
    """

    text: str
    ends: tuple[int, ...]
    version: str


class Sampling(Struct, frozen=True, kw_only=True):
    """How tokens are drawn. The recorded logprob is that of the distribution the token was really drawn from: logits
    shifted by penalties, divided by the temperature, cut by `top_p`, `top_k`, `min_p`, and normalised again. Greedy
    draws (temperature 0) have it at temperature 1, before any cut.

    Without penalties and cuts that is log_softmax(logits / temperature), over what the `grammar` allows where there is
    one, which the weights alone reproduce; `exact` says whether it is. Greedy turns carry no loss. An engine may take
    no seeds: vLLM does with `engine.vllm.seeds`.

    >>> Sampling().exact, Sampling(top_p=0.9).exact, Sampling(temperature=0.0).exact
    (True, False, False)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    grammar: AnswerGrammar | None = None

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def exact(self) -> bool:
        return self.temperature > 0.0 and not self.truncated and not self.penalised


class Reward(Struct, frozen=True, kw_only=True, gc=False):
    """A number with a name, for the whole rollout, for one agent in it, or for one turn (never both).

    The same name and target given twice: the last one wins. What is `wrong` is refused where it enters
    (`strop.errors.BadReward`): NaN, infinity, more than `MAX_REWARD`, names that cannot be shown.

    >>> Reward(name="reward", value=1.0).target
    ('reward', None, None)
    >>> Reward(value=float("nan")).wrong
    "reward 'reward' is nan: give a finite number"
    """

    name: str = "reward"
    value: float
    turn: str | None = None
    agent: str | None = None

    def __post_init__(self) -> None:
        if self.turn is not None and self.agent is not None:
            raise ValueError(f"reward {self.name!r} names a turn and an agent. Fix: give one of them")

    @property
    def target(self) -> tuple[str, str | None, str | None]:
        return self.name, self.turn, self.agent

    @property
    def huge(self) -> bool:
        return abs(self.value) > MAX_REWARD

    @property
    def wrong(self) -> str | None:
        """What is wrong with it, as a sentence."""
        if not math.isfinite(self.value):
            return f"reward {self.name!r} is {self.value}: give a finite number"
        if self.huge:
            return f"reward {self.name!r} is {self.value:g}: give a number between {-MAX_REWARD:g} and {MAX_REWARD:g}"
        if not self.name or not self.name.isprintable():  # surrogates are not printable either
            return f"a reward is called {self.name!r}: give it a name of printable characters"
        target = self.turn or self.agent or ""
        if not target.isprintable():
            return f"reward {self.name!r} is for {target!r}: name a turn or an agent with printable characters"
        return None


class Exclusion(Struct, frozen=True, kw_only=True, gc=False):
    """A turn that is to carry no loss, and why: what an `exclude` event says. The reason stands in metrics' names, as
    `excluded:<reason>`. Of the same turn the last one wins.

    >>> Exclusion(turn="g1.0/1/0", reason="title").wrong
    >>> Exclusion(turn="g1.0/1/0", reason="a title").wrong
    "the reason 'a title' is not a word of at most 64 letters, digits, '.', '-' and '_'"
    """

    turn: str
    reason: str

    @property
    def wrong(self) -> str | None:
        """What is wrong with it."""
        if not re.fullmatch(r"[\w.-]{1,64}", self.reason, re.ASCII):
            return f"the reason {self.reason!r} is not a word of at most 64 letters, digits, '.', '-' and '_'"
        return None if self.turn and self.turn.isprintable() else f"{self.turn!r} is not the id of a turn"


class Retry(Struct, frozen=True, kw_only=True, gc=False):
    """How often a rollout is tried again after one cause, and after how many seconds: twice as many each time.

    >>> Retry(limit=3, wait=0.5).pause(1), Retry(limit=3, wait=0.5).pause(3)
    (0.5, 2.0)
    """

    limit: Annotated[int, Meta(ge=0, le=1000, description="how often it is tried again")]
    wait: Annotated[float, Meta(ge=0, le=3600, description="seconds before that, twice as long each time")] = 0.0

    def pause(self, nth: int) -> float:
        """Seconds to wait before the nth time (from 1) it is tried again; an hour at most."""
        return min(self.wait * 2.0 ** min(nth - 1, 32), 3600.0)


RETRIES: dict[Cause, Retry] = {"lost_runner": Retry(limit=2), "engine_error": Retry(limit=2, wait=1.0)}
"""What is tried again unless a rollout says otherwise: what was not the agent's doing."""


FAILURES: dict[Cause, Failure] = {
    "agent_error": "zero",
    "timeout": "zero",
    "bad_reward": "exclude",
    "lost_runner": "exclude",
    "engine_error": "exclude",
    "cancelled": "exclude",
    "late": "exclude",
}
"""What failed rollouts count as unless a run says otherwise: what an agent did wrong is never better than what others
of its group did; what happened to it does not count, nor what has no known worth."""


TRAINED = "trained"
TokenCounts = dict[str, dict[str, int]]
"""Of a rollout's turns, by id: how many of the sampled tokens were `trained`, and how many were not, by reason."""


class Rollout(Struct, frozen=True, kw_only=True):
    """One run of an agent on one task. Rollouts with the same `group` are compared with each other.

    `seed` fixes every token the rollout samples in deterministic mode; it depends on the run's seed, the group and the
    member, never on attempt or time. `cause` and `detail` say why it failed. `rewards` are those of its last attempt.
    `retries` says which causes lead back to the queue, and how often; `due` is when a queued one may be leased again.
    `prompts` are the texts, by name, that its agent is given: it keeps the version that it began with. `excluded` has
    the turns of its last attempt that are to carry no loss, with the reason. `tokens` says what became of those that
    were sampled in the step that consumed it, turn by turn: how many were `trained`, how many not and why not.

    >>> r = Rollout(id="g000003.1", group="g000003", member=1, task=Task(id="calc-17"), seed=99, created=0.0)
    >>> r.status, r.ended
    ('queued', None)
    """

    id: str
    group: str
    member: int
    task: Task
    mode: Mode = "train"
    seed: int = 0
    status: Status = "queued"
    attempts: int = 0
    retries: dict[Cause, Retry] = field(default_factory=lambda: dict(RETRIES))
    due: float = 0.0
    created: float
    ended: float | None = None
    cause: Cause | None = None
    detail: str | None = None
    rewards: tuple[Reward, ...] = ()
    prompts: dict[str, str] = {}
    excluded: dict[str, str] = {}
    tokens: TokenCounts = {}

    def reward(self, name: str = "reward") -> float | None:
        """The rollout-wide reward called `name`, or None if nobody gave one."""
        for reward in self.rewards:
            if reward.target == (name, None, None):
                return reward.value
        return None


class Attempt(Struct, frozen=True, kw_only=True, gc=False):
    """One lease of a rollout by a runner. Only the last attempt of a rollout counts.

    `key` is the attempt's secret: it opens this attempt at the gateway and nothing else. Writes after `lease_until`
    passed and another attempt began are refused.

    >>> Attempt(rollout="g000003.1", number=1, runner="w0", key="k", started=0.0, lease_until=30.0).ended is None
    True
    """

    rollout: str
    number: int
    runner: str
    key: str
    started: float
    lease_until: float
    ended: float | None = None
    cause: Cause | None = None
    detail: str | None = None


class Lease(Struct, frozen=True, kw_only=True):
    """What a runner gets: the rollout to run and the attempt it runs it under."""

    rollout: Rollout
    attempt: Attempt


class Turn(Struct, frozen=True, kw_only=True):
    """One model call, token for token.

    `prompt_ids` are the ids the engine saw, `response_ids` the ids it sampled, `logprobs` one per sampled id.
    `versions` is run-length: [(first index, version)]. `parent` is the turn whose context this one extends exactly;
    `shared` counts the leading prompt ids taken over from it unchanged. Where a request could not extend any served
    context, `branch` says why. `requested` is what the agent asked for, `sampling` what was really used.

    A weather agent's second call, three prompt tokens longer than the first call's whole text:

    >>> first = Turn(id="g1.0/1/0", rollout="g1.0", attempt=1, agent="main", policy="main", prompt_ids=[1, 5, 2],
    ...     response_ids=[7, 8], logprobs=[-0.1, -0.7], versions=[(0, "1.4")], finish="tool_calls", started=0, ended=1)
    >>> second = Turn(id="g1.0/1/1", rollout="g1.0", attempt=1, agent="main", policy="main", parent=first.id, shared=5,
    ...     prompt_ids=[1, 5, 2, 7, 8, 4, 6, 2], response_ids=[9], logprobs=[-0.2], versions=[(0, "1.4")],
    ...     finish="stop", started=2, ended=3)
    >>> second.prompt_ids[: second.shared] == first.ids
    True
    """

    id: str
    rollout: str
    attempt: int
    agent: str = "main"
    policy: str = "main"
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, str]]
    sampling: Sampling = Sampling()
    requested: dict[str, Any] = {}
    finish: Finish
    parent: str | None = None
    shared: int = 0
    branch: str | None = None
    choice: int = 0
    choices: int = 1
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}
    started: float
    ended: float

    @property
    def ids(self) -> list[int]:
        """The whole path: what the engine saw and then sampled."""
        return self.prompt_ids + self.response_ids

    @property
    def outside(self) -> bool:
        """Answered by an outside model: it has messages and an answer, but no tokens that could carry loss."""
        return not self.prompt_ids

    @property
    def abandoned(self) -> bool:
        """Not delivered whole to the agent: recorded and counted, but trained with weight 0."""
        return self.finish in ("abandoned", "error")


class Event(Struct, frozen=True, kw_only=True):
    """Anything else an agent says while it runs. The `id` makes sure that one said twice, because the answer to the
    first time was lost, is recorded once. What an agent prints is a message with the stream's name:

    >>> Event(rollout="g1.0", attempt=1, kind="message", data={"stream": "stdout", "text": "hello"}, time=1.0).kind
    'message'
    """

    id: str = field(default_factory=lambda: secrets.token_hex(8))

    rollout: str
    attempt: int
    kind: EventKind
    data: dict[str, Any]
    time: float


class Step(Struct, frozen=True, kw_only=True):
    """One pass of the loop, committed at once: what was consumed, what was left out and why, what came of it.

    `number` counts from 1; step 0 is the model as it was before training. `dropped` maps rollout ids to the reason
    they carried no loss; they are consumed all the same. `digest` fingerprints the weights in deterministic mode.

    >>> Step(lineage=2, number=7, rollouts=["g000003.0"], metrics={}, time=0.0).version
    '2.7'
    """

    lineage: int
    number: int
    rollouts: list[str]
    dropped: dict[str, str] = {}
    metrics: dict[str, float]
    checkpoint: str | None = None
    digest: str | None = None
    superseded: bool = False
    time: float

    @property
    def version(self) -> str:
        return version(self.lineage, self.number)


class Policy(Struct, frozen=True, kw_only=True):
    """The thing being improved. `version` is the one that engines serve now.

    >>> Policy(name="main", version="1.0", model="strop/nano").kind
    'weights'
    """

    name: str
    version: str
    model: str
    kind: Literal["weights", "prompt"] = "weights"


DATA = "data"
"""The version of turns that no weights of their run sampled: copied from another run, or made of a transcript. Their
logprobs are those recorded there, or 0, and are compared with nobody's."""


def version(lineage: int, step: int) -> str:
    """The name of the weights that step `step` of lineage `lineage` made: '1.0' is where a run begins."""
    return f"{lineage}.{step}"


def parse_version(version: str) -> tuple[int, int]:
    """
    >>> parse_version("2.7")
    (2, 7)
    """
    lineage, _, step = version.partition(".")
    return int(lineage), int(step)


def parse_lineage(version: str) -> int:
    """
    >>> parse_lineage("2.7")
    2
    """
    return parse_version(version)[0]


def stable_hash(*parts: str | int | Sequence[int]) -> int:
    """A 63-bit hash that is the same in every process and on every machine; seeds are made from it.

    >>> stable_hash("run", 1) == stable_hash("run", 1) != stable_hash("run", "1")
    True
    """
    digest = hashlib.blake2b(msgspec.json.encode(parts), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
