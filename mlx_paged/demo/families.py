"""Generated requests: families of small tasks whose words and code vary together.

A family crosses a few word lists ("the sum of" x "the even numbers of a list"), so that the model
learns to compose parts instead of only recalling whole answers.
"""

from __future__ import annotations

from collections.abc import Iterator

from .corpus import Pair


def _answer(signature: str, doc: str, *body: str, imports: str = "") -> Pair:
    lines = "\n".join("    " + line for line in body)
    head = f"{imports}\n\n\n" if imports else ""
    return Pair(doc, f'{head}def {signature}:\n    """{doc}"""\n{lines}\n', "mlx_paged generated")


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
    """Aggregates over the numbers of a kind."""
    for kind, test in NUMBER_KINDS.items():
        noun = kind.removesuffix(" among the")
        things = noun if noun != kind else f"{kind} numbers"
        name = noun.replace(" ", "_").replace("-", "_")
        generator = f"n for n in numbers if {test}"
        yield _answer(
            f"sum_{name}(numbers: list[int]) -> int",
            f"Return the sum of the {things} in a list.",
            f"return sum({generator})",
        )
        yield _answer(
            f"count_{name}(numbers: list[int]) -> int",
            f"Return the number of {things} in a list.",
            f"return sum(1 for n in numbers if {test})",
        )
        yield _answer(
            f"filter_{name}(numbers: list[int]) -> list[int]",
            f"Return the {things} of a list.",
            f"return [{generator}]",
        )
        yield _answer(
            f"remove_{name}(numbers: list[int]) -> list[int]",
            f"Return the list without its {things}.",
            f"return [n for n in numbers if not {test}]"
            if "<=" in test
            else f"return [n for n in numbers if not ({test})]",
        )
        yield _answer(
            f"average_{name}(numbers: list[int]) -> float",
            f"Return the average of the {things} in a list.",
            f"chosen = [{generator}]",
            "if not chosen:",
            "    return 0.0",
            "return sum(chosen) / len(chosen)",
        )
        yield _answer(
            f"product_{name}(numbers: list[int]) -> int",
            f"Return the product of the {things} in a list.",
            "result = 1",
            "for n in numbers:",
            f"    if {test}:",
            "        result *= n",
            "return result",
        )
        for word, call in (("largest", "max"), ("smallest", "min")):
            yield _answer(
                f"{word}_{name}(numbers: list[int]) -> int | None",
                f"Return the {word} of the {things} in a list.",
                f"return {call}(({generator}), default=None)",
            )
        for word, call in (("all", "all"), ("any", "any")):
            subject = "all numbers of a list are" if word == "all" else "any number of a list is"
            if noun == kind:
                yield _answer(
                    f"{word}_{name}(numbers: list[int]) -> bool",
                    f"Return True if {subject} {kind}.",
                    f"return {call}({test} for n in numbers)",
                )
        yield _answer(
            f"first_{name}(numbers: list[int]) -> int | None",
            f"Return the first of the {things} in a list.",
            "for n in numbers:",
            f"    if {test}:",
            "        return n",
            "return None",
        )
        if noun == kind and kind != "nonzero":
            yield _answer(
                f"is_{name}(n: int) -> bool",
                f"Return True if a number is {kind}.",
                f"return {test}",
            )


WORD_TESTS = {
    "that start with a given letter": ("starting_with", ", letter: str", "word.startswith(letter)"),
    "that end with a given suffix": ("ending_with", ", suffix: str", "word.endswith(suffix)"),
    "that contain a given substring": ("containing", ", part: str", "part in word"),
    "that are longer than a given length": ("longer_than", ", length: int", "len(word) > length"),
    "that are shorter than a given length": ("shorter_than", ", length: int", "len(word) < length"),
    "that have exactly a given length": ("of_length", ", length: int", "len(word) == length"),
    "that are palindromes": ("palindromes", "", "word == word[::-1]"),
    "that start with a capital letter": ("capitalized", "", "word[:1].isupper()"),
    "that start with a vowel": ("starting_with_vowel", "", 'word[:1].lower() in "aeiou"'),
    "that contain a digit": ("with_digits", "", "any(c.isdigit() for c in word)"),
    "that are in upper case": ("uppercase", "", "word.isupper()"),
}


