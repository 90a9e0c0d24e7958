"""The tokens of a launch, cut into passes over the weights.

A pass over tens of tokens takes hardly longer than over one, and results are batch-invariant.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from collections.abc import Sequence as Many
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.scheduler.launch import ScheduledSequence
from legato_engine.sequence import NO_PAYLOAD, TokenKey

PROMPT = -1
"""The `source` of a staged token; else it is the row whose newest token is fed."""


class ScheduledPrompt(NamedTuple):
    """Adjacent tokens of one row, from position `start`."""

    row: int
    start: int
    tokens: Many[TokenKey]

    def part(self, first: int, end: int) -> ScheduledPrompt:
        """The tokens from `first` to before `end`, counted from its own first one."""
        return ScheduledPrompt(self.row, self.start + first, self.tokens[first:end])


class Pass(NamedTuple):
    """Tokens that read the weights together: newest tokens of rows that decode, then those of
    `prompts`, of which a row may have several.
    """

    decodes: Many[ScheduledSequence]
    prompts: Many[ScheduledPrompt]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(each.tokens) for each in self.prompts)

    def num_groups(self, max_tokens: int) -> int:
        """Count runs of up to `max_tokens` neighbours of one row."""
        by_row = groupby(self.prompts, attrgetter("row"))
        lengths = (sum(len(each.tokens) for each in run) for _, run in by_row)
        return len(self.decodes) + sum(-(-length // max_tokens) for length in lengths)


def bucket_for(buckets: Many[int], num_tokens: int) -> int:
    """The smallest of ascending `buckets` with so many tokens."""
    return buckets[bisect.bisect_left(buckets, num_tokens)]


def cut_passes(
    decodes: Many[ScheduledSequence], prompts: Many[ScheduledPrompt], max_tokens: int
) -> list[Pass]:
    """Cut tokens into the fewest passes of up to `max_tokens`.

    The last pass begins with the tokens that are sampled from, which must fit one pass: the
    decodes, then each prompt's last token. Its other tokens may run in the same pass, because a
    pass writes all keys and values before it reads any.
    """
    lengths = [len(each.tokens) for each in prompts]
    num_sampled, num_others = len(decodes) + len(prompts), sum(lengths) - len(prompts)
    assert num_sampled <= max_tokens, f"{num_sampled} sampled tokens, a pass has {max_tokens}"
    before = max(0, num_others + num_sampled - max_tokens)  # tokens of the passes before the last
    ends = [*range(before % max_tokens or max_tokens, before, max_tokens)]
    ends += [before] if before else []
    passes = [
        Pass((), _others(prompts, first, end)) for first, end in zip([0, *ends], ends, strict=False)
    ]
    last = [each.part(length - 1, length) for each, length in zip(prompts, lengths, strict=True)]
    return [*passes, Pass(decodes, last + _others(prompts, before, num_others))]


def _others(prompts: Many[ScheduledPrompt], first: int, end: int) -> list[ScheduledPrompt]:
    """Those from `first` to before `end` of all tokens but each prompt's last one."""
    runs, skipped = list[ScheduledPrompt](), 0
    for each in prompts:
        count = len(each.tokens) - 1
        begin, stop = max(0, first - skipped), min(count, end - skipped)
        if begin < stop:
            runs.append(each.part(begin, stop))
        skipped += count
    return runs


def stage_step(slot: DecodeSlot, rows: Many[ScheduledSequence], bucket: int, pad: int) -> None:
    """Stage a decode, padded with row `pad`."""
    _pad(slot.staged.host, _stage_decodes(slot.staged.host, rows), bucket, pad)


def stage_pass(slot: DecodeSlot, copy: int, given: Pass, bucket: int, pad: int) -> None:
    """Stage a pass in host side `copy`, padded with row `pad`."""
    staged = slot.staged.hosts[copy]
    at = _stage_decodes(staged, given.decodes)
    first: dict[int, int] = {}
    for row, start, _ in given.prompts:
        first[row] = min(start, first.get(row, start))
    for row, start, tokens in given.prompts:
        end = stage_tokens(staged, at, tokens)
        staged["row"][at:end] = row
        staged["position"][at:end] = range(start, start + end - at)
        staged["fresh"][at:end] = first[row]
        at = end
    staged["source"][len(given.decodes) : at] = PROMPT
    _pad(staged, at, bucket, pad)


def _stage_decodes(staged: Mapping[str, np.ndarray], rows: Many[ScheduledSequence]) -> int:
    """Stage their newest tokens first; return the index after them."""
    end = len(rows)
    staged["row"][:end] = [row.sequence.row for row in rows]
    staged["source"][:end] = staged["row"][:end]
    staged["position"][:end] = [row.position + row.slack for row in rows]
    staged["fresh"][:end] = staged["position"][:end]
    return end


def _pad(staged: Mapping[str, np.ndarray], first: int, bucket: int, pad: int) -> None:
    if first < bucket:
        staged["row"][first:bucket] = pad
        staged["source"][first:bucket] = pad
        staged["position"][first:bucket] = 0
        staged["fresh"][first:bucket] = 1  # above their position: padding


def stage_tokens(staged: Mapping[str, np.ndarray], first: int, tokens: Many[TokenKey]) -> int:
    """Stage tokens from index `first`; return the one after the last."""
    end = first + len(tokens)
    token_T, payload_T = zip(*tokens, strict=True)
    staged["token"][first:end] = token_T
    any_value = payload_T.count(NO_PAYLOAD) < len(payload_T)
    staged["payload"][first:end] = payload_T if any_value else 0.0
    return end
