"""Rows that draft in the resident kernel, over a model with random weights.

Their lookups find what a history was planted with, so that acceptance is what a caller chooses.

Shape legend: S rows of a launch, N tokens of an answer.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from legato_engine.device.base import Device
from legato_engine.device.cuda import CudaDevice, elapsed_ms, timing_event
from legato_engine.kernels.accelerated import LookupKernel
from legato_engine.kernels.cuda.drafting import RuleConstants
from legato_engine.kernels.cuda.module import Compile, Module
from legato_engine.kernels.cuda.value_heads import TwoLayerValues
from legato_engine.kernels.decode_loop import MegakernelDrafts, MegakernelRows
from legato_engine.kernels.megakernel.kernel import (
    RING_STAGES,
    MegakernelBuild,
    MegakernelWeights,
    value_dims,
)
from legato_engine.kernels.megakernel.program import build_program
from legato_engine.kernels.megakernel.sizes import MOONDREAM2
from legato_engine.kernels.proposer import LookupProposer
from legato_engine.kernels.step import StepCache
from legato_engine.runtime.buffers import TokenRing
from legato_engine.runtime.decode_slot import DecodeSlot, DraftState, StepLayout
from legato_engine.runtime.descriptors import DESCRIPTOR, STARTS, WORDS
from legato_engine.speculation import (
    INITIAL_RATE,
    BlockPolicy,
    FixedBlockPolicy,
    TokenBudgetPolicy,
)

from benchmarks.megakernel.kernel import ResidentKernel, Rules, lasting
from benchmarks.megakernel.model import DEVICE, Cache, Model

BACK = 150
"""An answer was planted so many positions before where it begins."""
MAX_STEPS = 128
CONTEXT, POSITIONS = 850, 1024
LOOKUP_LENGTHS = (1, 4)
"""Tokens of a lookup that match, fewest and most: the proposers' own."""


@dataclasses.dataclass
class DraftedStep:
    """What the host hears of a step: each row's tokens, draft tokens and descriptor."""

    tokens: list[list[int]]
    proposed: list[int]
    descriptors: list[list[int]]


