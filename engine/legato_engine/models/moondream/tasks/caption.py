"""Describe the picture."""

from __future__ import annotations

from legato_engine.core import CaptionResult, FinishReason
from legato_engine.models.moondream.tasks.answering import AnsweringSkill


class CaptionSkill(AnsweringSkill):
    """The answer is the caption."""

    def result(self, finish_reason: FinishReason) -> CaptionResult:
        """The caption so far."""
        self._close()
        return CaptionResult(caption=self._answer.text)
