"""Why a run does not begin, or ends early."""

from __future__ import annotations


class RunRefused(Exception):
    """The message is for the user, who must change what was asked."""