def words() -> Iterator[Pair]:
    """Selections of the words of a list or a text."""
    for phrase, (name, extra, test) in WORD_TESTS.items():
        for place, argument, source in (
            ("a list", "words: list[str]", "words"),
            ("a text", "text: str", "text.split()"),
        ):
            yield _answer(
                f"words_{name}({argument}{extra}) -> list[str]",
                f"Return the words of {place} {phrase}.",
                f"return [word for word in {source} if {test}]",
            )
            yield _answer(
                f"count_words_{name}({argument}{extra}) -> int",
                f"Return the number of words in {place} {phrase}.",
                f"return sum(1 for word in {source} if {test})",
            )
        yield _answer(
            f"remove_words_{name}(words: list[str]{extra}) -> list[str]",
            f"Return the list without the words {phrase}.",
            f"return [word for word in words if not {test}]"
            if " " not in test
            else f"return [word for word in words if not ({test})]",
        )


CHARACTER_KINDS = {
    "digits": "c.isdigit()",
    "letters": "c.isalpha()",
    "uppercase letters": "c.isupper()",
    "lowercase letters": "c.islower()",
    "spaces": "c.isspace()",
    "letters and digits": "c.isalnum()",
    "vowels": 'c.lower() in "aeiou"',
    "punctuation marks": "c in string.punctuation",
}


def characters() -> Iterator[Pair]:
    """Counts, removals and checks of the characters of a string."""
    for kind, test in CHARACTER_KINDS.items():
        name, imports = kind.replace(" ", "_"), "import string" if "string." in test else ""
        negated = test.replace(" in ", " not in ") if " in " in test else f"not {test}"
        yield _answer(
            f"count_{name}(text: str) -> int",
            f"Return the number of {kind} in a string.",
            f"return sum(1 for c in text if {test})",
            imports=imports,
        )
        yield _answer(
            f"remove_{name}(text: str) -> str",
            f"Remove all {kind} from a string.",
            f'return "".join(c for c in text if {negated})',
            imports=imports,
        )
        yield _answer(
            f"keep_{name}(text: str) -> str",
            f"Keep only the {kind} of a string.",
            f'return "".join(c for c in text if {test})',
            imports=imports,
        )
        yield _answer(
            f"has_{name}(text: str) -> bool",
            f"Return True if a string contains {kind}.",
            f"return any({test} for c in text)",
            imports=imports,
        )
        yield _answer(
            f"only_{name}(text: str) -> bool",
            f"Return True if a string contains only {kind}.",
            f"return bool(text) and all({test} for c in text)",
            imports=imports,
        )
        yield _answer(
            f"replace_{name}(text: str, replacement: str) -> str",
            f"Replace all {kind} in a string.",
            f'return "".join(replacement if {test} else c for c in text)',
            imports=imports,
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
        yield _answer(
            f"{name}(numbers: list[float]) -> list[float]",
            doc + ".",
            f"return [{expression} for n in numbers]",
        )
    for doc, (name, expression, kind) in STRING_MAPPINGS.items():
        yield _answer(
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
        yield _answer(
            f"{verb.lower()}_all(numbers: list[float], value: float) -> list[float]",
            doc,
            f"return [{name} for n in numbers]",
        )


SEPARATORS = {
    "commas": ",",
    "spaces": " ",
    "hyphens": "-",
    "newlines": "\\n",
    "semicolons": ";",
    "tabs": "\\t",
}
SEPARATORS |= {"underscores": "_", "slashes": "/", "colons": ":", "pipes": "|"}


def joining() -> Iterator[Pair]:
    """Joins and splits."""
    for word, mark in SEPARATORS.items():
        yield _answer(
            f"join_with_{word}(words: list[str]) -> str",
            f"Join a list of words with {word}.",
            f'return "{mark}".join(words)',
        )
        yield _answer(
            f"split_on_{word}(text: str) -> list[str]",
            f"Split a string on {word}.",
            f'return text.split("{mark}")',
        )
        yield _answer(
            f"replace_{word}(text: str, replacement: str) -> str",
            f"Replace the {word} of a string.",
            f'return text.replace("{mark}", replacement)',
        )
        if word != "spaces":
            yield _answer(
                f"{word}_to_spaces(text: str) -> str",
                f"Replace {word} by spaces in a string.",
                f'return text.replace("{mark}", " ")',
            )
