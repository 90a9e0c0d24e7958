"""Turns between prefills and decodes."""

from __future__ import annotations

import dataclasses
from collections import deque

from legato_engine.scheduler.decode_planner import DecodePlanner
from legato_engine.scheduler.launch import LaunchKind, Plan, Refinement
from legato_engine.scheduler.prefill_planner import PrefillPlanner


class Planner:
    """Alternates between decodes and other launches while there is work for both.

    At most `prefills_per_decode` encodes, prefills and refinements run between two decodes.
    Refinements go first, because they create no further work.

    A shared prefill takes all decodes into its launch, or none if they do not fit, and then counts
    as a decode.

    While a decoding sequence streams, an image is encoded in launches of at most `crops_per_launch`
    crops (0: all), so that no stream waits for a whole large image. This delays the image's own
    first token and the queue, because the device encodes one image at a time.
    """

    def __init__(
        self,
        prefill: PrefillPlanner,
        decode: DecodePlanner,
        *,
        prefills_per_decode: int,
        crops_per_launch: int,
    ) -> None:
        assert crops_per_launch >= 0, f"{crops_per_launch} crops per launch"
        self._prefill = prefill
        self._decode = decode
        self._prefills_per_decode = prefills_per_decode
        self._crops_per_launch = crops_per_launch
        self._refinements: deque[Refinement] = deque()
        self._num_since_decode = 0
        self.only_decodes = False  # no other launch was possible at the last plan

    @property
    def has_refinements(self) -> bool:
        return bool(self._refinements)

    @property
    def has_others(self) -> bool:
        """Whether other work than decodes waits."""
        return bool(self._refinements) or self._prefill.has_work

    @property
    def expects_other(self) -> bool:
        """Whether a launch of it is probably possible now."""
        return bool(self._refinements) or self._prefill.expects_plan

    def refine(self, refinement: Refinement) -> None:
        self._refinements.append(refinement)

    def plan(self) -> Plan | None:
        """Plan the next launch; a plan must be launched."""
        decode = self._decode.plan()
        plan = decode
        others_turn = decode is None or self._num_since_decode < self._prefills_per_decode
        if others_turn:
            plan = self._plan_other(decode) or decode
        self.only_decodes = plan is decode and (others_turn or not self.has_others)
        if plan is not None:
            self._num_since_decode = 0 if plan.decodes else self._num_since_decode + 1
        return plan

    def plan_behind(self, decode: Plan | None, *, ends: bool) -> Plan | None:
        """Plan a launch behind a loop in flight; it must be launched.

        Args:
            decode: the loop's rows that go on; they join the launch as in `plan`.
            ends: the loop ends by itself, so that they are a launch if no other is possible.
        """
        plan = self._plan_other(decode)
        if plan is None:
            plan = decode if ends else None
        elif decode is not None and plan.decodes:
            plan = dataclasses.replace(plan, behind=decode.behind)
        if plan is not None:
            self._num_since_decode = 0 if plan.decodes else self._num_since_decode + 1
        return plan

    def _plan_other(self, decode: Plan | None) -> Plan | None:
        if self._refinements:
            return Plan(LaunchKind.REFINE, (), refinement=self._refinements.popleft())
        if not self._prefill.has_work:
            return None
        streaming = self._decode.streaming
        return self._prefill.plan(
            self._crops_per_launch if streaming else 0,
            decode.rows if decode is not None else (),
            streaming=streaming,
        )
