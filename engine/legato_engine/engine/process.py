"""The engine process: `python -m legato_engine.engine.process`, started by `EngineClient`."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import msgspec
import structlog

from legato_engine import failpoints
from legato_engine.client.supervisor import EXIT_UNSERVABLE, STACKS_SIGNAL
from legato_engine.config import EngineConfig
from legato_engine.crash.bundle import CrashFiles
from legato_engine.crash.recording import Recorder
from legato_engine.engine.garbage import freeze_loaded
from legato_engine.engine.logs import configure_logging
from legato_engine.engine.main_loop import EngineLoop, Telemetry, apply
from legato_engine.engine.quarantine import Quarantine
from legato_engine.engine.unservable import UnservableConfig, unservable
from legato_engine.ipc import latency_policy
from legato_engine.ipc.heartbeat import HeartbeatThread, Vitals
from legato_engine.ipc.messages import FINAL, EngineOutput, Loading, ModelInfo, Ready
from legato_engine.ipc.service_connections import ServiceConnections
from legato_engine.models.decoder.template_process import templates
from legato_engine.models.registry import may_have_chat_template, tokenizer_path
from legato_engine.models.untrusted import start_check
from legato_engine.null import model as null_model
from legato_engine.null.engine import NullEngine
from legato_engine.parent_process import bind_to_parent
from legato_engine.shm.blob_reader import BlobReader
from legato_engine.telemetry.timeline import StepFeed, StepListener, Timeline

if TYPE_CHECKING:
    from legato_engine.engine.main_loop import Core

_LINGER_MS = 500  # to send the last outputs
_log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Load the model and serve; return the exit code."""
    arguments = _parse(argv)
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    configure_logging(config.log_level, for_people=config.log_for_people)
    bind_to_parent(arguments.parent)
    files = CrashFiles(pathlib.Path(arguments.crash_files)) if arguments.crash_files else None
    _write_stacks_to(files)
    if config.model != null_model.NAME:
        latency_policy.end_batch_scheduling()
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
    telemetry = Telemetry.of(connections)
    failpoints.hit("engine.startup")
    recorder = _recorder(files)
    with unservable():
        core, model = _open(config, blobs, connections, wake_fd, telemetry, recorder)
    quarantine = Quarantine(core, functools.partial(apply, core), connections.announce)
    loop = EngineLoop(core, telemetry, connections, vitals, quarantine)
    loop.publish()
    connections.broadcast(Ready(model=model, pid=os.getpid()))
    _log.info("engine_ready", model=model.name, device=model.device)
    freeze_loaded(config)
    loop.run()
    if (kv := core.load().kv) is not None:
        _log.info("kv_cache_stats", **msgspec.structs.asdict(kv))


def _open(
    config: EngineConfig,
    blobs: BlobReader,
    connections: ServiceConnections,
    wake_fd: int,
    telemetry: Telemetry,
    recorder: Recorder | None,
) -> tuple[Core, ModelInfo]:
    if config.model == null_model.NAME:
        core = NullEngine(config, blobs=blobs, send=connections.post, timeline=telemetry.stream)
        return core, null_model.info(config)
    if may_have_chat_template(config.model, config.weights):
        templates.start()  # loads its libraries while this process imports torch
    path = tokenizer_path(config.model, config.weights, config.tokenizer, config.models)
    if path is not None and path.is_file() and not config.random_weights:
        start_check(path)
    gc.disable()  # collections would walk over all that is imported, again and again
    from legato_engine.engine.loading import assemble  # imports torch, which takes seconds

    gc.freeze()
    gc.enable()
    assembly = assemble(
        config,
        lambda stage, fraction: connections.broadcast(Loading(stage=stage, fraction=fraction)),
    )
    templates.close_unused()
    recorders = () if recorder is None else (recorder,)
    return assembly.core(
        blobs=blobs,
        send=lambda output: _send(connections, output),
        wake=lambda: os.eventfd_write(wake_fd, 1),
        pause=connections.pause,
        observer=StepFeed(
            assembly.runner.times, (*telemetry.listeners, *recorders, *_timelines(config))
        ),
        recorder=recorder,
    ), assembly.info


def _recorder(files: CrashFiles | None) -> Recorder | None:
    if files is None:
        return None
    try:
        return Recorder(files.recording)
    except OSError as error:
        _log.warning("crash_recording_off", error=str(error))
        return None


def _write_stacks_to(files: CrashFiles | None) -> None:
    """Those of a fatal signal, and those that the service asks for; None: to standard error."""
    file: IO[Any] = sys.stderr
    if files is not None:
        try:
            file = files.open_stacks()
        except OSError as error:
            _log.warning("crash_stacks_off", error=str(error))
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    faulthandler.enable(file=file)


def _timelines(config: EngineConfig) -> tuple[StepListener, ...]:
    if not config.trace_steps:
        return ()
    timeline = Timeline(config.trace_steps)
    signal.signal(
        signal.SIGUSR1, lambda *_: _log.info("timeline_written", path=str(timeline.dump()))
    )
    return (timeline,)


def _send(connections: ServiceConnections, output: EngineOutput) -> None:
    if isinstance(output, FINAL):
        connections.send(output)
    else:
        connections.post(output)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="legato_engine.engine.process", description=__doc__)
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
