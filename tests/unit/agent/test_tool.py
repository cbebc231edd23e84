"""Functions as tools: what the model is told, and what comes of its calls."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import cloudpickle
import pytest
from msgspec import Struct

import strop
from strop.agent.functions import function_caller
from strop.agent.tool import Observation, Tool
from strop.errors import ConfigError
from tests.limits import stretch


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


@dataclass
class Place:
    city: str
    country: str = "NL"


class Span(TypedDict):
    first: int
    last: int


class Filter(Struct):
    word: str
    least: float = 0.5


@strop.tool
def everything(
    text: str,
    count: int,
    share: float,
    sure: bool,
    words: list[str],
    more: dict[str, int],
    mode: Literal["fast", "slow"],
    unit: Unit,
    place: Place,
    span: Span,
    filter: Filter,
    note: str | None = None,
    rest: list[int] = [1],  # noqa: B006
) -> dict[str, Any]:
    """Take one of everything,
    and give it back.

    This is for people who read code.

    Args:
        text: a text that goes on
            in the next line
        count (int): how many: 3, say
        place: where

    Returns:
        count: no argument at all
    """
    return {"count": count, "unit": unit.name, "city": place.city, "least": filter.least, "rest": rest, "span": span}


GOOD = {
    "text": "a", "count": "3", "share": 1, "sure": True, "words": ["x"], "more": {"a": 1}, "mode": "fast",
    "unit": "celsius", "place": {"city": "Delft"}, "span": {"first": 1, "last": 2}, "filter": {"word": "w"},
}  # fmt: skip


def test_hints_and_docstring_make_the_schema() -> None:
    about = everything.schema["function"]
    assert (about["name"], about["description"]) == ("everything", "Take one of everything, and give it back.")
    parameters = about["parameters"]
    properties = parameters["properties"]
    assert properties["text"] == {"type": "string", "description": "a text that goes on in the next line"}
    assert properties["count"] == {"type": "integer", "description": "how many: 3, say"}
    kinds = {"share": "number", "sure": "boolean", "words": "array", "more": "object"}
    assert {name: properties[name]["type"] for name in kinds} == kinds
    assert properties["words"]["items"] == {"type": "string"}
    assert properties["mode"]["enum"] == ["fast", "slow"]
    assert properties["note"]["default"] is None
    assert properties["place"]["description"] == "where"
    defined = parameters["$defs"]
    assert defined["Unit"]["enum"] == ["celsius", "fahrenheit"]
    assert defined["Place"]["required"] == ["city"]
    assert sorted(defined["Span"]["required"]) == ["first", "last"]
    assert defined["Filter"]["properties"]["least"]["default"] == 0.5
    assert "note" not in parameters["required"]
    assert "rest" not in parameters["required"]
    json.dumps(everything.schema)


async def test_arguments_are_converted_and_left_out_ones_have_their_defaults() -> None:
    result = await everything.run(json.dumps(GOOD))
    assert json.loads(result.text) == {
        "count": 3, "unit": "C", "city": "Delft", "least": 0.5, "rest": [1], "span": {"first": 1, "last": 2},
    }  # fmt: skip
    assert result.ok


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ("", "missing required field"),
        (json.dumps(GOOD | {"count": "many"}), "Expected `int`, got `str` - at `$.count`"),
        (json.dumps(GOOD | {"mode": "medium"}), "Invalid enum value 'medium'"),
        (json.dumps(GOOD | {"town": 1}), "unknown field `town`"),
        ('{"text": "\\ud800"}', "do not fit"),
        ("\ud800", "do not fit"),
        ("[" * 100_000, "do not fit"),
    ],
)
async def test_bad_arguments_say_what_is_expected(arguments: str, says: str) -> None:
    result = await everything.run(arguments)
    assert result.wrong == "arguments"
    assert says in result.text
    assert 'give {"text": string, "count": integer' in result.text
    assert '"mode": "fast" or "slow"' in result.text
    assert '"note": string or null (may be left out)' in result.text or '"note": null or string' in result.text


def test_it_is_still_the_plain_function() -> None:
    @strop.tool(name="sum_of", description="Add.", timeout=1)
    def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    assert add(1, b=2) == 3
    assert (add.__name__, add.schema["function"]["description"]) == ("sum_of", "Add.")
    assert add.run_now('{"a": 41}') == Observation("42")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@strop.tool
def fails() -> None:
    raise ValueError("one line\nand another")


@strop.tool
async def fails_later() -> None:
    raise KeyError("x")


@strop.tool
async def leaves() -> None:
    sys.exit(3)


@strop.tool
async def interrupts() -> None:
    raise KeyboardInterrupt


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("nothing to say")


@strop.tool
def mute() -> None:
    raise Mute


async def test_what_is_raised_is_one_line_without_a_traceback() -> None:
    assert await interrupts.run("{}") == Observation("error: RuntimeError: KeyboardInterrupt", "error")
    assert await mute.run("{}") == Observation("error: Mute", "error")
    assert await fails.run("{}") == Observation("error: ValueError: one line and another", "error")
    assert await fails_later.run("{}") == Observation("error: KeyError: 'x'", "error")
    assert await leaves.run("{}") == Observation("error: RuntimeError: SystemExit: 3", "error")


def test_one_that_takes_no_notice_holds_no_loop_up() -> None:
    @strop.tool(timeout=0.1)
    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    began = time.monotonic()
    assert stubborn.run_now("{}").wrong == "timeout"
    assert time.monotonic() - began < stretch(20)


async def test_one_that_hangs_holds_nothing_up() -> None:
    gate, ended = threading.Event(), threading.Event()

    @strop.tool(timeout=0.1)
    def sync_hang() -> str:
        gate.wait(30)
        ended.set()
        return "too late"

    @strop.tool(timeout=0.1)
    async def async_hang() -> None:
        await asyncio.sleep(30)

    @strop.tool(timeout=0.1)
    async def stubborn() -> None:
        for _ in range(4):
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                continue

    began = time.monotonic()
    results = await asyncio.gather(*(tool.run("{}") for tool in (sync_hang, async_hang, stubborn)))
    assert time.monotonic() - began < stretch(3)
    assert [result.wrong for result in results] == ["timeout"] * 3
    assert results[0].text == "error: sync_hang did not end within 0.1 s"
    assert not ended.is_set()
    gate.set()  # its thread goes on: it cannot be killed, as the docstring says
    assert await asyncio.to_thread(ended.wait, 10)


async def test_sync_ones_run_beside_each_other() -> None:
    both = threading.Barrier(2, timeout=10)

    @strop.tool(timeout=10)
    def meet() -> str:
        both.wait()
        return "met"

    assert [result.text for result in await asyncio.gather(meet.run("{}"), meet.run("{}"))] == ["met", "met"]


@dataclass
class Checked:
    how: str

    def __post_init__(self) -> None:
        raise {"key": KeyError("no such key"), "exit": SystemExit(2), "value": ValueError("below 0")}[self.how]


@pytest.mark.parametrize(
    ("how", "says"), [("key", "KeyError: 'no such key'"), ("exit", "SystemExit: 2"), ("value", "below 0 - at `$.what`")]
)
async def test_an_argument_that_refuses_to_be_made_does_not_fit(how: str, says: str) -> None:
    @strop.tool
    def take(what: Checked) -> None: ...

    result = await take.run(json.dumps({"what": {"how": how}}))
    assert result == Observation(
        f'error: the arguments of take do not fit: {says}; give {{"what": object}}', "arguments"
    )


# -- functions beside tools --------------------------------------------------------------------------------------------


class Shared:
    shares_loop = True


async def test_what_is_called_off_ends_before_the_next_is_called() -> None:
    """An environment whose step takes too long is closed after it, and closed for certain."""
    seen, begun, gate = list[str](), threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        gate.wait(30)
        seen.append("step")

    with function_caller(cast("strop.LLM", Shared())) as call:
        stepping = asyncio.ensure_future(call(step))
        await asyncio.to_thread(begun.wait, 10)
        stepping.cancel()
        closing = asyncio.ensure_future(call(seen.append, "close"))
        await asyncio.sleep(0.05)
        assert seen == []
        closing.cancel()
        gate.set()
        await call(seen.append, "reward")
        assert seen == ["step", "close", "reward"]
        with pytest.raises(RuntimeError, match="StopIteration"):
            await call(next, iter(()))


def test_a_function_that_never_ends_holds_up_no_exit() -> None:
    program = """if True:
        import asyncio, threading, types
        from strop.agent.functions import function_caller

        async def main():
            with function_caller(types.SimpleNamespace(shares_loop=True)) as call:
                try:
                    async with asyncio.timeout(0.2):
                        await call(threading.Event().wait)
                except TimeoutError:
                    print("called off")

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("called off\n", 0), done.stderr


