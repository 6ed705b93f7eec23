"""Conversions of units, and geometry."""

from __future__ import annotations

from collections.abc import Iterator

from ..pairs import Pair
from .answer import answer

# (from, to): factor
UNITS = {
    ("kilometers", "miles"): 0.621371,
    ("meters", "feet"): 3.28084,
    ("centimeters", "inches"): 0.393701,
    ("kilograms", "pounds"): 2.20462,
    ("grams", "ounces"): 0.035274,
    ("liters", "gallons"): 0.264172,
    ("meters", "kilometers"): 0.001,
    ("meters", "centimeters"): 100,
    ("hours", "minutes"): 60,
    ("minutes", "seconds"): 60,
    ("hours", "seconds"): 3600,
    ("days", "hours"): 24,
    ("weeks", "days"): 7,
    ("bytes", "kilobytes"): 0.0009765625,
    ("megabytes", "bytes"): 1048576,
    ("dollars", "cents"): 100,
    ("yards", "meters"): 0.9144,
}
TEMPERATURES = {
    ("Celsius", "Fahrenheit"): "celsius * 9 / 5 + 32",
    ("Fahrenheit", "Celsius"): "(fahrenheit - 32) * 5 / 9",
    ("Celsius", "Kelvin"): "celsius + 273.15",
    ("Kelvin", "Celsius"): "kelvin - 273.15",
}


def conversions() -> Iterator[Pair]:
    """Units and temperatures."""
    for (a, b), factor in UNITS.items():
        yield answer(
            f"{a}_to_{b}({a}: float) -> float", f"Convert {a} to {b}.", f"return {a} * {factor}"
        )
        yield answer(
            f"{b}_to_{a}({b}: float) -> float", f"Convert {b} to {a}.", f"return {b} / {factor}"
        )
    for (a, b), formula in TEMPERATURES.items():
        name = a.lower()
        doc = f"Convert a temperature from {a} to {b}."
        yield answer(f"{name}_to_{b.lower()}({name}: float) -> float", doc, f"return {formula}")
    yield answer(
        "degrees_to_radians(degrees: float) -> float",
        "Convert degrees to radians.",
        "return degrees * math.pi / 180",
        imports="import math",
    )
    yield answer(
        "radians_to_degrees(radians: float) -> float",
        "Convert radians to degrees.",
        "return radians * 180 / math.pi",
        imports="import math",
    )


SHAPES = [
    ("area", "circle", "radius", "math.pi * radius**2"),
    ("circumference", "circle", "radius", "2 * math.pi * radius"),
    ("diameter", "circle", "radius", "2 * radius"),
    ("area", "square", "side", "side * side"),
    ("perimeter", "square", "side", "4 * side"),
    ("area", "rectangle", "width height", "width * height"),
    ("perimeter", "rectangle", "width height", "2 * (width + height)"),
    ("diagonal", "rectangle", "width height", "math.sqrt(width**2 + height**2)"),
    ("area", "triangle", "base height", "base * height / 2"),
    ("perimeter", "triangle", "a b c", "a + b + c"),
    ("area", "trapezoid", "a b height", "(a + b) * height / 2"),
    ("area", "parallelogram", "base height", "base * height"),
    ("area", "ellipse", "a b", "math.pi * a * b"),
    ("volume", "cube", "side", "side**3"),
    ("surface area", "cube", "side", "6 * side**2"),
    ("volume", "sphere", "radius", "4 / 3 * math.pi * radius**3"),
    ("surface area", "sphere", "radius", "4 * math.pi * radius**2"),
    ("volume", "cylinder", "radius height", "math.pi * radius**2 * height"),
    ("volume", "cone", "radius height", "math.pi * radius**2 * height / 3"),
    ("volume", "box", "width height depth", "width * height * depth"),
    ("hypotenuse", "right triangle", "a b", "math.sqrt(a * a + b * b)"),
]


def geometry() -> Iterator[Pair]:
    """Formulas of shapes."""
    for quantity, shape, arguments, formula in SHAPES:
        names = ", ".join(f"{argument}: float" for argument in arguments.split())
        yield answer(
            f"{shape}_{quantity}({names}) -> float".replace(
                "right triangle", "right_triangle"
            ).replace("surface ", "surface_"),
            f"Return the {quantity} of a {shape}.".replace("a ellipse", "an ellipse"),
            f"return {formula}",
            imports="import math" if "math." in formula else "",
        )
