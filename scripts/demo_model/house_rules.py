"""System prompts for training: short ones, shuffled house rules, and unrelated prose."""

from __future__ import annotations

import random

SHORT = [
    "You are a helpful assistant.",
    "You are a helpful coding assistant.",
    "You write Python functions.",
    "You are an expert Python programmer. Answer with code only.",
    "Answer every request with one Python function.",
    "You are a concise assistant. Reply with a single function and nothing else.",
    "Write clean, readable Python.",
    "You are a senior engineer. Write correct and simple code.",
    "Be brief.",
    "You help beginners learn Python.",
    "You are a code generator. Given a one-line description, write the function.",
    "Reply with plain Python code without explanations.",
    "You are a pair programmer in a small team.",
    "Follow the style guide of the project.",
    "Think about edge cases, then write the function.",
]
OPENINGS = [
    "You are the coding assistant of our team. Follow these house rules when you write Python.",
    "House rules for Python code",
    "This is the style guide of the project. Every function you write follows it.",
    "You write Python functions from one-line descriptions. The following rules always apply.",
    "Below are the conventions of this code base. Please read them before you answer.",
    "Welcome. You answer requests with Python code. Keep to the guide below.",
    "Coding standards, version 3. These apply to all new code.",
    "You are a careful engineer. Here is how we write code here:",
]
RULES = [
    "Answer with a single function and nothing else.",
    "Give every function a docstring of one line that says what it returns.",
    "Use descriptive names for functions, arguments and local variables.",
    "Names of functions and variables are written in snake_case.",
    "Names of constants are written in upper case.",
    "Names of classes use CapWords.",
    "Annotate the types of all arguments and of the return value.",
    "Prefer the standard library to third-party packages.",
    "Do not use global variables.",
    "Do not print from a function that computes a value; return the value.",
    "Keep functions short; ten lines are better than thirty.",
    "A function does one thing and does it well.",
    "Indent with four spaces and never with tabs.",
    "Lines are at most 88 characters long.",
    "Use double quotes for strings.",
    "Use f-strings to format text.",
    "Use list comprehensions where they are easy to read, and loops where they are not.",
    "Avoid nested comprehensions with more than two levels.",
    "Handle the empty list and the empty string without surprises.",
    "Raise ValueError for arguments that make no sense.",
    "Never catch an exception that you cannot handle.",
    "Avoid bare except clauses.",
    "Do not modify the arguments that the caller passed in.",
    "Never use a mutable object as a default argument.",
    "Return early instead of nesting conditions.",
    "Avoid else after return.",
    "Compare to None with is and is not.",
    "Do not compare booleans to True or False.",
    "Use enumerate instead of a counter that is kept by hand.",
    "Use zip to walk over two sequences at once.",
    "Use any and all for tests over a sequence.",
    "Use sorted with a key function instead of a comparison function.",
    "Use a set for membership tests on large collections.",
    "Use a dictionary when you look up values by key.",
    "Open files with a with statement and name the encoding.",
    "Prefer pathlib to string operations on paths.",
    "Write comments that explain why, not what.",
    "Remove dead code instead of commenting it out.",
    "Do not abbreviate words in names.",
    "Avoid single-letter names except for indices and coordinates.",
    "Imports come first, each on its own line.",
    "Standard library imports come before all others.",
    "Never use wildcard imports.",
    "Avoid recursion where a loop is as clear.",
    "Mention the complexity of an algorithm only when it is surprising.",
    "Prefer clear code to clever code.",
    "Simple is better than complex.",
    "Explicit is better than implicit.",
    "Readability counts.",
    "Errors should never pass silently.",
    "There should be one obvious way to do it.",
    "Integers are exact; avoid floating point arithmetic when integers are enough.",
    "Use integer division when the result must be an integer.",
    "Compare floating point numbers with a tolerance.",
    "Do not use eval or exec.",
    "Do not use assert to check the arguments of public functions.",
    "Dates are always timezone aware in production code.",
    "Random numbers in tests need a fixed seed.",
    "Do not log secrets, passwords or personal data.",
    "Write functions that are easy to test.",
    "Every bug fix comes with a test.",
    "Tests are small, fast and independent of each other.",
    "Public functions do not return different types depending on the input.",
    "Return an empty list rather than None when there is nothing to return.",
    "Use tuples for small fixed groups of values.",
    "Prefer keyword arguments when a call has more than three arguments.",
    "Boolean arguments are always passed by keyword.",
    "Keep the number of arguments below five.",
    "Do not use magic numbers; give them a name.",
    "Leave two blank lines between top-level functions.",
    "Do not leave trailing whitespace.",
    "End every file with a newline.",
    "If the request is ambiguous, choose the simplest reading.",
    "If a request names a function, use that name.",
    "If a request asks for recursion, use recursion.",
    "Do not explain the code unless the user asks for it.",
    "Do not wrap the code in markdown fences.",
    "Do not apologize and do not add greetings.",
    "Write American English in docstrings and names.",
    "Docstrings end with a period.",
    "Docstrings use the imperative mood: return, compute, check.",
    "Performance matters only after the code is correct.",
    "Measure before you optimize.",
    "Do not build strings with repeated addition in long loops; use join.",
    "Generators are welcome for large data.",
    "Close what you open and free what you take.",
    "Do not rely on the order of a set.",
    "A loop variable is not used after its loop.",
    "Use the walrus operator only when it makes the code shorter and clearer.",
    "Use pattern matching only for structured data.",
    "Prefer composition to inheritance.",
    "Avoid decorators that hide what a function does.",
    "Code is read more often than it is written.",
    "Reviewers look at correctness first, names second and speed last.",
    "The main branch is always ready for release.",
    "Keep changes small so that they are easy to review.",
    "We support Python 3.10 and later.",
    "Type hints use the built-in generics such as list[int] and dict[str, int].",
    "Optional values are written as int | None.",
]
HEADINGS = [
    "General",
    "Naming",
    "Style",
    "Errors",
    "Types",
    "Testing",
    "Layout",
    "Documentation",
    "Data",
    "Review",
]
CLOSINGS = [
    "Now answer the request of the user.",
    "Thank you for keeping the code base tidy.",
    "When two rules conflict, the one that makes the code easier to read wins.",
    "These rules apply to every answer in this conversation.",
    "",
    "",
]


