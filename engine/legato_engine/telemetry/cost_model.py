"""Cost model of pipelined decoding, from the parts of a decode step.

    speedup = T_block / T_pipe * (1 - z)

`T_block` and `T_pipe` are the periods of a step at depth 1 and 2. `z` is the zombie tax: a request
of `L` tokens runs one more step. For a single stream this is one forward in `L`. In a batch a
zombie is one more row, and costs its share of the time that the rows add to a forward.
"""

from __future__ import annotations


def row_share(forward: float, forward_single: float, streams: int) -> float:
    """Return the part of a forward that is due to its `streams` rows, 0..1; 1 for one stream.

    `forward` and `forward_single`, that of one stream, have the same unit.
    """
    if streams == 1:
        return 1.0
    return min(1.0, max(0.0, 1.0 - forward_single / forward))


def zombie_tax(length: float, share: float) -> float:
    """Return `z`, the part of device time spent on finished sequences of `length` tokens."""
    return share / length


def predicted_speedup(blocking: float, pipelined: float, tax: float) -> float:
    """Return pipelined over blocking throughput; 1.0 is no gain."""
    return blocking / pipelined * (1.0 - tax)
