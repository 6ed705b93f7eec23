"""Bodies of requests and answers, as OpenAI and vLLM name them."""
