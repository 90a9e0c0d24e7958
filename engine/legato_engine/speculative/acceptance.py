"""Which proposed tokens stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class AcceptancePolicy:
    """A proposal stands as far as it is what the target samples.

    Sampling is keyed by request and position, so the target's choice at a position is the same
    whether the token was proposed or not: what is committed is what would have been without.
    """

    stop_token: int = 0

    def accepted_prefix(self, draft: Sequence[int], sampled: Sequence[int]) -> int:
        """How many of `draft` equal what was sampled in their place.

        `sampled` has one token more: the target's own choice behind the last proposed one.
        """
        assert len(sampled) == len(draft) + 1, f"{len(sampled)} sampled for {len(draft)} proposed"
        for count, (proposed, right) in enumerate(zip(draft, sampled, strict=False)):
            if proposed != right:
                return count
        return len(draft)

    def committed(self, sampled: Sequence[int], accepted: int, num_left: int) -> tuple[int, ...]:
        """What is committed: the accepted tokens and the target's next; no more than `num_left`.

        Nothing behind a stop token.
        """
        tokens = tuple(sampled[: min(accepted + 1, num_left)])
        if self.stop_token in tokens:
            return tokens[: tokens.index(self.stop_token) + 1]
        return tokens
