"""The parts of sampling: edits of logits, filters, log-probabilities, and who wants which."""
