"""A request's life on the device."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from legato_engine.core import PromptToken, Request
from legato_engine.tasks import Task


class SequenceStatus(enum.StrEnum):
    """Where a sequence stands; it only ever moves down this list."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A request's life on the device.

    The two fields of the zombie rule: `finalized` is set once, when the last token was committed
    or the request was aborted; `inflight_refs` (0, 1 or 2) counts the launches that still name
    this sequence. Pages, row and adapter slot are released when both say so, and only then.

    `prefix_length` tokens (BOS and image) may be shared with other sequences; they are followed by
    `len(prompt)` private prompt tokens. The picture may be encoded in parts of its `num_crops`
    crops; 0 or 1 leaves nothing to split. `adapter_key` names the content of the adapter, empty for
    none; rows of a batch that have one pay for the largest `adapter_rank` of them. `num_launched`
    counts the tokens whose sampling was planned, `num_committed` those read back; the difference is
    at most 2.
    """

    seq_id: int
    request: Request
    task: Task
    prefix_key: str | None
    prefix_length: int
    prompt: tuple[PromptToken, ...]
    pixels: Any = None  # prepared image, opaque here; dropped once prefilled or finalized
    num_crops: int = 0
    adapter: Any = None  # its weights, opaque here; dropped with `pixels`
    adapter_key: str = ""
    adapter_rank: int = 0
    adapter_slot: int = 0  # on the device while resources are held, 0 without an adapter
    status: SequenceStatus = SequenceStatus.WAITING
    finalized: bool = False
    inflight_refs: int = 0
    num_launched: int = 0
    last_position: int = -1  # of the newest launched token: the next decode feeds it
    num_committed: int = 0
    row: int = -1  # index into the device's per-row state while resources are held
    page_ids: tuple[int, ...] = ()  # page of position p is page_ids[p // page_size]
    cached_tokens: int = 0
    arrival: float = 0.0  # time.monotonic() when the request was accepted
    prefill_start: float = 0.0
    first_token: float = 0.0

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
    def is_zombie(self) -> bool:
        """Finished, yet still named by a launch in flight."""
        return self.finalized and self.inflight_refs > 0
