"""Staging of launches: passes, row changes and decode inputs.

A pass over tens of tokens takes hardly longer than over one, and results are batch-invariant.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from legato_engine.kernels import ops
from legato_engine.kernels.decode_loop import NOT_BEHIND, place_behind
from legato_engine.runtime.decode_slot import DecodeSlot, Resources
from legato_engine.runtime.descriptors import NO_DRAFTS, UNDER_PRESSURE
from legato_engine.runtime.graphs import Work
from legato_engine.scheduler.batch import LaunchKind, Plan, ScheduledSequence
from legato_engine.sequence import NO_PAYLOAD, TokenKey, allow_only
from legato_engine.sequence import Sequence as EngineSequence

PROMPT = -1
"""The `source` of a staged token; else it is the row whose newest token is fed."""


class ScheduledPrompt(NamedTuple):
    """Adjacent tokens of one row, from position `start`."""

    row: int
    start: int
    tokens: Sequence[TokenKey]

    def part(self, first: int, end: int) -> ScheduledPrompt:
        """Return the tokens from `first` to before `end`, relative to this part's own first one."""
        return ScheduledPrompt(self.row, self.start + first, self.tokens[first:end])


class Pass(NamedTuple):
    """Tokens computed in one pass over the weights.

    First the newest tokens of rows that decode, then those of `prompts`; a row may have several.
    """

    decodes: Sequence[ScheduledSequence]
    prompts: Sequence[ScheduledPrompt]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(each.tokens) for each in self.prompts)

    def num_groups(self, max_tokens: int) -> int:
        """Count runs of up to `max_tokens` neighbours of one row."""
        by_row = groupby(self.prompts, attrgetter("row"))
        lengths = (sum(len(each.tokens) for each in run) for _, run in by_row)
        return len(self.decodes) + sum(-(-length // max_tokens) for length in lengths)


def bucket_for(buckets: Sequence[int], num_tokens: int) -> int:
    """Return the smallest of ascending `buckets` that holds `num_tokens`."""
    return buckets[bisect.bisect_left(buckets, num_tokens)]


def cut_passes(
    decodes: Sequence[ScheduledSequence], prompts: Sequence[ScheduledPrompt], max_tokens: int
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


def _others(prompts: Sequence[ScheduledPrompt], first: int, end: int) -> list[ScheduledPrompt]:
    """Return tokens `first` to `end` of all prompts, without each prompt's last token."""
    runs, skipped = list[ScheduledPrompt](), 0
    for each in prompts:
        count = len(each.tokens) - 1
        begin, stop = max(0, first - skipped), min(count, end - skipped)
        if begin < stop:
            runs.append(each.part(begin, stop))
        skipped += count
    return runs


def stage_step(slot: DecodeSlot, rows: Sequence[ScheduledSequence], bucket: int, pad: int) -> None:
    """Stage a decode, padded with row `pad`."""
    staged = slot.staged.host
    end = _stage_decodes(staged, rows)
    for index, row in enumerate(rows):
        if row.forced:
            end = _stage_forced(staged, index, end, row)
    _pad(staged, end, bucket, pad)


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


def _stage_decodes(staged: Mapping[str, np.ndarray], rows: Sequence[ScheduledSequence]) -> int:
    """Stage their newest tokens first; return the index after them."""
    end = len(rows)
    staged["row"][:end] = [row.sequence.row for row in rows]
    staged["source"][:end] = staged["row"][:end]
    staged["position"][:end] = [row.position + row.slack for row in rows]
    staged["fresh"][:end] = staged["position"][:end]
    return end


def _stage_forced(
    staged: Mapping[str, np.ndarray], index: int, first: int, row: ScheduledSequence
) -> int:
    """Stage a decode's forced tokens; return the index after its others.

    The last replaces the newest token at the row's index, because the row is sampled from it. The
    newest one and the others begin at `first`.
    """
    newest, num_forced = row.position, len(row.forced)
    end = first + num_forced
    staged["row"][first:end] = row.sequence.row
    staged["source"][first] = row.sequence.row
    staged["source"][first + 1 : end] = staged["source"][index] = PROMPT
    staged["token"][first + 1 : end] = row.forced[:-1]
    staged["token"][index] = row.forced[-1]
    staged["payload"][first + 1 : end] = staged["payload"][index] = 0.0
    staged["position"][first:end] = range(newest, newest + num_forced)
    staged["position"][index] = newest + num_forced
    staged["fresh"][first:end] = newest
    return end


def _pad(staged: Mapping[str, np.ndarray], first: int, bucket: int, pad: int) -> None:
    if first < bucket:
        staged["row"][first:bucket] = pad
        staged["source"][first:bucket] = pad
        staged["position"][first:bucket] = 0
        staged["fresh"][first:bucket] = 1  # above their position: padding


def stage_tokens(staged: Mapping[str, np.ndarray], first: int, tokens: Sequence[TokenKey]) -> int:
    """Stage tokens from index `first`; return the one after the last."""
    end = first + len(tokens)
    token_T, payload_T = zip(*tokens, strict=True)
    staged["token"][first:end] = token_T
    any_value = payload_T.count(NO_PAYLOAD) < len(payload_T)
    staged["payload"][first:end] = payload_T if any_value else 0.0
    return end


# ---------------------------------------------------------------- preparation


class Changes(NamedTuple):
    """Row changes that a slot has staged."""

    grows: bool = False  # pages begin
    places: bool = False  # rows continue behind the loop in the other slot


def preparation(resources: Resources, slot: int, changes: Changes, *, admits: bool) -> Work:
    """Add the pages that begin, admit prompts, and place rows behind the loop.

    A prompt's copy of a page that it shares in part is made here, because it writes to the rest.
    The staged inputs are uploaded; rows are placed once those of the forward are. Can be captured.
    """
    state, kv, buffers = resources.state, resources.kv, resources.slots[slot]
    staged, index_B = buffers.staged.device, buffers.behind.device["index"]
    next_B = resources.slots[1 - slot].staged.device["position"]

    def work() -> None:
        if changes.grows:
            state.grow(buffers)
        if admits:
            state.admit(buffers)
            ops.copy_pages(kv.k_LNHSE, kv.v_LNHSE, buffers.prompt.device["copied"])
        if changes.places:
            place_behind(staged, next_B, index_B, state.scratch_row)

    return work


# ---------------------------------------------------------------- step staging


class StepStaging:
    """Fills the host sides of slots."""

    def __init__(self, resources: Resources) -> None:
        state = resources.state
        self._drafts = state.drafts
        self._scratch_row = state.scratch_row
        self._max_pages = state.page_table_RM.shape[1]
        self._buckets = resources.buckets
        self._first_mask = resources.first_mask
        self._page_size = resources.kv.page_size

    def bucket(self, num_tokens: int) -> int:
        return bucket_for(self._buckets, num_tokens)

    def padding(self, slot: DecodeSlot) -> None:
        rows = ("row", "source", "sample_row")
        for field in (*rows, "scheduled_row") if slot.speculates else rows:
            slot.staged.host[field].fill(self._scratch_row)
        slot.prompt.host["row"].fill(self._scratch_row)
        slot.behind.host["index"].fill(NOT_BEHIND)
        for staged in (
            (slot.grown.host, slot.staged.host) if slot.speculates else (slot.grown.host,)
        ):
            staged["entry"].fill(self._scratch_row * self._max_pages)

    def decode(self, slot: DecodeSlot, plan: Plan) -> int:
        """Stage a decode and return its bucket.

        With speculation the bucket holds the most tokens that the device may choose, and the pages
        that a single step begins are staged too.
        """
        rows = plan.rows
        if self._drafts is not None:
            return self._drafting_rows(slot, plan)
        staged, bucket = slot.staged.host, self.bucket(sum(row.num_tokens for row in rows))
        stage_step(slot, rows, bucket, self._scratch_row)
        staged["sample_row"][: len(rows)] = staged["row"][: len(rows)]
        staged["sample_row"][len(rows) : bucket] = self._scratch_row
        np.add(staged["position"][:bucket], 1, out=staged["sample_position"][:bucket])
        return bucket

    def changes(self, slot: DecodeSlot, plan: Plan) -> Changes:
        """Stage the pages that begin in a launch, and where decodes are in the loop before it.

        Single steps with speculation stage their pages themselves.
        """
        drafts, decodes = self._drafts is not None, plan.decodes
        grown: Sequence[tuple[EngineSequence, int]] = ()
        if not drafts:
            grown = self._begun(decodes, plan.num_steps)
        elif plan.is_loop or plan.kind is not LaunchKind.DECODE:
            grown = self._unstaged(decodes)
        if grown:
            self._stage_grown(slot.grown.host, grown)
        if plan.behind:
            slot.behind.host["index"].fill(NOT_BEHIND)
            slot.behind.host["index"][: len(plan.behind)] = plan.behind
        return Changes(bool(grown), bool(plan.behind))

    def _begun(
        self, rows: Sequence[ScheduledSequence], num_steps: int
    ) -> Sequence[tuple[EngineSequence, int]]:
        size = self._page_size
        if num_steps == 1:
            rows = [row for row in rows if (row.position + row.slack) % size == 0 or row.forced]
        return [(row.sequence, page) for row in rows for page in row.new_pages(size, num_steps)]

    def _stage_grown(
        self, staged: Mapping[str, np.ndarray], grown: Sequence[tuple[EngineSequence, int]]
    ) -> None:
        staged["entry"].fill(self._scratch_row * self._max_pages)
        staged["page"].fill(0)
        for index, (sequence, page) in enumerate(grown):
            staged["entry"][index] = sequence.row * self._max_pages + page
            staged["page"][index] = sequence.pages.ids[page]

    def masks(
        self, slot: DecodeSlot, plan: Plan, constraints: Sequence[int]
    ) -> tuple[list[int], int]:
        """Stage the masks of rows with a grammar; return all constraints and the masks' number.

        With speculation a row's forced tokens are sampled, too: each has a mask before the row's.
        """
        host, masked, count = slot.masks.host, list[int](), 0
        for row, constraint in zip(plan.sampled_rows, constraints, strict=True):
            grammar = row.sequence.task.grammar
            forced = row.forced if self._drafts is not None else ()
            if grammar is None or row.sequence.finalized:
                masked += [constraint] * (1 + len(forced))
                continue
            end = count + len(forced)
            for index, token_id in enumerate(forced, start=count):
                allow_only(token_id, host["words"][index])
            grammar.fill(host["words"][end], row.forced)
            host["base"][count : end + 1] = constraint
            masked += range(self._first_mask + count, self._first_mask + end + 1)
            count = end + 1
        return masked, count

    def constraints(self, slot: DecodeSlot, plan: Plan, constraints: Sequence[int]) -> int:
        """Stage the constraints of all rows; return the maximum number of sampled tokens."""
        slot.constraint.host["constraint"][: len(constraints)] = constraints
        slot.constraint.host["after"][: len(plan.after)] = plan.after
        if self._drafts is None:
            return len(constraints)
        counts = [1 + len(row.forced) for row in plan.sampled_rows]
        slot.constraint.host["first"][: len(counts)] = [0, *accumulate(counts[:-1])]
        return sum(counts) + sum(row.num_drafts for row in plan.sampled_rows)

    def _drafting_rows(self, slot: DecodeSlot, plan: Plan) -> int:
        """Stage rows whose tokens and positions the device chooses."""
        staged, rows = slot.staged.host, plan.rows
        count, most = len(rows), 0
        room_S = []
        for index, row in enumerate(rows):
            most += row.num_tokens + row.num_drafts
            staged["num_forced"][index] = len(row.forced)
            staged["forced"][index, : len(row.forced)] = row.forced
            room_S.append(row.num_drafts if row.sequence.may_draft else NO_DRAFTS)
        staged["scheduled_row"][:count] = [row.sequence.row for row in rows]
        staged["scheduled_row"][count:] = self._scratch_row
        staged["room"][:count] = room_S
        staged["reach"][:count] = [row.reach(plan.num_steps) for row in rows]
        staged["control"][0] = UNDER_PRESSURE if plan.under_pressure else 0
        self._stage_grown(staged, () if plan.is_loop else self._unstaged(rows))
        return self.bucket(most)

    def _unstaged(self, rows: Sequence[ScheduledSequence]) -> Sequence[tuple[EngineSequence, int]]:
        """Return the indices of pages that the device does not have yet."""
        unstaged: list[tuple[EngineSequence, int]] = []
        for row in rows:
            pages = row.sequence.pages
            count = len(pages.ids)
            if count > pages.num_staged:
                unstaged += [(row.sequence, page) for page in range(pages.num_staged, count)]
                pages.num_staged = count
        return unstaged
