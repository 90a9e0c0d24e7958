"""The caption skill."""

from __future__ import annotations

from legato_engine.core.results import CaptionResult, FinishReason
from legato_engine.models.moondream.tasks.text_skill import TextSkill


class CaptionSkill(TextSkill):
    """Text that describes the image."""

    def result(self, finish_reason: FinishReason) -> CaptionResult:
        self._close()
        return CaptionResult(caption=self._answer.text)
