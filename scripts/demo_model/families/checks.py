"""Series of numbers, yes-or-no questions, and single elements."""

from __future__ import annotations

from collections.abc import Iterator

from ..pairs import Pair
from .answer import answer

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
        yield answer(
            f"first_{name}(n: int) -> list[int]",
            f"Return the first n {phrase}.",
            f"return [{term} for i in range(1, n + 1)]",
        )
        yield answer(
            f"sum_of_{name}(n: int) -> int",
            f"Return the sum of the first n {phrase}.",
            f"return sum({term} for i in range(1, n + 1))",
        )
    yield answer(
        "multiplication_table(n: int) -> list[list[int]]",
        "Return the multiplication table of size n.",
        "return [[i * j for j in range(1, n + 1)] for i in range(1, n + 1)]",
    )
    yield answer(
        "countdown(n: int) -> list[int]",
        "Return the numbers from n down to 1.",
        "return list(range(n, 0, -1))",
    )
    yield answer(
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
        yield answer(f"{signature} -> bool", f"Return True if {question}.", f"return {test}")
    for ordinal, index in ORDINALS.items():
        for whole, argument in WHOLES.items():
            name = f"{ordinal}_{whole.split()[0]}"
            split = PARTS.get(whole, "")
            variable = split.split()[0] if split else argument.split(":")[0]
            pick = variable + index.format(variable)
            result = "int" if "digit" in whole else "object" if "list" in whole else "str"
            body = [split] if split else []
            body.append(f"return int({pick})" if result == "int" else f"return {pick}")
            yield answer(f"{name}({argument}) -> {result}", f"Return the {ordinal} {whole}.", *body)
