"""The engine's resident kernel over a model with random weights.

Shape legend as in `kernels.cuda.resident`.
"""

from __future__ import annotations

import dataclasses
import statistics

import torch
from legato_engine.device.cuda import CudaDevice, elapsed_ms, timing_event
from legato_engine.kernels.cuda.module import Compile, Module
from legato_engine.kernels.cuda.value_heads import TwoLayerValues
from legato_engine.kernels.decode_loop import ANY, DONE, STOP, MegakernelRows
from legato_engine.kernels.megakernel.kernel import (
    RING_STAGES,
    MegakernelBuild,
    MegakernelWeights,
    value_dims,
)
from legato_engine.kernels.megakernel.program import Op, Program, build_program
from legato_engine.kernels.megakernel.sizes import MOONDREAM2, PAGE, ring_problem
from legato_engine.kernels.parameters import Affine
from legato_engine.kernels.step import StepCache

from benchmarks.megakernel.model import DEVICE, PAIR, SCALAR, Cache, Model, RandomValues

MAX_STEPS = 256
MAX_ROWS = 32


@dataclasses.dataclass(eq=False)
class Rules:
    """How each row is sampled; greedily unless changed. A row of a launch is one of the state."""

    token_R: torch.Tensor
    payload_R2: torch.Tensor
    temperature_R: torch.Tensor
    top_p_R: torch.Tensor
    top_k_R: torch.Tensor
    seed_R: torch.Tensor
    scratch_row: int

    @classmethod
    def greedy(cls, device: torch.device = DEVICE) -> Rules:
        """For `MAX_ROWS` rows."""

        def integers() -> torch.Tensor:
            return torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)

        numbers = torch.zeros(MAX_ROWS, device=device)
        payload = torch.zeros(MAX_ROWS, 2, device=device)
        return cls(
            integers(), payload, numbers, torch.ones_like(numbers), integers(), integers(), MAX_ROWS
        )


def lasting(constraints_CV: torch.Tensor) -> torch.Tensor:
    """Successors [C, 2] of constraints that stay whatever their rows sample."""
    own_C = torch.arange(len(constraints_CV), device=constraints_CV.device)
    return torch.stack([torch.full_like(own_C, ANY), own_C], dim=1)


