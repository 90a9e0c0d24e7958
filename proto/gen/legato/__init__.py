"""Legato's gRPC contract."""
