"""The device loop in virtual time."""

from __future__ import annotations

import dataclasses

from legato_engine.megakernel.descriptor import State
from legato_engine.megakernel.machine import Machine
from legato_engine.megakernel.pages import ResidencyReport
from legato_engine.megakernel.stages import STAGES, stage_kv, stage_scheduler
from legato_engine.speculative.costs import H200_MOONDREAM2, CostTable

MAX_IDLE = 8
"""Iterations without a token, beyond one per request, after which the machine is stuck."""


@dataclasses.dataclass(frozen=True, slots=True)
class Iteration:
    """The record of one iteration; times are virtual seconds."""

    start: float
    end: float
    block_sizes: dict[int, int]  # of requests that verified, by id
    ema: dict[int, float]
    committed: dict[int, int]
    residency: ResidencyReport


class Stuck(RuntimeError):
    """The loop makes no progress, which is a defect of the specification."""


class Simulator:
    """Runs a machine to its end."""

    def __init__(self, machine: Machine, costs: CostTable = H200_MOONDREAM2) -> None:
        self.machine = machine
        self.costs = costs
        self.iterations: list[Iteration] = []
        self._idle = 0

    def run(self) -> None:
        """Iterate until every request is done.

        Raises:
            Stuck: iterations commit no tokens.
        """
        while not self.machine.done:
            self.step()

    def step(self) -> None:
        """One iteration: both batch stages, the four stages of every request, then the clock."""
        machine = self.machine
        machine.num_scheduled = machine.longest_block = machine.num_prefilled = 0
        lengths = {each.request_id: len(each.tokens) for each in machine.requests}
        start = machine.now
        stage_scheduler(machine)
        stage_kv(machine)
        for request in machine.requests:
            for stage in STAGES:
                stage(machine, request)
        machine.now += self._seconds()
        self._record(start, lengths)
        machine.iteration += 1
        self._watch()

    def _seconds(self) -> float:
        machine = self.machine
        return (
            self.costs.step(machine.num_scheduled)
            + self.costs.prefill * machine.num_prefilled
            + self.costs.propose * machine.longest_block
        )

    def _record(self, start: float, lengths: dict[int, int]) -> None:
        machine = self.machine
        committed = {
            each.request_id: len(each.tokens) - lengths[each.request_id]
            for each in machine.requests
            if len(each.tokens) > lengths[each.request_id]
        }
        verified = [each for each in machine.requests if each.request_id in committed]
        self.iterations.append(
            Iteration(
                start=start,
                end=machine.now,
                block_sizes={each.request_id: each.block_size_history[-1] for each in verified},
                ema={each.request_id: each.ema_acceptance_rate for each in verified},
                committed=committed,
                residency=machine.pages.report(),
            )
        )

    def _watch(self) -> None:
        """Advance to the next arrival if the batch is empty; raise after too many idle iterations.

        Only tokens count as progress, because prefills and preemptions could repeat for ever.
        """
        machine = self.machine
        if self.iterations[-1].committed:
            self._idle = 0
            return
        self._idle += 1
        if self._idle > MAX_IDLE + len(machine.requests):
            raise Stuck(f"no token in {self._idle} iterations up to {machine.iteration}")
        arrivals = [each.arrival for each in machine.requests if each.state is State.WAITING]
        if arrivals and not machine.running():
            machine.now = max(machine.now, min(arrivals))
