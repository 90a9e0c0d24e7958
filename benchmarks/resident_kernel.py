"""The resident kernel on the current GPU: compiled, its weights packed, and launched.

Shape legend: L layers, D width, F inner width, V vocabulary, W workers, T tokens of all tiles.
"""

from __future__ import annotations

import collections
import ctypes
import importlib.resources
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from legato_engine.kernels.cuda.packing import fold_norm
from legato_engine.resident.header import defines
from legato_engine.resident.program import WORDS, Program, build_program
from legato_engine.resident.sizes import BLOCK, GROUP, PAGE_BYTES, WARPS, ModelSizes
from legato_engine.resident.stream import Matrix, Stage, qkv_rows, worker_stages

from benchmarks.resident_model import DEVICE, DTYPE, Cache, Model

THREADS = 32 * WARPS + 128
COUNTER_WORDS = 32
MOST_PAGES = 128
"""Of a row: four times `OWN_PAGES` in worker.cuh."""
RING_STAGES = {1: 12, 2: 11, 4: 8}
"""Stages of 16 KB, by tiles."""
REPORT = ("worker", "warp", "step", "instruction", "kind", "which", "want", "got")
"""What an overdue wait says of itself; the kinds are a counter, a full stage, an empty one."""


class Weights:
    """A model's weights as a program streams them."""

    def __init__(self, model: Model, program: Program) -> None:
        sizes = model.sizes
        self.stream_stages = max(map(program.stream_stages, range(sizes.num_workers)))
        elements = sizes.stage_bytes // 2
        stages = sizes.num_workers * self.stream_stages
        self.stream = torch.zeros(stages, elements, device=DEVICE, dtype=DTYPE)
        places: dict[tuple[Matrix, int], list[tuple[int, Stage]]] = collections.defaultdict(list)
        for worker in range(sizes.num_workers):
            for index, stage in enumerate(worker_stages(program, worker)):
                place = worker * self.stream_stages + index
                places[stage.matrix, stage.layer].append((place, stage))
        order = [row for block in range(3 * sizes.num_workers) for row in qkv_rows(block)]
        self._rows = torch.tensor(order, device=DEVICE)
        self.folded = torch.zeros(
            sizes.num_layers, 3 * sizes.dim + sizes.ff_dim, 2, device=DEVICE, dtype=torch.float32
        )
        for index, layer in enumerate(model.layers):
            qkv, folded_qkv = fold_norm(layer.qkv.weight, layer.qkv.bias, layer.norm)
            fc1, folded_fc1 = fold_norm(layer.fc1.weight, layer.fc1.bias, layer.norm)
            self.folded[index] = torch.cat([folded_qkv[self._rows], folded_fc1])
            maps = {
                Matrix.QKV: qkv[self._rows],
                Matrix.FC1: fc1,
                Matrix.FC2: layer.fc2.weight,
                Matrix.PROJ: layer.proj.weight,
            }
            for matrix, weight in maps.items():
                self._place(sizes, weight, places[matrix, index])
        head, self.head_folded = fold_norm(model.head.weight, model.head.bias, model.norm)
        self._place(sizes, head, places[Matrix.HEAD, sizes.num_layers])
        self.out_bias = torch.stack(
            [layer.fc2.bias.float() + layer.proj.bias.float() for layer in model.layers]
        )

    def _place(
        self, sizes: ModelSizes, weight: torch.Tensor, places: list[tuple[int, Stage]]
    ) -> None:
        outputs, inputs = weight.shape
        chunks = inputs // sizes.chunk
        # Rows 16b + 8h + r; inputs of chunk c, warp w, half i, lane t, quad q, pair p. A lane's 16
        # bytes are both rows' pairs of a quad: a fragment of a tensor-core product.
        shape = (outputs // BLOCK, 2, 8, chunks, sizes.chunk // GROUP, 2, 4, 2, 2, 2)
        order = (0, 3, 4, 5, 7, 2, 6, 8, 1, 9)
        packed = weight.reshape(shape).permute(order).reshape(-1, BLOCK * sizes.chunk)
        to = torch.tensor([place for place, _ in places], device=DEVICE)
        source = [stage.block * chunks + stage.chunk for _, stage in places]
        self.stream[to] = packed[torch.tensor(source, device=DEVICE)]


class ResidentKernel:
    """One build of the kernel, for up to `8 * tiles` rows, with its scratch memory."""

    def __init__(
        self,
        model: Model,
        tiles: int,
        program: Program | None = None,
        weights: Weights | None = None,
    ) -> None:
        """`program` other than the model's own: for faults that are planted."""
        sizes = self.sizes = model.sizes
        self.model, self.tiles = model, tiles
        self.program = program or build_program(sizes, RING_STAGES[tiles])
        self.weights = weights or Weights(model, self.program)
        code = _compile(defines(sizes, RING_STAGES[tiles], tiles))
        self._module = _checked(driver.cuModuleLoadData(code))
        self._function = _checked(driver.cuModuleGetFunction(self._module, b"steps"))
        self.count = max(map(len, self.program.workers))
        self._shared = _shared_bytes(sizes, tiles, self.count)
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, limit, self._shared))
        self.table = torch.tensor(self.program.table(), dtype=torch.int32, device=DEVICE)
        tokens, workers = 8 * tiles, sizes.num_workers
        self.counters = torch.zeros(
            self.program.num_counters + 1, COUNTER_WORDS, dtype=torch.int32, device=DEVICE
        )  # the last line is the abort word
        self.report = torch.zeros(16, dtype=torch.int32).pin_memory()

        def scratch(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
            return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)

        self.x = scratch(2, tokens, sizes.dim)
        self.act, self.q = scratch(tokens, sizes.ff_dim), scratch(tokens, sizes.dim)
        self.heads = scratch(tokens, sizes.dim)
        self.part = scratch(tokens, workers, 64, dtype=torch.float32)
        self.ends = scratch(tokens, workers, 2, dtype=torch.float32)
        self.best = scratch(workers, tokens, 2, dtype=torch.float32)

    def run(
        self,
        cache: Cache,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        steps: int,
        out: torch.Tensor,
        *,
        logits: torch.Tensor | None = None,
        trace: torch.Tensor | None = None,
        profile: torch.Tensor | None = None,
        patience_ms: int = 200,
    ) -> None:
        """Enqueue `steps` steps; their tokens go to `out` [steps, B]. All of int32."""
        model, weights = self.model, self.weights
        assert cache.pages.shape[1] <= MOST_PAGES, f"{cache.pages.shape[1]} pages in a row"
        assert len(tokens) <= 8 * self.tiles, f"{len(tokens)} rows in {self.tiles} tiles"
        self.counters.zero_()
        pointers = (
            *(self.table, self.counters, self.counters[-1], self.report, weights.stream),
            *(weights.folded, weights.head_folded, weights.out_bias, model.embedding),
            *(self.x[0], self.x[1], self.act, self.q, self.heads, self.part, self.ends, self.best),
            *(cache.keys, cache.values, cache.pages, positions, model.cosines, model.sines),
            *(tokens, out, logits, trace, profile),
        )
        numbers = (
            *(self.count, weights.stream_stages, cache.keys.shape[1], cache.pages.shape[1]),
            *(len(tokens), steps, patience_ms),
        )
        values = tuple(0 if each is None else each.data_ptr() for each in pointers) + numbers
        types = (ctypes.c_void_p,) * len(pointers) + (ctypes.c_int32,) * len(numbers)
        stream = torch.cuda.current_stream().cuda_stream
        grid, block = (self.sizes.num_workers, 1, 1), (THREADS, 1, 1)
        _checked(
            driver.cuLaunchCooperativeKernel(
                self._function, *grid, *block, self._shared, stream, (values, types)
            )
        )

    def failure(self) -> str | None:
        """The wait that the last launch gave up, if it did."""
        said, *values = self.report.tolist()
        if not said:
            return None
        return ", ".join(f"{name} {value}" for name, value in zip(REPORT, values, strict=False))

    def ended(self, what: str) -> bool:
        """Wait for the last launch; say so if it gave up a wait."""
        torch.cuda.synchronize()
        if failure := self.failure():
            print(f"{what}: STUCK {failure}", flush=True)
            self.report.zero_()
            return False
        return True


