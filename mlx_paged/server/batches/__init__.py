"""The batch APIs of OpenAI and Anthropic: files of requests, and their answers."""
