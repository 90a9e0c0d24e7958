"""The engine process: `python -m legato_engine.engine.process`, started by `EngineClient`."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from legato_engine.client.supervisor import EXIT_UNSERVABLE, bind_to_parent
from legato_engine.config import EngineConfig
from legato_engine.errors import InvalidField, LegatoError, ModelNotFound
from legato_engine.ipc.heartbeat import HeartbeatThread, Vitals
from legato_engine.ipc.links import Links
from legato_engine.ipc.messages import (
    LAST,
    Abort,
    Command,
    DropImage,
    EngineOutput,
    Heartbeat,
    HoldImage,
    Loading,
    ModelInfo,
    Ready,
    Shutdown,
    Stop,
    Submit,
)
from legato_engine.null import engine
from legato_engine.shm.blob_reader import BlobReader
from legato_engine.telemetry.step_stats import StepStats
from legato_engine.telemetry.timeline import StepFeed, StepListener, Timeline

if TYPE_CHECKING:
    from legato_engine.engine.engine_core import (
        EngineCore,  # whose parts load torch, which not every engine needs
    )
    from legato_engine.null.engine import NullEngine

    Core = EngineCore | NullEngine

_GC_THRESHOLD = 50_000  # containers made and not freed
_LINGER_MS = 500  # what was reported before the end still leaves
_MOMENT_MS = 5  # without a command, after which the loop is taken to sleep
_log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Load, serve until told to stop; the exit code is 0 only for an ordered stop.

    `EXIT_UNSERVABLE` says that the configuration is at fault, which one line in the log explains.
    """
    arguments = _parse(argv)
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    configure_logging()
    bind_to_parent(arguments.parent)
    if config.model != engine.NAME:
        _run_when_woken()
    vitals = Vitals()
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    door, vitals_door = arguments.doors
    blobs = BlobReader(arguments.namespace)
    links = Links(door, wake_fd, on_gone=blobs.forget)
    heartbeat = HeartbeatThread(
        vitals_door,
        vitals,
        interval=config.heartbeat_interval,
        parent=arguments.parent,
        orphaned=lambda: os._exit(1),
    )
    try:
        serve(config, blobs, links, wake_fd, vitals)
    except Unservable as error:
        _log.error("cannot serve", reason=str(error), **error.why.metadata)
        return EXIT_UNSERVABLE
    except Exception:  # noqa: BLE001 - any fault may have left the device in an unknown state
        _log.exception("engine fails")
        return 1
    finally:
        heartbeat.stop()
        links.close(_LINGER_MS)
    return 0


class Unservable(Exception):
    """`why` the configuration cannot be served."""

    def __init__(self, why: LegatoError) -> None:
        super().__init__(str(why))
        self.why = why


def serve(
    config: EngineConfig, blobs: BlobReader, links: Links, wake_fd: int, vitals: Vitals
) -> None:
    """Load the model and run requests until `Shutdown`.

    Raises `Unservable`, and what the device or a tick raises.
    """
    stats = StepStats()
    try:
        core, model = _open(config, blobs, links, wake_fd, stats)
    except (InvalidField, ModelNotFound) as error:
        raise Unservable(error) from None
    _publish(core, stats, vitals)
    links.broadcast(Ready(model=model, pid=os.getpid()))
    _log.info("engine ready", model=model.name, device=model.device)
    _freeze()
    _loop(Serving(core, stats, links, vitals))
    if (kv := core.load().kv) is not None:
        _log.info("kv cache", **msgspec.structs.asdict(kv))


