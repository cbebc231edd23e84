"""Several engines behind one policy: who answers, who takes over, and what waits."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from strop.engines.base import Chunk, Engine, GivenAnswer
from strop.engines.direct_line import DirectLine, LineHolder
from strop.engines.scripted import Answer, Breaks, Scripted
from strop.errors import ContextOverflow, EngineError
from strop.gateway import replicas as module
from strop.gateway.replicas import Replicas
from strop.types import Sampling


class Letters:
    """Tokens that are letters."""

    end_of_turn = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:  # type: ignore[override]
        return "".join(map(chr, ids))


def engine(answer: Answer = "ok", **options) -> Scripted:
    return Scripted(lambda asked: answer, Letters(), chunk=1, **options)  # type: ignore[arg-type]


async def ask(engine: Engine, prompt: str = "hi") -> str:
    ids = [ord(letter) for letter in prompt]
    chunks: AsyncIterator[Chunk] = engine.generate(ids, Sampling(max_tokens=50), stop_ids=[0])
    return "".join(chr(i) for i in [i async for chunk in chunks for i in chunk.ids] if i)


def asked(*engines: Scripted) -> list[int]:
    return [len(engine.calls) for engine in engines]


async def test_a_rollout_stays_where_it_began_and_rollouts_are_spread() -> None:
    engines = [engine() for _ in range(3)]
    replicas = Replicas(engines)
    for _ in range(4):
        for rollout in ("a", "b", "c"):
            assert await ask(replicas.of(rollout), rollout) == "ok"
    assert asked(*engines) == [4, 4, 4]
    for one in engines:
        assert len({call.asked.prompt for call in one.calls}) == 1


@pytest.mark.parametrize("count", [2, 4])
async def test_a_crowded_replica_hands_over_to_the_one_with_the_least_to_do(count: int) -> None:
    engines = [engine(latency=0.05) for _ in range(count)]
    replicas = Replicas(engines)
    await ask(replicas.of("a"))
    first = next(i for i, one in enumerate(engines) if one.calls)
    busy = [asyncio.create_task(ask(replicas.of("a"))) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert asked(engines[first]) == [3]  # twice as much as nothing is still little
    busy += [asyncio.create_task(ask(replicas.of("a"))) for _ in range(4)]
    await asyncio.gather(*busy)
    assert sum(asked(*engines)) == 7
    assert asked(engines[first]) == [4]
    assert max(asked(*engines)) == 4


async def test_a_request_looks_at_a_few_replicas_however_many_there_are() -> None:
    looks = [0]

    class Watched(Scripted):
        @property
        def serving(self) -> bool:
            looks[0] += 1
            return True

        @property
        def context(self) -> int:
            looks[0] += 1
            return 100

    replicas = Replicas([Watched(lambda asked: "ok", Letters(), chunk=1) for _ in range(256)])  # type: ignore[arg-type]
    rollouts = [f"r{number}" for number in range(256)]
    homes = [replicas.pick(rollout) for rollout in rollouts]
    assert len(set(map(id, homes))) == 256
    looks[0] = 0
    for _ in range(4):
        assert [replicas.pick(rollout) for rollout in rollouts] == homes
        assert [replicas.context for _ in rollouts] == [100] * 256
    assert looks[0] / 1024 < 2 * module.LOOKS + 2


async def test_one_that_hangs_and_one_that_fails_starve_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST", 60.0)
    hung, broken = engine(latency=600.0), engine(EngineError("out of memory"))
    well = [engine(latency=0.002) for _ in range(30)]
    replicas = Replicas([*well, hung, broken])

    async def talk(rollout: str) -> None:
        for _ in range(5):
            await ask(replicas.of(rollout))

    talks = [asyncio.create_task(talk(f"r{number}")) for number in range(640)]
    async with asyncio.timeout(60):
        while sum(not task.done() for task in talks) > asked(hung)[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    stuck = [task for task in talks if not task.done()]
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
    assert 20 <= len(stuck) <= 22  # its share of those that began at once, and nobody after them
    assert asked(broken) == [1]
    assert max(asked(*well)) < 2 * 640 * 5 / 30
    assert all(replica.in_flight == 0 for replica in replicas._replicas)


async def test_a_replica_that_fails_is_replaced_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST", 0.1)
    broken = [True]
    one = Scripted(lambda asked: EngineError("out of memory") if broken[0] else "back", Letters(), chunk=1)  # type: ignore[arg-type]
    other = engine()
    replicas = Replicas([one, other])
    said = [await ask(replicas.of("a")) for _ in range(3)]
    assert said == ["ok"] * 3
    assert asked(one, other) == [1, 3]  # it is left alone for a while
    broken[0] = False
    await asyncio.sleep(0.15)
    assert [await ask(replicas.of(rollout)) for rollout in ("b", "a")] == ["back", "ok"]


async def test_one_that_is_started_again_is_not_waited_for() -> None:
    class Down(Scripted):
        serving = True

    down, other = Down(lambda asked: "back", Letters(), chunk=1), engine()  # type: ignore[arg-type]
    replicas = Replicas([down, other])
    assert await ask(replicas.of("a")) == "back"
    down.serving = False
    assert [await ask(replicas.of(rollout)) for rollout in "abc"] == ["ok"] * 3
    down.serving = True
    assert await ask(replicas.of("d")) == "back"
    alone = Down(lambda asked: "waited", Letters(), chunk=1)  # type: ignore[arg-type]
    alone.serving = False
    assert await ask(Replicas([alone]).of("a")) == "waited"  # nobody else could


async def test_one_that_does_not_come_up_is_told() -> None:
    class Missing(Scripted):
        async def start(self) -> None:
            raise EngineError("no such GPU")

    with pytest.raises(EngineError, match="no such GPU"):
        await Replicas([engine(), Missing([], Letters())]).start()  # type: ignore[arg-type]


async def test_what_was_given_out_cannot_be_begun_anew() -> None:
    one, other = engine(Breaks("half", EngineError("the GPU is gone"))), engine()
    replicas = Replicas([one, other])
    with pytest.raises(EngineError, match="the GPU is gone"):
        await ask(replicas.of("a"))
    assert asked(one, other) == [1, 0]
    assert await ask(replicas.of("a")) == "ok"


async def test_when_all_have_failed_the_reason_is_told_and_the_next_request_tries_again() -> None:
    engines = [engine(EngineError(f"engine {n} died")) for n in range(2)]
    replicas = Replicas(engines)
    for times in (1, 2):
        with pytest.raises(EngineError, match=r"engine \d died"):
            await ask(replicas.of("a"))
        assert sum(asked(*engines)) >= 2 * times - 1


async def test_a_prompt_that_is_too_long_is_nobodys_failure() -> None:
    engines = [engine(context=4), engine(context=8)]
    replicas = Replicas(engines)
    assert replicas.context == 4
    with pytest.raises(ContextOverflow):
        await ask(replicas.of("a"), "x" * 100)
    await ask(replicas.of("b"))
    await ask(replicas.of("c"))
    assert max(asked(*engines)) == 1


async def test_requests_wait_while_paused_and_then_are_answered() -> None:
    engines = [engine(latency=0.02), engine(latency=0.02)]
    replicas = Replicas(engines, patience=5)
    running = asyncio.create_task(ask(replicas.of("a")))
    await asyncio.sleep(0.01)
    await replicas.pause()
    assert running.done()  # what was in flight is finished first
    waiting = [asyncio.create_task(ask(replicas.of(rollout))) for rollout in "abc"]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    await replicas.load("1.1")
    await replicas.resume()
    assert await asyncio.gather(*waiting) == ["ok"] * 3
    assert {one.version for one in engines} == {"1.1"}


async def test_a_pause_without_end_is_told() -> None:
    replicas = Replicas([engine()], patience=0.1)
    await replicas.pause()
    with pytest.raises(EngineError, match=r"paused for more than 0.1 s.*gateway.pause_timeout"):
        await ask(replicas.of("a"))
    await replicas.resume()
    assert await ask(replicas.of("a")) == "ok"


async def test_a_replica_without_the_new_version_serves_no_more_until_it_has_one() -> None:
    class Stuck(Scripted):
        stuck = True

        async def load(self, version: str, weights: object = None) -> None:
            if self.stuck:
                raise EngineError("weights did not arrive")
            await super().load(version)

    stuck = Stuck(lambda asked: "old", Letters(), chunk=1)  # type: ignore[arg-type]
    replicas = Replicas([stuck, engine("new")])
    await replicas.load("1.1")
    assert {await ask(replicas.of(rollout)) for rollout in "abcd"} == {"new"}
    stuck.stuck = False
    await replicas.load("1.2")
    assert stuck.version == "1.2"
    stuck.stuck = True
    with pytest.raises(EngineError, match="weights did not arrive"):
        await Replicas([stuck]).load("1.3")  # nobody has it


class Served(Scripted):
    """One that lends a line to its server, and gets no version while it is `stuck`."""

    stuck = False

    def lend(self, holder: LineHolder) -> None:
        self.holder = holder
        holder.tell(self.line())

    def line(self) -> DirectLine:
        return DirectLine(url="http://here", model="m", version=self.version, context=10, vocabulary=10)

    async def load(self, version: str, weights: object = None) -> None:
        if self.stuck:
            raise EngineError("weights did not arrive")
        await super().load(version)
        self.holder.tell(self.line())


class Lines(LineHolder):
    """The lines that somebody else was told of, by replica."""

    def __init__(self) -> None:
        self.versions: dict[int, str | None] = {}
        self.number = 0

    def of_replica(self, number: int) -> LineHolder:
        lines = Lines()
        lines.versions, lines.number = self.versions, number
        return lines

    def tell(self, line: DirectLine | None) -> None:
        self.versions[self.number] = None if line is None else line.version

    async def wait_until_idle(self) -> None: ...


async def test_nobody_else_asks_a_replica_without_the_new_version_either() -> None:
    engines = [Served(lambda asked: "ok", Letters(), chunk=1) for _ in range(2)]  # type: ignore[arg-type]
    replicas, lines = Replicas(engines), Lines()
    replicas.lend(lines)
    await replicas.load("1.1")
    assert lines.versions == {0: "1.1", 1: "1.1"}
    engines[0].stuck = True
    await replicas.load("1.2")
    assert lines.versions == {0: None, 1: "1.2"}
    engines[0].holder.tell(engines[0].line())  # its server was started again, with the version that it had
    assert lines.versions == {0: None, 1: "1.2"}
    engines[0].stuck = False
    await replicas.load("1.3")
    assert lines.versions == {0: "1.3", 1: "1.3"}


async def test_leaving_early_ends_the_work_and_frees_the_place() -> None:
    one = engine("a long answer", latency=0.01)
    replicas = Replicas([one])
    stream = replicas.of("a").generate([104], Sampling(max_tokens=50), stop_ids=[0])
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert not one.calls[0].finished
    assert one._in_flight == replicas._replicas[0].in_flight == 0


async def test_given_answers_are_scored_by_one_that_can_also_while_they_are_paused() -> None:
    class Broken(Scripted):
        async def score(self, answers: list[GivenAnswer]) -> list[list[float]]:  # type: ignore[override]
            raise EngineError("it is broken")

    broken = Broken([], Letters())  # type: ignore[arg-type]
    replicas = Replicas([broken, engine(logprob=-2.0)])
    answers = [GivenAnswer(prompt_ids=[1], response_ids=[2, 3])]
    for _ in range(2):
        assert await replicas.score(answers) == [[-2.0, -2.0]]
    await replicas.pause()
    assert await replicas.of("a").score(answers) == [[-2.0, -2.0]]
    with pytest.raises(EngineError, match="it is broken"):
        await Replicas([broken]).score(answers)
