"""Acceptance of draft tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class AcceptancePolicy:
    """Accepts the longest prefix of a draft that equals what the target samples.

    Sampling is keyed by request and position, so the target samples the same token at a position
    with and without a draft.
    """

    stop_token: int = 0

    def accepted_prefix(self, draft: Sequence[int], sampled: Sequence[int]) -> int:
        """Count the leading tokens of `draft` that equal the sampled ones.

        `sampled` has one more token, the target's choice after the last draft token.
        """
        assert len(sampled) == len(draft) + 1, (
            f"{len(sampled)} tokens sampled for {len(draft)} drafted"
        )
        for count, (proposed, right) in enumerate(zip(draft, sampled, strict=False)):
            if proposed != right:
                return count
        return len(draft)

    def committed(self, sampled: Sequence[int], accepted: int, num_left: int) -> tuple[int, ...]:
        """The accepted tokens and the target's next, up to a stop token and at most `num_left`."""
        tokens = tuple(sampled[: min(accepted + 1, num_left)])
        if self.stop_token in tokens:
            return tokens[: tokens.index(self.stop_token) + 1]
        return tokens
