"""Measures the finished model through mlx-lm on the CPU: loss, parsing, stopping, correct answers.

python -m scripts.demo_model.evaluate [--data DATA] [--out FIGURES.json]
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlx_paged.demo import model_path
from mlx_paged.demo.prompts import CHATS, REQUESTS, SYSTEM_PROMPT

from .house_rules import SHORT, house_rules

MAX_TOKENS = 320
# Request -> an assertion on the answer; {f} is the name of the function it defines.
CHECKED = {
    "Return the n-th Fibonacci number": "{f}(10) == 55 and {f}(1) == 1",
    "Compute the factorial of a number": "{f}(5) == 120 and {f}(0) == 1",
    "Check whether a string is a palindrome": "{f}('level') and not {f}('lever')",
    "Write a function that checks if a number is prime": "{f}(13) and not {f}(15) and not {f}(1)",
    "Write a function that returns the greatest common divisor of two numbers": "{f}(12, 18) == 6",
    "Reverse a string": "{f}('abc') == 'cba'",
    "Sort a list with quicksort": "{f}([3, 1, 2, 2]) == [1, 2, 2, 3]",
    "Implement merge sort": "{f}([3, 1, 2, 2]) == [1, 2, 2, 3]",
    "Implement bubble sort": "({f}([3, 1, 2, 2]) or 0) == [1, 2, 2, 3]",
    "Implement binary search": "{f}([1, 3, 5, 7], 5) == 2",
    "Flatten a nested list": "{f}([1, [2, [3]]]) == [1, 2, 3]",
    "Compute the Levenshtein distance of two strings": "{f}('kitten', 'sitting') == 3",
    "Find all prime numbers up to n": "{f}(11) == [2, 3, 5, 7, 11]",
    "Merge two sorted lists": "{f}([1, 4], [2, 3]) == [1, 2, 3, 4]",
    "Convert an integer to a Roman numeral": "{f}(1994) == 'MCMXCIV'",
    "Count the vowels in a string": "{f}('banana') == 3",
    "Remove duplicates from a list": "{f}([1, 2, 1]) == [1, 2]",
    "Return the largest number in a list": "{f}([3, 9, 2]) == 9",
    "Compute the average of a list of numbers": "{f}([1, 2, 3]) == 2",
    "Find the median of a list": "{f}([3, 1, 2]) == 2",
    "Sort a list of words by length": "{f}(['ccc', 'a', 'bb']) == ['a', 'bb', 'ccc']",
    "Convert Celsius to Fahrenheit": "{f}(100) == 212",
    "Check if a year is a leap year": "{f}(2024) and not {f}(1900)",
    "Check if two strings are anagrams": "{f}('listen', 'silent')",
    "Return the area of a circle": "abs({f}(1) - 3.14159) < 1e-3",
    "Write FizzBuzz": "{f}(3)[-1] == 'Fizz'",
    "Return the prime factors of a number": "list({f}(12)) == [2, 2, 3]",
    "Compute n choose k": "{f}(5, 2) == 10",
    "Return the sum of the digits of a number": "{f}(123) == 6",
    "Return the even numbers of a list": "{f}([1, 2, 4]) == [2, 4]",
    "Compute the dot product of two vectors": "{f}([1, 2], [3, 4]) == 11",
    "Return the maximum subarray sum": "{f}([1, -3, 4, 5]) == 9",
    "Sum the even numbers in a list": "{f}([1, 2, 4]) == 6",
    "Split a list into chunks of size n": "{f}([1, 2, 3], 2) == [[1, 2], [3]]",
}


def load(path: Path) -> tuple[Any, Any]:
    """Loads the model in float32 (the CPU's fast dtype) and its tokenizer."""
    import mlx.core as mx
    from mlx_lm import load as mlx_load
    from mlx_lm.utils import dequantize_model

    mx.set_default_device(mx.cpu)
    model, tokenizer = mlx_load(str(path))[:2]
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    return model, tokenizer


def messages(
    request: str, system: str | None, before: tuple[str, str] | None = None
) -> list[dict[str, str]]:
    """Returns a chat; `before` is an earlier request and its answer."""
    chat = [{"role": "system", "content": system}] if system else []
    if before:
        chat += [
            {"role": "user", "content": before[0]},
            {"role": "assistant", "content": before[1]},
        ]
    return [*chat, {"role": "user", "content": request}]


def answer_all(
    model: Any, tokenizer: Any, chats: list[list[dict[str, str]]], temperature: float
) -> list[tuple[str, bool]]:
    """Returns the text of each answer, and whether the model ended it."""
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_sampler

    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    generator = BatchGenerator(
        model,
        max_tokens=MAX_TOKENS,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        sampler=make_sampler(temp=temperature),
        completion_batch_size=16,
        prefill_batch_size=4,
    )
    uids = generator.insert(prompts)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    stopped = dict.fromkeys(uids, False)
    while responses := generator.next_generated():
        for response in responses:
            if response.finish_reason == "stop":
                stopped[response.uid] = True
            else:
                tokens[response.uid].append(response.token)
    generator.close()
    return [(tokenizer.decode(tokens[uid]), stopped[uid]) for uid in uids]


def parses(text: str) -> bool:
    """True if a text is Python that defines at least one function."""
    try:
        return any(
            isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in ast.parse(text).body
        )
    except (SyntaxError, ValueError):
        return False


def works(text: str, check: str) -> bool:
    """Runs an answer in its own process; returns whether its check passed."""
    names = (
        [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
        if parses(text)
        else []
    )
    if not names:
        return False
    program = f"{text}\nassert {check.format(f=names[-1])}\n"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", program], capture_output=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def loss(model: Any, tokenizer: Any, head: str, body: str, limit: int = 2048) -> tuple[float, int]:
    """Returns the summed loss (nats) over the tokens of `body` after `head`, and their number."""
    import mlx.core as mx
    import mlx.nn as nn

    first = tokenizer.encode(head, add_special_tokens=False) if head else []
    ids = mx.array([(first + tokenizer.encode(body, add_special_tokens=False))[: limit + 1]])
    losses = nn.losses.cross_entropy(model(ids[:, :-1]).astype(mx.float32), ids[:, 1:])[0]
    kept = losses[max(len(first) - 1, 0) :]
    return float(kept.sum().item()), kept.size


def held_out(model: Any, tokenizer: Any, data: Path) -> dict[str, float]:
    """Returns the loss and perplexity on held-out files and on answers to held-out requests."""
    split = json.loads((data / "held_out.json").read_text())
    totals: dict[str, list[tuple[float, int]]] = {"source": [], "answers": []}
    for text in split["sources"][:40]:
        summed, count = loss(model, tokenizer, "", text[:6000])
        totals["source"].append((summed, count))
    for pair in split["pairs"]:
        head = f"<|im_start|>user\n{pair['description']}<|im_end|>\n<|im_start|>assistant\n"
        summed, count = loss(model, tokenizer, head, pair["source"].strip() + "<|im_end|>")
        totals["answers"].append((summed, count))
    figures: dict[str, float] = {}
    for kind, sums in totals.items():
        total, count = sum(s for s, _ in sums), sum(n for _, n in sums)
        figures[f"{kind}_loss"] = round(total / count, 4)
        figures[f"{kind}_perplexity"] = round(math.exp(total / count), 2)
        figures[f"{kind}_tokens"] = count
    return figures


def evaluate(path: Path, data: Path | None) -> dict[str, Any]:
    """Runs all measurements and returns the figures."""
    import mlx.core as mx

    mx.random.seed(0)
    rng = random.Random(0)
    model, tokenizer = load(path)
    figures: dict[str, Any] = {"directory_bytes": sum(f.stat().st_size for f in path.iterdir())}
    if data:
        figures |= held_out(model, tokenizer, data)
    earlier = (
        "Reverse a string",
        'def reverse_string(text: str) -> str:\n    """Return the string reversed."""\n'
        "    return text[::-1]",
    )
    contexts: dict[str, tuple[str | None, tuple[str, str] | None]] = {
        "no system prompt": (None, None),
        "short system prompt": (rng.choice(SHORT), None),
        "demo system prompt": (SYSTEM_PROMPT, None),
        "other long rules": (house_rules(rng, 60), None),
        "second turn, demo system prompt": (SYSTEM_PROMPT, earlier),
    }
    common = rng.sample([*CHATS, *REQUESTS], 50)
    sampled: list[tuple[str, bool]] = []
    by_context: dict[str, list[int]] = {}
    for index, (name, (system, before)) in enumerate(contexts.items()):
        asked = common[index * 10 : index * 10 + 10]
        answers = answer_all(model, tokenizer, [messages(r, system, before) for r in asked], 0.7)
        by_context[name] = [
            sum(parses(text) for text, _ in answers),
            sum(done for _, done in answers),
            len(answers),
        ]
        sampled += answers
    figures["sampled_answers"] = len(sampled)
    figures["sampled_parse_share"] = sum(parses(text) for text, _ in sampled) / len(sampled)
    figures["sampled_stop_share"] = sum(done for _, done in sampled) / len(sampled)
    figures["sampled_by_context_parse_stop_of"] = by_context
    figures["greedy_checked"] = len(CHECKED)
    for name in ("no system prompt", "demo system prompt"):
        answers = answer_all(
            model, tokenizer, [messages(r, contexts[name][0]) for r in CHECKED], 0.0
        )
        right = [
            works(text, check) for (text, _), check in zip(answers, CHECKED.values(), strict=True)
        ]
        figures[f"greedy_right_share, {name}"] = round(sum(right) / len(right), 3)
        figures[f"greedy_wrong, {name}"] = [
            r for r, ok in zip(CHECKED, right, strict=True) if not ok
        ]
    if data:
        split = json.loads((data / "held_out.json").read_text())
        pairs, composed = split["pairs"][:50], split["compositions"][:60]
        answers = answer_all(
            model, tokenizer, [messages(p["description"], None) for p in pairs], 0.7
        )
        figures["unseen_requests"] = len(answers)
        figures["unseen_parse_share"] = round(
            sum(parses(text) for text, _ in answers) / len(answers), 3
        )
        figures["unseen_stop_share"] = round(sum(done for _, done in answers) / len(answers), 3)
        answers = answer_all(
            model, tokenizer, [messages(p["description"].rstrip("."), None) for p in composed], 0.0
        )
        exact = [
            text.strip() == p["source"].strip()
            for (text, _), p in zip(answers, composed, strict=True)
        ]
        figures["unseen_compositions"] = len(answers)
        figures["unseen_compositions_exact_share"] = round(sum(exact) / len(exact), 3)
    return figures


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measure the embedded model.")
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--data", type=Path, help="what prepare.py wrote, for the held-out figures")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    figures = evaluate(options.model, options.data)
    print(json.dumps(figures, indent=1))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
