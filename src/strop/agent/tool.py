"""A function that a model may call. What goes wrong with a call is its result, as text, for the model to try again.

    @strop.tool(timeout=5)
    def weather(city: str, days: int = 1) -> str:
        \"\"\"Tell the weather of the next days.

        Args:
            city: where
        \"\"\"
        return ...

    weather("Delft")                              the plain function
    weather.schema                                what the model is told, as OpenAI's API writes it
    await weather.run('{"city": "Delft"}')        a model's call: an Observation, whatever happens
    weather.run_now('{"city": "Delft"}')          the same where no event loop runs

A call takes `timeout` seconds at most. Then its result says so and the rollout goes on; but a thread cannot be killed:
a function that is not `async` runs in one and goes on in it, unheard, until it ends by itself or its process does. An
`async` one is cancelled. One that never gives the event loop back cannot be stopped at all: let it be a plain function.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine
from functools import cached_property
from typing import Any, Literal, cast, get_type_hints, overload

import msgspec
from msgspec import Struct

from strop.agent.functions import run_until_done
from strop.agent.schema import build_arguments, describe_parameters, parse_docstring, summarize_parameters
from strop.errors import ConfigError
from strop.imports import one_line

Function = Callable[..., Any]
TIMEOUT, LIMIT = 60.0, 10_000


class Observation(Struct, frozen=True):
    """What came of a call: the text that the model sees, and what went wrong, if anything did.

    >>> Observation("42").ok, Observation("error: there is no tool add", wrong="unknown").ok
    (True, False)
    """

    text: str
    wrong: Literal["unknown", "arguments", "error", "timeout"] | None = None

    @property
    def ok(self) -> bool:
        return self.wrong is None


class Tool:
    """A function as a tool. `parameters` is the JSON schema of its arguments where hints do not say it: then any JSON
    object is let through. `hints` are its type hints where they are known already. Raises `ConfigError` for a function
    that cannot be described.

    >>> def add(a: int, b: int = 1) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> Tool(add).schema["function"]["parameters"]["required"]
    ['a']
    >>> Tool(add).run_now('{"a": 2, "b": 40}').text
    '42'
    """

    def __init__(
        self,
        function: Function,
        *,
        name: str = "",
        description: str | None = None,
        parameters: dict[str, Any] | None = None,
        timeout: float | None = TIMEOUT,
        limit: int = LIMIT,
        hints: dict[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise ConfigError(f"tools: {function!r} is not a function. Fix: give one, with types and docstring")
        self.function, self.timeout, self.limit = function, timeout, limit
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.description = parse_docstring(function)[0] if description is None else description
        self._given = parameters
        if hints is not None:
            self._hints = hints
        self.__name__, self.__doc__ = self.name, function.__doc__
        self.__wrapped__ = function
        if not self._is_unbound:
            _ = self.parameters  # what cannot be described is said now

    @property
    def _is_unbound(self) -> bool:
        """A method in the body of its class: its arguments are known once it is taken from an object."""
        try:
            first = next(iter(inspect.signature(self.function).parameters), "")
        except ValueError:  # some built-in functions do not tell
            raise ConfigError(
                f"tools: {self.name} does not say what it takes. Fix: write a function around it"
            ) from None
        return self._given is None and first == "self"

    @cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return get_type_hints(self.function, include_extras=True)
        except Exception as error:  # a hint that is text may be anything
            raise ConfigError(f"tools: {self.name} cannot be described: {one_line(error)}") from None

    @cached_property
    def _arguments(self) -> type[Struct] | None:
        return build_arguments(self.function, self.name, self._hints) if self._given is None else None

    @cached_property
    def parameters(self) -> dict[str, Any]:
        return self._given or (describe_parameters(self._arguments) if self._arguments else {})

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAI's API writes tools."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Tool:
        """A method's tool, of the object it is taken from."""
        if owner is None:
            return self
        options: dict[str, Any] = {"timeout": self.timeout, "limit": self.limit, "parameters": self._given}
        hints = self._hints if self._given is None else None
        bound = self.function.__get__(owner, kind)
        return Tool(bound, name=self.name, description=self.description, hints=hints, **options)

    def __getstate__(self) -> dict[str, Any]:
        """For other processes: hints are sent as types, since the names they were written with may be gone there."""
        if self._given is None:
            _ = self._hints
        return {key: value for key, value in vars(self).items() if key not in ("_arguments", "parameters")}

    def __repr__(self) -> str:
        return f"Tool({self.name})"

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def run(self, arguments: str) -> Observation:
        """One call with its arguments as JSON. Nothing that goes wrong is raised."""
        try:
            given = self._read(arguments)
        except (Exception, SystemExit) as error:  # types of users may raise anything while they are made
            why = str(error) if isinstance(error, msgspec.MsgspecError | UnicodeError) else one_line(error)
            said = (
                f"error: the arguments of {self.name} do not fit: {why}; give {summarize_parameters(self.parameters)}"
            )
            return Observation(truncate(said, self.limit), "arguments")
        work = asyncio.ensure_future(call_function(self.function, given, self.name))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, even if it comes too late
        try:
            await asyncio.wait([work], timeout=self.timeout)
            if not work.done():
                return Observation(f"error: {self.name} did not end within {self.timeout:g} s", "timeout")
            if work.cancelled():
                return Observation(f"error: {self.name} was cancelled", "error")
            return to_observation(work.result(), self.limit)
        except (Exception, SystemExit) as error:
            return Observation(truncate(f"error: {one_line(error)}", self.limit), "error")
        finally:
            work.cancel()  # nobody waits for it, so that one that takes no notice holds nothing up

    def run_now(self, arguments: str) -> Observation:
        """The same where no event loop runs."""
        return run_until_done(self.run(arguments))

    def _read(self, arguments: str) -> dict[str, Any]:
        text = arguments if arguments.strip() else "{}"  # some models write nothing where there is nothing to say
        if self._arguments is None:
            return msgspec.json.decode(text, type=dict[str, Any])
        given = msgspec.json.decode(text, type=self._arguments, strict=False)
        return {name: getattr(given, name) for name in self._arguments.__struct_fields__}


