"""Answers that are always valid: by a JSON schema, by a regular expression, or one of a few texts.

$ python examples/structured_output.py [MODEL]
"""

import sys

from mlx_paged import LLM, SamplingParams
from pydantic import BaseModel, Field


class Person(BaseModel, extra="forbid"):  # no other properties
    name: str = Field(max_length=30)
    born: int = Field(ge=1000, le=2100)


QUESTIONS = {
    "Ada Lovelace was born in 1815 in London. Give her name and the year of her birth as JSON.": {
        "json": Person
    },
    "Write the date December 25, 2026 in ISO format.": {"regex": r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d"},
    "Is Paris the capital of France?": {"choice": ["yes", "no"]},
}

llm = LLM(*sys.argv[1:])
outputs = llm.chat(
    [[{"role": "user", "content": question}] for question in QUESTIONS],
    [
        SamplingParams(temperature=0, max_tokens=64, structured_outputs=each)
        for each in QUESTIONS.values()
    ],
)
person, date, choice = (output.outputs[0].text for output in outputs)
print(Person.model_validate_json(person))
print(date)
print(choice)
