"""Shared parts of the tests: oracles, small models, fakes, helpers."""
