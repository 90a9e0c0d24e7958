"""What admission leaves for the prefill to do."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillWork:
    """What a sequence's launches must do before the first token that is fed.

    `compute_pages` are the pages to fill by running the prefix (image miss, or no image), empty on
    a hit. `copy_tail` is (source page, destination page): what is shared ends inside that page, so
    the sequence continues in a private copy; None when it ends on a page border.

    `first_crop` counts the picture's crops that earlier launches have encoded. An encode goes on to
    `stop_crop` (not included) and no further; a prefill encodes all that are left, and its
    `stop_crop` is 0.

    `write_adapter`: the sequence's adapter is not in its slot yet, its prefill writes it first.
    """

    compute_pages: tuple[int, ...] = ()
    copy_tail: tuple[int, int] | None = None
    first_crop: int = 0
    stop_crop: int = 0
    write_adapter: bool = False


NO_PREFILL_WORK = PrefillWork()
"""A decode's, and a prefill's behind a hit that ends on a page border."""
