"""The resident kernel on the current GPU: weights packed in the order of its program, launches.

Shape legend: O outputs, I inputs, W workers, T tokens of all tiles; otherwise that of
`kernels.resident_launch`.
"""

from __future__ import annotations

import collections
import importlib.resources
from collections.abc import Sequence
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING

import torch

from legato_engine.kernels.cuda.decoder_sizes import DecoderSizes
from legato_engine.kernels.cuda.module import Argument, Compile, Module
from legato_engine.kernels.cuda.packed_layers import folded_first
from legato_engine.kernels.cuda.packing import fold_norm
from legato_engine.kernels.cuda.resident_drafts import BuildDrafts
from legato_engine.kernels.cuda.resident_values import BuildValues
from legato_engine.kernels.cuda.value_heads import TwoLayerValues
from legato_engine.kernels.parameters import Affine, DecoderLayer, DenseMlp
from legato_engine.resident.header import defines
from legato_engine.resident.instructions import WORD_BYTES, WORDS
from legato_engine.resident.program import Program
from legato_engine.resident.ring_model import ring_problem
from legato_engine.resident.sizes import (
    BLOCK,
    GROUP,
    HEAD_DIM,
    PAGE_BYTES,
    RANGES,
    SPLITS,
    WARPS,
    ModelSizes,
)
from legato_engine.resident.stream import Matrix, Stage, qkv_rows, worker_stages
from legato_engine.speculative.block_policy import BlockPolicy

if TYPE_CHECKING:
    from legato_engine.kernels.resident_launch import ResidentRows
    from legato_engine.kernels.step import StepCache

SOURCE = "step.cu"
PATIENCE_MS = 1000
"""How long a wait may last: a step takes a few milliseconds, and all workers run at once."""
RING_STAGES = {1: 12, 2: 10, 4: 8}
"""Stages of the ring by tiles of 8 rows: what a multiprocessor's shared memory holds of 16 KB."""
UNDER_WAY = {1: 3, 2: 3, 4: 4}
"""Stages that are being copied at once: the fastest on an H200, and of up to two tiles on an H100:
bytes under way beyond what memory needs only delay activations.
"""

_OWN_PAGES = 32  # of a row in a worker's quarter: OWN_PAGES in worker.cuh
MAX_PAGES = SPLITS * _OWN_PAGES
MAX_SHARED = 227 * 1024
"""Bytes that a thread block may have on a GPU of compute capability 9.0."""
_THREADS = 32 * WARPS + 128
_COUNTER_WORDS = 32  # from one counter to the next
_SAMPLING_BYTES = 704  # at least `Sampling`, what is called takes, and single words in worker.cuh
_REPORT = ("worker", "warp", "step", "instruction", "kind", "which", "want", "got")
"""What an overdue wait says of itself; the kinds are a counter, a full stage, an empty one, and a
step's tokens.
"""


