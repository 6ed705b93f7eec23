"""Numbers of a list: aggregates over one kind of number, and elementwise operations."""

from __future__ import annotations

from collections.abc import Iterator

from ..pairs import Pair
from .answer import answer

NUMBER_KINDS = {
    "even": "n % 2 == 0",
    "odd": "n % 2 != 0",
    "positive": "n > 0",
    "negative": "n < 0",
    "nonzero": "n != 0",
    "two-digit": "10 <= abs(n) <= 99",
    "single-digit": "abs(n) < 10",
    "multiples of three among the": "n % 3 == 0",
    "multiples of five among the": "n % 5 == 0",
    "multiples of seven among the": "n % 7 == 0",
    "multiples of ten among the": "n % 10 == 0",
}


def numbers_in_a_list() -> Iterator[Pair]:
    """Aggregates over one kind of number."""
    for kind, test in NUMBER_KINDS.items():
        noun = kind.removesuffix(" among the")
        things = noun if noun != kind else f"{kind} numbers"
        name = noun.replace(" ", "_").replace("-", "_")
        generator = f"n for n in numbers if {test}"
        yield answer(
            f"sum_{name}(numbers: list[int]) -> int",
            f"Return the sum of the {things} in a list.",
            f"return sum({generator})",
        )
        yield answer(
            f"count_{name}(numbers: list[int]) -> int",
            f"Return the number of {things} in a list.",
            f"return sum(1 for n in numbers if {test})",
        )
        yield answer(
            f"filter_{name}(numbers: list[int]) -> list[int]",
            f"Return the {things} of a list.",
            f"return [{generator}]",
        )
        yield answer(
            f"remove_{name}(numbers: list[int]) -> list[int]",
            f"Return the list without its {things}.",
            f"return [n for n in numbers if not {test}]"
            if "<=" in test
            else f"return [n for n in numbers if not ({test})]",
        )
        yield answer(
            f"average_{name}(numbers: list[int]) -> float",
            f"Return the average of the {things} in a list.",
            f"chosen = [{generator}]",
            "if not chosen:",
            "    return 0.0",
            "return sum(chosen) / len(chosen)",
        )
        yield answer(
            f"product_{name}(numbers: list[int]) -> int",
            f"Return the product of the {things} in a list.",
            "result = 1",
            "for n in numbers:",
            f"    if {test}:",
            "        result *= n",
            "return result",
        )
        for word, call in (("largest", "max"), ("smallest", "min")):
            yield answer(
                f"{word}_{name}(numbers: list[int]) -> int | None",
                f"Return the {word} of the {things} in a list.",
                f"return {call}(({generator}), default=None)",
            )
        for word, call in (("all", "all"), ("any", "any")):
            subject = "all numbers of a list are" if word == "all" else "any number of a list is"
            if noun == kind:
                yield answer(
                    f"{word}_{name}(numbers: list[int]) -> bool",
                    f"Return True if {subject} {kind}.",
                    f"return {call}({test} for n in numbers)",
                )
        yield answer(
            f"first_{name}(numbers: list[int]) -> int | None",
            f"Return the first of the {things} in a list.",
            "for n in numbers:",
            f"    if {test}:",
            "        return n",
            "return None",
        )
        if noun == kind and kind != "nonzero":
            yield answer(
                f"is_{name}(n: int) -> bool",
                f"Return True if a number is {kind}.",
                f"return {test}",
            )


MAPPINGS = {
    "Double every number in a list": ("double_all", "2 * n"),
    "Triple every number in a list": ("triple_all", "3 * n"),
    "Halve every number in a list": ("halve_all", "n / 2"),
    "Square every number in a list": ("square_all", "n**2"),
    "Cube every number in a list": ("cube_all", "n**3"),
    "Negate every number in a list": ("negate_all", "-n"),
    "Round every number in a list": ("round_all", "round(n)"),
    "Increment every number in a list": ("increment_all", "n + 1"),
    "Decrement every number in a list": ("decrement_all", "n - 1"),
    "Take the absolute value of every number in a list": ("absolute_all", "abs(n)"),
}
STRING_MAPPINGS = {
    "Convert every string in a list to upper case": ("upper_all", "word.upper()", "str"),
    "Convert every string in a list to lower case": ("lower_all", "word.lower()", "str"),
    "Capitalize every string in a list": ("capitalize_all", "word.capitalize()", "str"),
    "Strip every string in a list": ("strip_all", "word.strip()", "str"),
    "Reverse every string in a list": ("reverse_all", "word[::-1]", "str"),
    "Return the lengths of the strings in a list": ("lengths", "len(word)", "int"),
    "Return the first letter of every word in a list": ("first_letters", "word[0]", "str"),
    "Return the last letter of every word in a list": ("last_letters", "word[-1]", "str"),
    "Convert a list of strings to integers": ("to_integers", "int(word)", "int"),
    "Convert a list of strings to floats": ("to_floats", "float(word)", "float"),
}


def mappings() -> Iterator[Pair]:
    """One operation on every element."""
    for doc, (name, expression) in MAPPINGS.items():
        yield answer(
            f"{name}(numbers: list[float]) -> list[float]",
            doc + ".",
            f"return [{expression} for n in numbers]",
        )
    for doc, (name, expression, kind) in STRING_MAPPINGS.items():
        yield answer(
            f"{name}(words: list[str]) -> list[{kind}]",
            doc + ".",
            f"return [{expression} for word in words]",
        )
    for amount, name in (
        ("add a number to", "n + value"),
        ("multiply", "n * value"),
        ("divide", "n / value"),
    ):
        verb = amount.split()[0].capitalize()
        tail = "to every number in a list" if verb == "Add" else "every number in a list by a value"
        doc = f"{verb} a value {tail}." if verb == "Add" else f"{verb} {tail}."
        yield answer(
            f"{verb.lower()}_all(numbers: list[float], value: float) -> list[float]",
            doc,
            f"return [{name} for n in numbers]",
        )
