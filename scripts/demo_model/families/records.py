"""Sorting, and lists of dictionaries."""

from __future__ import annotations

from collections.abc import Iterator

from ..pairs import Pair
from .answer import answer

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
            yield answer(
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
            yield answer(
                f"{one}_{names}{head} -> list",
                f"Return the {names} of a list of {plural}.",
                f'return [{one}["{name}"] for {one} in {plural}]',
            )
            yield answer(
                f"group_{plural}_by_{name}{head} -> dict",
                f"Group a list of {plural} by {name}.",
                "groups: dict = {}",
                f"for {one} in {plural}:",
                f'    groups.setdefault({one}["{name}"], []).append({one})',
                "return groups",
            )
        for name in fields:
            field = f'{one}["{name}"]'
            yield answer(
                f"total_{name}{head} -> float",
                f"Return the total {name} of a list of {plural}.",
                f"return sum({field} for {one} in {plural})",
            )
            yield answer(
                f"average_{name}{head} -> float",
                f"Return the average {name} of a list of {plural}.",
                f"if not {plural}:",
                "    return 0.0",
                f"return sum({field} for {one} in {plural}) / len({plural})",
            )
            for word, call in (("highest", "max"), ("lowest", "min")):
                yield answer(
                    f"{word}_{name}{head} -> dict",
                    f"Return the {one} with the {word} {name}.",
                    f"return {call}({plural}, key=lambda {one}: {field})",
                )
            yield answer(
                f"{plural}_above({plural}: list[dict], {name}: float) -> list[dict]",
                f"Return the {plural} whose {name} is above a limit.",
                f"return [{one} for {one} in {plural} if {field} > {name}]",
            )
