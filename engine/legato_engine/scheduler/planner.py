"""Turns between prefills and decodes."""

from __future__ import annotations

from collections import deque

from legato_engine.scheduler.decode_planner import DecodePlanner
from legato_engine.scheduler.launch import LaunchKind, Plan, Refinement
from legato_engine.scheduler.prefill_planner import PrefillPlanner


class Planner:
    """Alternates between decodes and other launches while there is work for both.

    At most `prefills_per_decode` encodes, prefills and refinements run between two decodes.
    Refinements go first, because they create no further work.

    A shared prefill takes all decodes into its launch, or none if they do not fit. Their tokens are
    as early as in a decode right after it. Such a mixed launch counts as a decode.

    While a decoding sequence streams, an image is encoded in launches of at most `crops_per_launch`
    crops, so that no stream waits for a whole large image. This delays the image's own first token
    and the queue, because the device encodes one image at a time. Otherwise, and with
    `crops_per_launch` 0, the prefill launch encodes the whole image, or several.
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
        self._num_since_decode = 0  # launches planned since the last decode

    @property
    def has_refinements(self) -> bool:
        """Whether refinements wait for their launch."""
        return bool(self._refinements)

    def refine(self, refinement: Refinement) -> None:
        """Queue a refinement."""
        self._refinements.append(refinement)

    def plan(self) -> Plan | None:
        """Plan the next launch, None without work; a plan must be launched."""
        decode = self._decode.plan()
        plan = decode
        if decode is None or self._num_since_decode < self._prefills_per_decode:
            plan = self._plan_other(decode) or decode
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
