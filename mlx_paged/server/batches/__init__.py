"""Batches: files of requests in OpenAI's format, and their answers."""
