"""The tokens of a launch, cut into passes over the weights.

A pass over tens of tokens takes hardly longer than over one, and results are batch-invariant.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Many
from itertools import count, groupby, repeat
from typing import NamedTuple

from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.scheduler.launch import ScheduledSequence
from legato_engine.sequence import NO_PAYLOAD, TokenKey

PROMPT = -1
"""The `source` of a staged token; else it is the row whose newest token is fed."""


class ScheduledToken(NamedTuple):
    """One token of a pass; `token` is read if `source` is `PROMPT`."""

    row: int
    position: int
    source: int = PROMPT
    token: TokenKey = (0, NO_PAYLOAD)


class ScheduledPrompt(NamedTuple):
    """Adjacent tokens of one row, from position `start`."""

    row: int
    start: int
    tokens: Many[TokenKey]


def bucket_for(buckets: Many[int], num_tokens: int) -> int:
    """The smallest of ascending `buckets` with so many tokens."""
    return buckets[bisect.bisect_left(buckets, num_tokens)]


def cut_passes(
    decodes: Many[ScheduledSequence], prompts: Many[ScheduledPrompt], max_tokens: int
) -> tuple[list[ScheduledToken], ...]:
    """Cut tokens into the fewest passes of up to `max_tokens`.

    The last pass begins with the tokens that are sampled from, which must fit one pass: the
    decodes, then each prompt's last token. Its other tokens may run in the same pass, because a
    pass writes all keys and values before it reads any.
    """
    sampled = [
        ScheduledToken(r.sequence.row, r.position + r.slack, r.sequence.row) for r in decodes
    ]
    others: list[ScheduledToken] = []
    for row, start, tokens in prompts:
        others += map(ScheduledToken, repeat(row), count(start), repeat(PROMPT), tokens)
        sampled.append(others.pop())
    assert len(sampled) <= max_tokens, f"{len(sampled)} sampled tokens, a pass has {max_tokens}"
    before = max(0, len(others) + len(sampled) - max_tokens)  # tokens of the passes before the last
    begins = [*range(before % max_tokens or max_tokens, before, max_tokens)]
    begins += [before] if before else []
    passes = [others[a:b] for a, b in zip([0, *begins], begins, strict=False)]
    return (*passes, sampled + others[before:])


def stage_step(slot: DecodeSlot, rows: Many[ScheduledSequence], bucket: int, pad: int) -> None:
    staged, padding = slot.staged.host, bucket - len(rows)
    row_B = [row.sequence.row for row in rows]
    position_B = [row.position + row.slack for row in rows]
    if padding:
        row_B += [pad] * padding
        position_B += [0] * padding
    staged["row"][:bucket] = row_B
    staged["source"][:bucket] = staged["row"][:bucket]
    staged["position"][:bucket] = position_B
    staged["fresh"][:bucket] = staged["position"][:bucket]
    staged["fresh"][len(rows) : bucket] = 1  # above their position: padding


def stage_pass(
    slot: DecodeSlot, copy: int, tokens: Many[ScheduledToken], bucket: int, pad: int
) -> None:
    """Stage a pass in host side `copy`, padded with row `pad`."""
    staged, size = slot.staged.hosts[copy], len(tokens)
    row_T, position_T, source_T, token_T = zip(*tokens, strict=True)
    first: dict[int, int] = {}
    for row, position in zip(row_T, position_T, strict=True):
        first[row] = min(position, first.get(row, position))
    staged["row"][:size] = row_T
    staged["position"][:size] = position_T
    staged["source"][:size] = source_T
    staged["fresh"][:size] = [first[row] for row in row_T]
    staged["token"][:size], staged["payload"][:size] = zip(*token_T, strict=True)
    staged["row"][size:bucket] = pad
    staged["source"][size:bucket] = pad
    staged["position"][size:bucket] = 0
    staged["fresh"][size:bucket] = 1  # above their position: padding


def num_groups(tokens: Many[ScheduledToken], max_tokens: int) -> int:
    """Count runs of up to `max_tokens` tokens of one row."""
    runs = groupby(token.row for token in tokens)
    return sum(-(-len(list(run)) // max_tokens) for _, run in runs)
