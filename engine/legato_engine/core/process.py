"""The engine process: `python -m legato_engine.core.process`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import logging
import math
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import msgspec
import structlog

from legato_engine import failpoints, null_engine
from legato_engine.client.engine_client import EXIT_UNSERVABLE, STACKS_SIGNAL
from legato_engine.config import EngineConfig
from legato_engine.core.quarantine import Quarantine
from legato_engine.crash import CrashFiles, FlightRecorder
from legato_engine.device.host import return_freed_memory
from legato_engine.errors import InvalidField, LegatoError, ModelNotFound
from legato_engine.ipc import latency_policy
from legato_engine.ipc.heartbeat import HeartbeatThread, Vitals
from legato_engine.ipc.messages import (
    FINAL,
    Abort,
    Command,
    DropImage,
    EngineOutput,
    Heartbeat,
    HoldImage,
    Loading,
    Ready,
    ServedModel,
    SetPipelineDepth,
    Shutdown,
    Stop,
    Submit,
)
from legato_engine.ipc.service_connections import ServiceConnections
from legato_engine.log_sink import NEW_LINE, LogSink, SinkHandler, standard_error
from legato_engine.models.decoder.template_process import templates
from legato_engine.models.registry import may_have_chat_template, tokenizer_path
from legato_engine.models.untrusted import is_out_of_memory, start_check
from legato_engine.null_engine import NullEngine
from legato_engine.parent_process import bind_to_parent
from legato_engine.shm import BlobReader
from legato_engine.telemetry import (
    StepCounter,
    StepListener,
    StepStats,
    Timeline,
    TimelineStream,
    step_feed,
)


def configure_logging(level: str = "info", *, for_people: bool = False) -> None:
    """Log JSON or human-readable lines, including the standard library's."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[structlog.typing.Processor]
    if for_people:
        # Default tracebacks show local variables and therefore prompts.
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(exception_formatter=plain), _on_new_line]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    sink = LogSink(standard_error(), _dropped_text if for_people else _dropped)
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *last, _bytes],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: sink,
    )
    handler = SinkHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.INFO), force=True)


def _on_new_line(_logger: object, _method: str, line: object) -> str:
    return NEW_LINE.decode() + str(line)


def _bytes(_logger: object, _method: str, line: object) -> bytes:
    return str(line).encode(errors="replace")


