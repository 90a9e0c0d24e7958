"""The state that the stages share."""

from __future__ import annotations

import dataclasses

from legato_engine.megakernel.descriptor import RequestDescriptor, State
from legato_engine.megakernel.models import Proposer
from legato_engine.megakernel.pages import PageTable
from legato_engine.speculative.acceptance import AcceptancePolicy
from legato_engine.speculative.block_policy import BlockPolicy


@dataclasses.dataclass(slots=True, eq=False)
class Machine:
    """One launch.

    `num_scheduled`, `num_prefilled` (positions) and `longest_block` are of this iteration's
    forward.
    """

    requests: list[RequestDescriptor]
    pages: PageTable
    proposer: Proposer
    block_policy: BlockPolicy
    acceptance: AcceptancePolicy = dataclasses.field(default_factory=AcceptancePolicy)
    max_running: int = 8
    iteration: int = 0
    now: float = 0.0  # virtual seconds
    num_scheduled: int = 0
    longest_block: int = 0
    num_prefilled: int = 0
    num_preemptions: int = 0

    @property
    def done(self) -> bool:
        return all(request.state is State.DONE for request in self.requests)

    def running(self) -> list[RequestDescriptor]:
        return [request for request in self.requests if request.is_running]

    def find(self, request_id: int) -> RequestDescriptor | None:
        return next((each for each in self.requests if each.request_id == request_id), None)
