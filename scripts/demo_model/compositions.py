# ruff: noqa: E501 (tables and templates read better on one line)
"""Random compositions: quantity x transformation x condition, with literals from the request.

Training shows only a small part of them, so the model must compose and copy rather than recall.
Some are held out to measure whether it does.
"""

from __future__ import annotations

import random

from .families.answer import answer
from .pairs import Pair

CONDITIONS = [
    ("even numbers", "even", "n % 2 == 0"),
    ("odd numbers", "odd", "n % 2 != 0"),
    ("positive numbers", "positive", "n > 0"),
    ("negative numbers", "negative", "n < 0"),
    ("numbers", "all", ""),
    ("numbers greater than {a}", "greater", "n > {a}"),
    ("numbers less than {a}", "less", "n < {a}"),
    ("numbers divisible by {k}", "divisible", "n % {k} == 0"),
    ("numbers not divisible by {k}", "indivisible", "n % {k} != 0"),
    ("numbers between {a} and {b}", "between", "{a} <= n <= {b}"),
    ("numbers that end with {d}", "ending", "n % 10 == {d}"),
    ("multiples of {k}", "multiples", "n % {k} == 0"),
]
TRANSFORMS = [
    ("", "", "n"),
    ("squares of the ", "squared_", "n * n"),
    ("cubes of the ", "cubed_", "n**3"),
    ("absolute values of the ", "absolute_", "abs(n)"),
    ("doubles of the ", "doubled_", "2 * n"),
    ("halves of the ", "halved_", "n / 2"),
    ("square roots of the ", "rooted_", "n**0.5"),
    ("reciprocals of the ", "inverted_", "1 / n"),
]
PLACES = [
    ("in a list", "numbers: list[int]", "numbers"),
    ("from 1 to n", "limit: int", "range(1, limit + 1)"),
]
PLACES += [
    ("below {m}", "", "range({m})"),
    ("in a tuple", "numbers: tuple", "numbers"),
    ("in a set", "numbers: set", "numbers"),
]

