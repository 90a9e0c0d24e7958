"""A loop of decode steps where work is not captured."""

from __future__ import annotations

from legato_engine.kernels.decode_loop import (
    AnyLoop,
    DraftLoopTensors,
    LoopTensors,
    control_drafting_step,
    control_step,
)
from legato_engine.runtime.graph_runner import Work


def host_loop(works: tuple[Work, ...], loop: AnyLoop) -> Work:
    """Run `works` in turn, then the control step, until that says so."""

    def work() -> None:
        while True:
            for each in works:
                each()
            if not _control(loop):
                return

    return work


def _control(loop: AnyLoop) -> bool:
    match loop:
        case LoopTensors():
            return control_step(loop)
        case DraftLoopTensors():
            return control_drafting_step(loop)
        case _:
            raise AssertionError(f"no control step for {type(loop).__name__}")