# -- results -----------------------------------------------------------------------------------------------------------


@strop.tool(limit=100)
def gives(what: str) -> Any:
    if what == "many":
        return [[i] for i in range(1_000_000)]
    values: dict[str, Any] = {
        "none": None, "bytes": b"\x89PNG\x00", "view": memoryview(b"abc"), "list": [1, {"a": Place("Delft")}],
        "set": {1}, "object": object(), "nan": float("nan"), "surrogate": "a\ud800b", "long": "x" * 10_000_000,
        "empty": "",
    }  # fmt: skip
    return values[what]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("none", "null"),
        ("bytes", "5 bytes of binary data, which cannot be shown as text"),
        ("view", "3 bytes of binary data, which cannot be shown as text"),
        ("list", '[1,{"a":{"city":"Delft","country":"NL"}}]'),
        ("set", "[1]"),
        ("nan", "null"),
        ("surrogate", "a?b"),
        ("empty", ""),
    ],
)
async def test_results_are_text(what: str, text: str) -> None:
    assert await gives.run(json.dumps({"what": what})) == Observation(text)


async def test_an_object_that_json_does_not_know_is_shown_as_python_does() -> None:
    assert "<object object at" in (await gives.run('{"what": "object"}')).text


async def test_ten_megabytes_are_cut_with_a_note() -> None:
    result = await gives.run('{"what": "long"}')
    assert result.text == "x" * 100 + "\n[cut here: 9999900 of 10000000 characters are missing]"
    result = await gives.run('{"what": "many"}')
    assert result.text.startswith("[[0],[1]")
    assert result.text.endswith("characters are missing]")
    assert len(result.text) < 200


