"""Whose turn it is: the prefill side or the decode side."""

from __future__ import annotations

from collections import deque

from legato_engine.scheduler.decode_planner import DecodePlanner
from legato_engine.scheduler.launch import LaunchKind, Plan, Refinement
from legato_engine.scheduler.prefill_planner import PrefillPlanner


class Planner:
    """Lets both sides in turn have a launch while both have work.

    At most `prefills_per_decode` encodes, prefills and refinements run between two decodes. A
    refinement goes before a prefill: all else of its request is done, and none makes another.

    Where a prefill may be shared, whoever could decode rides with it instead, all of them or
    nobody: their tokens come at the end of the shared launch, just as they would behind that
    prefill, and nobody else's turn comes between. A launch with riders is a decode to whoever waits
    for one.

    `crops_per_launch` bounds how long each of them holds up those whose tokens are read as they
    come: while anybody of them decodes, a picture of more crops is encoded in launches of at most
    that many. The time between two tokens of a streaming request then grows by one such launch, by
    one prefill behind them, or by one prefill of a picture of no more crops, and never by a whole
    large picture; prompts that share the prefill add their own tokens to it. The price is paid by
    the picture's own first token, which waits for a decode between every two of its launches, by
    smaller batches in the vision tower, and by those queued behind it, as the device encodes one
    picture at a time. Without a stream to hold up, a picture is prefilled in one launch: whoever
    waits for a whole answer has it sooner so, and several pictures may be, where many wait. 0
    always prefills a picture in one launch.
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
        self._streak = 0  # launches that are no decode planned since the last one

    @property
    def refines(self) -> bool:
        """Whether a refinement waits for its launch."""
        return bool(self._refinements)

    def refine(self, refinement: Refinement) -> None:
        """Launch it when its turn comes."""
        self._refinements.append(refinement)

    def plan(self) -> Plan | None:
        """What runs next, None when neither side has anything; a plan must be launched."""
        decode = self._decode.plan()
        plan = decode
        if decode is None or self._streak < self._prefills_per_decode:
            plan = self._other(decode) or decode
        if plan is not None:
            self._streak = 0 if plan.decodes else self._streak + 1
        return plan

    def _other(self, decode: Plan | None) -> Plan | None:
        """What runs while it is not the decode side's turn."""
        if self._refinements:
            return Plan(LaunchKind.REFINE, (), refinement=self._refinements.popleft())
        if not self._prefill.due:
            return None
        streams = self._decode.streams
        max_crops = self._crops_per_launch if streams else 0
        riding = decode.rows if decode is not None else ()
        return self._prefill.plan(max_crops, riding, streams=streams)