def model_sizes(sizes: DecoderSizes, num_layers: int) -> ModelSizes:
    """Without values. Raises ValueError as `ModelSizes` does."""
    return ModelSizes(sizes.dim, sizes.ff_dim // sizes.dim, num_layers, sizes.vocab_size)


class ResidentWeights:
    """A decoder's weights as a program streams them."""

    def __init__(
        self, program: Program, layers: Sequence[DecoderLayer], head: Affine, head_norm: Affine
    ) -> None:
        sizes = program.sizes
        like = head.weight
        self.stream_stages = max(map(program.stream_stages, range(sizes.num_workers)))
        stages = sizes.num_workers * self.stream_stages
        self.stream = like.new_zeros(stages, sizes.stage_bytes // 2)
        places: dict[tuple[Matrix, int], list[tuple[int, Stage]]] = collections.defaultdict(list)
        for worker in range(sizes.num_workers):
            for index, stage in enumerate(worker_stages(program, worker)):
                place = worker * self.stream_stages + index
                places[stage.matrix, stage.layer].append((place, stage))
        order = [row for block in range(3 * sizes.num_workers) for row in qkv_rows(block)]
        rows = torch.tensor(order, device=like.device)
        folded, biases = [], []
        for index, layer in enumerate(layers):
            assert isinstance(layer.mlp, DenseMlp), "a layer with experts has another layout"
            first, both = folded_first(layer, layer.mlp)
            qkv, fc1 = first[: len(rows)], first[len(rows) :]
            folded.append(torch.cat([both[: len(rows)][rows], both[len(rows) :]]))
            biases.append(layer.mlp.fc2.bias.float() + layer.proj.bias.float())
            maps = {
                Matrix.QKV: qkv[rows],
                Matrix.FC1: fc1,
                Matrix.FC2: layer.mlp.fc2.weight,
                Matrix.PROJ: layer.proj.weight,
            }
            for matrix, weight in maps.items():
                self._place(sizes, weight, places[matrix, index])
        whole, self.head_folded = fold_norm(*head, head_norm)
        self._place(sizes, whole, places[Matrix.HEAD, sizes.num_layers])
        self.folded, self.out_bias = torch.stack(folded), torch.stack(biases)

    def _place(
        self, sizes: ModelSizes, weight_OI: torch.Tensor, places: Sequence[tuple[int, Stage]]
    ) -> None:
        outputs, inputs = weight_OI.shape
        chunks = inputs // sizes.chunk
        # Rows 16b + 8h + r; inputs of chunk c, warp w, half i, lane t, quad q, pair p. A lane's 16
        # bytes are both rows' pairs of a quad: a fragment of a tensor-core product.
        shape = (outputs // BLOCK, 2, 8, chunks, sizes.chunk // GROUP, 2, 4, 2, 2, 2)
        order = (0, 3, 4, 5, 7, 2, 6, 8, 1, 9)
        packed = weight_OI.reshape(shape).permute(order).reshape(-1, BLOCK * sizes.chunk)
        to = torch.tensor([place for place, _ in places], device=weight_OI.device)
        source = [stage.block * chunks + stage.chunk for _, stage in places]
        self.stream[to] = packed[torch.tensor(source, device=weight_OI.device)]


class ResidentBuild:
    """The kernel for up to `8 * tiles` rows, with counters that only its launches advance."""

    def __init__(
        self,
        program: Program,
        weights: ResidentWeights,
        embedding: torch.Tensor,
        cache: StepCache,
        tiles: int,
        *,
        values: TwoLayerValues | None = None,
        policy: BlockPolicy | None = None,
        under_way: int = 0,
        delays: bool = False,
        compile_source: Compile | None = Module,
    ) -> None:
        """`values` as the program has them; rows draft by `policy`, if the program has drafts.

        `under_way`: stages that are being copied at once, for measuring; 0: `UNDER_WAY`. `delays`:
        warps come late at random, for tests. `compile_source`: for another machine than the current
        GPU; None: `load` does it.
        """
        sizes, device = program.sizes, embedding.device
        assert (values is None) == (sizes.values is None), "the program has other values"
        assert (policy is not None) == sizes.drafts, "a policy is of a program with drafts"
        self._weights, self._embedding, self._cache = weights, embedding, cache
        self.tokens = tokens = 8 * tiles
        self.patience_ms = PATIENCE_MS
        self.count = max(map(len, program.workers))
        self._grid = (sizes.num_workers, 1, 1)
        body = shared_body(sizes, program.ring_stages, tokens)
        under_way = under_way or UNDER_WAY[tiles]
        fault = ring_problem(program.ring_stages, under_way)
        assert fault is None, fault
        constants = defines(sizes, program.ring_stages, under_way, tiles) | {"SHARED": body}
        self.values = BuildValues(values, tokens, device)
        self._drafts = BuildDrafts(policy, device)
        constants |= self.values.defines | self._drafts.defines
        if delays:
            constants["DELAYS"] = 1
        self.constants = constants
        self._shared = body + self.count * WORDS * WORD_BYTES
        if compile_source is not None:
            self.load(compile_source)
        self._table = torch.tensor(program.table(), dtype=torch.int16, device=device)
        self._report = torch.zeros(16, dtype=torch.int32, pin_memory=device.type == "cuda")
        # Counters, the epoch, the abort word, and the host's wish: a cache line each.
        lines = torch.zeros(
            program.num_counters + 3, _COUNTER_WORDS, dtype=torch.int32, device=device
        )
        self._counters, (self._epoch, self._abort, self._stop) = lines[:-3], lines[-3:]

        def scratch(*shape: int, dtype: torch.dtype = embedding.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        workers = sizes.num_workers
        self.x = scratch(2, tokens, sizes.dim)
        self.act, self.q = scratch(tokens, sizes.ff_dim), scratch(tokens, sizes.dim)
        self.part = scratch(tokens, workers, 2, HEAD_DIM, dtype=torch.float32)
        self.ends = scratch(tokens, workers, 2, 2, dtype=torch.float32)
        self.heads = scratch(tokens, sizes.dim)
        self._best = scratch(workers, tokens, 2, dtype=torch.int32)
        self._scores = scratch(tokens, sizes.vocab_size, dtype=torch.float32)
        weighed = 2, tokens, workers, RANGES, 4
        self._weighed = scratch(*weighed, dtype=torch.int32).unbind()
        self._token = scratch(tokens, dtype=torch.int32)

    def load(self, compile_source: Compile = Module) -> None:
        module = compile_source(SOURCE, self.constants, own=True, folder=source_folder())
        self._kernel = module.kernel("steps", shared=self._shared)

    def run(
        self,
        rows: ResidentRows,
        num_rows: int,
        num_steps: int,
        *,
        num_tokens: int = 0,
        logits: torch.Tensor | None = None,
        trace: torch.Tensor | None = None,
        profile: torch.Tensor | None = None,
        patience_ms: int | None = None,
    ) -> None:
        """Enqueue; the last tensors are for measuring (see `Arguments` in worker.cuh)."""
        most = max(num_rows, num_tokens)
        assert 0 < num_rows <= most <= self.tokens, f"{most} tokens in a build for {self.tokens}"
        weights, cache, state = self._weights, self._cache, rows.state
        pointers: tuple[Argument, ...] = (
            *(self._table, self._counters, self._epoch, self._abort, self._report),
            *(weights.stream, weights.folded, weights.head_folded, weights.out_bias),
            *(self._embedding, self.x[0], self.x[1], self.act, self.q, self.part, self.ends),
            *(self.heads, self._best, self._scores, *self._weighed),
            *(self._token, self._stop),
            *(cache.k_LNHSE, cache.v_LNHSE, cache.cos_PR, cache.sin_PR),
            *(rows.row_B, rows.constraint_B, rows.position_B, rows.sample_position_B),
            *(rows.page_table_RM, state.token_R, state.temperature_R, state.top_p_R),
            *(state.top_k_R, state.seed_R, rows.constraints_CV, rows.successor_C2, rows.ring_SB),
            *(rows.words, rows.payload_SB2, rows.certainty_SB2),
            *self.values.pointers(state),
            *(logits, trace, profile),
        )
        numbers = (
            *(self.count, len(weights.out_bias), weights.stream_stages, cache.k_LNHSE.shape[1]),
            *(rows.page_table_RM.shape[1], num_rows, num_steps, rows.ring_SB.stride(0)),
            self.patience_ms if patience_ms is None else patience_ms,
            0,
            self._drafts.table(rows),
        )
        self._kernel.launch(self._grid, _THREADS, (*pointers, *numbers), cooperative=True)

    def fault(self) -> str | None:
        """The wait that a launch which is over gave up."""
        said, *values = self._report.tolist()
        if not said:
            return None
        return ", ".join(f"{name} {value}" for name, value in zip(_REPORT, values, strict=False))


def rows_of(inputs: torch.Tensor) -> torch.Tensor:
    """Inputs of products [T, I], which lie as `place_of` in inputs.cuh says, row by row."""
    tokens, width = inputs.shape
    pieces = inputs.view(width // GROUP, tokens // 8, GROUP // 32, 8, 32)
    return pieces.permute(1, 3, 0, 2, 4).reshape(tokens, width)


def source_folder() -> Traversable:
    return importlib.resources.files("legato_engine.resident") / "sources"


def shared_body(sizes: ModelSizes, stages: int, tokens: int) -> int:
    """At least the size of `Shared` in worker.cuh, which checks it."""
    ring = stages * (max(sizes.stage_bytes, PAGE_BYTES) + 2 * 8)
    sums = WARPS * 4 * tokens // 8 * 512
    rows = 2 * WARPS * tokens * 8 + tokens * (4 * (12 + _OWN_PAGES) + 512 + 64 + 8)
    return -(-(ring + sums + rows + _SAMPLING_BYTES) // 128) * 128
