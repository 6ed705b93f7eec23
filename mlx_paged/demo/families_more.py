"""More families of generated requests: conversions, geometry, sorting, records, series, checks."""

from __future__ import annotations

from collections.abc import Iterator

from .corpus import Pair
from .families import _answer, characters, joining, mappings, numbers_in_a_list, words

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
        yield _answer(
            f"{a}_to_{b}({a}: float) -> float", f"Convert {a} to {b}.", f"return {a} * {factor}"
        )
        yield _answer(
            f"{b}_to_{a}({b}: float) -> float", f"Convert {b} to {a}.", f"return {b} / {factor}"
        )
    for (a, b), formula in TEMPERATURES.items():
        name = a.lower()
        doc = f"Convert a temperature from {a} to {b}."
        yield _answer(f"{name}_to_{b.lower()}({name}: float) -> float", doc, f"return {formula}")
    yield _answer(
        "degrees_to_radians(degrees: float) -> float",
        "Convert degrees to radians.",
        "return degrees * math.pi / 180",
        imports="import math",
    )
    yield _answer(
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
        yield _answer(
            f"{shape}_{quantity}({names}) -> float".replace(
                "right triangle", "right_triangle"
            ).replace("surface ", "surface_"),
            f"Return the {quantity} of a {shape}.".replace("a ellipse", "an ellipse"),
            f"return {formula}",
            imports="import math" if "math." in formula else "",
        )


ORDERS = {
    "numbers": ("numbers: list[float]", "list[float]", "numbers", ""),
    "words alphabetically": ("words: list[str]", "list[str]", "words", ""),
    "words by length": ("words: list[str]", "list[str]", "words", "key=len"),
    "words ignoring case": ("words: list[str]", "list[str]", "words", "key=str.lower"),
    "strings by their last character": (
        "words: list[str]",
        "list[str]",
        "words",
        "key=lambda word: word[-1]",
    ),
    "numbers by absolute value": ("numbers: list[float]", "list[float]", "numbers", "key=abs"),
    "tuples by their first element": (
        "pairs: list[tuple]",
        "list[tuple]",
        "pairs",
        "key=lambda pair: pair[0]",
    ),
    "tuples by their second element": (
        "pairs: list[tuple]",
        "list[tuple]",
        "pairs",
        "key=lambda pair: pair[1]",
    ),
    "tuples by their last element": (
        "pairs: list[tuple]",
        "list[tuple]",
        "pairs",
        "key=lambda pair: pair[-1]",
    ),
    "dictionaries by a key": (
        "records: list[dict], key: str",
        "list[dict]",
        "records",
        "key=lambda record: record[key]",
    ),
    "people by age": (
        "people: list[dict]",
        "list[dict]",
        "people",
        'key=lambda person: person["age"]',
    ),
    "people by name": (
        "people: list[dict]",
        "list[dict]",
        "people",
        'key=lambda person: person["name"]',
    ),
    "products by price": (
        "products: list[dict]",
        "list[dict]",
        "products",
        'key=lambda product: product["price"]',
    ),
    "lists by length": ("lists: list[list]", "list[list]", "lists", "key=len"),
}


def orders() -> Iterator[Pair]:
    """Sorts with keys, both ways."""
    for phrase, (argument, result, name, key) in ORDERS.items():
        short = "sort_" + phrase.replace(" ", "_").replace("_their", "")
        for suffix, doc, flag in (
            ("", "", ""),
            ("_descending", " in descending order", "reverse=True"),
        ):
            options = "".join(f", {option}" for option in (key, flag) if option)
            yield _answer(
                f"{short}{suffix}({argument}) -> {result}",
                f"Sort a list of {phrase}{doc}.",
                f"return sorted({name}{options})",
            )


RECORDS = {
    "people": ("person", ["age", "height", "salary"]),
    "products": ("product", ["price", "weight", "rating"]),
    "students": ("student", ["grade", "score", "age"]),
    "orders": ("order", ["total", "quantity"]),
    "employees": ("employee", ["salary", "age"]),
}


def records() -> Iterator[Pair]:
    """Statistics and selections over lists of dictionaries."""
    for plural, (one, fields) in RECORDS.items():
        head = f"({plural}: list[dict])"
        for name in ["name", *fields]:
            names = name[:-1] + "ies" if name.endswith("y") else name + "s"
            yield _answer(
                f"{one}_{names}{head} -> list",
                f"Return the {names} of a list of {plural}.",
                f'return [{one}["{name}"] for {one} in {plural}]',
            )
            yield _answer(
                f"group_{plural}_by_{name}{head} -> dict",
                f"Group a list of {plural} by {name}.",
                "groups: dict = {}",
                f"for {one} in {plural}:",
                f'    groups.setdefault({one}["{name}"], []).append({one})',
                "return groups",
            )
        for name in fields:
            field = f'{one}["{name}"]'
            yield _answer(
                f"total_{name}{head} -> float",
                f"Return the total {name} of a list of {plural}.",
                f"return sum({field} for {one} in {plural})",
            )
            yield _answer(
                f"average_{name}{head} -> float",
                f"Return the average {name} of a list of {plural}.",
                f"if not {plural}:",
                "    return 0.0",
                f"return sum({field} for {one} in {plural}) / len({plural})",
            )
            for word, call in (("highest", "max"), ("lowest", "min")):
                yield _answer(
                    f"{word}_{name}{head} -> dict",
                    f"Return the {one} with the {word} {name}.",
                    f"return {call}({plural}, key=lambda {one}: {field})",
                )
            yield _answer(
                f"{plural}_above({plural}: list[dict], {name}: float) -> list[dict]",
                f"Return the {plural} whose {name} is above a limit.",
                f"return [{one} for {one} in {plural} if {field} > {name}]",
            )


SERIES = {
    "square numbers": "i * i",
    "cubes": "i**3",
    "even numbers": "2 * i",
    "odd numbers": "2 * i - 1",
    "powers of two": "2**i",
    "triangular numbers": "i * (i + 1) // 2",
    "multiples of three": "3 * i",
    "multiples of five": "5 * i",
    "natural numbers": "i",
}


def series() -> Iterator[Pair]:
    """Lists and sums of simple series."""
    for phrase, term in SERIES.items():
        name = phrase.replace(" ", "_")
        yield _answer(
            f"first_{name}(n: int) -> list[int]",
            f"Return the first n {phrase}.",
            f"return [{term} for i in range(1, n + 1)]",
        )
        yield _answer(
            f"sum_of_{name}(n: int) -> int",
            f"Return the sum of the first n {phrase}.",
            f"return sum({term} for i in range(1, n + 1))",
        )
    yield _answer(
        "multiplication_table(n: int) -> list[list[int]]",
        "Return the multiplication table of size n.",
        "return [[i * j for j in range(1, n + 1)] for i in range(1, n + 1)]",
    )
    yield _answer(
        "countdown(n: int) -> list[int]",
        "Return the numbers from n down to 1.",
        "return list(range(n, 0, -1))",
    )
    yield _answer(
        "multiples(number: int, count: int) -> list[int]",
        "Return the first multiples of a number.",
        "return [number * i for i in range(1, count + 1)]",
    )


CHECKS = [
    ("is_divisible(a: int, b: int)", "one number is divisible by another", "b != 0 and a % b == 0"),
    (
        "is_between(x: float, low: float, high: float)",
        "a number lies between two limits",
        "low <= x <= high",
    ),
    ("is_empty(items: list)", "a list is empty", "len(items) == 0"),
    ("contains(items: list, value: object)", "a list contains a value", "value in items"),
    ("is_empty_string(text: str)", "a string is empty", 'text == ""'),
    ("is_blank(text: str)", "a string is empty or only whitespace", "not text.strip()"),
    (
        "starts_with(text: str, prefix: str)",
        "a string starts with a prefix",
        "text[: len(prefix)] == prefix",
    ),
    ("ends_with(text: str, suffix: str)", "a string ends with a suffix", "text.endswith(suffix)"),
    ("contains_substring(text: str, part: str)", "a string contains a substring", "part in text"),
    ("is_upper(text: str)", "a string is in upper case", "text == text.upper()"),
    ("is_lower(text: str)", "a string is in lower case", "text == text.lower()"),
    ("is_vowel(letter: str)", "a letter is a vowel", 'letter.lower() in "aeiou"'),
    ("has_key(mapping: dict, key: object)", "a dictionary has a key", "key in mapping"),
    ("is_subset(a: list, b: list)", "one list is a subset of another", "set(a) <= set(b)"),
    (
        "is_disjoint(a: list, b: list)",
        "two lists have no elements in common",
        "not set(a) & set(b)",
    ),
    ("is_multiple(n: int, k: int)", "n is a multiple of k", "n % k == 0"),
    (
        "same_elements(a: list, b: list)",
        "two lists have the same elements",
        "sorted(a) == sorted(b)",
    ),
    (
        "equal_ignoring_case(a: str, b: str)",
        "two strings are equal ignoring case",
        "a.lower() == b.lower()",
    ),
    (
        "is_square(matrix: list[list])",
        "a matrix is square",
        "all(len(row) == len(matrix) for row in matrix)",
    ),
    (
        "is_symmetric(matrix: list[list])",
        "a matrix is symmetric",
        "matrix == [list(row) for row in zip(*matrix)]",
    ),
    (
        "is_triangle(a: float, b: float, c: float)",
        "three sides form a triangle",
        "a + b > c and a + c > b and b + c > a",
    ),
    ("is_weekend(day: str)", "a day is on the weekend", 'day in ("Saturday", "Sunday")'),
    ("is_adult(age: int)", "a person is an adult", "age >= 18"),
]
ORDINALS = {
    "first": "[0]",
    "second": "[1]",
    "third": "[2]",
    "last": "[-1]",
    "middle": "[len({0}) // 2]",
}
WHOLES = {
    "element of a list": "items: list",
    "character of a string": "text: str",
    "word of a sentence": "text: str",
}
WHOLES |= {"line of a text": "text: str", "digit of a number": "n: int"}
PARTS = {
    "word of a sentence": "words = text.split()",
    "line of a text": "lines = text.splitlines()",
}
PARTS |= {"digit of a number": "digits = str(abs(n))"}


def checks_and_picks() -> Iterator[Pair]:
    """Yes-or-no questions and single elements."""
    for signature, question, test in CHECKS:
        yield _answer(f"{signature} -> bool", f"Return True if {question}.", f"return {test}")
    for ordinal, index in ORDINALS.items():
        for whole, argument in WHOLES.items():
            name = f"{ordinal}_{whole.split()[0]}"
            split = PARTS.get(whole, "")
            variable = split.split()[0] if split else argument.split(":")[0]
            pick = variable + index.format(variable)
            result = "int" if "digit" in whole else "object" if "list" in whole else "str"
            body = [split] if split else []
            body.append(f"return int({pick})" if result == "int" else f"return {pick}")
            yield _answer(
                f"{name}({argument}) -> {result}", f"Return the {ordinal} {whole}.", *body
            )


def all_families() -> list[Pair]:
    """Returns every generated pair."""
    families = (
        numbers_in_a_list,
        words,
        characters,
        mappings,
        joining,
        conversions,
        geometry,
        orders,
        records,
        series,
    )
    return [pair for family in (*families, checks_and_picks) for pair in family()]
