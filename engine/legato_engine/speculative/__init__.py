"""Speculative decoding: proposers of draft tokens, and policies for how many to propose."""
