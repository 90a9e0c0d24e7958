"""The query skill."""

from __future__ import annotations

from legato_engine.core.events import Event
from legato_engine.core.results import FinishReason, QueryResult
from legato_engine.models.moondream.constraints import Allow
from legato_engine.models.moondream.tasks.reasoning import ReasoningOutput
from legato_engine.models.moondream.tasks.skill_task import TaskSetup
from legato_engine.models.moondream.tasks.text_skill import TextSkill
from legato_engine.models.text_output import TextOutput
from legato_engine.tasks import SampledToken

# Ints, because enum lookup is slow.
_REASONING, _TEXT, _ANSWER = int(Allow.REASONING), int(Allow.TEXT), int(Allow.ANSWER)


class QuerySkill(TextSkill):
    """An answer without reasoning."""

    def result(self, finish_reason: FinishReason) -> QueryResult:
        self._close()
        return QueryResult(answer=self._answer.text)


class ReasonedQuerySkill(QuerySkill):
    """Reasoning, `num_answer_tokens` answer tokens, then the answer, in one budget.

    The model samples the first answer token; others are forced. EOS ends the task.
    """

    constrained = True

    def __init__(
        self,
        setup: TaskSetup,
        answer: TextOutput,
        reasoning: ReasoningOutput,
        num_answer_tokens: int,
    ) -> None:
        super().__init__(setup, answer)
        self.has_payload = True  # reasoning points at objects
        self._reasoning = reasoning
        self._num_answer_tokens = num_answer_tokens
        self._num_opened = 0  # answer tokens so far
        self._num_before_answer = 0

    @property
    def reasoning_tokens(self) -> int:
        """Answer tokens included."""
        return self._num_before_answer

    def constraint(self) -> int:
        if self._num_opened == 0:
            return _REASONING
        if self._num_opened == self._num_answer_tokens:
            return _TEXT
        return _ANSWER + self._num_opened - 1

    def result(self, finish_reason: FinishReason) -> QueryResult:
        answer = super().result(finish_reason).answer
        return QueryResult(
            answer=answer, reasoning=self._reasoning.text, grounding=self._reasoning.grounding
        )

    def _read(self, token: SampledToken) -> list[Event]:
        if self._num_opened == self._num_answer_tokens:
            return super()._read(token)
        self._num_before_answer += 1
        if token.token_id == self._tokens.eos:
            self.finish_reason = FinishReason.STOP
            return []
        if token.token_id == self._tokens.answer:
            self._num_opened += 1
            return []
        return self._reasoning.push(token)
