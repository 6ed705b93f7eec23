"""Finds the text that fits a question: by embeddings, and by the server's reranking.

$ mlx-paged serve --runner pooling --pooler-config.pooling_type MEAN
$ python examples/embeddings_and_rerank.py

The embedded model knows Python only. An embedding model, such as
mlx-community/Qwen3-Embedding-0.6B-8bit, needs none of these options.
"""

import os

import httpx
from openai import OpenAI

QUERY = "Read a text file"
DOCUMENTS = [
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
    "def is_palindrome(text):\n    return text == text[::-1]",
    "def read(path):\n    with open(path) as file:\n        return file.read()",
    "def mean(values):\n    return sum(values) / len(values)",
]

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id

answer = client.embeddings.create(model=model, input=[QUERY, *DOCUMENTS])
query, *documents = (each.embedding for each in answer.data)
print(f"{len(query)} numbers a text")
for text, vector in zip(DOCUMENTS, documents):
    cosine = sum(a * b for a, b in zip(query, vector))  # all vectors have length 1
    print(f"{cosine:6.3f}  {text.splitlines()[0]}")

ranked = client.post(
    "/rerank",
    body={"model": model, "query": QUERY, "documents": DOCUMENTS, "top_n": 2},
    cast_to=httpx.Response,
).json()
for result in ranked["results"]:
    first = DOCUMENTS[result["index"]].splitlines()[0]
    print(f"{result['relevance_score']:6.3f}  {first}  (reranked)")
