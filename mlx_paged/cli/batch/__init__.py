"""Batches in OpenAI's format: a JSONL file of requests in, a JSONL file of answers out."""
