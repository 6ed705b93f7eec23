"""Sampling: logits processors, filters, log-probabilities, and settings by sequence."""
