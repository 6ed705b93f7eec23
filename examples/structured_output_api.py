"""Structured output over HTTP: OpenAI's client parses an answer into a class; then a regex.

$ mlx-paged serve
$ python examples/structured_output_api.py
"""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Review(BaseModel):
    sentiment: Literal["positive", "neutral", "negative"]
    stars: int = Field(ge=1, le=5)


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
message = {"role": "user", "content": "Rate this: I loved every minute, and I would go again."}

answer = client.chat.completions.parse(
    model=model, messages=[message], response_format=Review, temperature=0
)
review = answer.choices[0].message.parsed
print(f"{review.sentiment}, {review.stars} of 5")

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "At what time does the film begin?"}],
    temperature=0,
    extra_body={"structured_outputs": {"regex": r"([01]\d|2[0-3]):[0-5]\d"}},
)
print(answer.choices[0].message.content)
