"""The device loop, in virtual time."""

from __future__ import annotations

import dataclasses

from legato_engine.megakernel.descriptor import State
from legato_engine.megakernel.machine import Machine
from legato_engine.megakernel.pages import ResidencyReport
from legato_engine.megakernel.stages import STAGES, stage_kv, stage_scheduler
from legato_engine.speculative.costs import H200_MOONDREAM2, CostTable

MAX_IDLE = 8
"""Iterations without a token, beyond one for each request, before the machine is declared stuck."""


@dataclasses.dataclass(frozen=True, slots=True)
class Iteration:
    """What one turn of the loop did, for those who draw it. Times are virtual seconds."""

    start: float
    end: float
    block_sizes: dict[int, int]  # by request id, of those that verified
    ema: dict[int, float]
    committed: dict[int, int]
    residency: ResidencyReport


class Stuck(RuntimeError):
    """The loop turns and nothing happens: a defect of the specification."""


class Simulator:
    """Runs a machine to its end, iteration by iteration."""

    def __init__(self, machine: Machine, costs: CostTable = H200_MOONDREAM2) -> None:
        self.machine = machine
        self.costs = costs
        self.iterations: list[Iteration] = []
        self._idle = 0

    def run(self) -> None:
        """Iterate until every request is done. Raises `Stuck`."""
        while not self.machine.done:
            self.step()

    def step(self) -> None:
        """One iteration: both batch stages, then the four of every request, then the clock."""
        machine = self.machine
        machine.num_fed = machine.longest_block = machine.num_prefilled = 0
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
            self.costs.step(machine.num_fed)
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
        """With nobody running, time passes up to the next arrival; complain when that helps nobody.

        A prefill or a preemption is no progress by itself: both could repeat for ever, tokens not.
        """
        machine = self.machine
        if self.iterations[-1].committed:
            self._idle = 0
            return
        self._idle += 1
        if self._idle > MAX_IDLE + len(machine.requests):
            raise Stuck(f"nothing moves at iteration {machine.iteration}")
        arrivals = [each.arrival for each in machine.requests if each.state is State.WAITING]
        if arrivals and not machine.running():
            machine.now = max(machine.now, min(arrivals))
