"""A request in the scheduler: the interface of its task, its state and its output."""

from __future__ import annotations

import dataclasses
from collections import abc, deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from legato_engine.errors import InvalidField
from legato_engine.types import (
    Certainty,
    Event,
    FinishReason,
    ObjectEvent,
    ObjectOrder,
    PointEvent,
    PromptToken,
    ReasoningEvent,
    Request,
    SamplingParams,
    TaskOutput,
    TextEvent,
    TokenInfo,
    TokensEvent,
)

if TYPE_CHECKING:
    import llguidance


class SampledToken(NamedTuple):
    """A sampled token of one row."""

    token_id: int  # -1 if the row's logits were not finite
    payload: tuple[float, float]  # opaque to all but the model
    logprob: float | None = None  # None if no row of the batch requested it
    certainty: Certainty | None = None  # None unless a row of the batch has a task with payloads
    alternatives: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens and their logprobs, in descending order; empty if no row requested any."""

    @classmethod
    def forced(cls, token_id: int) -> SampledToken:
        """Return the token as if it was sampled where no other is allowed."""
        return cls(token_id, NO_PAYLOAD, 0.0, alternatives=((token_id, 0.0),))


class Task(Protocol):
    """State machine that turns a request's committed tokens into events.

    If `constrained`, the constraint depends on committed tokens, so sampling waits for the previous
    commit. Otherwise it never changes, and sampling may run a step ahead. With
    `uses_transition_table` each constraint follows from the previous one and its token, so the
    device can advance it without the host.
    """

    prompt: tuple[PromptToken, ...]  # after the shared prefix (BOS and image, or BOS alone)
    sampling: SamplingParams  # resolved: no field is None except top_k
    max_tokens: int  # including the terminal token
    constrained: bool
    uses_transition_table: bool
    has_payload: bool

    @property
    def grammar(self) -> Grammar | None:
        """Return the grammar that the next token must follow besides the constraint, if any."""

    def constraint(self) -> int:
        """Return an index into the model's constraint table."""

    def consume(self, token: SampledToken) -> abc.Sequence[Event]:
        """Process a committed token; not called after `finish_reason` is set."""

    @property
    def finish_reason(self) -> FinishReason | None: ...

    def result(self, finish_reason: FinishReason) -> TaskOutput:
        """Return the result so far, including pending text."""

    @property
    def reasoning_tokens(self) -> int: ...


class Constraint(NamedTuple):
    """Tokens that a row may sample: `allowed` (None: all) minus `suppressed`.

    After token `on` (None: any) comes constraint `then` (None: the same).
    """

    allowed: tuple[int, ...] | None = None
    suppressed: tuple[int, ...] = ()
    then: int | None = None
    on: int | None = None


class Grammar:
    """State of an answer that must match, advanced token by token.

    Where the grammar permits only one text, its tokens are forced: those into which the tokenizer
    itself splits that text, and the mask allows no other. The matcher may be ahead of the accepted
    tokens by forced ones.

    Shape legend: W words of 32 tokens.
    """

    def __init__(self, matcher: llguidance.LLMatcher, field: str) -> None:
        self._matcher = matcher
        self._field = field
        self._ahead = deque[int]()  # forced, consumed by the matcher and not accepted yet
        self._run: tuple[int, ...] | None = None  # forced after the matcher's state; None: unknown

    @property
    def is_complete(self) -> bool:
        """Return whether the answer matches and nothing can follow."""
        stopped = bool(self._matcher.is_stopped()) and not self._matcher.is_error()
        return stopped and not self._ahead

    def forced(self, num_inflight: int) -> tuple[int, ...]:
        """Return the tokens that are certain after the next `num_inflight` tokens.

        There are none if one of those is not forced itself.
        """
        return (*self._ahead, *self._forced_run())[num_inflight:]

    def fill(self, words_W: npt.NDArray[np.int32], forced: abc.Sequence[int] = ()) -> None:
        """Set the bits of the tokens that may come after `forced` ones, and clear all others.

        A grammar that turns out to be too complex sets all; `accept` then raises.
        """
        self._run_ahead(forced)
        if following := self.forced(len(forced)):
            allow_only(following[0], words_W)
        else:
            self._matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
        if self._matcher.is_error():
            words_W.fill(-1)

    def closing(self) -> tuple[int, ...]:
        """Return the tokens that the answer certainly ends with; () if others may come first."""
        forced = self.forced(0)
        self._run_ahead(forced)
        return forced if self._matcher.is_stopped() and not self._matcher.is_error() else ()

    def _run_ahead(self, forced: abc.Sequence[int]) -> None:
        for token_id in forced[len(self._ahead) :]:
            self._consume(token_id)
            self._ahead.append(token_id)

    def _forced_run(self) -> tuple[int, ...]:
        if self._run is None:
            self._run = tuple(self._matcher.compute_ff_tokens())
        return self._run

    def _consume(self, token_id: int) -> bool:
        run, self._run = self._run, None
        if run and run[0] == token_id:
            self._run = run[1:] or None
        return self._matcher.consume_token(token_id)

    def allows(self, token_id: int) -> bool:
        return bool(self._matcher.validate_tokens([token_id]) == 1)

    def accept(self, token_id: int) -> None:
        """Advance by a token that `fill` allowed.

        Raises:
            InvalidField: The grammar is too complex to go on.
        """
        if self._ahead and not self._matcher.is_error():
            forced = self._ahead.popleft()
            assert token_id == forced, f"token {token_id} where the grammar forces {forced}"
        elif not self._consume(token_id):
            raise grammar_refused(self._field, self._matcher.get_error())


