"""Python functions as tools: what a model is told about them, and how its calls are run.

    def weather(city: str, days: int = 1) -> str:
        \"\"\"Tell the weather of the next days.

        Args:
            city: where
        \"\"\"

The type hints and the docstring make the description; a call's arguments are checked against the same hints. What goes
wrong with a call is its result, as text, so that the model can try again.

Left out: methods, arguments without a name, time limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from strop.errors import ConfigError
from strop.imports import one_line, resolve

SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?):", re.MULTILINE)
"""Where the parts of a docstring begin that are no description of the whole."""


class Tool:
    """A function that a model may call. Raises `ConfigError` for one that cannot be described."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.name = function, function.__name__
        self._arguments = arguments_of(function)

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAI's API writes tools.

        >>> def add(a: int, b: int = 1):
        ...     "Add two numbers."
        >>> Tool(add).schema["function"]["parameters"]["required"]
        ['a']
        """
        whole = msgspec.json.schema(self._arguments)
        defined: dict[str, Any] = whole["$defs"]
        parameters = defined.pop(self._arguments.__name__)
        shown = {key: parameters[key] for key in ("type", "properties", "required")}
        if defined:
            shown["$defs"] = defined
        about = {"name": self.name, "description": _parts(self.function)[0], "parameters": shown}
        return {"type": "function", "function": about}

    async def run(self, arguments: str) -> str:
        """The result of one call as text, or what was wrong."""
        try:
            given = msgspec.json.decode(arguments, type=self._arguments, strict=False)
        except (msgspec.MsgspecError, UnicodeError) as error:
            return f"error: the arguments of {self.name} do not fit: {error}"
        try:
            result = await _called(self.function, msgspec.structs.asdict(given))
            return result if isinstance(result, str) else msgspec.json.encode(result, enc_hook=str).decode()
        except Exception as error:
            return f"error: {one_line(error)}"


class Tools:
    """Tools by name; `schemas` is what requests say about them."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.schemas = [tool.schema for tool in tools]

    @classmethod
    def load(cls, specs: Sequence[str]) -> Tools:
        """From `FILE.py:name,name` and `package.module:name`."""
        found: list[Tool] = []
        for spec in specs:
            place, _, names = spec.rpartition(":")
            for name in names.split(","):
                function = resolve(f"{place}:{name.strip()}", "tools")
                if not inspect.isroutine(function):
                    raise ConfigError(
                        f"tools: {place}:{name.strip()} is no function: name one, with types and docstring"
                    )
                found.append(Tool(function))
        return cls(found)

    async def run(self, name: str, arguments: str) -> str:
        if (tool := self._tools.get(name)) is None:
            return f"error: there is no tool {name}"
        return await tool.run(arguments)


def arguments_of(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """A function's arguments as a record: its fields are what JSON is described by and checked against."""
    name, (_, about) = function.__name__, _parts(function)
    hints = get_type_hints(function, include_extras=True)
    fields: list[tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tools: {name} takes {parameter}, which has no name of its own: give it named arguments")
        if parameter.name not in hints:
            raise ConfigError(f"tools: {name} does not say what {parameter.name} is: write {parameter.name}: str, say")
        hint = hints[parameter.name]
        if parameter.name in about:
            hint = Annotated[hint, Meta(description=about[parameter.name])]
        given = msgspec.NODEFAULT if parameter.default is parameter.empty else parameter.default
        fields.append((parameter.name, hint, _default(given)))
    made = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    try:
        msgspec.json.schema(made)
    except TypeError as error:
        raise ConfigError(f"tools: {name} cannot be described: {str(error).splitlines()[0]}") from None
    return made


def _default(value: Any) -> Any:
    return msgspec.field(default_factory=lambda: value) if isinstance(value, list | dict | set) else value


def _parts(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What the docstring says of the whole, and of each argument in its section `Args:`."""
    text = inspect.getdoc(function) or ""
    found = list(SECTION.finditer(text))
    about: dict[str, str] = {}
    ends = [*(section.start() for section in found[1:]), len(text)]
    for section, end in zip(found, ends, strict=False):
        if section[1] in ("Args", "Arguments", "Parameters"):
            lines = text[section.end() : end]
            for name, said in re.findall(r"^\s+(\w+)(?: \([^)]*\))?:\s*(.+(?:\n\s{8,}.+)*)", lines, re.MULTILINE):
                about[name] = " ".join(said.split())
    return " ".join(text[: found[0].start() if found else None].split()), about


async def _called(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Run it beside the loop, in a thread that nobody has to wait for when the program ends."""
    if inspect.iscoroutinefunction(function):
        return await function(**given)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def work() -> None:
        try:
            outcome = function(**given), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(outcome))

    threading.Thread(target=work, name=f"tool-{function.__name__}", daemon=True).start()
    result, raised = await ended
    if raised is not None:
        raise raised if isinstance(raised, Exception) else RuntimeError(one_line(raised))
    return result
