"""Measured times of steps in loops, by the resident kernel and captured."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Iterator

import numpy as np
import torch

from legato_engine.kernels.decode_loop import ANY
from legato_engine.kernels.resident_builds import Build, Kind
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.decode_loop import DecodeLoops
from legato_engine.runtime.draft_state import DraftState
from legato_engine.runtime.passes import bucket_for
from legato_engine.runtime.path_table import ALL, NONE
from legato_engine.runtime.request_descriptors import DESCRIPTOR, STARTS, WORDS, Descriptor
from legato_engine.runtime.resources import Resources
from legato_engine.scheduler.runner import NoTokens, sleep
from legato_engine.speculative.block_policy import INITIAL_RATE

_STEPS = 10
_CONTEXT = 512  # positions: an image, a question and half of an answer
_COMMON = 0.75  # of its pages, where rows have some in common: the image's
_TEMPERATURE, _TOP_P = 0.7, 0.9  # of drawn rows
_FREE = 0  # the constraint of words
_SLOT = 0


def own_hash() -> str:
    """Of this file: what is measured, and how."""
    return hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:32]


class LoopTimes:
    """Times steps of loops over the first slot's buffers; nothing may be in flight.

    Rows read pages of their own, or some in common as requests about one image do, and write to the
    scratch page alone. In lists all tokens have values and no drafts; other drafts are of an answer
    that repeats one token, so that all are accepted. Among drawn lists every other row has words:
    the token of a value is drawn from one.
    """

    def __init__(self, resources: Resources, loops: DecodeLoops) -> None:
        self._resources = resources
        self._loops = loops
        self._context = min(_CONTEXT, resources.model.max_context // 2)
        self._context -= self._context % resources.kv.page_size
        known = [each.allowed for each in resources.model.constraints]
        self._lone = [index for index, each in enumerate(known) if each and len(each) == 1]

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within it rows have what drawn rows draw by, and constraints that stay; their pages may
        change.
        """
        resources, state = self._resources, self._resources.state
        successor_C2 = resources.successor_C2
        rules = (state.temperature_R, state.top_p_R, state.top_k_R, state.seed_R)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def begin() -> None:
            changed = (state.page_table_RM, *rules, successor_C2)
            kept.extend((each, each.clone()) for each in changed)
            state.top_p_R.fill_(_TOP_P)
            state.top_k_R.zero_()
            state.seed_R.copy_(torch.arange(len(state.seed_R)))
            successor_C2[:, 0] = ANY
            successor_C2[:, 1] = torch.arange(len(successor_C2), device=successor_C2.device)

        def end() -> None:
            for each, copy in kept:
                each.copy_(copy)
            if state.drafts is not None:
                state.drafts.clear()

        resources.compute.submit(begin)
        try:
            yield
        finally:
            resources.compute.submit(end)
            resources.compute.record().wait()

    def seconds(
        self, kind: Kind, num_rows: int, *, drawn: bool, common: bool, resident: bool
    ) -> float:
        """Of a step, once, within `rehearsing`."""
        resources, loops = self._resources, self._loops
        compute, slot = resources.compute, resources.slots[_SLOT]
        before, loops.choice = loops.choice, ALL if resident else NONE

        def set_rows() -> None:
            resources.state.temperature_R.fill_(_TEMPERATURE if drawn else 0.0)
            self._take_pages(common=common)

        try:
            compute.submit(set_rows)
            num_rows, num_tokens = self._stage(kind, num_rows, drawn)
            slot.staged.upload(compute)
            slot.constraint.upload(compute)
            begun = compute.record()
            needs = Needs(sampled=drawn, payload=kind.has_values, logprobs=False)
            bucket = bucket_for(resources.buckets, num_tokens)
            loops.start(_SLOT, num_rows, num_tokens, bucket, 0, _STEPS, needs, common)
            ended = compute.record()
            num_steps = 0
            while loops.next_outputs(_SLOT, ended, sleep) is not NoTokens.LEFT:
                num_steps += 1
            loops.restore(_SLOT)
        finally:
            loops.choice = before
        return (ended.time_ns() - begun.time_ns()) / 1e9 / max(1, num_steps)

    def _take_pages(self, *, common: bool) -> None:
        """Different ones up to the context, as far as the pool has so many, or most in common."""
        resources = self._resources
        table_RM, num_pages = resources.state.page_table_RM, resources.kv.k_LNHSE.shape[1]
        rows, width = resources.state.scratch_row, self._context // resources.kv.page_size
        pages = torch.arange(rows * width, device=table_RM.device).view(rows, width)
        table_RM.zero_()
        table_RM[:rows, :width] = 1 + pages % (num_pages - 1)
        if common:
            shared = int(_COMMON * width)
            table_RM[:rows, :shared] = table_RM[0, :shared].clone()

    def _repeat(self, drafts: DraftState, token: int) -> None:
        """Let all rows have had one token up to the context, and tokens left."""
        drafts.clear()
        drafts.tokens_RC[:, : self._context + 1] = token
        drafts.position_R.fill_(self._context)
        drafts.limit_R.fill_(self._resources.model.max_context - 1)
        words = np.zeros(WORDS, dtype=np.int64)
        words.view(DESCRIPTOR)[0] = Descriptor(0.0, 0.0, INITIAL_RATE, 0, 0, STARTS)
        drafts.descriptor_R4.copy_(torch.from_numpy(words).expand_as(drafts.descriptor_R4))
        self._resources.state.token_R.fill_(token)

    def _constraints(self, kind: Kind, drawn: bool) -> list[int]:
        """Of rows, in turn."""
        if kind is Kind.WORDS or not self._lone:
            return [_FREE]
        if kind is Kind.DRAFTS:
            return self._lone[:1]
        return [index for each in self._lone for index in (each, _FREE)] if drawn else self._lone

    def _stage(self, kind: Kind, count: int, drawn: bool) -> tuple[int, int]:
        """Stage rows at the end of the context, which count as so many; return their number and the
        most tokens of a step.
        """
        slot, scratch_row = self._resources.slots[_SLOT], self._resources.state.scratch_row
        num_rows = min(count, scratch_row)
        staged, constraint = slot.staged.host, slot.constraint.host["constraint"]
        cycle = self._constraints(kind, drawn)
        constraint[:num_rows] = [cycle[row % len(cycle)] for row in range(num_rows)]
        drafts = self._resources.state.drafts
        if drafts is not None:
            allowed = self._resources.model.constraints[cycle[0]].allowed or (0,)
            self._resources.compute.submit(lambda: self._repeat(drafts, allowed[0]))
            staged["scheduled_row"].fill(scratch_row)
            staged["scheduled_row"][:num_rows] = range(num_rows)
            staged["room"][:num_rows] = 0 if kind.has_values else drafts.max_block
            staged["reach"][:num_rows] = self._resources.model.max_context
            staged["control"].fill(0)
            return num_rows, Build(kind, count).tokens(drafts.max_block)
        for name in ("row", "source", "sample_row"):
            staged[name].fill(scratch_row)
            staged[name][:num_rows] = range(num_rows)
        staged["position"].fill(0)
        staged["position"][:num_rows] = self._context
        staged["fresh"][:] = staged["position"]
        staged["fresh"][num_rows:] = 1  # above their position: padding
        staged["sample_position"][:] = staged["position"] + 1
        return num_rows, num_rows