class ResidentKernel:
    """One build of the kernel, for up to `8 * tiles` rows."""

    def __init__(
        self,
        model: Model,
        tiles: int,
        program: Program | None = None,
        weights: MegakernelWeights | None = None,
        *,
        values: TwoLayerValues | None = None,
        under_way: int = 0,
        delays: bool = False,
        compile_source: Compile = Module,
    ) -> None:
        """Prepare a kernel for the model's program, or for another `program` with planted faults.

        With `values` tokens may have some; `under_way` and `compile_source` are those of a build.
        """
        self.sizes, self.tiles = model.sizes, tiles
        self._compile = compile_source
        self._device = device = model.embedding.device
        self._model, self._delays, self._under_way = model, delays, under_way
        self._values = values
        if values is not None:
            self.sizes = dataclasses.replace(model.sizes, values=value_dims(values))
        self.program = program or build_program(self.sizes, RING_STAGES[tiles])
        layers = [layer.parameters for layer in model.layers]
        head = model.head.affine
        self.weights = weights or MegakernelWeights(self.program, layers, head, Affine(*model.norm))
        self.rules = Rules.greedy(device)
        # Of each step tokens, values and certainties, one after the other.
        pinned = device.type == "cuda"
        shape = (MAX_STEPS, 3 * MAX_ROWS)
        self._ring = torch.full(shape, -2, dtype=torch.int64, pin_memory=pinned)
        self._words = torch.zeros(2, dtype=torch.int64, pin_memory=pinned)
        self._builds: dict[int, MegakernelBuild] = {}
        self.build: MegakernelBuild
        self.constraints_CV = torch.zeros(1, model.sizes.vocab_size, device=device)

    def run(
        self,
        cache: Cache,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        steps: int,
        *,
        payload: torch.Tensor | None = None,
        constraint: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        trace: torch.Tensor | None = None,
        profile: torch.Tensor | None = None,
        patience_ms: int | None = None,
    ) -> None:
        """Enqueue `steps` steps.

        `payload` [B, 2]: values of the first tokens; `constraint` [B]: by index of
        `constraints_CV`.
        """
        count = len(tokens)
        self.rules.token_R[:count] = tokens
        if payload is not None:
            self.rules.payload_R2[:count] = payload
        self._words.zero_()
        if constraint is None:
            constraint = torch.zeros(count, dtype=torch.int64, device=self._device)
        rows = MegakernelRows(
            row_B=torch.arange(count, device=self._device),
            constraint_B=constraint,
            position_B=positions.long().clone(),  # where the launch leaves them
            sample_position_B=positions.long() + 1,
            state=self.rules,
            page_table_RM=cache.pages.long(),
            constraints_CV=self.constraints_CV,
            successor_C2=lasting(self.constraints_CV),
            ring_SB=self._ring[:, :MAX_ROWS],
            payload_SB2=self._field(1, 2),
            certainty_SB2=self._field(2, 2),
            words=self._words,
        )
        self.build = self._build(cache)
        self.build.run(
            rows,
            count,
            steps,
            logits=logits,
            trace=trace,
            profile=profile,
            patience_ms=patience_ms,
        )
        self._kept = rows  # until the launch is over

    def _build(self, cache: Cache) -> MegakernelBuild:
        key = cache.keys.data_ptr()
        if key not in self._builds:
            angles = self._model.cosines, self._model.sines
            self._builds[key] = MegakernelBuild(
                self.program,
                self.weights,
                self._model.embedding,
                StepCache(cache.keys, cache.values, None, *angles),
                self.tiles,
                values=self._values,
                under_way=self._under_way,
                delays=self._delays,
                compile_source=self._compile,
            )
        return self._builds[key]

    def stop(self) -> None:
        """Stop the launch after its current step."""
        self._words[STOP] = 1

    @property
    def steps(self) -> int:
        """How many steps of the launch are over."""
        return int(self._words[DONE])

    def tokens(self, steps: int, rows: int) -> torch.Tensor:
        """[S, B] of a launch that has ended."""
        assert self.steps == steps, f"{self.steps} steps of {steps}"
        return self._ring[:steps, :rows].to(self._device, copy=True)

    def allow_only(self, token: int) -> None:
        """Every row's next tokens are this one."""
        self.constraints_CV.fill_(-torch.inf)
        self.constraints_CV[:, token] = 0.0

    def favour(self, token: int, by: float) -> None:
        """Every row's constraint adds so much to this token's logits, and nothing to others'."""
        self.constraints_CV.zero_()
        self.constraints_CV[:, token] = by

    def values(self, steps: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and certainties [S, B, 2] of a launch that has ended."""
        shape = (steps, -1, 2)
        both = (self._field(which, 2)[:steps].view(shape)[:, :rows] for which in (1, 2))
        payload, certainty = (each.to(self._device, copy=True) for each in both)
        return payload, certainty

    def _field(self, which: int, width: int) -> torch.Tensor:
        """View a field of the ring as float32 [steps, rows * width]."""
        words = self._ring[:, which * MAX_ROWS : (which + 1) * MAX_ROWS]
        return words.view(torch.float32)[:, : MAX_ROWS * width]

    def fault(self) -> str | None:
        """Wait for the last launch; what it gave up to wait for."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return self.build.fault()

    def ended(self, what: str) -> bool:
        """Wait for the last launch; say so if it gave up a wait."""
        if failure := self.fault():
            print(f"{what}: STUCK {failure}", flush=True)
            return False
        return True


# ---------------------------------------------------------------- times
# Milliseconds of a step of the resident kernel, and where they go.


CONTEXT, IMAGE = 850, 730
POSITIONS = 1024
WORD = 100
"""A token without values."""


def time_steps(tiles: list[int]) -> None:
    """Milliseconds of a step, and where one goes."""
    sizes = MOONDREAM2
    model = Model.random(sizes, POSITIONS)
    weights = None
    steps = 32
    for each in tiles:
        kernel = ResidentKernel(model, each, weights=weights)
        weights = kernel.weights
        for rows in (1, 8 * each):
            tokens = torch.randint(sizes.vocab_size, (rows,), device=DEVICE, dtype=torch.int32)
            positions = torch.full((rows,), CONTEXT - steps // 2, device=DEVICE, dtype=torch.int32)
            cache = Cache.random(sizes, rows, POSITIONS // 16)
            took = _time(kernel, cache, tokens, positions, steps)
            single = _time(kernel, cache, tokens, positions, 1)
            kv = 2 * rows * CONTEXT * sizes.dim * 2 * sizes.num_layers
            read = weights.stream.numel() * 2 + kv
            print(
                f"tiles {each}, {rows} rows, {CONTEXT} positions: {took:.4f} ms a step of {steps},",
                f"{read / took / 1e9:.2f} TB/s; floor at 4.68 {read / 4.68e9:.3f} ms;",
                f"a launch of one step {single:.4f} ms",
                flush=True,
            )
            _profile(kernel, cache, tokens, positions)


def time_values(tiles: list[int]) -> None:
    """Milliseconds of a step whose tokens are all words, scalars or pairs."""
    sizes = MOONDREAM2
    model = Model.random(sizes, POSITIONS)
    read = RandomValues.random(sizes).two_layers()
    weights = None
    steps = 32
    for each in tiles:
        kernel = ResidentKernel(model, each, weights=weights, values=read)
        weights = kernel.weights
        for rows in (1, 8 * each):
            positions = torch.full((rows,), CONTEXT - steps // 2, device=DEVICE, dtype=torch.int32)
            cache = Cache.random(sizes, rows, POSITIONS // 16)
            took = {}
            for name, token in (("words", WORD), ("scalars", SCALAR), ("pairs", PAIR)):
                kernel.allow_only(token)
                tokens = torch.full((rows,), token, device=DEVICE, dtype=torch.int32)
                took[name] = _time(kernel, cache, tokens, positions, steps)
            said = ", ".join(f"{name} {ms:.4f}" for name, ms in took.items())
            print(f"values: tiles {each}, {rows} rows, ms a step: {said}", flush=True)
            _profile(kernel, cache, tokens, positions)


def time_draws(tiles: list[int]) -> None:
    """Milliseconds of a step whose rows are all drawn, by their rules."""
    model, steps, weights = Model.random(MOONDREAM2, POSITIONS), 32, None
    rules = {"greedy": (0.0, 1.0, 0), "0.7": (0.7, 1.0, 0), "0.7 top_p 0.9": (0.7, 0.9, 0)}
    rules["1.0 top_k 40"] = 1.0, 1.0, 40
    for each in tiles:
        kernel = ResidentKernel(model, each, weights=weights)
        weights = kernel.weights
        for rows in (1, 8 * each):
            tokens = torch.randint(model.sizes.vocab_size, (rows,), device=DEVICE)
            positions = torch.full((rows,), CONTEXT - steps // 2, device=DEVICE)
            cache = Cache.random(MOONDREAM2, rows, POSITIONS // 16)
            took = []
            for name, (temperature, top_p, top_k) in rules.items():
                kernel.rules.temperature_R.fill_(temperature)
                kernel.rules.top_p_R.fill_(top_p)
                kernel.rules.top_k_R.fill_(top_k)
                took.append(f"{name} {_time(kernel, cache, tokens, positions, steps):.4f}")
            print(f"draws: tiles {each}, {rows} rows, ms a step:", ", ".join(took), flush=True)


def time_common(tiles: list[int]) -> None:
    """Milliseconds of a step whose rows have an image in common, and of rows that do not."""
    model, steps, weights = Model.random(MOONDREAM2, POSITIONS), 32, None
    for each in tiles:
        kernel = ResidentKernel(model, each, weights=weights)
        weights = kernel.weights
        for rows in (2, 4, 8 * each):
            tokens = torch.randint(model.sizes.vocab_size, (rows,), device=DEVICE)
            positions = torch.full((rows,), CONTEXT - steps // 2, device=DEVICE)
            took = []
            for common in (0, IMAGE // PAGE):
                cache = Cache.random(MOONDREAM2, rows, POSITIONS // PAGE)
                cache.pages[:, :common] = cache.pages[0, :common].clone()
                took.append(f"{common} pages {_time(kernel, cache, tokens, positions, steps):.4f}")
                del cache
            print(f"common: tiles {each}, {rows} rows, ms a step:", ", ".join(took), flush=True)


def time_under_way(tiles: list[int]) -> None:
    """Milliseconds of a step by how many stages are being copied at once."""
    sizes = MOONDREAM2
    model = Model.random(sizes, POSITIONS)
    weights = None
    steps = 32
    print(f"a copy moves {copy_rate():.2f} TB/s", flush=True)
    for each in tiles:
        for under_way in (3, 4, 5, 6):
            if ring_problem(RING_STAGES[each], under_way):
                continue
            kernel = ResidentKernel(model, each, weights=weights, under_way=under_way)
            weights = kernel.weights
            said = []
            for rows in (1, 4 * each, 8 * each):
                place = CONTEXT - steps // 2
                positions = torch.full((rows,), place, device=DEVICE, dtype=torch.int32)
                tokens = torch.randint(sizes.vocab_size, (rows,), device=DEVICE, dtype=torch.int32)
                cache = Cache.random(sizes, rows, POSITIONS // 16)
                said.append(f"{_time(kernel, cache, tokens, positions, steps):.4f}")
                del cache
            print(f"tiles {each}, {under_way} under way: {' / '.join(said)}", flush=True)


def copy_rate() -> float:
    """TB/s read and written by a copy of a gigabyte."""
    x = torch.randn(1 << 28, device=DEVICE)
    y = torch.empty_like(x)
    times = []
    for _ in range(8):
        begin, end = (timing_event() for _ in range(2))
        begin.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(elapsed_ms(begin, end))
    return float(2 * x.nbytes / statistics.median(times) / 1e9)


def time_graph(tiles: list[int]) -> None:
    """Milliseconds of a step of today's graph path, without sampling."""
    del tiles
    from benchmarks.decode.kernels import steps
    from benchmarks.decode.step_bench import Bench

    with torch.inference_mode():
        bench, device = Bench.make("moondream2"), CudaDevice(0)
        for rows in (1, 8, 32):
            figures = steps(bench, device, (rows, 1))
            print(f"graph path, {rows} rows: {figures['step']:.4f} ms", flush=True)


def _time(
    kernel: ResidentKernel, cache: Cache, tokens: torch.Tensor, positions: torch.Tensor, steps: int
) -> float:
    times = []
    for _ in range(12):
        begin, end = (timing_event() for _ in range(2))
        begin.record()
        kernel.run(cache, tokens, positions, steps)
        end.record()
        end.synchronize()
        times.append(elapsed_ms(begin, end) / steps)
    if not kernel.ended("timing"):
        return float("nan")
    return statistics.median(times[2:])


def _profile(
    kernel: ResidentKernel, cache: Cache, tokens: torch.Tensor, positions: torch.Tensor
) -> None:
    """Clocks of waiting and running, by instruction: the workers' least, median and most."""
    steps, workers = 6, kernel.sizes.num_workers
    profile = torch.zeros(workers, steps, kernel.build.count, 3, dtype=torch.int64, device=DEVICE)
    kernel.run(cache, tokens, positions, steps, profile=profile)
    if not kernel.ended("profile"):
        return
    clocks = profile[:, 2:].cpu().double()
    total = (clocks[0, 1:, 0, 0] - clocks[0, :-1, 0, 0]).mean()
    gaps = (clocks[:, :, 1:, 0] - clocks[:, :, :-1, 2]).mean()
    seen: dict[tuple[int, int], list[int]] = {}
    for index, it in enumerate(kernel.program.workers[0]):
        seen.setdefault((it.op, it.chunk), []).append(index)
    said = []
    for (op, chunk), indices in seen.items():
        times = clocks[:, :, indices]
        for name, first, last in ((" waits", 0, 1), ("", 1, 2)):
            each = (times[..., last] - times[..., first]).mean((1, 2))
            low, middle, high = each.min(), each.median(), each.max()
            if high > 200:
                said.append(f"{Op(op).name}{chunk or ''}{name} {low:.0f}/{middle:.0f}/{high:.0f}")
    print(f"  {total:.0f} clocks a step, {gaps:.0f} between two instructions;", ", ".join(said))
    runs = clocks[:, :, seen[Op.HEAD, 0][0]]
    order = (runs[..., 2] - runs[..., 1]).mean(1).argsort().tolist()
    print(f"  fastest heads {order[:8]}, slowest {order[-8:]}")
    _arrivals(kernel, clocks)


def _arrivals(kernel: ResidentKernel, clocks: torch.Tensor) -> None:
    """How late the last worker signals, and how long after it the others know: clocks.

    The workers' clocks are brought together by when each passes the wait for the residual stream.
    """
    program = kernel.program.workers[0]
    firsts = [i for i, it in enumerate(program) if it.op == Op.FC1 and it.layer > 0]
    passes = clocks[:, :, firsts, 1].flatten(1)
    offsets = (passes - passes.median(0).values).median(1).values
    clocks = clocks - offsets[:, None, None, None]
    for waiting, it in enumerate(program):
        if it.wait < 0 or it.layer not in (7, 8):
            continue
        matching = [i for i, each in enumerate(program) if each.signal == it.wait]
        if not matching or it.op in (Op.ATTEND, Op.MERGE):  # only a head's workers signal
            continue
        ends = clocks[:, :, matching[0], 2]
        last, worker = ends.max(0)
        late = last - ends.median(0).values
        hop = clocks[:, :, waiting, 1].min(0).values - last
        begun = clocks[:, :, matching[0], 0].gather(0, worker[None])[0]
        took, usual = last - begun, (ends - clocks[:, :, matching[0], 0]).median(0).values
        said = [
            f"{name} {[round(x) for x in values.tolist()]}"
            for name, values in (
                ("last worker", worker),
                ("late by", late),
                ("took", took),
                ("usual", usual),
                ("then", hop),
            )
        ]
        print(f"  {Op(it.op).name} of layer {it.layer}:", ", ".join(said))
