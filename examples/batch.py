"""Answers a file of requests through OpenAI's batch API. Batches survive a restart of the server.

$ mlx-paged serve --files-dir batches
$ python examples/batch.py [REQUESTS]

The same without a server; after an interruption, it goes on where it was:

$ mlx-paged generate -i examples/requests.jsonl -o answers.jsonl
"""

import json
import os
import sys
import time
from pathlib import Path

from openai import OpenAI

requests = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("requests.jsonl")
client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)

file = client.files.create(file=requests, purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(f"# {batch.status}: {batch.request_counts.completed} of {batch.request_counts.total}")

if batch.output_file_id:  # in the order in which the answers were ready
    for line in client.files.content(batch.output_file_id).text.splitlines():
        answer = json.loads(line)
        text = answer["response"]["body"]["choices"][0]["message"]["content"]
        print(f"# {answer['custom_id']}\n{text}\n")
