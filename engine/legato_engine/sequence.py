"""A request's life on the device."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from legato_engine.core import PromptToken, Request
from legato_engine.tasks import Task

TokenKey = tuple[int, tuple[float, float]]
"""A token with its payload: what decides its KV, beside the positions before it."""

Keys = tuple[TokenKey, ...]

NO_PAYLOAD = (0.0, 0.0)
BOS_KEY: TokenKey = (-1, NO_PAYLOAD)
"""Stands for BOS where no picture follows it; the model alone knows its token."""


class SequenceStatus(enum.StrEnum):
    """Where a sequence stands; it moves down this list, and to WAITING when it is preempted."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False)
class DraftStats:
    """How the proposals of a sequence have fared; a policy's state, written at commits.

    Without pressure on the KV cache and with `num_left` tokens still to launch, the policy chose
    `current_block_size` tokens to propose next; `block_size_history` says how many really were,
    commit by commit.
    """

    ema_acceptance_rate: float
    accepted_weight: float = 0.0  # tokens accepted and tried, older ones counting less
    tried_weight: float = 0.0
    current_block_size: int = 0
    block_size_history: list[int] = dataclasses.field(default_factory=list)
    num_left: int = 0
    under_pressure: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A request's life on the device.

    The two fields of the zombie rule: `finalized` is set once, when the last token was committed
    or the request was aborted; `inflight_refs` (0, 1 or 2) counts the launches that still name
    this sequence. Pages, row and adapter slot are released when both say so, and only then.
    `preempted` is set while a live sequence gives up its pages: no launch names it any more, and it
    waits again once those in flight are committed, with `num_preemptions` one higher.

    `prefix_length` positions (BOS and image) come first; `prefix_key` names the image's content, is
    "" without one, and None for a sequence that shares nothing. What is shared is shared among
    sequences of one adapter: `adapter_key` names its content, empty for none; rows of a batch that
    have one pay for the largest `adapter_rank` of them. Behind the prefix stand `tokens`: the
    prompt and every token committed. The picture may be encoded in parts of its `num_crops` crops;
    0 or 1 leaves nothing to split. `num_launched` counts the tokens that are sure to be sampled:
    one a launch, and those that a commit found accepted beyond it. `num_committed` counts those
    read back; the difference is at most 2. `num_drafted` tokens are proposed by the launches in
    flight, and may be sampled besides.

    `page_ids` holds the positions before `capacity`, and behind them what is only proposed. Of the
    positions fed by its prefill `num_cached` were found, and of a first prefill's `cached_tokens`.
    `refused_at` is how many pages there were when it last did not fit.
    """

    seq_id: int
    request: Request
    task: Task
    prefix_key: str | None
    prefix_length: int
    prompt: tuple[PromptToken, ...]
    pixels: Any = None  # prepared image, opaque here; kept until finalized, to compute it again
    num_crops: int = 0
    adapter: Any = None  # its weights, opaque here; kept until finalized, to write them again
    adapter_key: str = ""
    adapter_rank: int = 0
    adapter_slot: int = 0  # on the device while resources are held, 0 without an adapter
    tokens: list[TokenKey] = dataclasses.field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    finalized: bool = False
    preempted: bool = False
    num_preemptions: int = 0
    inflight_refs: int = 0
    num_launched: int = 0
    last_position: int = -1  # of the newest of these: the next decode feeds it, or one behind it
    num_drafted: int = 0
    drafting: DraftStats | None = None  # None until it has been planned to propose
    num_committed: int = 0
    row: int = -1  # index into the device's per-row state while resources are held
    page_ids: tuple[int, ...] = ()  # page of position p is page_ids[p // page_size]
    capacity: int = 0
    refused_at: int = 0
    num_cached: int = 0
    cached_tokens: int = 0
    arrival: float = 0.0  # time.monotonic() when the request was accepted
    prefill_start: float = 0.0
    first_token: float = 0.0

    def __post_init__(self) -> None:
        """Nothing but the prompt is known."""
        self.tokens = [(token.token_id, token.payload) for token in self.prompt]

    @property
    def prompt_length(self) -> int:
        """Input positions before the first generated token."""
        return self.prefix_length + len(self.prompt)

    @property
    def max_length(self) -> int:
        """Positions that must hold KV if every allowed token is generated.

        The last generated token is never fed back, so it needs no KV of its own.
        """
        return self.prompt_length + self.task.max_tokens - 1

    @property
    def length(self) -> int:
        """Positions whose token is known: the prompt and all that is committed."""
        return self.prefix_length + len(self.tokens)

    @property
    def image_prefix_length(self) -> int:
        """Positions that see each other in both directions, so that only all of them are shared.

        BOS alone is a token like any other.
        """
        return self.prefix_length if self.prefix_length > 1 else 0

    def keys(self, start: int, stop: int) -> Keys:
        """What decides the KV of positions behind the unit.

        What comes beside a sampled token of a task without payloads is left from another launch.
        """
        first, num_prompt = max(start - self.prefix_length, 0), len(self.prompt)
        keys = self.tokens[first : stop - self.prefix_length]
        if not self.task.has_payload and first + len(keys) > num_prompt:
            kept = max(num_prompt - first, 0)
            keys[kept:] = [(token_id, NO_PAYLOAD) for token_id, _ in keys[kept:]]
        return tuple(keys) if start >= self.prefix_length else (BOS_KEY, *keys)

    @property
    def may_draft(self) -> bool:
        """Whether tokens can be proposed: none depends on the host, none carries a value."""
        return not (self.task.constrained or self.task.has_payload)

    def settle(self, num_drafts: int, accepted: int) -> None:
        """Of a launch's `num_drafts` proposals, so many were accepted.

        Where they end the sequence, the launch behind it feeds and samples nothing.
        """
        self.num_drafted -= num_drafts
        self.num_launched = min(self.num_launched + accepted, self.task.max_tokens)
        self.last_position = min(self.last_position + accepted, self.max_length)

    @property
    def is_zombie(self) -> bool:
        """Finished, yet still named by a launch in flight."""
        return self.finalized and self.inflight_refs > 0
