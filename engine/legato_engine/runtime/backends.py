"""Selection of a backend: CUDA kernels or torch, with or without the megakernel."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from legato_engine.kernels.accelerated import LookupKernel
from legato_engine.kernels.decode_loop import MegakernelOffer, MegakernelSteps
from legato_engine.kernels.proposer import LookupProposer
from legato_engine.models.base import StepKernels
from legato_engine.runtime.autotune import ALL, Kept, PathChoice, measure
from legato_engine.runtime.backend import StepBackend
from legato_engine.runtime.calibration import LoopTimes, own_hash
from legato_engine.runtime.decode_slot import DraftState, Resources
from legato_engine.runtime.loops import DecodeLoops
from legato_engine.runtime.torch_backend import TorchBackend

_log = structlog.get_logger()


def backend_for(kernels: StepKernels | None, resources: Resources) -> StepBackend:
    if kernels is None:
        return TorchBackend(resources)
    from legato_engine.runtime.kernel_backend import KernelBackend

    return KernelBackend(kernels, resources)


class Paths(NamedTuple):
    """Result of selecting decode paths.

    `unmeasured`: the offer whose builds have to be measured after the warm-up, if any.
    """

    megakernel: MegakernelSteps | None
    choice: PathChoice = ALL
    unmeasured: MegakernelOffer | None = None


def paths_for(
    backend: StepBackend, max_rows: int, drafts: DraftState | None, *, by_times: bool
) -> Paths:
    """Choose between megakernel and captured loops, with `by_times` from stored times.

    The log says why captured loops replace the megakernel.
    """
    offer = _offer(backend, max_rows, drafts)
    if isinstance(offer, str):
        if by_times:
            _log.info("decode_paths", all="loop", reason=f"the megakernel {offer}")
        else:
            _log.warning("megakernel_unavailable", reason=f"it {offer}", instead="decode_path loop")
        return Paths(None)
    table = _kept(offer).read() if by_times else None
    if table is not None:
        _log.info("decode_paths", milliseconds=table.milliseconds(), measured="at an earlier start")
        wanted = table.wanted(offer.builds)
        return Paths(offer.make(wanted) if wanted else None, table)
    steps = offer.make(offer.builds)
    max_rows_by_kind = {str(kind): rows for kind, rows in steps.max_rows.items()}
    _log.info("megakernel_compiled", max_rows=max_rows_by_kind)
    return Paths(steps, unmeasured=offer if by_times else None)


def choose(offer: MegakernelOffer, times: LoopTimes, loops: DecodeLoops) -> None:
    """Measure both paths, choose by the times and store them; nothing may be in flight."""
    if not loops.megakernel_rows:  # after a timeout
        return
    with times.calibrating():
        table = measure(offer.builds, times.seconds)
    if not loops.megakernel_rows:
        return
    _log.info("decode_paths", milliseconds=table.milliseconds(), measured="now")
    _kept(offer).write(table)
    loops.choice = table
    if not table.wanted(offer.builds):
        loops.without_kernel()


def _kept(offer: MegakernelOffer) -> Kept:
    return Kept({**offer.subject, "measurement": own_hash()})


def _offer(backend: StepBackend, max_rows: int, drafts: DraftState | None) -> MegakernelOffer | str:
    if drafts is not None and not isinstance(drafts.proposer, LookupKernel | LookupProposer):
        return "runs drafts by lookup only"
    return backend.offer_megakernel(max_rows, None if drafts is None else drafts.policy)
