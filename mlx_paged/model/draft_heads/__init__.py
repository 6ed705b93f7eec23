"""Draft heads: small modules that predict tokens from a model's hidden states."""
