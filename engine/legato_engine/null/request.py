"""A request to an engine without a model."""

from __future__ import annotations

import msgspec

from legato_engine.core.images import ImageInfo
from legato_engine.core.requests import Request
from legato_engine.core.results import Timings, Usage
from legato_engine.null.scripted_output import ScriptedOutput

IMAGE_TOKENS = 729


class NullRequest(msgspec.Struct, eq=False):
    """A request with its output; times are monotonic seconds, 0 until they are known."""

    request: Request
    output: ScriptedOutput
    image: ImageInfo | None
    arrival: float
    image_seconds: float
    input_tokens: int
    started: float = 0.0
    first_token: float = 0.0
    num_tokens: int = 0

    @property
    def adapter_key(self) -> str:
        return ""

    @property
    def max_cost(self) -> int:
        return self.input_tokens + len(self.output.events)

    @property
    def cost(self) -> int:
        return self.input_tokens + self.num_tokens

    @property
    def was_started(self) -> bool:
        return self.request.was_admitted

    @property
    def cached_tokens(self) -> int:
        return 1 + IMAGE_TOKENS if self.image and self.image.cache_hit else 0

    @property
    def queue_time(self) -> float:
        return max(0.0, self.started - self.arrival - self.image_seconds)

    def usage(self) -> Usage:
        return Usage(
            input_tokens=self.input_tokens,
            output_tokens=self.num_tokens,
            cached_tokens=self.cached_tokens,
            image_tokens=IMAGE_TOKENS if self.image else 0,
            reasoning_tokens=min(self.num_tokens, self.output.num_thoughts),
        )

    def timings(self, now: float) -> Timings:
        first_token = self.first_token or now
        return Timings(
            queue=self.queue_time,
            image=self.image_seconds,
            prefill=max(0.0, first_token - (self.started or now)),
            first_token=first_token - self.arrival,
            decode=now - first_token,
            total=now - self.arrival,
        )
