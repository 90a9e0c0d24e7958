"""What an admission leaves to the prefill, before its first input token."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillWork:
    """The prefix to compute, the page to copy and the adapter to write.

    `compute_pages` are the pages of a prefix (BOS and image) that is not cached, otherwise empty.

    `copy_tail` is (source page, destination page) where the shared positions end inside a page: the
    sequence continues in a private copy of it.

    Crops `[0, first_crop)` of the image were encoded by earlier launches. An encode continues with
    `[first_crop, stop_crop)`; a prefill has `stop_crop` 0 and encodes all remaining crops.

    `write_adapter` is set if the adapter's weights are not in its slot yet.
    """

    compute_pages: tuple[int, ...] = ()
    copy_tail: tuple[int, int] | None = None
    first_crop: int = 0
    stop_crop: int = 0
    write_adapter: bool = False


NO_PREFILL_WORK = PrefillWork()
"""For decodes, and for prefills whose cache hit ends on a page boundary."""
