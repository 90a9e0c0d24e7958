"""The tokens of a launch, laid one behind another and cut into passes of the weights.

A pass serves some tens of tokens at nearly the price of one, and a token's bits are independent of
its neighbours: so prompts of several sequences and the rows that decode run in the same passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from typing import NamedTuple

from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.scheduler.launch import Row
from legato_engine.sequence import NO_PAYLOAD, TokenKey

PROMPT = -1
"""The source of a token that is given; else it is the row whose newest token is fed."""


class ScheduledToken(NamedTuple):
    """One token of a pass: of which row of the page table, where it stands, and what it is."""

    row: int
    position: int
    source: int = PROMPT
    token: TokenKey = (0, NO_PAYLOAD)


class ScheduledPrompt(NamedTuple):
    """What one row of a launch feeds, from a position on."""

    row: int
    start: int
    tokens: Many[TokenKey]


def bucket_for(buckets: Many[int], num_tokens: int) -> int:
    """Of steps of these sizes, rising, the first that has room for so many."""
    return next(bucket for bucket in buckets if bucket >= num_tokens)


def cut_passes(
    decodes: Many[Row], prompts: Many[ScheduledPrompt], most: int
) -> tuple[list[ScheduledToken], ...]:
    """Passes of at most `most` tokens, as few as there can be.

    The last one begins with those that are sampled from: the decodes, then each prompt's last
    token. Earlier tokens of a prompt run in the same pass or before: a pass writes all of its keys
    and values before it reads any. Those that are sampled from have to fit one pass.
    """
    sampled = [ScheduledToken(r.sequence.row, r.position, r.sequence.row) for r in decodes]
    sampled += [_fed(prompt, len(prompt.tokens) - 1) for prompt in prompts]
    assert len(sampled) <= most, f"{len(sampled)} rows are sampled in a pass of {most} tokens"
    earlier = [_fed(prompt, at) for prompt in prompts for at in range(len(prompt.tokens) - 1)]
    behind = max(0, len(earlier) + len(sampled) - most)  # tokens in the passes before the last
    begins = [*range(behind % most or most, behind, most), behind] if behind else []
    passes = [earlier[a:b] for a, b in zip([0, *begins], begins, strict=False)]
    return (*passes, sampled + earlier[behind:])


def stage_step(slot: DecodeSlot, rows: Many[Row], bucket: int, pad: int) -> None:
    """Write a decode step of `bucket` tokens to the slot; those missing are row `pad`'s."""
    staged, padding = slot.staged.host, bucket - len(rows)
    row_B = [row.sequence.row for row in rows]
    position_B = [row.position for row in rows]
    if padding:
        row_B += [pad] * padding
        position_B += [0] * padding
    staged["row"][:bucket] = row_B
    staged["source"][:bucket] = staged["row"][:bucket]
    staged["position"][:bucket] = position_B
    staged["fresh"][:bucket] = staged["position"][:bucket]
    staged["fresh"][len(rows) : bucket] = 1  # behind their position


def stage_pass(
    slot: DecodeSlot, copy: int, tokens: Many[ScheduledToken], bucket: int, pad: int
) -> None:
    """Write a pass of `bucket` tokens to a host side of the slot; those missing are row `pad`'s."""
    staged, count = slot.staged.hosts[copy], len(tokens)
    first: dict[int, int] = {}
    for token in tokens:
        first[token.row] = min(token.position, first.get(token.row, token.position))
    staged["row"][:count] = [token.row for token in tokens]
    staged["position"][:count] = [token.position for token in tokens]
    staged["source"][:count] = [token.source for token in tokens]
    staged["fresh"][:count] = [first[token.row] for token in tokens]
    staged["token"][:count] = [token.token[0] for token in tokens]
    staged["payload"][:count] = [token.token[1] for token in tokens]
    staged["row"][count:bucket] = pad
    staged["source"][count:bucket] = pad
    staged["position"][count:bucket] = 0
    staged["fresh"][count:bucket] = 1  # behind their position


def num_groups(tokens: Many[ScheduledToken], most: int) -> int:
    """Groups of a pass: runs of tokens of one row, cut into at most `most`."""
    runs = itertools.groupby(token.row for token in tokens)
    return sum(-(-len(list(run)) // most) for _, run in runs)


def _fed(prompt: ScheduledPrompt, at: int) -> ScheduledToken:
    return ScheduledToken(prompt.row, prompt.start + at, token=prompt.tokens[at])
