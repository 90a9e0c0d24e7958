"""The task of a skill."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable

from legato_engine.core.events import Event
from legato_engine.core.requests import SamplingParams
from legato_engine.core.results import FinishReason, TaskResult
from legato_engine.core.tokens import Certainty, PromptToken
from legato_engine.models.confidence import Calibration, score
from legato_engine.models.moondream.config import SpecialTokens
from legato_engine.models.token_log import TokenLog
from legato_engine.tasks import SampledToken, with_token


@dataclasses.dataclass(frozen=True, slots=True)
class TaskSetup:
    """Parts of a task; `sampling` is resolved, and `max_tokens` fits the context.

    `values_in_text`: answers may hold coords and sizes.
    """

    prompt: tuple[PromptToken, ...]
    sampling: SamplingParams
    max_tokens: int
    tokens: SpecialTokens
    values_in_text: bool
    log: TokenLog | None
    calibration: Calibration


class SkillTask(abc.ABC):
    """A `Task`; skills read a token in `_read`, which may set `finish_reason`."""

    constrained = False
    follows_table = True
    has_payload = False

    def __init__(self, setup: TaskSetup) -> None:
        self.prompt = setup.prompt
        self.sampling = setup.sampling
        self.max_tokens = setup.max_tokens
        self.finish_reason: FinishReason | None = None
        self._tokens = setup.tokens
        self._log = setup.log
        self._calibration = setup.calibration
        self._num_consumed = 0

    @property
    def reasoning_tokens(self) -> int:
        return 0

    def consume(self, token: SampledToken) -> list[Event]:
        self._num_consumed += 1
        events = self._read(token)
        if self._log is not None:
            events = with_token(events, self._log.read(token))
        if self.finish_reason is None:
            if self._num_consumed < self.max_tokens:
                return events
            self.finish_reason = FinishReason.LENGTH
        return events + self._close()

    @abc.abstractmethod
    def constraint(self) -> int: ...

    @abc.abstractmethod
    def _read(self, token: SampledToken) -> list[Event]: ...

    def _close(self) -> list[Event]:
        return []

    def _confidence(self, certainties: Iterable[Certainty | None]) -> float | None:
        raw = score(certainties)
        return None if raw is None else self._calibration(raw)

    @abc.abstractmethod
    def result(self, finish_reason: FinishReason) -> TaskResult: ...
