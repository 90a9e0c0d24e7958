"""What pipelining is worth, from the parts of a decode step.

    speedup = T_block / T_pipe * (1 - z)

`T_block` and `T_pipe` are the periods of a step at depth 1 and 2. `z` is the zombie tax: for every
request, one more step than its `L` tokens is run. Alone that is a whole forward in `L`. In a batch
a zombie is one more row, and costs its share of what the rows together add to a forward.
"""

from __future__ import annotations


def row_share(forward: float, forward_single: float, streams: int) -> float:
    """The part of a forward over `streams` rows that is due to its rows, 0..1; alone it is all.

    `forward` and `forward_single` (the forward of one stream) are times in one unit.
    """
    if streams == 1:
        return 1.0
    return min(1.0, max(0.0, 1.0 - forward_single / forward))


def zombie_tax(length: float, share: float) -> float:
    """`z`: the part of all device time that is spent on ended sequences of `length` tokens."""
    return share / length


def predicted_speedup(blocking: float, pipelined: float, tax: float) -> float:
    """Pipelined over blocking throughput, 1.0 meaning no gain; the periods are in one unit."""
    return blocking / pipelined * (1.0 - tax)
