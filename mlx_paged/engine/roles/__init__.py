"""Roles: one engine computes prompts (prefill), another one answers them (decode)."""
