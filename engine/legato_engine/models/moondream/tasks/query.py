"""Answer a question, after thinking if asked to."""

from __future__ import annotations

from legato_engine.core import Event, FinishReason, QueryResult
from legato_engine.models.moondream.constraints import Allow
from legato_engine.models.moondream.tasks.answering import AnsweringSkill
from legato_engine.models.moondream.tasks.base import TaskSetup
from legato_engine.models.moondream.tasks.thoughts import Thoughts
from legato_engine.models.text_output import Answer
from legato_engine.tasks import SampledToken

# Plain numbers: every step asks, and looking up an enum's member is slow.
_THOUGHT, _TEXT, _ANSWER = int(Allow.THOUGHT), int(Allow.TEXT), int(Allow.ANSWER)


class QuerySkill(AnsweringSkill):
    """The answer alone."""

    def result(self, finish_reason: FinishReason) -> QueryResult:
        """The answer so far."""
        self._close()
        return QueryResult(answer=self._answer.text)


class ReasonedQuerySkill(QuerySkill):
    """Thoughts until the answer token, then the answer; one budget for both, EOS ends either.

    The model is fed `num_answer_tokens` answer tokens before the answer: the first is its own
    choice, the others are forced.
    """

    constrained = True

    def __init__(
        self, setup: TaskSetup, answer: Answer, thoughts: Thoughts, num_answer_tokens: int
    ) -> None:
        super().__init__(setup, answer)
        self.has_payload = True  # thoughts point at places
        self._thoughts = thoughts
        self._num_answer_tokens = num_answer_tokens
        self._num_opened = 0  # answer tokens so far
        self._num_before_answer = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens before the answer's first, those that open it included."""
        return self._num_before_answer

    def constraint(self) -> int:
        """By phase: thoughts, opening, answer."""
        if self._num_opened == 0:
            return _THOUGHT
        return _TEXT if self._num_opened == self._num_answer_tokens else _ANSWER

    def result(self, finish_reason: FinishReason) -> QueryResult:
        """Thoughts and answer so far."""
        answer = super().result(finish_reason).answer
        return QueryResult(
            answer=answer, reasoning=self._thoughts.text, grounding=self._thoughts.grounding
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
        return self._thoughts.push(token)
