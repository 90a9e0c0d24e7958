"""The work of a step of a model's CUDA kernels, to be captured for a slot and a shape."""

from __future__ import annotations

from collections.abc import Sequence

from legato_engine.kernels import ops
from legato_engine.kernels.accelerated import SampledTokens, Sampler
from legato_engine.kernels.step import GROUP
from legato_engine.models.step_kernels import StepInputs, StepKernels
from legato_engine.runtime.draft_state import Layout
from legato_engine.runtime.drafting_decode import DraftingDecode
from legato_engine.runtime.graph_runner import Work
from legato_engine.runtime.logprobs import LogprobStep
from legato_engine.runtime.preparation import Changes, preparation
from legato_engine.runtime.resources import Resources

FEW_GROUPS = (1, 2)
"""Token groups that steps are laid out for, besides one per token."""


def laid_out_groups(bucket: int, num_groups: int) -> int:
    """The fewest groups, at least so many, that steps of `bucket` tokens are laid out for."""
    fits = (few for few in FEW_GROUPS if num_groups <= few < bucket <= few * GROUP)
    return next(fits, bucket)


class StepWorks:
    """Each method makes work over the buffers of a slot, at fixed addresses."""

    def __init__(self, kernels: StepKernels, resources: Resources) -> None:
        self._kernels, self._resources = kernels, resources
        self._slots, self._state = resources.slots, resources.state
        self._sampler = Sampler(resources.model.vocab_size)
        self._drafting = None
        if self._state.drafts is not None:
            self._drafting = DraftingDecode(resources, _layouts(resources.buckets))

    def prepare(self, slot: int, grows: bool, places: bool, admits: bool) -> Work:
        buffers, kv = self._slots[slot], self._resources.kv

        def admit() -> None:
            self._state.admit(buffers)
            ops.copy_pages(kv.k_LNHSE, kv.v_LNHSE, buffers.prompt.device["copied"])

        changes = Changes(grows, places)
        return preparation(self._resources, slot, changes, admit if admits else None)

    def drafting(self, slot: int, adapted: bool) -> Work:
        assert self._drafting is not None, "only draft tokens are placed by the device"
        # The forward begins after a conditional node: its kernels read positions before the
        # previous kernel of their graph has ended.
        return self._drafting.work(slot, self.forward, adapted)

    def forward(
        self, slot: int, bucket: int, num_groups: int, adapted: bool, sampled: bool = True
    ) -> Work:
        buffers, state = self._slots[slot], self._state
        staged = {name: field[:bucket] for name, field in buffers.staged.device.items()}
        inputs = StepInputs(
            source_B=staged["source"],
            row_B=staged["row"],
            position_B=staged["position"],
            fresh_B=staged["fresh"],
            prompt_token_B=staged["token"],
            prompt_payload_B2=staged["payload"],
            token_R=state.token_R,
            payload_R2=state.payload_R2,
            page_table_RM=state.page_table_RM,
            adapter_slot_R=state.adapter_slot_R if adapted else None,
            num_groups=num_groups,
        )
        hidden_BD = buffers.hidden_RD[:bucket]
        logits_BV = buffers.logits_RV[:bucket] if sampled else None
        return lambda: self._kernels.forward(inputs, hidden_BD, logits_BV)

    def drafting_sample(self, slot: int, payload: bool) -> Work:
        assert self._drafting is not None, "only draft tokens are placed by the device"
        return self._drafting.sampling(slot, self.sample, payload, False)

    def sample(self, slot: int, bucket: int, payload: bool, settles: bool = True) -> Work:
        buffers, state = self._slots[slot], self._state
        staged = buffers.staged.device
        sampled = SampledTokens(
            row_B=staged["sample_row"][:bucket],
            token_B=buffers.tokens_R[:bucket],
            hidden_BD=buffers.hidden_RD[:bucket],
            logits_BV=buffers.logits_RV[:bucket],
            constraints_CV=self._resources.constraints_CV,
            constraint_S=buffers.constraint.device["constraint"],
            entry_B=None if buffers.entry_R is None else buffers.entry_R[:bucket],
            payload_B2=buffers.payload_R2[:bucket],
            certainty_B2=buffers.certainty_R2[:bucket],
        )

        def work() -> None:
            self._sampler.sample(
                state,
                sampled.logits_BV,
                sampled.constraints_CV,
                sampled.constraint_S,
                sampled.row_B,
                staged["sample_position"][:bucket],
                sampled.token_B,
                entry_B=sampled.entry_B,
                overlap=False,
            )
            if payload:
                self._kernels.values(state, sampled)
            if state.drafts is not None and settles:
                state.drafts.settle(buffers, bucket, state.token_R)

        return work

    def logprobs(self, slot: int, payload: bool, alternatives: bool) -> Work:
        step = LogprobStep(self._resources, self._slots[slot], self._resources.buckets[-1])
        return lambda: step(payload, alternatives)


def _layouts(buckets: Sequence[int]) -> list[Layout]:
    """As `laid_out_groups` chooses them."""
    return [
        Layout(bucket, groups)
        for bucket in buckets
        for groups in sorted({laid_out_groups(bucket, few) for few in (*FEW_GROUPS, bucket)})
    ]