def allow_only(token_id: int, words_W: npt.NDArray[np.int32]) -> None:
    """Set one token's bit, and clear all others."""
    words_W.fill(0)
    words_W.view(np.uint32)[token_id // 32] = 1 << token_id % 32


def grammar_refused(field: str, problem: str) -> InvalidField:
    """Make the error of a grammar from the compiler's first line, or its line "error: ..."."""
    lines = [*problem.strip().splitlines(), "not valid"]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return InvalidField([*reasons, *lines][0][:300], field=f"response_format.{field}")


def with_token(events: abc.Sequence[Event], token: TokenInfo) -> list[Event]:
    """Attach the token to the first event if it is text, else insert it before the events."""
    if events and isinstance(first := events[0], TextEvent | ReasoningEvent):
        return [msgspec.structs.replace(first, tokens=(token,)), *events[1:]]
    return [TokensEvent(tokens=(token,)), *events]


def tokens_of(events: Iterable[Event]) -> Iterator[TokenInfo]:
    for event in events:
        if isinstance(event, TextEvent | ReasoningEvent | TokensEvent):
            yield from event.tokens


FoundT = TypeVar("FoundT", ObjectEvent, PointEvent)


def ordered(found: Iterable[FoundT], order: ObjectOrder) -> tuple[FoundT, ...]:
    """Return a result's objects in order; those of unknown confidence come last."""
    if order is ObjectOrder.MODEL:
        return tuple(found)
    return tuple(sorted(found, key=_rank))


def _rank(found: ObjectEvent | PointEvent) -> float:
    return 1.0 if found.confidence is None else -found.confidence


# ---------------------------------------------------------------- sequence

TokenKey = tuple[int, tuple[float, float]]
"""A token id with its payload; with the preceding ones it determines the KV."""

Keys = tuple[TokenKey, ...]

NO_PAYLOAD = (0.0, 0.0)
BOS_KEY: TokenKey = (-1, NO_PAYLOAD)
"""BOS without an image; only the model knows its token id."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSpan:
    """Positions `[start, start + length)` of the prompt, which are of image `index`."""

    start: int
    length: int
    index: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class VisualPrompt:
    """A prompt with images between its tokens, in the order of their indices.

    `rope_3P`: int64 (time, row, column) of each position for rotary embeddings; that of a later
    position is the position plus `rope_offset`, in all three.

    An image is encoded in `pieces_per_image` pieces, one after another; they count on from image to
    image.
    """

    spans: tuple[ImageSpan, ...]
    rope_3P: Any
    rope_offset: int
    pieces_per_image: int = 1

    @property
    def num_image_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    def pieces_of(self, start: int, stop: int) -> range:
        """Return the pieces of the images in positions `[start, stop)`."""
        shown = [span.index for span in self.spans if span.start < stop and start < span.stop]
        if not shown:
            return range(0)
        return range(shown[0] * self.pieces_per_image, (shown[-1] + 1) * self.pieces_per_image)

    def cost(self, piece: int) -> int:
        """Return a piece's share of the tokens of its image; together they are all."""
        index, at = divmod(piece, count := self.pieces_per_image)
        length = self.spans[index].length
        return length * (at + 1) // count - length * at // count


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class VisualInputs:
    """A visual prompt with its prepared images.

    `features`, by image, belong to the runner: what is encoded for the next chunk of the prompt.
    """

    prompt: VisualPrompt
    images: abc.Sequence[Any]
    features: dict[int, Any] = dataclasses.field(default_factory=dict)


class VisualTask:
    """Base of a `Task` with images in its prompt; its sequence takes over `visual`."""

    visual: VisualInputs | None


@dataclasses.dataclass(frozen=True, slots=True)
class HostInputs:
    """Host data, kept until the sequence is finalized because preemption recomputes it.

    `image`: of the prefix. `visual`: images in the prompt.
    """

    image: Any = None
    adapter: Any = None
    visual: VisualInputs | None = None


NO_INPUTS = HostInputs()


@dataclasses.dataclass(slots=True, eq=False)
class SequenceAdapter:
    """Adapter of a sequence; the KV cache writes `slot`."""

    key: str = ""  # names its content; "" without one
    rank: int = 0
    slot: int = 0  # 0 without an adapter or resources


@dataclasses.dataclass(slots=True, eq=False)
class SequencePages:
    """Pages of a sequence, written by the KV cache.

    With `end` = `len(ids) * page_size`, positions are:

    - `[0, cached_length)`: found by the latest admission, not computed again
    - `[0, capacity)`: in pages that the sequence keeps
    - `[capacity, end)`: in pages for draft tokens
    """

    ids: tuple[int, ...] = ()
    capacity: int = 0
    cached_length: int = 0
    cached_tokens: int = 0  # `cached_length` of the first admission
    num_preemptions: int = 0
    free_pages_when_refused: int = 0  # when the sequence last did not fit
    num_staged: int = 0  # of `ids`, in the device's page table; the runner writes it, too


@dataclasses.dataclass(slots=True, eq=False)
class Progress:
    """Decoding progress, written by the scheduler.

    `num_launched` counts tokens certain to be committed: one per single-step launch and its forced
    ones, one per step read from a loop (a loop may abort), and accepted draft tokens. Launches in
    flight may accept `inflight_drafts` more.
    """

    num_launched: int = 0
    last_position: int = -1  # of the newest token; -1 before the prefill is launched
    inflight_drafts: int = 0


class Descriptor(NamedTuple):
    """Acceptance statistics and block size that the device chose for a sequence."""

    accepted_weight: float  # tokens, decayed by age
    tried_weight: float
    ema_acceptance_rate: float
    current_block_size: int
    idle_steps: int  # consecutive verifications without draft tokens
    flags: int


class RowTokens(NamedTuple):
    """Accepted draft tokens or forced ones, then the model's next token.

    Empty for a zombie whose last token came with an earlier launch.
    """

    tokens: tuple[SampledToken, ...]
    num_drafted: int = 0  # chosen by the device; a proposer may have no guess
    learnt: Descriptor | None = None


@dataclasses.dataclass(slots=True, eq=False)
class DraftStats:
    """Acceptance of draft tokens on the device at the latest commit."""

    learnt: Descriptor | None = None  # None before the first
    block_size_history: list[int] = dataclasses.field(default_factory=list)  # drafted, by commit
    under_pressure: bool = True  # at the latest plan, or before the first


@dataclasses.dataclass(slots=True, eq=False)
class Timing:
    """Times in `time.monotonic()` seconds, written by the scheduler except for `arrival`."""

    arrival: float = 0.0  # when the request was accepted
    prefill_start: float = 0.0
    first_token: float = 0.0


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A request on the device; each part of the state has one writer.

    The zombie rule: `finalized` is set once, when the last token is committed or the request ends
    early. `inflight_refs` counts the launches that name the sequence. Its pages, row and adapter
    slot are released when it is finalized and no launch names it.

    `preempted` is set while a live sequence gives up its pages: no new launch names it, and it
    waits again after those in flight are committed.

    The KV cache writes `row`; the scheduler writes the other fields here and `tokens`.
    """

    seq_id: int
    request: Request
    task: Task
    prefix_key: str | None  # names the image's content; "" without one, None to share nothing
    prefix_length: int  # positions of BOS and image, before the prompt
    prompt: tuple[PromptToken, ...]
    num_crops: int = 0  # 0 or 1 cannot be encoded in several launches
    inputs: HostInputs = NO_INPUTS
    adapter: SequenceAdapter = dataclasses.field(default_factory=SequenceAdapter)
    timing: Timing = dataclasses.field(default_factory=Timing)
    is_waiting: bool = True  # for its first launch, or for that after a preemption
    finalized: bool = False
    preempted: bool = False
    inflight_refs: int = 0  # 0, 1 or 2
    row: int = -1  # of the device's state; -1 without resources
    pages: SequencePages = dataclasses.field(default_factory=SequencePages)
    progress: Progress = dataclasses.field(default_factory=Progress)
    draft_stats: DraftStats = dataclasses.field(default_factory=DraftStats)
    num_image_tokens: int = 0  # of the prefix or of the prompt
    tokens: list[TokenKey] = dataclasses.field(init=False)  # prompt and committed tokens
    certainties: list[Certainty] = dataclasses.field(default_factory=list)
    """Of committed tokens, if the task has payloads; later ones only, if a caller lost the first.
    """

    def __post_init__(self) -> None:
        self.tokens = [(token.token_id, token.payload) for token in self.prompt]

    @property
    def prompt_length(self) -> int:
        return self.prefix_length + len(self.prompt)

    @property
    def max_length(self) -> int:
        """Return the maximum positions that need KV; the last token is no input."""
        return self.prefix_length + len(self.prompt) + self.task.max_tokens - 1

    @property
    def length(self) -> int:
        return self.prefix_length + len(self.tokens)

    @property
    def num_committed(self) -> int:
        """Return the committed tokens; `progress.num_launched` counts those in flight, too."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_prompt_computed(self) -> int:
        """Return the prompt tokens that the prefill computes since admission, including BOS."""
        return self.prompt_length - max(self.pages.cached_length, self.image_prefix_length)

    @property
    def image_prefix_length(self) -> int:
        """Return the positions with bidirectional attention, which are shared only as a whole."""
        return self.prefix_length if self.prefix_length > 1 else 0

    @property
    def arrival(self) -> float:
        return self.timing.arrival

    @property
    def adapter_key(self) -> str:
        return self.adapter.key

    @property
    def max_cost(self) -> int:
        return self.prompt_length + self.task.max_tokens

    @property
    def cost(self) -> int:
        return self.length

    @property
    def was_started(self) -> bool:
        return self.pages.num_preemptions > 0 or self.request.was_admitted

    @property
    def may_draft(self) -> bool:
        """Return whether the task has neither constraints nor payloads."""
        return not (self.task.constrained or self.task.has_payload)

    def keys(self, start: int, stop: int) -> Keys:
        """Return the keys of positions after the image prefix."""
        first = max(start - self.prefix_length, 0)
        keys = self.tokens[first : stop - self.prefix_length]
        return tuple(keys) if start >= self.prefix_length else (BOS_KEY, *keys)

    def commit(self, token: SampledToken) -> bool:
        """Append a token; return whether the task may sample no further one."""
        task = self.task
        self.tokens.append((token.token_id, token.payload))
        if task.has_payload and token.certainty is not None:
            self.certainties.append(token.certainty)
        return len(self.tokens) - len(self.prompt) == task.max_tokens

    def roll_back_decode(self) -> None:
        """Uncount a decode whose row had ended or that ran behind an aborted loop."""
        self.progress.num_launched -= 1
        self.progress.last_position -= 1

    def commit_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count a committed launch's draft tokens.

        If they end the sequence, a later launch in flight samples nothing for it.
        """
        progress = self.progress
        progress.inflight_drafts -= num_drafts
        if not num_accepted:
            return
        progress.num_launched = min(progress.num_launched + num_accepted, self.task.max_tokens)
        progress.last_position = min(progress.last_position + num_accepted, self.max_length)