def _dropped(count: int) -> bytes:
    line = {
        "count": count,
        "event": "log_lines_dropped",
        "level": "warning",
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return msgspec.json.encode(line)


def _dropped_text(count: int) -> bytes:
    return f"log_lines_dropped count={count}".encode()


# ---------------------------------------------------------------- unservable


class UnservableConfig(Exception):
    """The configuration cannot be served."""

    def __init__(self, cause: LegatoError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def unservable() -> Iterator[None]:
    """Raise `UnservableConfig` for load errors that a restart would repeat."""
    try:
        yield
    except (InvalidField, ModelNotFound) as error:
        raise UnservableConfig(error) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        text = " ".join(str(error).split()) or "no memory"
        problem = f"memory ran out while the model was loaded: {text[:300]}"
        raise UnservableConfig(InvalidField(problem, field="device")) from None


# ---------------------------------------------------------------- main loop

if TYPE_CHECKING:
    from legato_engine.core.engine_core import EngineCore  # imports torch

    Core = EngineCore | NullEngine

_IDLE_MS = 5  # without a command before the loop publishes and sleeps


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLoop:
    """Main loop: executes commands, steps the engine and publishes its state."""

    core: Core
    stats: StepStats
    counter: StepCounter
    timeline: TimelineStream
    connections: ServiceConnections
    vitals: Vitals
    quarantine: Quarantine

    def run(self) -> None:
        """Serve until `Shutdown`.

        The published state must be true while the loop sleeps, except for sleeps under `_IDLE_MS`:
        publishing would cost more than the requests.
        """
        core, connections, quarantine = self.core, self.connections, self.quarantine
        while True:
            connections.flush()
            if self.vitals.due:
                self.publish()
            if not core.busy:
                deadline = core.next_deadline()
                if deadline < time.monotonic() + _IDLE_MS / 1000:
                    connections.wait(_timeout_ms(deadline))
                elif not connections.wait(_IDLE_MS):
                    self.publish()
                    connections.wait(_timeout_ms(deadline))
            for command in connections.receive():
                if isinstance(command, Shutdown):
                    return
                quarantine.receive(command)
            core.step()
            quarantine.advance()

    def publish(self) -> None:
        self.vitals.due = False
        self.timeline.flush()
        steps = self.stats.latest(time.monotonic(), fresh=not self.core.busy)
        load = self.core.load()
        waiting = load.waiting + self.quarantine.num_held
        self.vitals.beat = Heartbeat(
            step=self.core.steps_committed,
            load=msgspec.structs.replace(load, waiting=waiting, decode_steps=steps),
            estimated_wait=self.core.estimated_wait(),
            steps=self.counter.totals(),
            images=self.core.image_totals(),
        )


def apply(core: Core, command: Command) -> None:
    """Execute a command other than `Shutdown`, which ends the loop."""
    match command:
        case Submit(request=request):
            if failpoints.ACTIVE:
                failpoints.hit("engine.poison", str(request.task))
            core.submit(request)
        case Abort(request_id=request_id):
            core.abort(request_id)
        case Stop(request_id=request_id):
            core.stop(request_id)
        case HoldImage():
            core.hold(command)
        case DropImage():
            core.drop(command)
        case SetPipelineDepth(depth=depth):
            core.set_pipeline_depth(depth)


def _timeout_ms(deadline: float) -> int | None:
    if deadline == math.inf:
        return None
    return max(0, math.ceil((deadline - time.monotonic()) * 1000))


# ---------------------------------------------------------------- process

_LINGER_MS = 500  # to send the last outputs
_log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Load the model and serve; return the exit code."""
    arguments = _parse(argv)
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    configure_logging(config.log_level, for_people=config.human_readable_logs)
    bind_to_parent(arguments.parent)
    files = CrashFiles(pathlib.Path(arguments.crash_files)) if arguments.crash_files else None
    _write_stacks_to(files)
    if config.model != null_engine.NAME:
        latency_policy.reset_batch_scheduling()
    policy = latency_policy.resolve(config.latency_policy)
    vitals = Vitals()
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    requests_fd, vitals_fd = arguments.listeners
    blobs = BlobReader(arguments.namespace)
    connections = ServiceConnections(
        requests_fd, wake_fd, on_disconnect=blobs.forget, busy_poll=policy.busy_poll
    )
    heartbeat = HeartbeatThread(
        vitals_fd,
        vitals,
        interval=config.heartbeat_interval,
        parent=arguments.parent,
        orphaned=lambda: os._exit(1),
    )
    try:
        serve(config, blobs, connections, wake_fd, vitals, files)
    except UnservableConfig as error:
        _log.error("configuration_rejected", reason=str(error), **error.cause.metadata)
        return EXIT_UNSERVABLE
    except Exception as error:  # noqa: BLE001 - any fault may have left the device in an unknown state
        _log.exception("engine_failed")
        if files is not None:
            with contextlib.suppress(OSError), files.open_stacks() as stacks:
                traceback.print_exception(error, file=stacks)
        return 1
    finally:
        heartbeat.stop()
        connections.close(_LINGER_MS)
    return 0


def serve(
    config: EngineConfig,
    blobs: BlobReader,
    connections: ServiceConnections,
    wake_fd: int,
    vitals: Vitals,
    files: CrashFiles | None = None,
) -> None:
    """Load the model and run requests until `Shutdown`.

    Raises:
        UnservableConfig: a model or setting cannot be served.
    """
    stats, counter = StepStats(), StepCounter()
    timeline = TimelineStream(connections, stats)
    listeners: list[StepListener] = [stats.add, counter.add, timeline.add]
    failpoints.hit("engine.startup")
    recorder = _recorder(files)
    with unservable():
        core, model = _open(config, blobs, connections, wake_fd, timeline, listeners, recorder)
    quarantine = Quarantine(lambda: core.idle, functools.partial(apply, core), connections.announce)
    loop = EngineLoop(core, stats, counter, timeline, connections, vitals, quarantine)
    loop.publish()
    connections.broadcast(Ready(model=model, pid=os.getpid()))
    _log.info("engine_ready", model=model.name, device=model.device)
    freeze_loaded()
    loop.run()
    if (kv := core.load().kv) is not None:
        _log.info("kv_cache_stats", **msgspec.structs.asdict(kv))


def freeze_loaded() -> None:
    """Freeze loaded objects and raise the GC thresholds."""
    gc.collect()
    return_freed_memory()
    gc.freeze()
    gc.set_threshold(latency_policy.ENGINE_GC)


def _open(
    config: EngineConfig,
    blobs: BlobReader,
    connections: ServiceConnections,
    wake_fd: int,
    timeline: TimelineStream,
    listeners: list[StepListener],
    recorder: FlightRecorder | None,
) -> tuple[Core, ServedModel]:
    if config.model == null_engine.NAME:
        core = NullEngine(config, blobs=blobs, send=connections.post, timeline=timeline)
        return core, null_engine.info(config)
    if may_have_chat_template(config.model, config.weights):
        templates.start()  # loads its libraries while this process imports torch
    path = tokenizer_path(config.model, config.weights, config.tokenizer, config.models)
    if path is not None and path.is_file() and not config.random_weights:
        start_check(path)
    gc.disable()  # collections would traverse all imported modules repeatedly
    from legato_engine.core.assembly import assemble  # imports torch, which takes seconds

    gc.freeze()
    gc.enable()
    assembly = assemble(
        config,
        lambda stage, fraction: connections.broadcast(Loading(stage=stage, fraction=fraction)),
    )
    templates.close_unused()
    if recorder is not None:
        listeners.append(recorder.add)
    if config.trace_steps:
        listeners.append(_dumped_timeline(config.trace_steps))
    return assembly.core(
        blobs=blobs,
        send=lambda output: _send(connections, output),
        wake=lambda: os.eventfd_write(wake_fd, 1),
        pause=connections.pause,
        observer=step_feed(assembly.runner.times, listeners),
        recorder=recorder,
    ), assembly.info


def _recorder(files: CrashFiles | None) -> FlightRecorder | None:
    if files is None:
        return None
    try:
        return FlightRecorder(files.recording)
    except OSError as error:
        _log.warning("crash_recording_off", error=str(error))
        return None


def _write_stacks_to(files: CrashFiles | None) -> None:
    """Write stacks of fatal signals and requested dumps to `path`; None means standard error."""
    file: IO[Any] = sys.stderr
    if files is not None:
        try:
            file = files.open_stacks()
        except OSError as error:
            _log.warning("crash_stacks_off", error=str(error))
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    faulthandler.enable(file=file)


def _dumped_timeline(capacity: int) -> StepListener:
    """Keep the last launches, to be written at SIGUSR1."""
    timeline = Timeline(capacity)
    signal.signal(
        signal.SIGUSR1, lambda *_: _log.info("timeline_written", path=str(timeline.dump()))
    )
    return timeline.add


def _send(connections: ServiceConnections, output: EngineOutput) -> None:
    if isinstance(output, FINAL):
        connections.send(output)
    else:
        connections.post(output)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="legato_engine.core.process", description=__doc__)
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument(
        "--listeners", required=True, type=int, nargs=2, help="inherited sockets, see `transport`"
    )
    parser.add_argument("--namespace", required=True, help="prefix of the blobs to read")
    parser.add_argument("--crash-files", default="", help="prefix of the files to write")
    parser.add_argument("--parent", required=True, type=int, help="process id of the service")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