@overload
def tool(function: Function, /) -> Tool: ...
@overload
def tool(
    *, name: str = "", description: str | None = None, timeout: float | None = TIMEOUT, limit: int = LIMIT
) -> Callable[[Function], Tool]: ...
def tool(function: Function | None = None, /, **options: Any) -> Tool | Callable[[Function], Tool]:
    """Make a tool of a typed function, sync or async: as `@strop.tool` or `@strop.tool(timeout=5, limit=2000)`.

    `timeout` is in seconds (None: no limit), `limit` in characters of the result; what is longer is cut, with a note
    that says how much is missing. On a method, each object has a tool of its own.
    """

    def make(function: Function) -> Tool:
        return Tool(function, **options)

    return make if function is None else make(function)


# -- results -----------------------------------------------------------------------------------------------------------


def to_observation(value: Any, limit: int) -> Observation:
    """What a function returned, as text: text as it is, bytes as a sentence, anything else as JSON."""
    if isinstance(value, Observation):
        return Observation(truncate(value.text, limit), value.wrong)
    if isinstance(value, bytes | bytearray | memoryview):
        size = len(bytes(cast("bytes", value)))
        return Observation(f"{size} bytes of binary data, which cannot be shown as text")
    text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return Observation(truncate(text, limit))


def truncate(text: str, limit: int) -> str:
    """At most `limit` characters of it, that can be written as UTF-8, and a note if there were more.

    >>> truncate("abcdefgh", 3)
    'abc\\n[cut here: 5 of 8 characters are missing]'
    """
    kept = text[:limit].encode(errors="replace").decode()
    missing = len(text) - limit
    return f"{kept}\n[cut here: {missing} of {len(text)} characters are missing]" if missing > 0 else kept


# -- running -----------------------------------------------------------------------------------------------------------


async def call_function(function: Function, given: dict[str, Any], name: str) -> Any:
    """What a function returns: one that is not `async` in a thread that nobody has to wait for."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await _contain(function(**given))
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def work() -> None:
        try:
            outcome = function(**given), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(outcome))

    threading.Thread(target=work, name=f"tool-{name}", daemon=True).start()
    result, raised = await ended
    if raised is not None:
        raise raised if isinstance(raised, Exception) else RuntimeError(one_line(raised))
    return await _contain(cast("Coroutine[Any, Any, Any]", result)) if inspect.isawaitable(result) else result


async def _contain(work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` comes to. A tool that wants to end the program (sys.exit, KeyboardInterrupt) only fails itself."""
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(one_line(error)) from None
