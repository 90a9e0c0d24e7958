"""The state that the stages share: the kernel's arguments and its counters."""

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

    `num_scheduled` and `num_prefilled` count positions of this iteration's forward, `longest_block`
    is its longest draft.
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
        """Whether every request is done."""
        return all(request.state is State.DONE for request in self.requests)

    def running(self) -> list[RequestDescriptor]:
        """The requests in the batch, by id."""
        return [request for request in self.requests if request.is_running]

    def find(self, request_id: int) -> RequestDescriptor | None:
        """The request with this id."""
        return next((each for each in self.requests if each.request_id == request_id), None)
