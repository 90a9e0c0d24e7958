"""The tokens of a launch, cut into passes over the weights.

A pass over tens of tokens takes hardly longer than over one, and results are batch-invariant.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence as Many
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
    sampled += [_token(prompt, len(prompt.tokens) - 1) for prompt in prompts]
    assert len(sampled) <= max_tokens, f"{len(sampled)} sampled tokens, a pass has {max_tokens}"
    others = [_token(prompt, at) for prompt in prompts for at in range(len(prompt.tokens) - 1)]
    count = max(0, len(others) + len(sampled) - max_tokens)  # tokens in the passes before the last
    begins = [*range(count % max_tokens or max_tokens, count, max_tokens), count] if count else []
    passes = [others[a:b] for a, b in zip([0, *begins], begins, strict=False)]
    return (*passes, sampled + others[count:])


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
    staged["fresh"][count:bucket] = 1  # above their position: padding


def num_groups(tokens: Many[ScheduledToken], max_tokens: int) -> int:
    """Count runs of up to `max_tokens` tokens of one row."""
    runs = itertools.groupby(token.row for token in tokens)
    return sum(-(-len(list(run)) // max_tokens) for _, run in runs)


def _token(prompt: ScheduledPrompt, at: int) -> ScheduledToken:
    return ScheduledToken(prompt.row, prompt.start + at, token=prompt.tokens[at])
