"""The megakernel on the current GPU: packed weights, memory, launch.

Weights of values are those of single steps, `kernels.cuda.value_heads`.
"""

from __future__ import annotations

import collections
import importlib.resources
from collections.abc import Sequence
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.decoder import DecoderSizes
from legato_engine.kernels.cuda.drafting import RuleConstants
from legato_engine.kernels.cuda.module import Argument, Compile, Module
from legato_engine.kernels.cuda.sampling import RowTensors
from legato_engine.kernels.cuda.skinny_gemm import fold_norm
from legato_engine.kernels.cuda.value_heads import (
    DecoderWeights,
    TwoLayerValues,
    ValueEncoder,
    embed_defines,
    value_argmax_defines,
)
from legato_engine.kernels.megakernel.program import (
    WORD_BYTES,
    WORDS,
    Op,
    Program,
    WeightStage,
    defines,
    qkv_rows,
    worker_stages,
)
from legato_engine.kernels.megakernel.sizes import (
    BLOCK,
    GROUP,
    HEAD_DIM,
    PAGE_BYTES,
    RANGES,
    SPLITS,
    WARPS,
    ModelSizes,
    ValueDims,
    ring_problem,
)
from legato_engine.kernels.parameters import Affine, DecoderLayer, DenseMlp
from legato_engine.kernels.step import StepCache, folded_first
from legato_engine.speculation import BlockPolicy

if TYPE_CHECKING:
    from legato_engine.kernels.decode_loop import MegakernelDrafts, MegakernelRows

_NUM_POINTERS = 18
_FEATURE_BYTES = 2048  # per row: a quarter of its warps' sums


class BuildValues:
    """Value support of a build; empty without `values`."""

    def __init__(self, values: TwoLayerValues | None, tokens: int, device: torch.device) -> None:
        self._values = values
        self.defines = {"VALUES": 0} if values is None else _defines(values)
        dims = ValueDims(0, 0, 0) if values is None else value_dims(values)
        inner, num_bins = 2 * dims.inner_dim, dims.scalar_bins + dims.pair_bins
        self.inner = torch.zeros(tokens, inner, dtype=torch.bfloat16, device=device)
        """Inner activations of the scalar's decoder, then of the pair's."""
        self.bins = torch.zeros(tokens, num_bins, device=device)
        """Logits, likewise."""
        self._value = torch.zeros(tokens, 4, device=device)

    def pointers(self, state: RowTensors) -> tuple[Argument, ...]:
        """Return the pointers in the order of the kernel's parameters."""
        if self._values is None:
            return (None,) * _NUM_POINTERS
        kinds = self._values.scalar, self._values.pair
        weights = [pointer for kind in kinds for pointer in _weights(*kind)]
        return (*weights, state.payload_R2, self.inner, self.bins, self._value)