class DraftingRows:
    """S rows with a history each, and the memory of their launches."""

    def __init__(
        self,
        model: Model,
        cache: Cache,
        positions: torch.Tensor,
        policy: BlockPolicy,
        *,
        back: int = BACK,
        values: TwoLayerValues | None = None,
        device: Device | None = None,
        compile_source: Compile = Module,
    ) -> None:
        """Prepare the kernel on the current GPU, or on a `device` that `compile_source` serves.

        Answers are planted `back` positions before; with `values` tokens may have some.
        """
        sizes, self.count = model.sizes, len(positions)
        device = device or _device()
        on, self._compile, self._back = device.torch_device, compile_source, back
        self.model, self.cache, self.positions, self.policy = model, cache, positions, policy
        self._values = values
        self.context = cache.pages.shape[1] * 16
        self.most = self.count * (1 + policy.max_block)
        self.rules = Rules.greedy(on)
        self.state = DraftState(
            LookupKernel() if on.type == "cuda" else LookupProposer(),
            policy,
            num_rows=self.count,
            max_context=self.context,
            vocab_size=sizes.vocab_size,
            width=sizes.dim,
            dtype=torch.bfloat16,
            device=on,
        )
        if isinstance(policy, TokenBudgetPolicy):
            self.state.set_costs(policy)
        self.slot = DecodeSlot(
            device,
            max_rows=self.most,
            max_pages=2,
            max_prompt=self.context,
            width=sizes.dim,
            vocab_size=sizes.vocab_size,
            dtype=torch.bfloat16,
            max_drafting=self.count,
        )
        self.state.lay_out([StepLayout(self.most, self.most)], self.most)
        self.ring = TokenRing(device, self.slot.outputs, max_steps=MAX_STEPS)
        self.table = torch.zeros(self.count + 1, 2, dtype=torch.int64, device=on)
        self.constraints_CV = torch.zeros(1, sizes.vocab_size, device=on)
        self.constraint_S = torch.zeros(self.count, dtype=torch.int64, device=on)
        self._rules = torch.tensor(RuleConstants.of(policy).values, dtype=torch.float64, device=on)
        seconds = [1.0] * (self.most + 1)
        if isinstance(policy, TokenBudgetPolicy):
            seconds = [policy.costs.step(count) for count in range(self.most + 1)]
        self._seconds = torch.tensor(seconds, dtype=torch.float64, device=on)
        self.build: MegakernelBuild | None = None

    def begin(
        self, first: torch.Tensor, planted: torch.Tensor, limit: int, room: int, reach: int
    ) -> None:
        """Give rows their first token, with `planted` [S, N] in their histories.

        They feed tokens up to `limit` positions from the first one, with pages for `reach`.
        """
        state, rows, at = self.state, range(self.count), self.positions.tolist()
        state.clear()
        for row in rows:
            begin = at[row] - self._back
            state.tokens_RC[row, begin] = first[row]
            state.tokens_RC[row, begin + 1 : begin + 1 + planted.shape[1]] = planted[row]
            state.tokens_RC[row, at[row]] = first[row]
        state.position_R[: self.count] = self.positions
        state.limit_R[: self.count] = self.positions + limit
        descriptors = np.zeros(self.count + 1, DESCRIPTOR)
        descriptors["ema_acceptance_rate"], descriptors["flags"] = INITIAL_RATE, STARTS
        words = torch.from_numpy(descriptors.view(np.int64).reshape(self.count + 1, WORDS))
        state.descriptor_R4.copy_(words)
        self.rules.token_R[: self.count] = first
        staged = self.slot.staged.device
        staged["scheduled_row"].copy_(torch.arange(self.count))
        staged["room"].fill_(room)
        staged["reach"].copy_(self.positions + reach)
        staged["control"].zero_()
        staged["entry"].fill_(self.count * 2)
        staged["page"].zero_()
        self.ring.reset()

    def place(self) -> None:
        """Place the tokens of the next step by the kernels of single steps."""
        self.state.allot(self.slot, self.table)
        self.state.propose(self.slot, self.table, self.policy.max_block)
        self.state.place(self.slot)

    def launch(
        self,
        weights: MegakernelWeights,
        steps: int,
        *,
        logits: torch.Tensor | None = None,
        profile: torch.Tensor | None = None,
        delays: bool = False,
        tiles: int = 0,
    ) -> None:
        """Enqueue up to `steps` steps."""
        if self.build is None:
            tiles = tiles or next(tiles for tiles in RING_STAGES if self.most <= 8 * tiles)
            model, cache, values = self.model, self.cache, self._values
            dims = None if values is None else value_dims(values)
            sizes = dataclasses.replace(model.sizes, drafts=True, values=dims)
            self.build = MegakernelBuild(
                build_program(sizes, RING_STAGES[tiles]),
                weights,
                model.embedding,
                StepCache(cache.keys, cache.values, None, model.cosines, model.sines),
                tiles,
                values=values,
                policy=self.policy,
                delays=delays,
                compile_source=self._compile,
            )
        self.place()
        rows, num_tokens = self._rows(), self.most
        self.build.run(
            rows, self.count, steps, num_tokens=num_tokens, logits=logits, profile=profile
        )

    def _rows(self) -> MegakernelRows:
        staged, fields = self.slot.staged.device, self.ring.fields
        constraint_S = self.slot.constraint.device["constraint"]
        constraint_S[: self.count] = self.constraint_S
        drafts = MegakernelDrafts(
            staged=staged,
            state=self.state,
            rules=self._rules,
            seconds_P=self._seconds,
            outputs=self.slot.outputs.device,
            ring=fields,
            lengths=LOOKUP_LENGTHS,
        )
        self._kept = MegakernelRows(
            row_B=staged["row"],
            constraint_B=constraint_S,
            position_B=staged["position"],
            sample_position_B=staged["sample_position"],
            state=self.rules,
            page_table_RM=self.cache.pages.long(),
            constraints_CV=self.constraints_CV,
            successor_C2=lasting(self.constraints_CV),
            ring_SB=fields["token"],
            payload_SB2=fields["payload"],
            certainty_SB2=fields["certainty"],
            words=self.ring.words,
            drafts=drafts,
        )
        return self._kept

    def steps(self) -> list[DraftedStep]:
        """Read the steps of a finished launch."""
        if self.positions.is_cuda:
            torch.cuda.synchronize()
        assert self.build is not None
        fault = self.build.fault()
        assert fault is None, fault
        told = []
        while (outputs := self.ring.read()) is not None:
            told.append(self.told(outputs))
        return told

    def told(self, outputs: Mapping[str, Any]) -> DraftedStep:
        """Split a step's outputs by row."""
        counts, proposed = (list(map(int, outputs[name])) for name in ("count", "proposed"))
        tokens, begin = [], 0
        for count, drafted in zip(counts, proposed, strict=True):
            tokens.append(list(map(int, outputs["token"][begin : begin + count])))
            begin += 1 + drafted if count else 0
        return DraftedStep(
            tokens, proposed, [list(map(int, each)) for each in outputs["descriptor"]]
        )

    def replay(self, answers: torch.Tensor, steps: int) -> tuple[list[DraftedStep], list[bool]]:
        """Run the same steps by the kernels of single steps, on known tokens [S, N].

        Returns whether each would be a loop's last as well.
        """
        told, ends = [], []
        staged, state = self.slot.staged.device, self.state
        for _ in range(steps):
            self.place()
            row, position = staged["row"], staged["position"]
            real = row < self.count
            row = torch.where(real, row, 0)
            at = (position - self.positions[row]).clamp(0, answers.shape[1] - 1)
            self.slot.tokens_R.copy_(torch.where(real, answers[row, at], 0))
            state.settle(self.slot, self.most, self.rules.token_R)
            outputs = {name: each.cpu() for name, each in self.slot.outputs.device.items()}
            told.append(self.told(outputs))
            newest, last = (each[: self.count] for each in (state.position_R, state.limit_R))
            left = last - newest
            room = staged["room"].clamp(min=0)
            over = (left < 0) | (newest + 1 + torch.minimum(room, left) > staged["reach"])
            ends.append(bool(over.any()))
        return told, ends


