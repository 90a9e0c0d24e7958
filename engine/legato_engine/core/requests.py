"""A request: one task, with its image, its sampling and what was done for it before."""

from __future__ import annotations

import math

from legato_engine.core.images import ImageSource
from legato_engine.core.request_key import RequestKey
from legato_engine.core.task_specs import TaskSpec
from legato_engine.core.tokens import Certainty
from legato_engine.core.value import Value


class SamplingParams(Value, frozen=True):
    """Sampling parameters; None is the task's default (greedy for spatial tasks).

    `top_p` is in (0, 1]; `temperature` 0 is greedy. `seed` None derives it from the request's name,
    so that a retry has the same result.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Resumed(Value, frozen=True):
    """What was done for a request by engines that were lost. Times are `time.monotonic()` seconds.

    Its outputs have told the tokens in `token_ids`, with `payloads` and `certainties` if the task
    has them (a caller may not know the latter) and `logprobs` if the request wants them. A request
    that is `alone` runs with nothing beside it. One that is not `admitted` comes from a caller's
    checkpoint, and has no place in the queue yet.
    """

    arrival: float
    first_token: float = 0.0  # 0: none was told
    token_ids: tuple[int, ...] = ()
    payloads: tuple[tuple[float, float], ...] = ()
    logprobs: tuple[float, ...] = ()
    certainties: tuple[Certainty, ...] = ()
    admitted: bool = True
    alone: bool = False
    fingerprint: str = ""  # of its content, if `alone`
    is_last: bool = False  # it is not resumed once more


class Request(Value, frozen=True):
    """One task on at most one image.

    `deadline` is in `time.monotonic()` seconds, one clock for all processes of a host. A higher
    `priority` starts first. Without `progress`, `Queued` and `Started` are not sent.
    """

    request_id: RequestKey
    task: TaskSpec
    image: ImageSource | None = None
    sampling: SamplingParams = SamplingParams()
    model: str = ""
    adapter: str = ""
    deadline: float | None = None
    cache_image: bool = True
    return_tokens: bool = False
    logprobs: bool = False
    top_logprobs: int = 0  # alternatives to each token; above 0 only with `logprobs`
    deltas: bool = True
    progress: bool = True
    priority: int = 0
    resumed: Resumed | None = None

    @property
    def tenant(self) -> str:
        return self.request_id.tenant

    @property
    def ends_by(self) -> float:
        """Its deadline, infinity without one."""
        return math.inf if self.deadline is None else self.deadline

    @property
    def was_admitted(self) -> bool:
        """An engine that was lost had admitted it."""
        return self.resumed is not None and self.resumed.admitted
