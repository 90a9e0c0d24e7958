"""Requests of the engine: stages, the table by id, resumption."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import math
from collections import abc
from collections.abc import Callable, Iterator, Sized
from itertools import repeat
from typing import Any, ClassVar

from legato_engine.core.preprocessor import Lazy, PendingImage, PreprocessedImage
from legato_engine.errors import InvalidField
from legato_engine.ipc.messages import Done, HoldImage
from legato_engine.models.base import Adapter
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.scheduler.batch import Refinement
from legato_engine.sequence import (
    NO_PAYLOAD,
    HostInputs,
    SampledToken,
    Sequence,
    SequenceAdapter,
    Task,
    VisualTask,
    tokens_of,
)
from legato_engine.types import (
    FinishReason,
    ImageProperties,
    MaskOutline,
    Request,
    RequestKey,
    Resumed,
    TokenInfo,
)

Future = concurrent.futures.Future


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class RequestStage:
    """Base of all stages; `deadline` is in monotonic seconds."""

    counts_toward_queue_limit: ClassVar[bool] = True
    """Whether it counts toward the queue's limits although it is not in the queue."""

    request_id: RequestKey
    tenant: str
    deadline: float = math.inf

    @property
    def futures(self) -> abc.Sequence[Future[Any]]:
        """Return the futures on other threads that the stage waits for."""
        return ()

    def cancel(self) -> None:
        """Cancel the futures that have not started."""


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class PendingRequest(RequestStage):
    """Request whose images, adapter or text are being prepared.

    `text` completes when `task` is computed; None if that was done synchronously or, with
    `awaits_images`, if it has not begun.
    """

    request: Request
    arrival: float
    task: Lazy[Task]
    text: Future[Task] | None
    images: abc.Sequence[PendingImage]
    adapter: Future[Adapter] | None
    awaits_images: bool = False

    @property
    def futures(self) -> abc.Sequence[Future[Any]]:
        parts = (*self.images, self.adapter, self.text)
        return [part for part in parts if isinstance(part, Future)]

    @property
    def is_ready(self) -> bool:
        return all(future.done() for future in self.futures)

    @property
    def failure(self) -> BaseException | None:
        failures = (future.exception() for future in self.futures if future.done())
        return next((failure for failure in failures if failure is not None), None)

    @property
    def prepared_images(self) -> list[PreprocessedImage]:
        return [each.result() if isinstance(each, Future) else each for each in self.images]

    def cancel(self) -> None:
        """Cancel the images and the text; other requests may wait for the adapter."""
        for part in (*self.images, self.text):
            if isinstance(part, Future):
                part.cancel()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class PendingLease(RequestStage):
    """A `HoldImage` whose image is being prepared."""

    command: HoldImage
    image: Future[PreprocessedImage]

    @property
    def futures(self) -> abc.Sequence[Future[Any]]:
        return (self.image,)

    def cancel(self) -> None:
        self.image.cancel()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRequest(RequestStage):
    """Request in the scheduler, which enforces the deadline.

    `image_to_refine` is the image to refine an outline with.
    """

    counts_toward_queue_limit: ClassVar[bool] = False  # the scheduler counts its own queue

    request: Request
    images: tuple[ImageProperties, ...] = ()
    image_seconds: float = 0.0
    tokens: list[TokenInfo] = dataclasses.field(default_factory=list)
    num_sent_tokens: int = 0  # tokens sent in deltas, also by earlier engines
    image_to_refine: PreparedImage | None = None


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class PendingRefinement(RequestStage):
    """Request whose sequence has finished and whose `done` waits for its outline.

    `work` prepares the refinement on a thread; `refinement` then runs on the device; the next
    `work` traces its result.
    """

    done: Done
    outline: MaskOutline
    started: float
    work: Future[Any]
    refinement: Refinement | None = None

    @property
    def futures(self) -> abc.Sequence[Future[Any]]:
        return (self.work,)

    def cancel(self) -> None:
        self.work.cancel()


# ---------------------------------------------------------------- request table

_Future = concurrent.futures.Future[Any]


class RequestTable:
    """Table of the requests and image leases that the engine has accepted and not finished.

    The next stage of a request is a new entry. Belongs to the engine's main thread; `wake` runs on
    the thread that completes a future.
    """

    def __init__(self, *, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._entries: dict[RequestKey, RequestStage] = {}
        self._completed: collections.deque[tuple[RequestKey, _Future]] = collections.deque()
        self._next_deadline = math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestKey) -> bool:
        return request_id in self._entries

    def add(self, entry: RequestStage) -> None:
        assert entry.request_id not in self._entries, (
            f"request id {entry.request_id.name} is in use"
        )
        self._entries[entry.request_id] = entry
        self._next_deadline = min(self._next_deadline, entry.deadline)
        self.watch(entry)

    def get(self, request_id: RequestKey) -> RequestStage | None:
        return self._entries.get(request_id)

    def remove(self, request_id: RequestKey) -> RequestStage | None:
        return self._entries.pop(request_id, None)

    def watch(self, entry: RequestStage) -> None:
        """Have `completed` yield the entry when one of its current futures completes."""
        for future in entry.futures:
            # The callback must not hold the future: the cycle would keep its image alive until a
            # full garbage collection, which hardly ever runs.
            future.add_done_callback(functools.partial(self._on_completed, entry.request_id))

    # ------------------------------------------------------------ completion

    @property
    def has_completed(self) -> bool:
        return bool(self._completed)

    def completed(self) -> Iterator[RequestStage]:
        """Yield an entry for each completed future."""
        while self._completed:
            request_id, future = self._completed.popleft()
            entry = self._entries.get(request_id)
            is_current = entry is not None and future in entry.futures
            del future  # its image must not outlive the request
            if entry is not None and is_current:
                yield entry

    # ------------------------------------------------------------ deadlines and capacity

    @property
    def next_deadline(self) -> float:
        """Return a lower bound of the entries' deadlines."""
        return self._next_deadline

    def expired(self, now: float) -> list[RequestStage]:
        """Return the entries whose deadline has passed, for the caller to remove."""
        if now < self._next_deadline:
            return []
        left = (each.deadline for each in self._entries.values() if each.deadline > now)
        self._next_deadline = min(left, default=math.inf)
        return [each for each in self._entries.values() if each.deadline <= now]

    def queued_tenants(self) -> list[str]:
        return [each.tenant for each in self._entries.values() if each.counts_toward_queue_limit]

    def newest(self, stage: type[RequestStage], tenant: str) -> RequestStage | None:
        newest_first = (self._entries[key] for key in reversed(self._entries))
        return next((e for e in newest_first if isinstance(e, stage) and e.tenant == tenant), None)

    def count(self, stage: type[RequestStage]) -> int:
        return sum(isinstance(each, stage) for each in self._entries.values())

    def _on_completed(self, request_id: RequestKey, future: _Future) -> None:
        self._completed.append((request_id, future))
        self._wake()


