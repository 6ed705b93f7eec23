"""Speculative decoding: drafts of the next tokens, which one step verifies together.

A draft is accepted if it equals the token that is sampled in its place, with the noise of that seed
and position. So an answer has the same tokens with and without speculation, greedy or sampled.
"""
