"""`/v1/responses`: OpenAI's Responses API, with an in-memory store."""
