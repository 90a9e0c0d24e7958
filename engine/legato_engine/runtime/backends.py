"""Which backend a model has: its kernels' or torch's, with a resident kernel or without."""

from __future__ import annotations

import structlog

from legato_engine.kernels.accelerated import LookupKernel
from legato_engine.kernels.resident import ResidentSteps
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.model import Model
from legato_engine.models.paged_cache import KVCache
from legato_engine.models.step_kernels import StepKernels
from legato_engine.runtime.backend import Backend
from legato_engine.runtime.draft_state import DraftState
from legato_engine.runtime.resources import Resources
from legato_engine.runtime.torch_backend import TorchBackend
from legato_engine.speculative.lookup import LookupProposer

_log = structlog.get_logger()


def step_kernels(model: Model, kv: KVCache, adapters: AdapterBank | None) -> StepKernels | None:
    step = model.capabilities.step
    return None if step is None else step.step_kernels(kv, adapters)


def backend_for(kernels: StepKernels | None, resources: Resources) -> Backend:
    if kernels is None:
        return TorchBackend(resources)
    from legato_engine.runtime.kernel_backend import KernelBackend

    return KernelBackend(kernels, resources)


def resident_steps(
    backend: Backend, max_rows: int, drafts: DraftState | None
) -> ResidentSteps | None:
    """None, with the reason in the log, where loops stand in."""
    steps: ResidentSteps | str
    if drafts is not None and not isinstance(drafts.proposer, LookupKernel | LookupProposer):
        steps = "takes draft tokens of lookups alone"
    else:
        steps = backend.resident(max_rows, None if drafts is None else drafts.policy)
    if isinstance(steps, str):
        _log.warning("no_resident_kernel", reason=f"it {steps}", instead="decode_path loop")
        return None
    _log.info("resident_kernel", max_rows=steps.max_rows, values=steps.has_values)
    return steps
