"""The device's descriptor of a request that drafts, as the host reads and writes it.

The device decides how many tokens a request drafts: it updates the descriptor after each
verification. The host stages one when a sequence gets its row, and reads it with the tokens.
"""

from __future__ import annotations

import numpy as np

from legato_engine.sequence import Descriptor, Sequence

KV_PRESSURE = 1
STARTS = 2
"""Before the first proposal of an admitted sequence."""
VERIFIED = 4
"""The sequence has verified draft tokens, before a preemption too."""

UNDER_PRESSURE = 1
EXACT = 2
"""Flags of a launch: the pool is nearly full; rows draft as many tokens as they have room for."""

NO_DRAFTS = -1
"""The room of a row that must not draft, and is not verified."""

DESCRIPTOR = np.dtype(
    [
        ("accepted_weight", "<f8"),
        ("tried_weight", "<f8"),
        ("ema_acceptance_rate", "<f4"),
        ("current_block_size", "<i4"),
        ("idle_steps", "<i4"),
        ("flags", "<i4"),
    ]
)
"""`RequestDescriptor` of `block_policy.cuh`: the fields of `Descriptor`."""

WORDS = DESCRIPTOR.itemsize // 8
"""A descriptor is this many int64 of a tensor."""


def initial_descriptor(sequence: Sequence, initial_rate: float) -> Descriptor:
    """Return the descriptor of a newly admitted or resumed sequence."""
    learnt = sequence.draft_stats.learnt
    if learnt is None:
        return Descriptor(0.0, 0.0, initial_rate, 0, 0, STARTS)
    return Descriptor(
        learnt.accepted_weight,
        learnt.tried_weight,
        learnt.ema_acceptance_rate,
        learnt.current_block_size,
        learnt.idle_steps,
        STARTS | VERIFIED,
    )