def _open(
    config: EngineConfig, blobs: BlobReader, links: Links, wake_fd: int, stats: StepStats
) -> tuple[Core, ModelInfo]:
    """The engine that the configuration names, ready to run, and what it serves."""
    if config.model == engine.NAME:
        core = engine.NullEngine(config, blobs=blobs, send=links.post)
        return core, engine.info(config)
    from legato_engine.engine.assembly import assemble  # loads torch, in seconds

    assembly = assemble(
        config, lambda stage, fraction: links.broadcast(Loading(stage=stage, fraction=fraction))
    )
    return assembly.core(
        blobs=blobs,
        send=lambda report: _report(links, report),
        wake=lambda: os.eventfd_write(wake_fd, 1),
        observer=StepFeed(assembly.runner.times, (stats, *_timelines(config))),
    ), assembly.info


def _timelines(config: EngineConfig) -> tuple[StepListener, ...]:
    """The last launches, written to a file on SIGUSR1; empty when none are to be remembered."""
    if not config.trace_steps:
        return ()
    timeline = Timeline(config.trace_steps)
    signal.signal(signal.SIGUSR1, lambda *_: _log.info("timeline", path=str(timeline.dump())))
    return (timeline,)


class Serving(NamedTuple):
    """What the main loop serves with."""

    core: Core
    stats: StepStats
    links: Links
    vitals: Vitals


def _loop(serving: Serving) -> None:
    """Commands are read between ticks, and what a tick left to report leaves together behind it.

    With nothing to run the loop sleeps until woken. What is published before it sleeps longer than
    a moment is therefore true for as long as it sleeps; among many short sleeps it would cost more
    than the requests between them.
    """
    core, links, vitals = serving.core, serving.links, serving.vitals
    while True:
        links.flush()
        if vitals.due:
            _publish(core, serving.stats, vitals)
        if not core.busy:
            deadline = core.next_deadline()
            if deadline < time.monotonic() + _MOMENT_MS / 1000:
                links.wait(_timeout_ms(deadline))
            elif not links.wait(_MOMENT_MS):
                _publish(core, serving.stats, vitals)
                links.wait(_timeout_ms(deadline))
        for command in links.receive():
            if isinstance(command, Shutdown):
                return
            _apply(core, command)
        core.step()


def _freeze() -> None:
    """Keep garbage collections out of the ticks: over all that is loaded, one takes milliseconds.

    What is here by now stays for good. Nothing that a request or a tick makes lies in a cycle, so
    all of it goes with its last reference; the rare collections are for what libraries leave.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def _report(links: Links, report: EngineOutput) -> None:
    """An end leaves at once, ahead of the rest of its tick; what is only progress can wait."""
    if isinstance(report, LAST):
        links.send(report)
    else:
        links.post(report)


def _apply(core: Core, command: Command) -> None:
    match command:
        case Submit(request=request):
            core.submit(request)
        case Abort(request_id=request_id):
            core.abort(request_id)
        case Stop(request_id=request_id):
            core.stop(request_id)
        case HoldImage():
            core.hold(command)
        case DropImage():
            core.drop(command)


def _publish(core: Core, stats: StepStats, vitals: Vitals) -> None:
    vitals.due = False
    steps = stats.report(time.monotonic(), fresh=not core.busy)
    vitals.beat = Heartbeat(
        step=core.steps_committed,
        load=msgspec.structs.replace(core.load(), decode_steps=steps),
        estimated_wait=core.estimated_wait(),
    )


def _timeout_ms(deadline: float) -> int | None:
    if deadline == math.inf:
        return None
    return max(0, math.ceil((deadline - time.monotonic()) * 1000))


def _run_when_woken() -> None:
    """Have this process take a core as soon as something wakes it: a device waits for it.

    Service processes let others finish, and so does whoever inherits that from one and keeps no
    device waiting.
    """
    if os.sched_getscheduler(0) == os.SCHED_BATCH:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def configure_logging() -> None:
    """JSON lines on stderr, the standard library's records included."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="legato_engine.engine.process", description=__doc__)
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument(
        "--doors", required=True, type=int, nargs=2, help="inherited sockets, see transport.Doors"
    )
    parser.add_argument("--namespace", required=True, help="prefix of the blobs to read")
    parser.add_argument("--parent", required=True, type=int, help="process id of the service")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