def integers(*shape: int) -> torch.Tensor:
    """Of int32, not written yet."""
    return torch.full(shape, -1, dtype=torch.int32, device=DEVICE)


def _shared_bytes(sizes: ModelSizes, tiles: int, count: int) -> int:
    """The size of `Shared` in worker.cuh, and of a worker's instructions."""
    stages, tokens = RING_STAGES[tiles], 8 * tiles
    ring = stages * max(sizes.stage_bytes, PAGE_BYTES)
    sums = WARPS * 4 * tiles * 512
    rest = 3 * WARPS * tokens * 8 + 2 * stages * 8 + tokens * 4 * 34 + 16
    return -(-(ring + sums + rest) // 16) * 16 + count * 4 * WORDS


def _compile(constants: dict[str, int]) -> bytes:
    texts = {}
    for package in ("legato_engine.kernels.cuda", "legato_engine.resident"):
        folder = importlib.resources.files(package) / "sources"
        texts |= {file.name: file.read_text() for file in folder.iterdir() if file.is_file()}
    headers = {name: text for name, text in texts.items() if name.endswith(".cuh")}
    names = [name.encode() for name in headers]
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            texts["step.cu"].encode(),
            b"step.cu",
            len(headers),
            [text.encode() for text in headers.values()],
            names,
        )
    )
    options = [
        "--gpu-architecture=sm_90a",
        "--std=c++17",
        "--device-as-default-execution-space",
        "--extra-device-vectorization",
        *(f"-D{key}={value}" for key, value in constants.items()),
    ]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode(errors="replace"))
    code: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def _checked(answer: tuple[Any, ...]) -> Any:
    result, *values = answer
    if result.value:
        raise RuntimeError(result.name)
    return values[0] if values else None