def time_drafts(tiles: list[int]) -> None:
    """Milliseconds of a step of so many rows and tokens of each, all of them right."""
    del tiles
    sizes, steps, block = MOONDREAM2, 12, 7
    model = Model.random(sizes, POSITIONS)
    kernel = ResidentKernel(model, 1)
    first = torch.randint(sizes.vocab_size, (2,), device=DEVICE)
    positions = torch.full((2,), CONTEXT, device=DEVICE)
    whole = Cache.random(sizes, 2, POSITIONS // 16)
    kernel.run(whole, first, positions, steps * (1 + block))
    assert kernel.ended("answers")
    answers = kernel.tokens(steps * (1 + block), 2).T.contiguous()
    for count in (1, 2):
        cache = Cache(whole.keys, whole.values, whole.pages[:count].contiguous())
        rows = DraftingRows(model, cache, positions[:count], FixedBlockPolicy(block))
        for room in (0, 3, 7):
            limit = steps * (1 + room) - 1
            took, num_tokens = [], 0
            for _ in range(30):
                rows.begin(first[:count], answers[:count], limit, room, POSITIONS)
                begin, end = (timing_event() for _ in range(2))
                begin.record()
                rows.launch(kernel.weights, steps)
                end.record()
                told = rows.steps()
                took.append(elapsed_ms(begin, end) / len(told))
                num_tokens = sum(len(tokens) for each in told for tokens in each.tokens)
            assert rows.build is not None
            print(
                f"{count} rows, {1 + room} tokens of each, build for {rows.build.tokens}:",
                f"{statistics.median(took[5:]):.4f} ms a step of {len(told)},",
                f"{num_tokens / len(told) / count:.2f} tokens of a row",
                flush=True,
            )


@functools.cache
def _device() -> CudaDevice:
    return CudaDevice(0)
