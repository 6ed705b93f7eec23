"""Words and characters of strings, joined and split."""

from __future__ import annotations

from collections.abc import Iterator

from ..pairs import Pair
from .answer import answer

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
            yield answer(
                f"words_{name}({argument}{extra}) -> list[str]",
                f"Return the words of {place} {phrase}.",
                f"return [word for word in {source} if {test}]",
            )
            yield answer(
                f"count_words_{name}({argument}{extra}) -> int",
                f"Return the number of words in {place} {phrase}.",
                f"return sum(1 for word in {source} if {test})",
            )
        yield answer(
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
        yield answer(
            f"count_{name}(text: str) -> int",
            f"Return the number of {kind} in a string.",
            f"return sum(1 for c in text if {test})",
            imports=imports,
        )
        yield answer(
            f"remove_{name}(text: str) -> str",
            f"Remove all {kind} from a string.",
            f'return "".join(c for c in text if {negated})',
            imports=imports,
        )
        yield answer(
            f"keep_{name}(text: str) -> str",
            f"Keep only the {kind} of a string.",
            f'return "".join(c for c in text if {test})',
            imports=imports,
        )
        yield answer(
            f"has_{name}(text: str) -> bool",
            f"Return True if a string contains {kind}.",
            f"return any({test} for c in text)",
            imports=imports,
        )
        yield answer(
            f"only_{name}(text: str) -> bool",
            f"Return True if a string contains only {kind}.",
            f"return bool(text) and all({test} for c in text)",
            imports=imports,
        )
        yield answer(
            f"replace_{name}(text: str, replacement: str) -> str",
            f"Replace all {kind} in a string.",
            f'return "".join(replacement if {test} else c for c in text)',
            imports=imports,
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
        yield answer(
            f"join_with_{word}(words: list[str]) -> str",
            f"Join a list of words with {word}.",
            f'return "{mark}".join(words)',
        )
        yield answer(
            f"split_on_{word}(text: str) -> list[str]",
            f"Split a string on {word}.",
            f'return text.split("{mark}")',
        )
        yield answer(
            f"replace_{word}(text: str, replacement: str) -> str",
            f"Replace the {word} of a string.",
            f'return text.replace("{mark}", replacement)',
        )
        if word != "spaces":
            yield answer(
                f"{word}_to_spaces(text: str) -> str",
                f"Replace {word} by spaces in a string.",
                f'return text.replace("{mark}", " ")',
            )
