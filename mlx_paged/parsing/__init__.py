"""Tool calls and reasoning in answers: found in a model's own syntax, and forced in it."""
