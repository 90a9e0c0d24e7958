"""The error of every step of a release."""

from __future__ import annotations


class ReleaseError(Exception):
    """Something must be put right before a release; the message says what."""
