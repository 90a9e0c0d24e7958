"""What an admission leaves to the prefill, before its first input token."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillWork:
    """The prefix to compute, the page to copy and the adapter to write.

    Crops `[0, first_crop)` were encoded by earlier launches. An encode continues with
    `[first_crop, stop_crop)`; a prefill has `stop_crop` 0 and encodes the rest.
    """

    compute_pages: tuple[int, ...] = ()  # of a prefix (BOS and image) that is not cached
    copy_tail: tuple[int, int] | None = None  # source and destination page of a partial hit
    first_crop: int = 0
    stop_crop: int = 0
    write_adapter: bool = False


NO_PREFILL_WORK = PrefillWork()
"""For decodes, and for prefills whose cache hit ends on a page boundary."""
