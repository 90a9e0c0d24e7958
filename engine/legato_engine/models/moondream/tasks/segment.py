"""The segment skill."""

from __future__ import annotations

from legato_engine.core.events import Event, OutlineEvent
from legato_engine.core.geometry import Box
from legato_engine.core.results import FinishReason, Outline, SegmentResult
from legato_engine.core.tokens import Certainty
from legato_engine.models.moondream.constraints import Allow
from legato_engine.models.moondream.tasks.detect import centred_box
from legato_engine.models.moondream.tasks.skill_task import SkillTask, TaskSetup
from legato_engine.models.moondream.tasks.svg_path import SvgPath
from legato_engine.models.moondream.tokenizer import NUM_SPECIAL, Tokenizer
from legato_engine.tasks import SampledToken

_FREE = int(Allow.FREE)  # an int, because enum lookup is slow


class SegmentSkill(SkillTask):
    """One outline: x, y and size of its box, then path text until EOS, in any order.

    The first two coords and size make the box; earlier path text is emitted with it.
    """

    has_payload = True

    def __init__(self, setup: TaskSetup, label: str, tokenizer: Tokenizer) -> None:
        super().__init__(setup)
        self._label = label
        self._tokenizer = tokenizer
        self._coords: list[float] = []
        self._size: tuple[float, float] | None = None
        self._certainties: list[Certainty | None] = []  # of the box's tokens
        self._box: Box | None = None
        self._path = SvgPath()

    def constraint(self) -> int:
        return _FREE

    def result(self, finish_reason: FinishReason) -> SegmentResult:
        """No outline without a box; an empty path if the text is invalid."""
        if self._box is None:
            return SegmentResult()
        outline = Outline(
            path=self._path.text,
            box=self._box,
            label=self._label,
            confidence=self._confidence(self._certainties),
        )
        return SegmentResult(segments=(outline,))

    def _read(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.eos:
            self.finish_reason = FinishReason.STOP
            return []
        if token.token_id in (self._tokens.coord, self._tokens.size):
            return self._read_region(token)
        if token.token_id < NUM_SPECIAL:
            return []
        piece = self._tokenizer.piece(token.token_id).decode("utf-8", "replace")
        delta = self._path.push(piece)
        return [OutlineEvent(index=0, path_delta=delta)] if delta and self._box else []

    def _read_region(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.coord:
            if len(self._coords) < 2:
                self._certainties.append(token.certainty)
            self._coords.append(token.payload[0])
        elif self._size is None:
            self._certainties.append(token.certainty)
            self._size = token.payload
        if self._box is not None or self._size is None or len(self._coords) < 2:
            return []
        self._box = centred_box((self._coords[0], self._coords[1]), self._size)
        return [OutlineEvent(index=0, path_delta=self._path.text, box=self._box)]
