"""Python functions as tools."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from strop import demo
from strop.agent.tool import Tool
from strop.agent.toolbox import Tools
from strop.cli.tool_functions import load
from strop.errors import StropError


@dataclass
class Place:
    city: str
    country: str = "NL"


def weather(place: Place, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """Tell the weather
    of the next days.

    Args:
        place: where it is,
            roughly
        days: how many

    Returns: what nobody need know
    """
    return {"city": place.city, "days": days, "unit": unit}


def test_the_demos_function_is_the_demos_tool():
    """So that a model the demo trained is shown in a chat what it was shown in training."""
    assert [Tool(demo.calculator).schema] == demo.TOOLS


def test_hints_and_docstring_make_the_description():
    about = Tool(weather).schema["function"]
    assert about["description"] == "Tell the weather of the next days."
    properties = about["parameters"]["properties"]
    assert properties["place"]["description"] == "where it is, roughly"
    assert properties["days"] == {"type": "integer", "default": 1, "description": "how many"}
    assert properties["unit"]["enum"] == ["C", "F"]
    assert about["parameters"]["required"] == ["place"]
    assert about["parameters"]["$defs"]["Place"]["required"] == ["city"]


def fails(path: str) -> str:
    raise FileNotFoundError(path)


def leaves() -> None:
    raise SystemExit(3)


async def later(text: str) -> str:
    return text.upper()


async def test_calls_are_checked_and_run_and_what_goes_wrong_is_their_result():
    tools = Tools([Tool(function) for function in (weather, fails, leaves, later)])
    assert (
        await tools.text("weather", '{"place": {"city": "Delft"}, "days": 2}') == '{"city":"Delft","days":2,"unit":"C"}'
    )
    assert await tools.text("weather", '{"place": {"city": "Delft"}, "days": "many"}') == (
        "error: the arguments of weather do not fit: Expected `int`, got `str` - at `$.days`; give "
        '{"place": object, "days": integer (may be left out), "unit": "C" or "F" (may be left out)}'
    )
    assert "unknown field `town`" in await tools.text("weather", '{"town": "Delft"}')
    assert (await tools.text("weather", "{")).startswith("error: the arguments of weather do not fit")
    assert await tools.text("fails", '{"path": "a"}') == "error: FileNotFoundError: a"
    assert await tools.text("leaves", "{}") == "error: RuntimeError: SystemExit: 3"
    assert await tools.text("later", '{"text": "a"}') == "A"
    assert (
        await tools.text("nothing", "{}") == "error: there is no tool nothing; there are weather, fails, leaves, later"
    )


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("good,untyped", r"untyped does not say what x is\. Fix: write x: str, say"),
        ("many", r"many takes \*xs"),
        ("odd", "odd cannot be described"),
        ("NUMBER", "NUMBER is not a function"),
        ("god", "Fix: write .*:good"),
    ],
)
def test_functions_that_cannot_be_tools_are_refused_by_name(tmp_path: Path, names: str, says: str):
    file = tmp_path / "mine_for_chat.py"
    file.write_text(
        "NUMBER = 3\n"
        "class Odd: pass\n"
        "def good(x: int): ...\n"
        "def untyped(x): ...\n"
        "def many(*xs: int): ...\n"
        "def odd(x: Odd): ...\n"
    )
    with pytest.raises(StropError, match=says):
        load([f"{file}:{names}"])
