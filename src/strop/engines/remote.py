"""An engine that is a server: many requests over HTTP to one that is kept running and kept at the current version.

    start ──▶ server answers ──▶ its version is known ──▶ current weights delivered and probed ──▶ requests
                 ▲                                                                                    │
                 └─────────── back-off ◀── it died: answers that had begun fail, others wait ◀────────┘

A new version is loaded while nothing is in flight, so every answer is of one version. What can be seen to be wrong with
it is refused before the server hears of it. If the server does not end up with what was sent, it is started again with
the version before. Weights are given by a `WeightSource`, which is asked again after every start.

Several policies may be adapters on the model that the server has (served_policies.py): their versions are loaded while
others answer.

What only vLLM or only sglang knows is in vllm/ and sglang/: the methods that are abstract here.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from msgspec.structs import replace

from strop.config import MAIN, SglangConfig, VllmConfig
from strop.engines.base import Chunk, Engine, GivenAnswer
from strop.engines.direct_line import DirectLine, LineHolder, refuse_prompt
from strop.engines.given_answers import score_paths
from strop.engines.receiver import ModelTensors, WeightReceiver, WeightSource, WeightsRefused
from strop.engines.served_policies import PolicyEngine, ServedModel, ServedVersion
from strop.engines.server_events import BrokenOff, SampledTokens
from strop.engines.server_process import (
    HERE,
    EngineServer,
    ExternalServer,
    ServerLauncher,
    ServerProgram,
    is_answering,
)
from strop.engines.server_state import ServerState
from strop.engines.weight_files import read_tensors
from strop.errors import ConfigError, EngineError
from strop.net.client import Client
from strop.types import Sampling

TRIES = 3
"""How often a request is sent that got no token because the server broke down."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before a server that died is started again: twice as many each time in a row."""
LOOK = 1.0
"""Seconds between two looks, while it is, whether others can answer by now."""
NOTICE = 5.0
"""Seconds until those who watch the server must have seen that it is gone."""


class ServerGone(EngineError):
    """The server went away while it was given a version; it is started again."""


class ServerApi(Protocol):
    """A server that was found to be one that can be spoken to. `context`: the most tokens it takes, if it says so."""

    @property
    def context(self) -> int | None: ...


A = TypeVar("A", bound=ServerApi)
S = TypeVar("S", VllmConfig, SglangConfig)


