"""The instructions of a program, and the counters that order them."""

from __future__ import annotations

import dataclasses
import enum

from legato_engine.resident.sizes import ModelSizes

NONE = -1
"""A field that an instruction does not use; a counter that it neither waits for nor adds to."""


class Op(enum.IntEnum):
    """What an instruction does. MOMENTS, SUMS and NEEDED are a worker's own.

    FC1 and HEAD also find MOMENTS, mean and deviation of X[src]. A worker may keep X[src] from FC1
    on, in registers, or read it again.
    """

    FC1 = 0  # ACT[blocks] = gelu(norm(X[src]) @ fc1)
    QKV = 1  # Q[block], keys and values of the step's position = rotate(norm(X[src]) @ qkv)
    FC2 = 2  # SUMS += ACT[chunks] @ fc2; SUMS = 0 before chunk 0
    ATTEND = 3  # PART[block] = softmax(Q[head] @ keys) @ values over the worker's pages
    MERGE = 4  # HEADS[head] of every fourth token = merged(PART[blocks of the head])
    OUT = 5  # X[dst][block] = X[src][block] + SUMS + HEADS @ proj + biases
    LISTEN = 6  # STOP = the host's wish, if `num_blocks` is 1
    HEAD = 7  # LOGITS[blocks] = norm(X[src]) @ lm_head + constraint; BEST[worker] = their argmax
    WEIGH = 8  # WEIGHED[worker] = of rows that are drawn, what a slice of LOGITS has (draws.py)
    SAMPLE = 9  # TOKEN[rows] = a draw by WEIGHED and LOGITS, or the argmax over BEST
    COMMIT = 10  # the step's token = TOKEN, told to the host by worker 0; whether a step follows
    EMBED = 11  # X[dst][block] = the embedding of the step's token or value
    INNER = 12  # NEEDED = decoders of TOKEN; VACT[blocks] = gelu(X[src] @ value_fc1) of those
    BINS = 13  # BINS[blocks] = VACT @ value_fc2 of NEEDED decoders
    VALUE = 14  # VALUE[rows] = the likeliest bin of rows whose TOKEN has values; its certainty
    SETTLE = 15  # DRAFT[rows] = what TOKEN leaves of the row's draft tokens, and its next proposal
    PLACE = 16  # PLACED = the next step's tokens, of all rows, if `num_blocks` is 1


class Source(enum.IntEnum):
    """Buffers of the residual stream."""

    X0 = 0
    X1 = 1
    EMBED = 2  # the embedding of the worker's token, where all are words


class Kind(enum.IntEnum):
    """Kinds of counters: those from BEST on are not of a layer, those from EMBED on are of values,
    and the last two of drafts.
    """

    X = 0
    ACT = 1
    HEADS = 2
    Q = 3  # one for each head
    PART = 4  # likewise
    BEST = 5
    WEIGHED = 6
    TOKEN = 7
    EMBED = 8
    INNER = 9
    BINS = 10
    VALUE = 11
    SETTLED = 12
    PLACED = 13


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One entry of a worker's list; the device reads these fields as int16, in this order.

    `wait` is a counter, which has to reach `wait_count + step * wait_stride`, where steps count
    from the first launch on. `signal` is the counter that gets one. Output blocks, or the rows of
    SAMPLE, are `block`, `block + W`, ... (`num_blocks` of them, W
    workers); inputs are `num_chunks` chunks from `chunk` on. `stage` is the first of its
    `num_blocks * num_chunks` stages in the worker's stream of weights, for OUT and FC2 as well.
    With `only_draws` it waits only in launches with a row that is drawn: see `without_draws`.
    """

    op: int
    layer: int = NONE
    wait: int = NONE
    wait_count: int = 0
    wait_stride: int = 0
    signal: int = NONE
    src: int = NONE
    dst: int = NONE
    block: int = 0
    num_blocks: int = 0
    chunk: int = 0
    num_chunks: int = 0
    stage: int = 0
    only_draws: int = 0

    @property
    def num_stages(self) -> int:
        """Stages of weights that it takes from the ring."""
        return self.num_blocks * self.num_chunks


FIELDS = tuple(field.name for field in dataclasses.fields(Instruction))
WORDS = 16
WORD_BYTES = 2
"""int16 words of an instruction on the device; those after its fields are zero."""


def counter(sizes: ModelSizes, kind: Kind, layer: int = 0, head: int = 0) -> int:
    """Index of a counter."""
    of_layer = Kind.Q + 2 * sizes.num_heads
    if kind >= Kind.BEST:
        return sizes.num_layers * of_layer + kind - Kind.BEST
    if kind >= Kind.Q:
        return layer * of_layer + Kind.Q + (kind - Kind.Q) * sizes.num_heads + head
    return layer * of_layer + kind


def num_counters(sizes: ModelSizes) -> int:
    """One of each kind and layer, those of Q and PART also by head."""
    if sizes.drafts:
        return counter(sizes, Kind.PLACED) + 1
    return counter(sizes, Kind.TOKEN if sizes.values is None else Kind.VALUE) + 1
