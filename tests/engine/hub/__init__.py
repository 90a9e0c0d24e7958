"""Pulled models."""
