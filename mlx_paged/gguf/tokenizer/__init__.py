"""Tokenizer of a GGUF file, as mlx-lm wraps those of Hugging Face."""

from mlx_paged.gguf.tokenizer.build import build_tokenizer

__all__ = ["build_tokenizer"]
