"""Skills that answer in plain text."""

from __future__ import annotations

from legato_engine.core.events import Event
from legato_engine.core.results import FinishReason
from legato_engine.models.moondream.constraints import Allow
from legato_engine.models.moondream.tasks.skill_task import SkillTask, TaskSetup
from legato_engine.models.text_output import TextOutput
from legato_engine.tasks import SampledToken

_TEXT = int(Allow.TEXT)  # an int, because enum lookup is slow


class TextSkill(SkillTask):
    """Text until EOS or a stop string."""

    def __init__(self, setup: TaskSetup, answer: TextOutput) -> None:
        super().__init__(setup)
        self.has_payload = setup.values_in_text
        self._answer = answer

    def constraint(self) -> int:
        return _TEXT

    def _read(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.eos:
            self.finish_reason = FinishReason.STOP
            return []
        events = self._answer.push(token.token_id)
        if self._answer.stopped:
            self.finish_reason = FinishReason.STOP
        return events

    def _close(self) -> list[Event]:
        return self._answer.close()
