"""Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, and its lists of models."""
