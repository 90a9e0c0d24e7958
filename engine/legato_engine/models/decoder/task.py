"""The task of generating text."""

from __future__ import annotations

from legato_engine.core.events import Event
from legato_engine.core.requests import SamplingParams
from legato_engine.core.results import FinishReason, QueryResult
from legato_engine.core.tokens import PromptToken
from legato_engine.models.text_output import TextOutput
from legato_engine.models.token_log import TokenLog
from legato_engine.tasks import SampledToken, with_token


class TextTask:
    """A `Task` that ends with an EOS, a stop string or its budget."""

    constrained = False
    follows_table = True
    has_payload = False
    reasoning_tokens = 0

    def __init__(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        eos: frozenset[int],
        answer: TextOutput,
        log: TokenLog | None = None,
    ) -> None:
        self.prompt = tuple(map(PromptToken, prompt))
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.finish_reason: FinishReason | None = None
        self._eos = eos
        self._answer = answer
        self._log = log
        self._num_consumed = 0

    def constraint(self) -> int:
        return 0

    def consume(self, token: SampledToken) -> list[Event]:
        self._num_consumed += 1
        events: list[Event] = []
        if token.token_id in self._eos:
            self.finish_reason = FinishReason.STOP
        else:
            events = self._answer.push(token.token_id)
            if self._answer.stopped:
                self.finish_reason = FinishReason.STOP
            elif self._num_consumed == self.max_tokens:
                self.finish_reason = FinishReason.LENGTH
        if self._log is not None:
            events = with_token(events, self._log.read(token))
        return events if self.finish_reason is None else events + self._answer.close()

    def result(self, finish_reason: FinishReason) -> QueryResult:
        self._answer.close()
        return QueryResult(answer=self._answer.text)
