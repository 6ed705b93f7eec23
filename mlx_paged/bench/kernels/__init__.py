"""Kernel benchmarks: every native primitive against the machine's bandwidth."""
