"""Structured outputs: constraints on an answer, as a grammar that every token follows."""

from __future__ import annotations

from mlx_paged.engine.grammar.structured_outputs import StructuredOutputs, structured_outputs_of

__all__ = ["StructuredOutputs", "structured_outputs_of"]
