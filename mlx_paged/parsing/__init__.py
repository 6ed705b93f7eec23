"""Parsers and grammars for tool calls and reasoning, in the syntax of each model family."""
