"""What admission leaves for the prefill to do."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixWork:
    """What a prefill must do about the sequence's shared prefix before its own prompt.

    `compute_pages` are the pages to fill by running the prefix (image miss, or no image), empty on
    a hit. `copy_tail` is (source page, destination page): the prefix's last page is only partly
    full, so each sequence continues in a private copy; None when the prefix ends on a page border.
    """

    compute_pages: tuple[int, ...] = ()
    copy_tail: tuple[int, int] | None = None


NO_PREFIX_WORK = PrefixWork()
"""A decode's, and a prefill's behind a hit that ends on a page border."""