class RemoteEngine(Engine, Generic[A, S]):
    """One server and the policy it serves, or several that are adapters on one model.

    `renewed`: new versions will come. `version` is what the weights in the model's folder are called.
    """

    name: ClassVar[str]
    adapters: bool = False
    """Whether new versions are adapters, beside the weights that the server was started with."""
    gives_memory: bool = False
    """Whether the learner has the server's GPU memory while it is paused: it is not started again meanwhile."""

    def __init__(
        self,
        model: ServedModel,
        settings: S,
        *,
        log: Path,
        env: Mapping[str, str | None],
        renewed: bool,
        version: str,
        policies: Sequence[str] = (MAIN,),
        servers: ServerLauncher = HERE,
    ) -> None:
        self._model, self._context, self._settings = model, model.context, settings
        self._tensors = read_tensors(model.folder) if renewed else None
        self._server = self._make_server(log, env, servers)
        self._client: Client | None = None
        self._api: A | None = None
        self._served = {policy: ServedVersion(version) for policy in policies}
        self._first = policies[0]
        self._receiver: WeightReceiver | None = None  # of the present server
        self._paused = False
        self._num_loads = 0  # that are under way, and replace what is served
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._open = asyncio.Event()  # neither paused nor loading
        self._state = ServerState(f"{self.name} was not started")
        self._loading = asyncio.Lock()
        self._can_others: Callable[[], bool] = lambda: False  # answer
        self._holders: list[LineHolder] = []
        self._line: DirectLine | None = None  # that they have
        self._keeper: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._idle.set()
        self._open.set()

    def _make_server(self, log: Path, env: Mapping[str, str | None], servers: ServerLauncher) -> EngineServer:
        given, where = self._settings, f"engine.{self.name.lower()}"
        if given.url:
            return ExternalServer(self.name, given.url, timeout=given.start_timeout, setting=f"{where}.url")
        program = ServerProgram(
            name=self.name,
            command=self._command,
            log=log,
            env=env,
            timeout=given.start_timeout,
            settings=where,
            python=given.python,
            gpus=given.tensor_parallel,
        )
        return servers.make(program)

    # -- what differs --------------------------------------------------------------------------------------------------

    @abstractmethod
    def _command(self) -> list[str]:
        """How Python is told to start a server of ours, but for where it listens."""

    @abstractmethod
    async def _meet(self, client: Client) -> A:
        """Find out who answers. Raises `EngineError` if it is nobody we can speak to."""

    @abstractmethod
    def _stream(
        self,
        api: A,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
        max_tokens: int,
        model: str | None,
    ) -> AsyncGenerator[SampledTokens]:
        """Sampled tokens as they come, of what the server calls `model`. Raises `BrokenOff` or an error of `net.client`
        if the answer is cut off."""

    @abstractmethod
    async def _score(self, api: A, ids: Sequence[int], model: str | None) -> list[float]:
        """The logprob of every id but the first, at temperature 1, by what the server calls `model`."""

    @abstractmethod
    def _make_receiver(self, api: A, tensors: ModelTensors) -> WeightReceiver:
        """The end that takes new weights."""

    def _make_line(self, api: A) -> DirectLine | None:
        """How others may ask the server for tokens of what it serves now; None if they may not."""
        return None

    async def _find_abilities(self, api: A) -> None:
        """The server has the current version: see what else it can do."""

    async def _rest(self, api: A) -> None:
        """The engine is paused."""

    async def _wake(self, api: A) -> None:
        """The pause is over."""

    # ------------------------------------------------------------------------------------------------------------------

    def of_policy(self, policy: str) -> Engine:
        """This engine for one of its policies."""
        return self if len(self._served) == 1 else PolicyEngine(self, policy)

    async def start(self) -> None:
        """Returns once requests are answered. A server that does not come up the first time is not tried again, unless
        it had answered already."""
        if self._starting is None:  # several policies have it start
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        try:
            for left in reversed(range(TRIES)):
                try:
                    await self._bring_up()
                    break
                except EngineError:
                    if not left or self._client is None or not self._server.ours or await is_answering(self.url):
                        raise
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep(), name=f"strop-{self.name.lower()}")

    @property
    def context(self) -> int:
        return self._context

    @property
    def version(self) -> str:
        return self._served[self._first].version

    @property
    def serving(self) -> bool:
        return self._state.serving.is_set()

    @property
    def url(self) -> str:
        """Where the server is: for those who may speak to it directly."""
        return self._server.url

    # -- tokens --------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int], policy: str | None = None
    ) -> AsyncGenerator[Chunk]:
        refuse_prompt(prompt_ids, self._context, self._model.vocabulary)
        served = self._served[policy or self._first]
        most = min(sampling.max_tokens, self._context - len(prompt_ids))
        for left in reversed(range(TRIES)):
            api = await self._ready()
            (version, model), given = served.begin_answer(), False
            self._in_flight += 1
            self._idle.clear()
            try:
                async with aclosing(self._stream(api, prompt_ids, sampling, stop_ids, most, model)) as pieces:
                    async for piece in pieces:
                        given = True
                        yield Chunk(ids=piece.ids, logprobs=piece.logprobs, version=version, finish=piece.finish)
                return
            except (ConnectionError, TimeoutError, BrokenOff) as error:
                if given or not left:
                    raise EngineError(await self.explain(str(error))) from None
            finally:
                self._in_flight -= 1
                served.end_answer(model)
                if not self._in_flight:
                    self._idle.set()
                if self.adapters and self._receiver is not None:
                    await served.retire(self._receiver)
            await self._fell()

    async def explain(self, error: str, replica: int = 0) -> str:
        why = self._state.reason if await self._fell() else error
        return f"{self.name} broke down in the middle of an answer: {why}"

    @classmethod
    def refuse_scoring(cls, temperature: float) -> None:
        if temperature != 1.0:
            raise ConfigError(
                f"{cls.name} gives logprobs of given tokens at temperature 1 only, and they are sampled at "
                f"{temperature:g}. Fix: set policy.train.temperature=1, or serve the teacher with engine.name=embedded"
            )

    async def score(self, answers: Sequence[GivenAnswer], *, policy: str | None = None) -> list[list[float]]:
        """Answers are sent as prompts. A server that rests is woken for it; one that dies is asked again."""
        for answer in answers:
            refuse_prompt(answer.ids, self._context, self._model.vocabulary)
            self.refuse_scoring(answer.temperature)
        served = self._served[policy or self._first]
        for left in reversed(range(TRIES)):
            await self._until_serving()
            try:
                async with self._loading:  # it keeps its weights meanwhile
                    return await self._score_awake(served.name, answers)
            except EngineError:
                if not left or not await self._fell():
                    raise
        raise AssertionError("unreachable")

    async def _score_awake(self, model: str | None, answers: Sequence[GivenAnswer]) -> list[list[float]]:
        if (api := self._api) is None:
            raise EngineError(self._state.reason)
        try:
            if self._paused:
                await self._wake(api)
            return await score_paths(
                lambda ids: self._score(api, ids, model), answers, at_once=self._settings.max_sequences
            )
        finally:
            if self._paused:
                await self._rest(api)

    async def _ready(self) -> A:
        """Wait while paused, and while the server is started again, but not for ever."""
        while True:
            await self._open.wait()
            api = await self._until_serving()
            if self._open.is_set():  # it may have been closed again meanwhile
                return api

    async def _until_serving(self) -> A:
        deadline = asyncio.get_running_loop().time() + self._settings.restart_timeout
        with self._state.awaiting():
            while not self._state.settled.is_set() and not self._can_others():
                if (left := deadline - asyncio.get_running_loop().time()) <= 0:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._state.settled.wait(), min(left, LOOK))
        if not self._state.serving.is_set() or self._api is None:
            raise EngineError(self._state.reason)
        return self._api

    async def _fell(self) -> bool:
        """Something went wrong: is it that the server is gone? Then the state's `reason` says how."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state.failing.wait(), NOTICE)
        return self._state.failing.is_set()

    # -- pauses and versions -------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self._paused = True
        self._state.pause(paused=self._paused)
        await self._drain()
        async with self._loading:
            if self._paused and self._api is not None:
                await self._unless_gone(self._rest(self._api))  # started again, it rests then

    async def resume(self) -> None:
        async with self._loading:
            if self._api is not None:
                await self._unless_gone(self._wake(self._api))
            self._paused = False
            self._state.pause(paused=self._paused)
            self._open_again()  # once a load that still waits for the server has ended

    async def _unless_gone(self, work: Awaitable[None]) -> None:
        try:
            await work
        except EngineError:
            if not await self._fell():
                raise

    async def load(self, version: str, weights: WeightSource | None = None, *, policy: str | None = None) -> None:
        """Have the server take `version` while nothing is in flight, or beside what is where it is an adapter. The
        source is asked for it again when the server was started anew."""
        if self._tensors is None or weights is None:
            raise EngineError(
                f"{self.name} cannot load version {version}: it was started without a way to get new weights"
            )
        served = self._served[policy or self._first]
        if self.adapters:
            return await self._load_adapter(served, version, weights)
        self._num_loads += 1
        try:
            await self._drain()
            for left in reversed(range(TRIES)):
                await self._until_up()
                try:
                    async with self._loading:
                        return await self._load(served, version, weights)
                except ServerGone:
                    if not left or self._can_others():  # nobody waits then, and the next version is for it again
                        raise
        finally:
            self._num_loads -= 1
            self._open_again()

    async def _drain(self) -> None:
        """Begin nothing new, here and elsewhere, and return once nothing is in flight."""
        self._open.clear()
        self._tell_holders()
        await asyncio.gather(self._idle.wait(), *(holder.wait_until_idle() for holder in self._holders))

    def _open_again(self) -> None:
        if not self._paused and not self._num_loads:
            self._open.set()
            self._tell_holders()

    # -- those who ask the server themselves ---------------------------------------------------------------------------

    def give_way(self, can_others: Callable[[], bool]) -> None:
        self._can_others = can_others

    def lend(self, holder: LineHolder) -> None:
        self._holders.append(holder)
        if self._line is not None:
            holder.tell(self._line)

    def _tell_holders(self) -> None:
        """They may ask while requests here are sent as soon as they come, and wait while those wait."""
        line = self._make_line(self._api) if self._api is not None and self._state.serving.is_set() else None
        if line is not None and not self._open.is_set():
            line = replace(line, open=False)
        if line != self._line:
            self._line = line
            for holder in self._holders:
                holder.tell(line)

    async def _until_up(self) -> None:
        with self._state.awaiting(), contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state.up.wait(), self._settings.restart_timeout)
        if self._api is None:
            raise EngineError(self._state.reason)

    async def _load(self, served: ServedVersion, version: str, source: WeightSource) -> None:
        api, receiver = self._api, self._receiver
        if api is None or receiver is None:
            raise EngineError(self._state.reason)
        try:
            await served.load(version, source, receiver)
        except WeightsRefused:
            raise
        except BaseException as error:  # nobody knows what the server holds by now
            if isinstance(error, EngineError) and self._api is not api:  # it is being started again
                raise ServerGone(self._state.reason) from error
            self._fails(f"version {version} could not be loaded: {str(error) or 'it was given up'}")
            if self._server.ours:
                gone = isinstance(error, EngineError) and not await is_answering(self.url)
                await self._server.end()
                if gone:
                    self._is_down(self._state.reason)
                    raise ServerGone(self._state.reason) from error
            elif served.source is not None:
                await served.load(served.version, served.source, receiver)
                self._serves()
            raise
        self._serves()

    async def _load_adapter(self, served: ServedVersion, version: str, source: WeightSource) -> None:
        await served.wait_for_older()
        await self._until_up()
        async with self._loading:
            receiver = self._receiver
            if self._api is None or receiver is None:
                raise EngineError(self._state.reason)
            await served.load(version, source, receiver)
            if not self._state.serving.is_set():  # started again, it lacked a version that could not be had
                with contextlib.suppress(WeightsRefused):  # another policy's
                    await self._restore(receiver)
                    self._serves()
        await served.retire(receiver)

    async def _restore(self, receiver: WeightReceiver) -> None:
        for served in self._served.values():
            await served.restore(receiver)

    # -- the server ----------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Start the server and have it serve the current version."""
        await self._server.start()  # pauses do not wait for it
        async with self._loading:
            await self._hang_up()
            self._client = Client(self._server.url)
            self._api = api = await self._meet(self._client)
            self._context = min(self._context, api.context or self._context)
            self._receiver = self._make_receiver(api, self._tensors) if self._tensors is not None else None
            self._state.up.set()
            if self._receiver is not None:
                await self._restore(self._receiver)
            await self._find_abilities(api)
            if self._paused:
                await self._rest(api)
            self._serves()

    def _serves(self) -> None:
        self._state.serves()
        self._tell_holders()

    def _fails(self, reason: str) -> None:
        self._state.fails(reason)
        self._tell_holders()

    def _is_down(self, reason: str) -> None:
        self._fails(reason)
        self._api = None
        self._state.up.clear()

    async def _keep(self) -> None:
        """Start the server again when it dies, again and again if need be, until that seems to lead nowhere."""
        loop, failed = asyncio.get_running_loop(), 0
        while failed <= self._settings.restarts:
            if self._api is not None:
                since = loop.time()
                how = await self._server.wait_until_gone()
                self._is_down(f"{how}; it is being started again")
                await self._hang_up()
                failed = failed + 1 if loop.time() - since < LONGEST_WAIT else 0
            await asyncio.sleep(min(FIRST_WAIT * 2**failed, LONGEST_WAIT))
            if self.gives_memory:
                await self._state.needed.wait()
            try:
                await self._bring_up()
            except WeightsRefused as error:  # it answers, and waits for a version that can be had
                self._fails(str(error))
            except EngineError as error:
                failed += 1
                self._is_down(f"{self.name} cannot be started again: {error}")
                await self._server.end()
        self._state.gives_up()

    async def close(self) -> None:
        """Also when it is closed again, by another of its policies, and while it starts."""
        if self._starting not in (None, asyncio.current_task()):
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        self._is_down(f"{self.name} was closed")
        self._state.gives_up()
        await self._hang_up()
        await self._server.close()

    async def _hang_up(self) -> None:
        """Whoever waits for an answer hears that there will be none: a machine that is gone does not say so."""
        if self._client is not None:
            await self._client.close()
