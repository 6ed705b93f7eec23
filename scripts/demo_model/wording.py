"""Words for requests: reads the hand-written answers and varies the wording of requests."""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass
from pathlib import Path

from .pairs import VERBS, free_names, imports_of


@dataclass(frozen=True)
class Task:
    """One answer and the ways to ask for it."""

    asks: list[str]
    answer: str


def load_classics(folder: Path | None = None) -> list[Task]:
    """Reads `classics/*.py`: each definition with its imports and the `# ask:` lines above it."""
    tasks = []
    for path in sorted((folder or Path(__file__).parent / "classics").glob("*.py")):
        text = path.read_text()
        tree, lines = ast.parse(text), text.split("\n")
        imports = imports_of(tree)
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            asks = [ast.get_docstring(node) or ""] if isinstance(node, ast.FunctionDef) else []
            above = node.lineno - 2
            while above >= 0 and lines[above].startswith("# ask: "):
                asks += [ask.strip() for ask in lines[above].removeprefix("# ask: ").split("|")]
                above -= 1
            used = sorted({imports[name] for name in free_names(node) if name in imports})
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            tasks.append(Task(asks, ("\n".join(used) + "\n\n\n" if used else "") + source))
    return tasks


def third_person(verb: str) -> str:
    """Returns the verb with its third-person ending ("search" -> "searches")."""
    if verb.endswith(("ch", "sh", "ss", "x", "z", "o")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


_CHECKS = (
    "Check if",
    "Check whether",
    "Test whether",
    "Determine if",
    "Tell whether",
    "Determine whether",
    "Test if",
)
_GETS: tuple[str, ...] = ("Return", "Compute", "Get", "Find", "Calculate", "Give", "Return")


def reword(ask: str, rng: random.Random) -> str:
    """Sometimes replaces the opening verb with a synonym."""
    if ask.startswith("Return True if ") and rng.random() < 0.6:
        return rng.choice(_CHECKS) + ask.removeprefix("Return True if")
    if ask.startswith("Return the ") and rng.random() < 0.5:
        return rng.choice(_GETS) + ask.removeprefix("Return")
    return ask


_THAT: tuple[str, ...] = (
    "Write a function that {}",
    "Write a Python function that {}",
    "Create a function that {}",
    "function that {}",
)
_THAT += (
    "I need a function that {}",
    "Can you write a function that {}?",
    "Please write a function that {}",
)
_THAT += (
    "Give me a Python function that {}",
    "Implement a function that {}",
    "Define a function that {}",
)
_TO: tuple[str, ...] = (
    "Write a function to {}",
    "Write a Python function to {}",
    "Create a function to {}",
    "How do I {} in Python?",
)
_TO += (
    "I want to {}",
    "Python function to {}",
    "Write code to {}",
    "Please {}",
    "How to {}",
    "Show me how to {}",
)
_NOUN: tuple[str, ...] = (
    "{}",
    "Write a function for {}",
    "{} in Python",
    "Write {}",
    "Implement {}",
    "{} function",
    "Code for {}",
)


def phrase(ask: str, rng: random.Random, method: bool = False) -> str:
    """Rephrases a request in one of many forms."""
    text = reword(ask, rng).rstrip(".")
    first, _, rest = text.partition(" ")
    kind = rng.random()
    if method:
        return f"Write a method that {third_person(first.lower())} {rest}" + rng.choice(("", "."))
    if first.lower() not in VERBS and first not in (
        "Implement",
        "Estimate",
        "Play",
        "Simulate",
        "Solve",
        "Detect",
    ):
        text = rng.choice(_NOUN).format(text if rng.random() < 0.5 else text[:1].lower() + text[1:])
    elif kind < 0.3:
        text = rng.choice(_THAT).format(f"{third_person(first.lower())} {rest}")
    elif kind < 0.5:
        text = rng.choice(_TO).format(f"{first.lower()} {rest}")
    if rng.random() < 0.12:
        text = text[:1].lower() + text[1:]
    return text if text.endswith("?") else text + rng.choice(("", "", "."))


_NAMING = (
    "Write a function called {} that {}",
    "Write a function named {} that {}",
    "Define {}, which {}",
)
_NAME_WORDS = "get my find do calc compute solve run fast util simple item value data"
_NAME_WORDS += " list text number result process"
_NAME_PARTS = _NAME_WORDS.split()


def renamed(ask: str, answer: str, rng: random.Random) -> tuple[str, str]:
    """Returns a request that names its function, and the answer under that name."""
    match = re.search(r"^def (\w+)\(", answer, re.MULTILINE)
    first, _, rest = ask.rstrip(".").partition(" ")
    if match is None or first.lower() not in VERBS:
        return phrase(ask, rng), answer
    old = match.group(1)
    new = rng.choice(
        (
            rng.choice("fgh"),
            "_".join(rng.sample(_NAME_PARTS, 2)),
            f"{rng.choice(_NAME_PARTS)}_{old}",
        )
    )
    request = rng.choice(_NAMING).format(new, f"{third_person(first.lower())} {rest}")
    return request + rng.choice(("", ".")), re.sub(rf"\b{old}\(", f"{new}(", answer)
