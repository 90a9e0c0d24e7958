"""Sizes of the megakernel."""

from __future__ import annotations

import dataclasses

BLOCK = 16
"""Output rows of a block, the unit of matrix work."""
HEAD_DIM = 64
ROTARY_DIM = 32
SPLITS = HEAD_DIM // BLOCK
"""Workers of a head: each owns 16 of its dimensions, and a quarter of its pages."""
GROUP = 64
"""Inputs of a stage that one warp multiplies."""
WARPS = 8
"""Warps of a worker that compute."""
LOADERS = 2
"""Warps of a worker that fill its ring in turns."""
MAX_TOKENS = 16
"""Maximum tokens of a step: one per row, or with drafts several."""
PAGE = 16
"""Positions of a KV page."""
_PARTS, _LONG = 4, 4096  # inputs from which they have parts: `num_parts` in skinny_gemm.py
RANGES = 32
"""Ranges of distance from a row's highest score, nearest first, in which workers weigh tokens."""
NEAR_RANGES, NEAR_DIGITS, FAR_DIGITS = 28, 6, 211
"""Number of narrow ranges, their width and the others' width, in digits of sample.cuh."""
PAGE_BYTES = 2 * PAGE * HEAD_DIM * 2
"""Keys and values of one head in one page, bf16."""


@dataclasses.dataclass(frozen=True, slots=True)
class ValueDims:
    """Sizes of two two-layer value decoders; `pair_bins` counts the bins of both values."""

    inner_dim: int
    scalar_bins: int
    pair_bins: int

    @property
    def inner_blocks(self) -> int:
        """Blocks of both first layers: the scalar's, then the pair's."""
        return 2 * self.inner_dim // BLOCK

    @property
    def bin_blocks(self) -> int:
        """Blocks of all bins: the scalar's, then the pair's."""
        return (self.scalar_bins + self.pair_bins) // BLOCK


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a decoder whose MLP is `ff_ratio` times as wide as the residual stream.

    `values`: steps read the values of tokens and feed them back; None: all tokens are words.
    `drafts`: rows also feed draft tokens, and each step verifies them and proposes the next.

    Raises:
        ValueError: a size that the kernel's division into workers does not fit.
    """

    dim: int
    ff_ratio: int
    num_layers: int
    vocab_size: int
    values: ValueDims | None = None
    drafts: bool = False

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % HEAD_DIM:
            raise ValueError(f"dim {self.dim} is not a multiple of {HEAD_DIM}")
        if self.vocab_size % BLOCK or self.vocab_size < self.dim:
            raise ValueError(
                f"vocab_size {self.vocab_size} is not a multiple of {BLOCK} of at least {self.dim}"
            )
        if self.ff_ratio < 2 or self.num_layers < 1:
            raise ValueError(f"ff_ratio {self.ff_ratio} or num_layers {self.num_layers} too small")
        if self.values is not None:
            blocks = self.values.inner_blocks, self.values.bin_blocks
            if min(blocks) < self.num_workers:
                raise ValueError(f"{blocks} blocks of values are too few for each worker")

    @property
    def num_heads(self) -> int:
        return self.dim // HEAD_DIM

    @property
    def ff_dim(self) -> int:
        return self.dim * self.ff_ratio

    @property
    def num_workers(self) -> int:
        """Thread blocks, one per block of the residual stream."""
        return self.dim // BLOCK

    @property
    def chunk(self) -> int:
        """Inputs of a stage: 64 for each warp, of as many warps as divide `dim` evenly."""
        return next(n * GROUP for n in range(WARPS, 0, -1) if self.dim % (n * GROUP) == 0)

    @property
    def chunks(self) -> int:
        return self.dim // self.chunk

    @property
    def out_parts(self) -> int:
        """Parts (split K) of the inputs of a layer's output map, the MLP's and then attention's.

        Their sums are added in order. They are the captured kernels' where the megakernel can
        split alike.
        """
        inputs = (1 + self.ff_ratio) * self.chunks
        whole = (
            inputs % _PARTS == 0 and (_PARTS - 1) * inputs <= _PARTS * self.ff_ratio * self.chunks
        )
        return _PARTS if whole and inputs * self.chunk >= _LONG else 1

    @property
    def stage_bytes(self) -> int:
        return BLOCK * self.chunk * 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of all streams; workers with one head block less have a gap."""
        layer = (4 + 2 * self.ff_ratio) * self.dim
        head = self.num_workers * BLOCK * -(-self.vocab_blocks // self.num_workers)
        return 2 * self.dim * (self.num_layers * layer + head)

    @property
    def pages_per_stage(self) -> int:
        """KV pages of a head that a stage holds."""
        return max(1, self.stage_bytes // PAGE_BYTES)

    @property
    def vocab_blocks(self) -> int:
        return self.vocab_size // BLOCK

    def share(self, worker: int, blocks: int) -> int:
        """Return how many of `blocks` a worker has: `worker`, `worker + num_workers`, ..."""
        return len(range(worker, blocks, self.num_workers))

    def sampled_rows(self, worker: int) -> int:
        """Return how many rows a worker samples and verifies: every `num_workers`-th one."""
        return self.share(worker, MAX_TOKENS)


MOONDREAM2 = ModelSizes(dim=2048, ff_ratio=4, num_layers=24, vocab_size=51200)
LEGATO_TINY = ModelSizes(dim=320, ff_ratio=3, num_layers=6, vocab_size=1536)


def ring_problem(ring_stages: int, under_way: int) -> str | None:
    """Return why a ring cannot have these sizes, or None.

    A loader waits for the stage `under_way` before its own to land. If the other one may fill
    that stage's place again meanwhile, the phase equals the one before, and the wait never
    ends. A loader is fewer than `ring_stages` ahead of the other, and fewer than `under_way` if
    each waits for the other's stages.
    """
    if under_way < 1 or ring_stages < 2 * under_way:
        return f"{ring_stages} stages with {under_way} under way"
    if under_way % LOADERS == 0 and ring_stages % LOADERS:
        return f"{ring_stages} stages change loaders, and none waits for the other with {under_way}"
    return None
