"""One request as the kernel holds it."""

from __future__ import annotations

import dataclasses
import enum

from legato_engine.speculative.block_policy import INITIAL_RATE

NO_GRAFT = -1
"""`graft_source_id` of a request that borrows no pages."""


class State(enum.IntEnum):
    """The state of a request. DONE is final; a preempted request goes back to WAITING."""

    WAITING = 0
    PREFILL_READY = 1
    DECODE_READY = 2
    VERIFY_READY = 3
    COMMIT_READY = 4
    DONE = 5


class Flag(enum.IntFlag):
    """Independent conditions of a request."""

    NONE = 0
    KV_PRESSURE = 1  # the pool is nearly full: propose little
    GRAFTED = 2  # it borrowed pages of another request


@dataclasses.dataclass(slots=True, eq=False)
class RequestDescriptor:
    """A request: its constant inputs, and its progress.

    `tokens` are the prompt and the committed tokens. The first `num_cached` of them have valid KV;
    the newest is computed with the next verification. `page_ids[p // page_size]` holds position p.
    `draft` (proposed tokens) and `sampled` (the target's token for each scheduled position) are
    valid between stages only.
    """

    request_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    priority: int = 0
    arrival: float = 0.0  # virtual seconds
    graft_source_id: int = NO_GRAFT

    state: State = State.WAITING
    flags: Flag = Flag.NONE
    tokens: list[int] = dataclasses.field(default_factory=list)
    num_cached: int = 0
    page_ids: list[int] = dataclasses.field(default_factory=list)
    draft: tuple[int, ...] = ()
    sampled: tuple[int, ...] = ()
    accepted_prefix_len: int = 0

    ema_acceptance_rate: float = INITIAL_RATE  # float32, as on the device
    accepted_weight: float = 0.0  # tokens accepted and tried, older ones weighted less
    tried_weight: float = 0.0
    current_block_size: int = 0
    block_size_history: list[int] = dataclasses.field(default_factory=list)
    last_used: int = -1  # iteration of its latest verification

    def __post_init__(self) -> None:
        assert self.prompt, "a prompt has at least one token"
        assert self.max_tokens > 0, "a request generates at least one token"
        self.tokens = list(self.prompt)

    @property
    def num_generated(self) -> int:
        """Committed tokens after the prompt."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_left(self) -> int:
        """Tokens it may still generate."""
        return self.max_tokens - self.num_generated

    @property
    def is_running(self) -> bool:
        """Whether it is in the batch."""
        return self.state not in (State.WAITING, State.DONE)

    @property
    def under_pressure(self) -> bool:
        """Whether the pool was nearly full at the last check."""
        return Flag.KV_PRESSURE in self.flags

    def set_flag(self, flag: Flag, *, on: bool) -> None:
        """Set or clear one flag."""
        self.flags = self.flags | flag if on else self.flags & ~flag