WORD_CONDITIONS = [
    ("start with {s!r}", "starting", "word.startswith({s!r})"),
    ("end with {s!r}", "ending", "word.endswith({s!r})"),
    ("end with {s}", "ending", "word.endswith({s!r})"),
    ("start with {s}", "starting", "word.startswith({s!r})"),
    ("contain {s!r}", "containing", "{s!r} in word"),
    ("do not contain {s!r}", "without", "{s!r} not in word"),
    ("contain the letter {c}", "with_letter", "{c!r} in word"),
    ("start with the letter {c}", "with_initial", "word.startswith({c!r})"),
    ("are longer than {k} characters", "long", "len(word) > {k}"),
    ("are shorter than {k} characters", "short", "len(word) < {k}"),
    ("have exactly {k} letters", "sized", "len(word) == {k}"),
    ("are in upper case", "upper", "word.isupper()"),
    ("are palindromes", "palindromic", "word == word[::-1]"),
]
WORD_FORMS = [
    ("", "word"),
    ("in upper case", "word.upper()"),
    ("in lower case", "word.lower()"),
    ("reversed", "word[::-1]"),
]
_FRAGMENTS = "ing ed er un re pre ly tion ness ab con dis ex in on st th qu ch sh a b c s t foo bar py test _ www http"
FRAGMENTS = _FRAGMENTS.split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _numbers(rng: random.Random) -> Pair:
    values = {
        "a": rng.randint(0, 60),
        "k": rng.randint(2, 20),
        "d": rng.randint(0, 9),
        "m": rng.choice((50, 100, 1000)),
    }
    values |= {"b": values["a"] + rng.randint(2, 60)}
    condition, name, test = rng.choice(CONDITIONS)
    transform, prefix, term = rng.choice(TRANSFORMS)
    place, argument, source = rng.choice(PLACES) if rng.random() < 0.4 else PLACES[0]
    what = (transform + condition).format(**values) + " " + place.format(**values)
    if place == "from 1 to n":
        argument, source = "limit: int", "range(1, limit + 1)"
    clause = f" if {test}".format(**values) if test else ""
    items = f"{term} for n in {source}{clause}".format(**values)
    name = prefix + name
    quantity = rng.choice(
        ("sum", "list", "count", "largest", "smallest", "average", "product", "any")
    )
    if quantity == "sum":
        return answer(
            f"sum_{name}({argument}) -> float",
            f"Return the sum of the {what}.",
            f"return sum({items})",
        )
    if quantity == "list":
        return answer(
            f"list_{name}({argument}) -> list", f"Return a list of the {what}.", f"return [{items}]"
        )
    if quantity == "count":
        what = condition.format(**values) + " " + place.format(**values)
        items = f"1 for n in {source}{clause}".format(**values)
        return answer(
            f"count_{name}({argument}) -> int", f"Count the {what}.", f"return sum({items})"
        )
    if quantity in ("largest", "smallest"):
        call = "max" if quantity == "largest" else "min"
        doc = f"Return the {quantity} of the {what}."
        return answer(
            f"{quantity}_{name}({argument}) -> float | None",
            doc,
            f"return {call}(({items}), default=None)",
        )
    if quantity == "any" and test:
        what = condition.format(**values) + " " + place.format(**values)
        doc = f"Return True if there are any {what}."
        return answer(
            f"any_{name}({argument}) -> bool",
            doc,
            f"return any({test} for n in {source})".format(**values),
        )
    if quantity == "product":
        body = ["result = 1", f"for n in {source}:".format(**values)]
        body += (
            [f"    if {test}:".format(**values), f"        result *= {term}"]
            if test
            else [f"    result *= {term}"]
        )
        return answer(
            f"product_{name}({argument}) -> float",
            f"Return the product of the {what}.",
            *body,
            "return result",
        )
    body = [
        f"chosen = [{items}]",
        "if not chosen:",
        "    return 0.0",
        "return sum(chosen) / len(chosen)",
    ]
    return answer(
        f"average_{name}({argument}) -> float", f"Return the average of the {what}.", *body
    )


def _words(rng: random.Random) -> Pair:
    values = {"s": rng.choice(FRAGMENTS), "c": rng.choice(LETTERS), "k": rng.randint(2, 12)}
    condition, name, test = rng.choice(WORD_CONDITIONS)
    place, argument, source = rng.choice(
        (("of a list", "words: list[str]", "words"), ("of a text", "text: str", "text.split()"),
         ("in a sentence", "sentence: str", "sentence.split()"), ("in a file", "path: str", "file.read().split()"))
    )  # fmt: skip
    what, test = (
        f"words {place} that {condition}".format(**values),
        test.format(**values).replace("'", '"'),
    )
    form, term = rng.choice(WORD_FORMS)
    loop = f"for word in {source} if {test}"
    quantity = rng.choice(("list", "count", "first", "join", "longest", "drop"))
    head = ['with open(path, encoding="utf-8") as file:'] if "file" in source else []
    indent = "    " if head else ""
    if quantity == "list":
        doc = f"Return the {what}" + (f", {form}." if form else ".")
        return answer(
            f"words_{name}({argument}) -> list[str]", doc, *head, f"{indent}return [{term} {loop}]"
        )
    if quantity == "count":
        return answer(
            f"count_{name}({argument}) -> int",
            f"Count the {what}.",
            *head,
            f"{indent}return sum(1 {loop})",
        )
    if quantity == "first":
        doc = f"Return the first of the {what}."
        return answer(
            f"first_{name}({argument}) -> str | None",
            doc,
            *head,
            f"{indent}return next((word {loop}), None)",
        )
    if quantity == "longest":
        doc = f"Return the longest of the {what}."
        return answer(
            f"longest_{name}({argument}) -> str",
            doc,
            *head,
            f'{indent}return max((word {loop}), key=len, default="")',
        )
    if quantity == "drop":
        doc = f"Remove the {what}."
        kept = f"for word in {source} if not ({test})"
        return answer(
            f"remove_{name}({argument}) -> list[str]", doc, *head, f"{indent}return [word {kept}]"
        )
    mark, word = rng.choice(
        ((",", "commas"), (" ", "spaces"), ("-", "hyphens"), ("\\n", "newlines"))
    )
    doc = f"Join the {what} with {word}."
    return answer(
        f"join_{name}({argument}) -> str", doc, *head, f'{indent}return "{mark}".join(word {loop})'
    )


