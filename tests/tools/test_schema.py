"""Schemas of tools, after the cases of transformers' `get_json_schema`."""

from __future__ import annotations

import datetime
import enum
import json
from typing import Literal

import pytest

from posttrain.errors import ToolError
from posttrain.tools.schema import build_schema


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


def weather(city: str, days: int | None = None, unit: Unit = Unit.CELSIUS, parts: Literal["day", "night"] = "day"):  # type: ignore[no-untyped-def]
    """Forecast the weather
    of a city.

    Args:
        city: name of the city,
            in English.
            note: no country
        days (int, optional): how many days
            from today
        unit:
            of the temperature

    Returns:
        city: the forecast
    """


def test_descriptions_can_span_lines_and_end_at_the_next_section() -> None:
    made = build_schema(weather, "weather")["function"]
    assert made["description"] == "Forecast the weather of a city."
    found = {name: one.get("description") for name, one in made["parameters"]["properties"].items()}
    assert found == {
        "city": "name of the city, in English. note: no country",
        "days": "how many days from today",
        "unit": "of the temperature",
        "parts": None,
    }
    assert made["parameters"]["required"] == ["city"]


def test_section_after_the_arguments_describes_no_argument() -> None:
    def double(x: int) -> int:
        """Double it.

        Arguments:
            x: a number

        Raises:
            ValueError: if it is large

        Example:
            x: 3
        """
        return 2 * x

    (one,) = build_schema(double, "double")["function"]["parameters"]["properties"].values()
    assert one == {"type": "integer", "description": "a number"}


def test_defaults_are_json() -> None:
    def plan(
        unit: Unit = Unit.KELVIN,
        start: datetime.date = datetime.date(2024, 1, 2),
        hours: tuple[int, ...] = (6, 18),
        days: int | None = None,
    ) -> None:
        """Plan."""

    made = build_schema(plan, "plan")["function"]["parameters"]["properties"]
    assert {name: one["default"] for name, one in made.items()} == {
        "unit": "kelvin",
        "start": "2024-01-02",
        "hours": [6, 18],
        "days": None,
    }
    json.dumps(made)


def test_default_without_json_representation_is_refused() -> None:
    def bad(x: int = object()) -> None:  # type: ignore[assignment]
        """Do."""

    with pytest.raises(ToolError, match="the default of `x` has no JSON form"):
        build_schema(bad, "bad")