def _defines(values: TwoLayerValues) -> dict[str, int]:
    sizes, inner_dim = values.sizes, values.inner_dim
    return {
        "VALUES": 1,
        "INNER": inner_dim,
        "INNER_CHUNK": skinny_gemm.chunk(inner_dim // sizes.parts),
        "VALUE_PARTS": sizes.parts,
        **value_argmax_defines(sizes),
        **embed_defines(sizes),
    }


def value_dims(values: TwoLayerValues) -> ValueDims:
    return ValueDims(values.inner_dim, values.sizes.scalar_bins, values.sizes.pair_bins)


def values_obstacle(sizes: DecoderSizes, values: TwoLayerValues) -> str | None:
    """Return why the megakernel cannot read a model's values, or None."""
    dims, own = value_dims(values), values.sizes
    if min(dims.inner_blocks, dims.bin_blocks) < sizes.dim // BLOCK:
        return f"needs value decoders whose layers have at least {sizes.dim} outputs"
    if own.scalar_bins % 128 or own.pair_bins % 256:
        return f"runs 128 n scalar and 256 n pair bins, not {own.scalar_bins} and {own.pair_bins}"
    if 4 * max(own.scalar_features, own.pair_features) > _FEATURE_BYTES:
        return f"runs up to {_FEATURE_BYTES // 4} Fourier frequencies of a value"
    return None


def _weights(encoder: ValueEncoder, decoder: DecoderWeights) -> tuple[torch.Tensor, ...]:
    return (
        *(encoder.features, encoder.map.weight, encoder.map.bias),
        *(decoder.fc1_weights, decoder.fc1_bias, decoder.fc2_weights, decoder.fc2_bias),
    )


# ---------------------------------------------------------------- drafts

_ROW_FIELDS = ("scheduled_row", "room", "reach", "start", "fed")
_TOKEN_FIELDS = (
    *("row", "draft_index", "source", "token", "position", "fresh"),
    *("sample_row", "sample_position", "scheduled"),
)
_OUTPUTS = ("count", "proposed", "descriptor")


class BuildDrafts:
    """Draft support of a build; empty without a `policy`."""

    def __init__(self, policy: BlockPolicy | None, device: torch.device) -> None:
        self.defines: dict[str, int] = {"DRAFTS": int(policy is not None)}
        if policy is not None:
            self.defines |= RuleConstants.of(policy).defines
        self._device = device
        self._follows = torch.zeros(1, dtype=torch.int32, device=device)
        self._tables: dict[tuple[int, int], torch.Tensor] = {}

    def table(self, rows: MegakernelRows) -> torch.Tensor | None:
        """Return `Drafting` of drafts.cuh for these rows, whose tensors have fixed addresses."""
        drafts = rows.drafts
        if drafts is None:
            return None
        key = rows.row_B.data_ptr(), rows.ring_SB.data_ptr()
        if key not in self._tables:
            words = self._words(rows, drafts)
            self._tables[key] = torch.tensor(words, dtype=torch.int64, device=self._device)
        return self._tables[key]

    def _words(self, rows: MegakernelRows, drafts: MegakernelDrafts) -> list[int]:
        """List the fields in their order, pointers and numbers alike."""
        state, staged = drafts.state, drafts.staged
        fields = (
            *(staged[name] for name in _ROW_FIELDS),
            rows.constraint_B,
            *(staged[name] for name in _TOKEN_FIELDS),
            *(state.tokens_RC, state.position_R, state.limit_R, state.draft_RK),
            *(rows.state.token_R, state.descriptor_R4),
            *(drafts.rules, state.overall, drafts.seconds_P, state.block_S),
            *(drafts.outputs[name] for name in _OUTPUTS),
            *(drafts.ring[name] for name in _OUTPUTS),
        )
        context, tokens = state.tokens_RC.shape[1], len(staged["row"])
        numbers = (state.scratch_row, context, tokens, *drafts.lengths)
        return [*(each.data_ptr() for each in fields), *numbers, self._follows.data_ptr()]


# ---------------------------------------------------------------- builds

# Shape legend: O outputs, I inputs, W workers, T tokens of all tiles; otherwise that of
# `kernels.decode_loop`.

SOURCE = "step.cu"
PATIENCE_MS = 1000
"""Timeout of a wait: a step takes a few milliseconds, and all workers run at the same time."""
RING_STAGES = {1: 12, 2: 10}
"""Stages of the ring by tiles of 8 tokens: as many of 16 KB as shared memory holds."""
UNDER_WAY = 3
"""Stages that are copied at the same time: the fastest on H100 and H200."""

_OWN_PAGES = 32  # of a row in a worker's quarter, as in worker.cuh
MAX_PAGES = SPLITS * _OWN_PAGES
MAX_SHARED = 227 * 1024
"""Shared memory of a thread block in bytes, at compute capability 9.0."""
_THREADS = 32 * WARPS + 128
_COUNTER_WORDS = 32  # from one counter to the next
_SAMPLING_BYTES = 704  # `Sampling`, called functions' arguments and single words of worker.cuh
_REPORT = ("worker", "warp", "step", "instruction", "kind", "which", "want", "got")
"""Fields of a timeout report; the kinds are a counter, a full stage, an empty one, and a step's
tokens.
"""


def model_sizes(sizes: DecoderSizes, num_layers: int) -> ModelSizes:
    """Return the sizes without values.

    Raises:
        ValueError: as of `ModelSizes`.
    """
    return ModelSizes(sizes.dim, sizes.ff_dim // sizes.dim, num_layers, sizes.vocab_size)


class MegakernelWeights:
    """A decoder's weights in the order in which a program streams them."""

    def __init__(
        self, program: Program, layers: Sequence[DecoderLayer], head: Affine, head_norm: Affine
    ) -> None:
        sizes = program.sizes
        like = head.weight
        self.stream_stages = max(map(program.stream_stages, range(sizes.num_workers)))
        stages = sizes.num_workers * self.stream_stages
        self.stream = like.new_zeros(stages, sizes.stage_bytes // 2)
        places: dict[tuple[Op, int], list[tuple[int, WeightStage]]] = collections.defaultdict(list)
        for worker in range(sizes.num_workers):
            for index, stage in enumerate(worker_stages(program, worker)):
                place = worker * self.stream_stages + index
                places[stage.op, stage.layer].append((place, stage))
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
                Op.QKV: qkv[rows],
                Op.FC1: fc1,
                Op.FC2: layer.mlp.fc2.weight,
                Op.OUT: layer.proj.weight,
            }
            for op, weight in maps.items():
                self._place(sizes, weight, places[op, index])
        whole, self.head_folded = fold_norm(*head, head_norm)
        self._place(sizes, whole, places[Op.HEAD, sizes.num_layers])
        self.folded, self.out_bias = torch.stack(folded), torch.stack(biases)

    def _place(
        self, sizes: ModelSizes, weight_OI: torch.Tensor, places: Sequence[tuple[int, WeightStage]]
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


class MegakernelBuild:
    """One compiled megakernel, for up to `8 * tiles` tokens a step, with counters of its own."""

    def __init__(
        self,
        program: Program,
        weights: MegakernelWeights,
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
        """Allocate memory and compile; `values` and drafts by `policy` must match the program.

        `under_way`: stages that are copied at the same time, for measuring; 0: `UNDER_WAY`.
        `delays`: warps sleep at random, for tests. `compile_source`: compiler for another machine
        than the current GPU; None: `load` compiles.
        """
        sizes, device = program.sizes, embedding.device
        assert (values is None) == (sizes.values is None), "the values do not match the program"
        assert (policy is not None) == sizes.drafts, "a policy needs a program with drafts"
        self._weights, self._embedding, self._cache = weights, embedding, cache
        self.tokens = tokens = 8 * tiles
        self.patience_ms = PATIENCE_MS
        self.count = max(map(len, program.workers))
        self._grid = (sizes.num_workers, 1, 1)
        body = shared_body(sizes, program.ring_stages, tokens)
        under_way = under_way or UNDER_WAY
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
        # Counters, the epoch, the abort word, and the stop flag: a cache line each.
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
        rows: MegakernelRows,
        num_rows: int,
        num_steps: int,
        *,
        num_tokens: int = 0,
        logits: torch.Tensor | None = None,
        trace: torch.Tensor | None = None,
        profile: torch.Tensor | None = None,
        patience_ms: int | None = None,
    ) -> None:
        """Enqueue a launch; the last tensors are for measuring (see `Arguments` in worker.cuh)."""
        step_tokens = max(num_rows, num_tokens)
        assert 0 < num_rows <= step_tokens <= self.tokens, (
            f"{step_tokens} tokens in a build for {self.tokens}"
        )
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
        timed_out, *values = self._report.tolist()
        if not timed_out:
            return None
        return ", ".join(f"{name} {value}" for name, value in zip(_REPORT, values, strict=False))


def rows_of(inputs: torch.Tensor) -> torch.Tensor:
    """Return inputs of products, laid out as by `place_of` in inputs.cuh, row by row [T, I]."""
    tokens, width = inputs.shape
    pieces = inputs.view(width // GROUP, tokens // 8, GROUP // 32, 8, 32)
    return pieces.permute(1, 3, 0, 2, 4).reshape(tokens, width)


def source_folder() -> Traversable:
    return importlib.resources.files("legato_engine.kernels.megakernel") / "sources"


def shared_body(sizes: ModelSizes, stages: int, tokens: int) -> int:
    """Return an upper bound of `sizeof(Shared)` in worker.cuh, which checks it."""
    ring = stages * (max(sizes.stage_bytes, PAGE_BYTES) + 2 * 8)
    sums = WARPS * 4 * tokens // 8 * 512
    rows = 2 * WARPS * tokens * 8 + tokens * (4 * (12 + _OWN_PAGES) + 512 + 64 + 8)
    return -(-(ring + sums + rows + _SAMPLING_BYTES) // 128) * 128
