"""Model runner: stage, forward, sample, copy back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import structlog
import torch

from legato_engine import failpoints
from legato_engine.device.base import Device, DeviceEvent
from legato_engine.kernels.accelerated import LookupKernel
from legato_engine.kernels.decode_loop import MegakernelOffer, MegakernelSteps
from legato_engine.kernels.proposer import LookupProposer, Proposer
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.base import MaskRefiner, Model
from legato_engine.models.paged_attention import KVCache
from legato_engine.runtime.autotune import ALL, Kept, PathTable, measure
from legato_engine.runtime.backend import (
    Needs,
    Outputs,
    StepBackend,
    drafted_tokens,
    have_common_pages,
    needs_of,
    sampled_tokens,
)
from legato_engine.runtime.calibration import LoopTimes, StepCosts, own_hash
from legato_engine.runtime.decode_slot import DecodeSlot, DraftState, Resources, RowState
from legato_engine.runtime.graphs import GraphRunner, Work
from legato_engine.runtime.kernel_backend import KernelBackend
from legato_engine.runtime.loops import DecodeLoops
from legato_engine.runtime.sampler import constraint_table, mask_work, successor_table
from legato_engine.runtime.staging import StepStaging
from legato_engine.runtime.torch_backend import TorchBackend
from legato_engine.scheduler.batch import BatchLimits, Launch, LaunchKind, ScheduledSequence
from legato_engine.scheduler.interfaces import LaunchTimes, LoopPoll, Pause
from legato_engine.scheduler.loops import max_new_pages
from legato_engine.scheduler.scheduler import NUM_SLOTS
from legato_engine.sequence import RowTokens, SampledToken
from legato_engine.speculation import BlockPolicy, TokenBudgetPolicy

_log = structlog.get_logger()


class RefineStep:
    """A refiner's launches. A launch owns its slot's pinned buffers until it is collected."""

    def __init__(
        self, refiner: MaskRefiner, device: Device, num_slots: int, graphs: GraphRunner
    ) -> None:
        self._refiner = refiner
        self._compute = device.compute
        self._graphs = graphs
        self._given = [
            [device.pinned(tuple(each.shape), each.dtype) for each in refiner.given]
            for _ in range(num_slots)
        ]
        answer = refiner.answer
        self._answers = [device.pinned(tuple(answer.shape), answer.dtype) for _ in range(num_slots)]

    def warm_up(self) -> None:
        self._graphs.run(self._refine_work)

    def forward(self, slot: int, given: Any) -> None:
        compute, hosts = self._compute, self._given[slot]
        for host, tensor in zip(hosts, self._refiner.tensors(given), strict=True):
            host.copy_(tensor)
        for device, host in zip(self._refiner.given, hosts, strict=True):
            compute.copy(device, host)
        self._graphs.run(self._refine_work)
        compute.copy(self._answers[slot], self._refiner.answer)

    def answer(self, slot: int) -> Any:
        return torch.clone(self._answers[slot]).numpy()

    def _refine_work(self) -> Work:
        return self._refiner.refine


# ---------------------------------------------------------------- model runner

SHARED_PROMPTS = 4
"""A question has some 20 tokens, and a launch takes 128."""


@dataclasses.dataclass(slots=True)
class LaunchEvents:
    """A slot's events; its next launch records them again."""

    forward_start: DeviceEvent
    forward_end: DeviceEvent
    mask_end: DeviceEvent
    sample_start: DeviceEvent
    sample_end: DeviceEvent
    copy_end: DeviceEvent
    needs: Needs = dataclasses.field(default=Needs(False, False, False), kw_only=True)
    is_void: bool = dataclasses.field(default=False, kw_only=True)  # a decode does not count


def _draft_state(
    model: Model, device: Device, proposer: Proposer, policy: BlockPolicy, num_rows: int
) -> DraftState:
    return DraftState(
        proposer,
        policy,
        num_rows=num_rows,
        max_context=model.max_context,
        vocab_size=model.vocab_size,
        width=model.width,
        dtype=model.dtype,
        device=device.torch_device,
    )


