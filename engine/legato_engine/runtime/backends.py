"""Selection of a backend: CUDA kernels or torch, with or without the megakernel."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from legato_engine.kernels.accelerated import LookupKernel
from legato_engine.kernels.decode_loop import ResidentOffer, ResidentSteps
from legato_engine.models.base import StepKernels
from legato_engine.runtime.autotune import ALL, Choice, Kept, measure
from legato_engine.runtime.backend import Backend
from legato_engine.runtime.calibration import LoopTimes, own_hash
from legato_engine.runtime.decode_slot import DraftState, Resources
from legato_engine.runtime.loops import DecodeLoops
from legato_engine.runtime.torch_backend import TorchBackend
from legato_engine.speculative.lookup import LookupProposer

_log = structlog.get_logger()


def backend_for(kernels: StepKernels | None, resources: Resources) -> Backend:
    if kernels is None:
        return TorchBackend(resources)
    from legato_engine.runtime.kernel_backend import KernelBackend

    return KernelBackend(kernels, resources)


class Paths(NamedTuple):
    """The resident kernel, what of its launches are chosen, and what is to be measured for that
    when all is warm.
    """

    resident: ResidentSteps | None
    choice: Choice = ALL
    unmeasured: ResidentOffer | None = None


def paths_for(
    backend: Backend, max_rows: int, drafts: DraftState | None, *, by_times: bool
) -> Paths:
    """Choose decode paths with or without the megakernel, by stored `times`; the log says
    where loops stand in for it, and why.
    """
    offer = _offer(backend, max_rows, drafts)
    if isinstance(offer, str):
        if by_times:
            _log.info("decode_paths", all="loop", reason=f"the resident kernel {offer}")
        else:
            _log.warning("no_resident_kernel", reason=f"it {offer}", instead="decode_path loop")
        return Paths(None)
    table = _kept(offer).read() if by_times else None
    if table is not None:
        _log.info("decode_paths", milliseconds=table.milliseconds(), measured="at an earlier start")
        wanted = table.wanted(offer.builds)
        return Paths(offer.make(wanted) if wanted else None, table)
    steps = offer.make(offer.builds)
    most = {str(kind): rows for kind, rows in steps.most_rows.items()}
    _log.info("resident_kernel", most_rows=most)
    return Paths(steps, unmeasured=offer if by_times else None)


def choose(offer: ResidentOffer, times: LoopTimes, loops: DecodeLoops) -> None:
    """Measure both paths, choose by it, and keep it for later starts; nothing may be in flight."""
    if not loops.resident_rows:  # it is stuck
        return
    with times.rehearsing():
        table = measure(offer.builds, times.seconds)
    if not loops.resident_rows:
        return
    _log.info("decode_paths", milliseconds=table.milliseconds(), measured="now")
    _kept(offer).write(table)
    loops.choice = table
    if not table.wanted(offer.builds):
        loops.without_kernel()


def _kept(offer: ResidentOffer) -> Kept:
    return Kept({**offer.subject, "measurement": own_hash()})


def _offer(backend: Backend, max_rows: int, drafts: DraftState | None) -> ResidentOffer | str:
    if drafts is not None and not isinstance(drafts.proposer, LookupKernel | LookupProposer):
        return "takes draft tokens of lookups alone"
    return backend.resident(max_rows, None if drafts is None else drafts.policy)
