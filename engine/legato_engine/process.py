"""The engine process: `python -m legato_engine.process`, started by `EngineClient`."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Sequence

import msgspec
import structlog

from legato_engine.assembly import Assembly, assemble
from legato_engine.config import EngineConfig
from legato_engine.engine import EngineCore
from legato_engine.heartbeat import HeartbeatThread, Vitals
from legato_engine.messages import Abort, Command, Heartbeat, Loading, Ready, Shutdown, Submit
from legato_engine.timeline import Timeline
from legato_engine.transport import CommandReceiver, ReportSender

_PR_SET_PDEATHSIG = 1
_LINGER_MS = 500  # what was reported before the end still leaves
_log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Load, serve until told to stop; the exit code is 0 only for an ordered stop."""
    arguments = _parse(argv)
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    configure_logging()
    _bind_to_parent(arguments.parent)
    vitals = Vitals()
    reports = ReportSender(arguments.endpoint)
    heartbeat = HeartbeatThread(
        arguments.endpoint,
        vitals,
        interval=config.heartbeat_interval,
        parent=arguments.parent,
        orphaned=lambda: os._exit(1),
    )
    try:
        serve(config, arguments.endpoint, arguments.namespace, reports, vitals)
    except Exception:  # noqa: BLE001 - any fault may have left the device in an unknown state
        _log.exception("engine fails")
        return 1
    finally:
        heartbeat.stop()
        reports.close(_LINGER_MS)
    return 0


def serve(
    config: EngineConfig, endpoint: str, namespace: str, reports: ReportSender, vitals: Vitals
) -> None:
    """Load the model and run requests until `Shutdown`; raises what the device or a tick raises."""
    assembly = assemble(
        config, lambda stage, fraction: reports.send(Loading(stage=stage, fraction=fraction))
    )
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    core = assembly.core(
        namespace=namespace,
        send=reports.send,
        wake=lambda: os.eventfd_write(wake_fd, 1),
        observer=_timeline(assembly),
    )
    commands = CommandReceiver(endpoint, wake_fd)
    _publish(core, vitals)
    reports.send(Ready(model=assembly.info, pid=os.getpid()))
    _log.info("engine ready", model=assembly.info.name, device=assembly.device.name)
    try:
        _loop(core, commands, wake_fd, vitals)
    finally:
        commands.close()


def _timeline(assembly: Assembly) -> Timeline | None:
    """The last launches, written to a file on SIGUSR1."""
    if not assembly.config.trace_steps:
        return None
    timeline = Timeline(assembly.runner.times, assembly.config.trace_steps)
    signal.signal(signal.SIGUSR1, lambda *_: _log.info("timeline", path=str(timeline.dump())))
    return timeline


def _loop(core: EngineCore, commands: CommandReceiver, wake_fd: int, vitals: Vitals) -> None:
    """Commands are read between ticks; with nothing to run the loop sleeps until woken."""
    while True:
        if not core.busy:
            commands.wait(_timeout_ms(core.next_deadline()))
            _clear(wake_fd)
        for command in commands.receive():
            if isinstance(command, Shutdown):
                return
            _apply(core, command)
        core.step()
        _publish(core, vitals)


def _apply(core: EngineCore, command: Command) -> None:
    match command:
        case Submit(request=request):
            core.submit(request)
        case Abort(request_id=request_id):
            core.abort(request_id)


def _publish(core: EngineCore, vitals: Vitals) -> None:
    vitals.beat = Heartbeat(
        step=core.steps_committed, load=core.load(), estimated_wait=core.estimated_wait()
    )


def _timeout_ms(deadline: float) -> int | None:
    if deadline == math.inf:
        return None
    return max(0, math.ceil((deadline - time.monotonic()) * 1000))


def _clear(wake_fd: int) -> None:
    with contextlib.suppress(BlockingIOError):  # woken by a command or by the time
        os.eventfd_read(wake_fd)


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


def _bind_to_parent(parent: int) -> None:
    """Only the service decides when to stop, and its death is the engine's."""
    faulthandler.enable()  # SIGABRT writes the stacks of a process that hangs
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="legato_engine.process", description=__doc__)
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--endpoint", required=True, help="folder of the two sockets, ipc://...")
    parser.add_argument("--namespace", required=True, help="prefix of the blobs to read")
    parser.add_argument("--parent", required=True, type=int, help="process id of the service")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