# ---------------------------------------------------------------- resumption


def replay(sequence: Sequence, resumed: Resumed, frontend: ModelFrontend) -> list[TokenInfo]:
    """Replay the tokens of a resumed request into a new sequence; return their descriptions.

    The prefill then computes prompt and tokens at once, as after a preemption, and the next token
    is sampled at its original position. The events of the tokens were sent already.

    Raises:
        InvalidField: the tokens cannot be of this request.
    """
    task = sequence.task
    if bool(resumed.payloads) != (task.has_payload and bool(resumed.token_ids)):
        wanted = "two for each token" if task.has_payload else "none: the task has no values"
        raise InvalidField(wanted, field="resume_from.values")
    infos: list[TokenInfo] = []
    for index, token in enumerate(_tokens(resumed)):
        _check(sequence, token.token_id, index, frontend)
        infos += tokens_of(task.consume(token))
        sequence.commit(token)
    sequence.progress.num_launched = sequence.num_committed
    sequence.timing.first_token = resumed.first_token
    return infos


def finish_reason_of(sequence: Sequence) -> FinishReason | None:
    """Return the finish reason if the sequence's last token is committed."""
    if sequence.num_committed == sequence.task.max_tokens:
        return sequence.task.finish_reason or FinishReason.LENGTH
    return sequence.task.finish_reason


def _check(sequence: Sequence, token_id: int, index: int, frontend: ModelFrontend) -> None:
    """Check a resumed token: one outside the vocabulary would read invalid memory."""
    field = f"resume_from.token_ids[{index}]"
    if finish_reason_of(sequence) is not None:
        raise InvalidField("the answer has ended before it", field=field)
    constraint = frontend.constraints[sequence.task.constraint()]
    allowed = constraint.allowed is None or token_id in constraint.allowed
    grammar = sequence.task.grammar
    allowed = allowed and (grammar is None or grammar.allows(token_id))
    if not (0 <= token_id < frontend.vocab_size and allowed) or token_id in constraint.suppressed:
        raise InvalidField("the task allows no such token here", field=field)


def _tokens(resumed: Resumed) -> Iterator[SampledToken]:
    """Return the resumed tokens; raise InvalidField if a column's length differs."""
    columns: tuple[tuple[str, Sized], ...] = (
        ("values", resumed.payloads),
        ("logprobs", resumed.logprobs),
        ("certainties", resumed.certainties),
    )
    for name, values in columns:
        if values and len(values) != len(resumed.token_ids):
            problem = f"{len(values)} for {len(resumed.token_ids)} tokens"
            raise InvalidField(problem, field=f"resume_from.{name}")
    payloads = resumed.payloads or repeat(NO_PAYLOAD)
    logprobs = resumed.logprobs or repeat(None)
    certainties = resumed.certainties or repeat(None)
    return map(SampledToken, resumed.token_ids, payloads, logprobs, certainties)


# ---------------------------------------------------------------- sequences


def make_sequence(
    frontend: ModelFrontend,
    request: Request,
    image: PreparedImage | None,
    adapter: Adapter | None = None,
    *,
    task: Task | None = None,
) -> Sequence:
    """Make a waiting sequence; raise as `make_task`.

    `image` is that of the prefix, which is not shared under another adapter: it changes keys and
    values.
    """
    task = task or frontend.make_task(request)
    prefix_length, visual = frontend.prefix_length(image is not None), None
    num_image_tokens = prefix_length - 1 if image else 0  # all of the prefix but BOS
    if isinstance(task, VisualTask) and task.visual is not None:
        # Moved, because the task outlives the inputs, and would keep the images.
        visual, task.visual = task.visual, None
        num_image_tokens = visual.prompt.num_image_tokens
    return Sequence(
        seq_id=0,
        request=request,
        task=task,
        prefix_key=(image.key if image else "") if request.cache_image else None,
        prefix_length=prefix_length,
        num_image_tokens=num_image_tokens,
        prompt=task.prompt,
        num_crops=image.num_crops if image else 0,
        inputs=HostInputs(image, adapter, visual),
        adapter=SequenceAdapter(adapter.key, adapter.rank) if adapter else SequenceAdapter(),
    )