class ModelRunner:
    """A `scheduler.interfaces.Runner`; `buckets`: decode batch sizes in tokens, ascending.

    The decode path allocates no memory, and only `collect` waits.
    """

    def __init__(
        self,
        model: Model,
        device: Device,
        kv: KVCache,
        *,
        max_running: int,
        buckets: Sequence[int],
        cuda_graphs: bool = True,
        adapters: AdapterBank | None = None,
        proposer: Proposer | None = None,
        block_policy: BlockPolicy | None = None,
        max_prompts: int = 0,
        max_images: int = 1,
        max_image_bytes: int = 0,
        refiner: MaskRefiner | None = None,
        loops: bool | None = False,
        megakernel: bool | None = False,
    ) -> None:
        """Allocate slots and select the backend.

        Up to `max_prompts` share a launch (0: `SHARED_PROMPTS` with kernels, else 1; always 1
        with a `proposer`), which computes up to `max_images` images. Features of images in prompts
        are kept up to `max_image_bytes`. `proposer` drafts as many tokens as `block_policy` says.
        With `loops` launches may be loops; None is for loops
        that are captured kernels, whose bits do not depend on the batch. With `megakernel` loops
        run in the megakernel where it can; None: where `choose_paths` finds it faster.
        """
        kernels = model.step_kernels(kv, adapters)
        if loops is None:
            loops = kernels is not None and cuda_graphs
        shared = SHARED_PROMPTS if kernels is not None else 1
        max_prompts = 1 if proposer is not None else max_prompts or shared
        max_pages = -(-model.max_context // kv.page_size)
        drafts = None
        if proposer is not None:
            assert block_policy is not None, "a proposer without a block policy"
            drafts = _draft_state(model, device, proposer, block_policy, max_running)
        max_block = 0 if drafts is None else drafts.max_block
        self._device, self._drafts = device, drafts
        self._slots = slots = tuple(
            DecodeSlot(
                device,
                max_rows=buckets[-1],
                max_pages=max_pages,
                max_prompt=model.max_context,
                max_prompts=max_prompts,
                max_images=max_images if max_prompts > 1 else 1,
                width=model.width,
                vocab_size=model.vocab_size,
                dtype=model.dtype,
                max_drafting=0 if drafts is None else max_running,
                max_block=max_block,
                max_grown=max_new_pages(max_running, kv.page_size, max_block) if loops else 0,
            )
            for _ in range(NUM_SLOTS)
        )
        constraints_CV = constraint_table(model.constraints, model.vocab_size, buckets[-1])
        self._resources = Resources(
            model=model,
            device=device,
            kv=kv,
            state=RowState(
                max_running,
                max_pages,
                device.torch_device,
                drafts,
                has_visual_prompts=model.has_visual_prompts,
            ),
            slots=slots,
            bank=adapters,
            buckets=tuple(buckets),
            constraints_CV=constraints_CV.to(device.torch_device),
            successor_C2=successor_table(model.constraints, buckets[-1]).to(device.torch_device),
            graphs=GraphRunner(device, captures=cuda_graphs),
            max_image_bytes=max_image_bytes,
        )
        self._events = [LaunchEvents(*(device.compute.record() for _ in range(6))) for _ in slots]
        self._backend: StepBackend = (
            TorchBackend(self._resources)
            if kernels is None
            else KernelBackend(kernels, self._resources)
        )
        self._loops: DecodeLoops | None = None
        self._unmeasured: MegakernelOffer | None = None
        if loops:
            path: tuple[MegakernelSteps | None, PathTable] = None, ALL
            if megakernel is not False:
                path = self._path(max_running, by_times=megakernel is None)
            self._loops = DecodeLoops(self._resources, self._backend, *path)
        self._refine = None
        if refiner is not None:
            self._refine = RefineStep(refiner, device, len(slots), self._resources.graphs)
        self._staging = StepStaging(self._resources)

    @property
    def encodes_images(self) -> bool:
        return self._backend.encodes_images

    @property
    def decodes_by_loops(self) -> bool:
        return self._loops is not None

    @property
    def megakernel_rows(self) -> int:
        """Return the maximum rows of the megakernel's launches; 0 without it or after a timeout."""
        return 0 if self._loops is None else self._loops.megakernel_rows

    @property
    def limits(self) -> BatchLimits:
        return self._backend.limits

    def warm_up(self) -> None:
        compute = self._device.compute
        for slot in self._slots:
            self._staging.padding(slot)
            slot.staged.upload_from(slot.prompt, compute)
        self._backend.warm_up()
        for index, _ in enumerate(self._slots):
            for bucket in self._resources.buckets:
                self._resources.graphs.run(self._mask_work, index, bucket)
            if self._drafts is not None:
                self._resources.graphs.run(self._index_work, index)
        if self._loops is not None:
            self._loops.warm_up()
        if self._refine is not None:
            self._refine.warm_up()
        compute.record().wait()
        if self._loops is not None:
            self._loops.restore(0)  # what is stuck already is not tried again

    def _path(self, max_rows: int, *, by_times: bool) -> tuple[MegakernelSteps | None, PathTable]:
        """Return the megakernel, or None, and which launches it runs, `by_times` of earlier starts.

        The log says why captured loops replace it.
        """
        offer = self._offer(max_rows)
        if isinstance(offer, str):
            if by_times:
                _log.info("decode_paths", all="loop", reason=f"the megakernel {offer}")
            else:
                reason, instead = f"it {offer}", "decode_path loop"
                _log.warning("megakernel_unavailable", reason=reason, instead=instead)
            return None, ALL
        table = _kept(offer).read() if by_times else None
        if table is not None:
            milliseconds = table.milliseconds()
            _log.info("decode_paths", milliseconds=milliseconds, measured="at an earlier start")
            wanted = table.wanted(offer.builds)
            return offer.make(wanted) if wanted else None, table
        steps = offer.make(offer.builds)
        max_rows_by_kind = {str(kind): rows for kind, rows in steps.max_rows.items()}
        _log.info("megakernel_compiled", max_rows=max_rows_by_kind)
        self._unmeasured = offer if by_times else None
        return steps, ALL

    def _offer(self, max_rows: int) -> MegakernelOffer | str:
        drafts = self._drafts
        if drafts is not None and not isinstance(drafts.proposer, LookupKernel | LookupProposer):
            return "runs drafts by lookup only"
        return self._backend.offer_megakernel(max_rows, None if drafts is None else drafts.policy)

    def choose_paths(self) -> None:
        """Measure both paths unless an earlier start has, choose by the times and store them.

        Nothing may be in flight.
        """
        loops, offer, self._unmeasured = self._loops, self._unmeasured, None
        if loops is None or offer is None or not loops.megakernel_rows:  # 0: after a timeout
            return
        times = LoopTimes(self._resources, loops)
        with times.calibrating():
            table = measure(offer.builds, times.seconds)
        if not loops.megakernel_rows:
            return
        _log.info("decode_paths", milliseconds=table.milliseconds(), measured="now")
        _kept(offer).write(table)
        loops.choice = table
        if not table.wanted(offer.builds):
            loops.without_kernel()

    def costs(self) -> StepCosts:
        return StepCosts(self._resources, self._backend)

    def set_costs(self, policy: TokenBudgetPolicy) -> None:
        """Choose block sizes by these costs; nothing may be in flight."""
        assert self._drafts is not None, "costs are of speculation, which is off"
        self._drafts.set_costs(policy)

    def forget_acceptance(self) -> None:
        if self._drafts is not None:
            self._device.compute.submit(self._drafts.forget)

    def forward(self, launch: Launch) -> None:
        failpoints.hit("engine.forward")
        rows, compute, events = launch.plan.rows, self._device.compute, self._events[launch.slot]
        slot, events.is_void = self._slots[launch.slot], False
        if launch.plan.kind is LaunchKind.DECODE:
            bucket = self._staging.decode(slot, launch.plan)
            events.forward_start = compute.record(events.forward_start)
            changes = self._staging.changes(slot, launch.plan)
            first = slot.behind if changes.places else slot.staged
            slot.staged.upload_from(slot.grown if changes.grows else first, compute)
            self._backend.prepare(launch.slot, changes)
            if not launch.plan.is_loop:  # else its steps begin when the constraints are there
                num_tokens = sum(row.num_tokens for row in rows)
                rank, forces = self._rank(rows), num_tokens > len(rows)
                self._backend.decode(launch.slot, bucket, rank, num_tokens, forces=forces)
        else:
            events.forward_start = compute.record(events.forward_start)
            if launch.plan.refinement is not None:
                assert self._refine is not None, "a refinement without a refiner"
                self._refine.forward(launch.slot, launch.plan.refinement.inputs)
            elif launch.plan.kind is LaunchKind.ENCODE:
                self._backend.encode(launch.slot, rows[0])
            else:
                prompts, decodes = launch.plan.prefills, launch.plan.decodes
                changes = self._staging.changes(slot, launch.plan)
                self._backend.prefill(launch.slot, prompts, decodes, self._rank(decodes), changes)
        events.forward_end = compute.record(events.forward_end)

    def mask(self, launch: Launch, constraints: Sequence[int]) -> list[int]:
        """Stage and apply the masks of rows with a grammar; return all rows' constraints.

        With speculation those of a row's forced tokens come before the row's own.
        """
        slot, events = self._slots[launch.slot], self._events[launch.slot]
        compute, copy = self._device.compute, self._device.copy
        masked, count = self._staging.masks(slot, launch.plan, constraints)
        if count:
            slot.masks.upload(copy)
            events.mask_end = copy.record(events.mask_end)
            compute.wait_event(events.mask_end)
            bucket = self._staging.bucket(count)
            self._resources.graphs.run(self._mask_work, launch.slot, bucket)
        return masked

    def _mask_work(self, slot: int, count: int) -> Work:
        return mask_work(self._resources, self._slots[slot], count)

    def _index_work(self, slot: int) -> Work:
        drafts, buffers = self._drafts, self._slots[slot]
        assert drafts is not None, "a row has one constraint without speculation"
        return lambda: drafts.index_constraints(buffers)

    def sample(self, launch: Launch, constraints: Sequence[int]) -> None:
        """Upload the constraints on the copy stream, sample, and start the copy back."""
        slot, events = self._slots[launch.slot], self._events[launch.slot]
        compute, copy = self._device.compute, self._device.copy
        failpoints.hit("engine.sample")
        rows = launch.plan.sampled_rows
        if rows:
            if failpoints.hit("sample.nan"):
                compute.submit(lambda: _corrupt(slot))
            count = self._staging.constraints(slot, launch.plan, constraints)
            slot.constraint.upload(copy)
            events.copy_end = copy.record(events.copy_end)
            compute.wait_event(events.copy_end)
            if self._drafts is not None and any(row.forced for row in rows):
                self._resources.graphs.run(self._index_work, launch.slot)
        if launch.plan.is_loop:
            self._loop(launch)
        events.sample_start = compute.record(events.sample_start)
        if rows and not (launch.plan.is_loop or self._is_void(launch)):
            needs = events.needs = needs_of(rows)
            bucket = self._staging.bucket(count)
            self._backend.sample(launch.slot, bucket, sampled=needs.sampled, payload=needs.payload)
            if needs.logprobs:
                self._backend.logprobs(
                    launch.slot, bucket, payload=needs.payload, alternatives=needs.alternatives
                )
        events.sample_end = compute.record(events.sample_end)
        copy.wait_event(events.sample_end)
        if rows and not launch.plan.is_loop:
            slot.outputs.download(copy)
            if events.needs.alternatives:
                slot.alternatives.download(copy)
        events.copy_end = copy.record(events.copy_end)

    def _loop(self, launch: Launch) -> None:
        """Enqueue forwards with their sampling; the times report all of it as the forward."""
        assert self._loops is not None, "a loop on a runner without loops"
        rows, events = launch.plan.rows, self._events[launch.slot]
        num_tokens = sum(1 + row.num_drafts for row in rows)
        bucket, rank = self._staging.bucket(num_tokens), self._rank(rows)
        events.needs = needs_of(rows)
        ended = all(row.sequence.finalized for row in rows)  # by the commit before
        num_steps = 0 if ended else launch.plan.num_steps
        common = have_common_pages(rows)
        if launch.plan.after:
            self._loops.follow(launch.slot)
        self._loops.start(
            launch.slot, len(rows), num_tokens, bucket, rank, num_steps, events.needs, common
        )
        events.forward_end = self._device.compute.record(events.forward_end)

    def collect(self, launch: Launch) -> list[RowTokens] | None:
        events, rows = self._events[launch.slot], launch.plan.sampled_rows
        events.copy_end.wait()
        if self._is_void(launch):
            return None
        if launch.plan.refinement is not None and self._refine is not None:
            launch.plan.refinement.result = self._refine.answer(launch.slot)
        if not rows or launch.plan.is_loop:
            return []
        return self._sampled(self._slots[launch.slot].outputs.host, launch)

    def _sampled(self, outputs: Outputs, launch: Launch) -> list[RowTokens]:
        """Return a token of each row, after its forced ones or its accepted draft tokens."""
        slot, needs = self._slots[launch.slot], self._events[launch.slot].needs
        rows = launch.plan.sampled_rows
        num_rows = len(rows)
        if self._drafts is not None:
            return drafted_tokens(outputs, slot, num_rows, needs)
        tokens = sampled_tokens(outputs, slot, num_rows, needs)
        return [
            RowTokens((*map(SampledToken.forced, row.forced), token))
            for row, token in zip(rows, tokens, strict=True)
        ]

    def poll_loop(self, launch: Launch, pause: Pause) -> list[RowTokens] | LoopPoll:
        assert self._loops is not None, "a loop on a runner without loops"
        end = self._events[launch.slot].copy_end
        outputs = self._loops.next_outputs(launch.slot, end, pause)
        if not isinstance(outputs, LoopPoll):
            return self._sampled(outputs, launch)
        if outputs is LoopPoll.FINISHED and self._loops.restore(launch.slot):
            self._events[1 - launch.slot].is_void = True
        return outputs

    def break_even_steps(self, launch: Launch) -> int:
        assert self._loops is not None, "a loop on a runner without loops"
        return self._loops.break_even_steps(launch.slot)

    def _is_void(self, launch: Launch) -> bool:
        return launch.plan.kind is LaunchKind.DECODE and self._events[launch.slot].is_void

    def stop_loop(self, launch: Launch) -> None:
        assert self._loops is not None, "a loop on a runner without loops"
        self._loops.stop(launch.slot)

    def times(self, launch: Launch) -> LaunchTimes:
        events = self._events[launch.slot]
        return LaunchTimes(
            forward_start=events.forward_start.time_ns(),
            forward_end=events.forward_end.time_ns(),
            sample_start=events.sample_start.time_ns(),
            sample_end=events.sample_end.time_ns(),
            copy_end=events.copy_end.time_ns(),
        )

    def _rank(self, rows: Sequence[ScheduledSequence]) -> int:
        return self._resources.rank(max((row.sequence.adapter.rank for row in rows), default=0))


def _kept(offer: MegakernelOffer) -> Kept:
    return Kept({**offer.subject, "measurement": own_hash()})


def _corrupt(slot: DecodeSlot) -> None:
    slot.logits_RV[:1].fill_(torch.nan)
