"""Which builds of the resident kernel there are."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.StrEnum):
    """What tokens of a launch have: ids alone, values too, draft tokens beside them, or both."""

    WORDS = "words"
    VALUES = "values"
    DRAFTS = "drafts"
    BOTH = "values and drafts"

    @staticmethod
    def of(*, values: bool, drafts: bool) -> Kind:
        if drafts:
            return Kind.BOTH if values else Kind.DRAFTS
        return Kind.VALUES if values else Kind.WORDS

    @property
    def has_values(self) -> bool:
        return self in (Kind.VALUES, Kind.BOTH)

    @property
    def has_drafts(self) -> bool:
        return self in (Kind.DRAFTS, Kind.BOTH)

    def counts_as(self, num_rows: int, num_tokens: int) -> int:
        """How many rows a launch counts as, of up to `num_tokens` tokens: with both its tokens, as
        rows with values have one each.
        """
        return num_tokens if self is Kind.BOTH else num_rows


class Build(NamedTuple):
    """The kernel for launches that count as up to `rows` rows, with all draft tokens that rows may
    have where all of them draft.
    """

    kind: Kind
    rows: int

    def tokens(self, block: int) -> int:
        """The most of a step, with `block` draft tokens of a row."""
        return self.rows if self.kind is Kind.BOTH else self.rows * (1 + block)
