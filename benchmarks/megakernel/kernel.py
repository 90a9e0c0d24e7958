"""The engine's resident kernel over a model with random weights.

Shape legend as in `kernels.cuda.resident`.
"""

from __future__ import annotations

import dataclasses

import torch
from legato_engine.kernels.cuda.module import Compile, Module
from legato_engine.kernels.cuda.value_heads import TwoLayerValues
from legato_engine.kernels.decode_loop import ANY, DONE, STOP, MegakernelRows
from legato_engine.kernels.megakernel.kernel import (
    RING_STAGES,
    MegakernelBuild,
    MegakernelWeights,
    value_dims,
)
from legato_engine.kernels.megakernel.program import Program, build_program
from legato_engine.kernels.parameters import Affine
from legato_engine.kernels.step import StepCache

from benchmarks.megakernel.model import DEVICE, Cache, Model

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