SMALL = [
    ("Return the first {k} elements of a list.", "first_{k}(items: list) -> list", "return items[:{k}]"),
    ("Return the last {k} characters of a string.", "last_{k}(text: str) -> str", "return text[-{k}:]"),
    ("Remove the first {k} characters of a string.", "without_first_{k}(text: str) -> str", "return text[{k}:]"),
    ("Check if a number is divisible by {k}.", "divisible_by_{k}(n: int) -> bool", "return n % {k} == 0"),
    ("Check if a number is between {a} and {b}.", "between(n: float) -> bool", "return {a} <= n <= {b}"),
    ("Check if a number is greater than {a}.", "above(n: float) -> bool", "return n > {a}"),
    ("Add {a} to every number in a list.", "add_{a}(numbers: list[int]) -> list[int]", "return [n + {a} for n in numbers]"),
    ("Multiply every number in a list by {k}.", "times_{k}(numbers: list[int]) -> list[int]", "return [n * {k} for n in numbers]"),
    ("Multiply a number by {k}.", "times_{k}(n: float) -> float", "return n * {k}"),
    ("Return the multiples of {k} up to n.", "multiples_of_{k}(n: int) -> list[int]", "return list(range({k}, n + 1, {k}))"),
    ("Return the numbers from {a} to {b}.", "numbers() -> list[int]", "return list(range({a}, {b} + 1))"),
    ("Return the multiplication table of {k}.", "table_of_{k}() -> list[int]", "return [{k} * i for i in range(1, 11)]"),
    ("Raise a number to the power of {k}.", "power_{k}(x: float) -> float", "return x**{k}"),
    ("Repeat a string {k} times.", "repeat_{k}(text: str) -> str", "return text * {k}"),
    ("Split a list into chunks of {k}.", "chunks_of_{k}(items: list) -> list[list]",
     "return [items[i : i + {k}] for i in range(0, len(items), {k})]"),
    ("Return every {k}th element of a list.", "every_{k}th(items: list) -> list", "return items[::{k}]"),
    ("Return a random number between {a} and {b}.", "random_number() -> int", "return random.randint({a}, {b})"),
    ("Count how often the letter {c} occurs in a string.", "count_{c}(text: str) -> int", 'return text.count("{c}")'),
    ("Replace {c} by {e} in a string.", "replace_{c}(text: str) -> str", 'return text.replace("{c}", "{e}")'),
    ("Remove the letter {c} from a string.", "remove_{c}(text: str) -> str", 'return text.replace("{c}", "")'),
    ("Check if a string starts with {s}.", "starts_with_{c}(text: str) -> bool", 'return text.startswith("{s}")'),
]  # fmt: skip


def _small(rng: random.Random) -> Pair:
    a = rng.randint(1, 99)
    values = {
        "a": a,
        "b": a + rng.randint(1, 99),
        "k": rng.randint(2, 24),
        "s": rng.choice(FRAGMENTS),
    }
    values |= {"c": rng.choice(LETTERS), "e": rng.choice(LETTERS)}
    doc, signature, body = (text.format(**values) for text in rng.choice(SMALL))
    return answer(signature, doc, body, imports="import random" if "random." in body else "")


def random_compositions(count: int, seed: int = 0) -> list[Pair]:
    """Returns `count` compositions with distinct descriptions; the seed determines them."""
    rng = random.Random(seed)
    made: dict[str, Pair] = {}
    while len(made) < count:
        pair = rng.choice((_numbers, _numbers, _words, _words, _small))(rng)
        if all(len(line) <= 100 for line in pair.source.split("\n")):
            made.setdefault(pair.description, pair)
    return list(made.values())