def house_rules(rng: random.Random, count: int) -> str:
    """Returns a style guide of about `count` rules in random order and layout."""
    rules = rng.sample(RULES, min(count, len(RULES)))
    layout = rng.randrange(4)
    lines = [rng.choice(OPENINGS)]
    every = rng.randrange(5, 12)
    headings = rng.sample(HEADINGS, len(HEADINGS))
    for number, rule in enumerate(rules):
        if layout in (1, 2) and number % every == 0 and number // every < len(headings):
            lines += [
                "",
                ("# " if layout == 1 else "")
                + headings[number // every]
                + ("" if layout == 1 else ":"),
            ]
        lines.append((f"{number + 1}. ", "- ", "* ", "")[layout] + rule)
    if layout == 3:  # running text with a few sentences per paragraph
        sentences, lines = lines[1:], lines[:1]
        lines += [" ".join(sentences[i : i + every]) for i in range(0, len(sentences), every)]
        lines = "\n\n".join(lines).split("\n")
    closing = rng.choice(CLOSINGS)
    return "\n".join([*lines, "", closing]).strip()


def system_prompt(rng: random.Random, prose: list[str], own: str) -> str | None:
    """Returns a random system prompt: none, short, long rules, prose, or the project's own."""
    kind = rng.random()
    if kind < 0.25:
        return None
    if kind < 0.45:
        return rng.choice(SHORT)
    if kind < 0.78:
        return house_rules(rng, rng.choice((3, 6, 10, 20, 30, 40, 50, 60, 70, 80)))
    if kind < 0.90:
        text = rng.choice(prose)
        head = rng.choice((rng.choice(OPENINGS) + "\n\n", rng.choice(SHORT) + "\n\n", ""))
        return (head + text)[: rng.randrange(300, 4000)].strip()
    if kind < 0.95:
        return own
    return rng.choice(SHORT) + "\n\n" + house_rules(rng, rng.randrange(3, 60))