async def test_errors_are_cut_too() -> None:
    @strop.tool(limit=50)
    def loud() -> None:
        raise ValueError("x" * 1_000_000)

    assert len((await loud.run("{}")).text) < 120
    assert len((await loud.run("[" + "1," * 100_000)).text) < 120


# -- refused -----------------------------------------------------------------------------------------------------------


class Odd: ...


def named(x: str) -> None: ...
def hidden(__x: str) -> None: ...


def untyped(x): ...  # type: ignore[no-untyped-def]
def many(*xs: int) -> None: ...
def endless(x: float = float("inf")) -> None: ...
def garbled(x: "int int") -> None: ...  # type: ignore[syntax]  # noqa: F722
def odd(x: Odd) -> None: ...
def unknown(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (untyped, r"untyped does not say what x is\. Fix: write x: str, say"),
        (many, r"many takes \*xs"),
        (odd, "odd cannot be described"),
        (endless, "endless has a default that JSON cannot hold"),
        (garbled, "garbled cannot be described: SyntaxError"),
        (unknown, "unknown cannot be described: NameError: name 'Nowhere' is not defined"),
        (hidden, r"hidden takes __x\. Fix: give it a name that does not begin with __"),
        (3, "3 is not a function"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_by_name(function: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        strop.tool(function)


@pytest.mark.parametrize("name", ["get weather", "wetter_für", "<lambda>", "天気"])
def test_a_name_that_no_model_can_call_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not a name that models can call"):
        Tool(named, name=name)
    assert Tool(named, name="get-weather_2").parameters["required"] == ["x"]


@dataclass
class weather:
    city: str


@dataclass
class Arguments:
    wind: int


async def test_a_tool_may_have_the_name_of_a_type_that_it_takes() -> None:
    def forecast(where: weather, how: Arguments) -> str:
        return f"{where.city} {how.wind}"

    tool = Tool(forecast, name="weather")
    assert list(tool.parameters["properties"]) == ["where", "how"]
    assert sorted(about["required"][0] for about in tool.parameters["$defs"].values()) == ["city", "wind"]
    assert (await tool.run('{"where": {"city": "Delft"}, "how": {"wind": 3}}')).text == "Delft 3"


# -- elsewhere ---------------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.total = 0

    @strop.tool(timeout=3)
    def add(self, n: int) -> int:
        """Add to the total."""
        self.total += n
        return self.total


async def test_a_methods_tool_belongs_to_its_object() -> None:
    one, other = Counter(), Counter()
    assert list(one.add.schema["function"]["parameters"]["properties"]) == ["n"]
    await one.add.run('{"n": 2}')
    assert (await one.add.run('{"n": 3}')).text == "5"
    assert (one.total, other.total, one.add.timeout) == (5, 0, 3)
    assert other.add(7) == 7


SCRIPT = """
from __future__ import annotations
import sys, cloudpickle, strop
from typing import Literal

@strop.tool
def weather(city: str, unit: Literal["C", "F"] = "C") -> str:
    return city + unit

class Box:
    @strop.tool
    def put(self, unit: Literal["C", "F"]) -> str:
        return unit

sys.stdout.buffer.write(cloudpickle.dumps((weather, Box)))
"""


def test_it_goes_to_another_process_though_its_hints_are_only_names() -> None:
    """As a script's own tools do: names that only hints mention do not travel with a function."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    weather, Box = cloudpickle.loads(done.stdout)
    assert weather.run_now('{"city": "Delft"}').text == "DelftC"
    assert weather.run_now('{"city": "Delft", "unit": "K"}').wrong == "arguments"
    assert Box().put.run_now('{"unit": "F"}').text == "F"


def test_a_schema_of_ones_own() -> None:
    tool = Tool(lambda **given: sorted(given), name="any", parameters={"type": "object", "properties": {"a": {}}})
    assert tool.run_now('{"b": 1, "a": 2}').text == '["a","b"]'
    assert tool.run_now("3").wrong == "arguments"


def test_nothing_heavy_is_imported() -> None:
    heavy = "{'openai', 'mcp', 'anyio', 'torch'}"
    code = f"import sys, strop, strop.agent.mcp; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)
