"""The OpenAI endpoint: Starlette in front of `AsyncEngine`."""
