"""An engine process without a model: `python -m tests.service.fake_process`.

Ready at once. The answer to a question is the question; "wait" ends only by `Abort` or `Stop`, and
"until PATH" once that file exists.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading

from legato_engine.ipc.messages import (
    Abort,
    Command,
    Heartbeat,
    Loading,
    Ready,
    SchedulerLoad,
    Shutdown,
    Stop,
    Submit,
)
from legato_engine.ipc.service_connections import ServiceConnections, Subscribers
from legato_engine.types import FinishReason, QueryOutput, QuerySpec, Request, RequestKey

from tests.service.fakes import MODEL, done, started

UNTIL = "until "


def main() -> None:
    """Serve until `Shutdown`, or until the parent is gone."""
    parser = argparse.ArgumentParser()
    for name in ("--config", "--namespace", "--parent"):
        parser.add_argument(name)
    parser.add_argument("--listeners", type=int, nargs=2)
    arguments, _ = parser.parse_known_args()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    connections = ServiceConnections(arguments.listeners[0], os.eventfd(0))
    connections.broadcast(Loading(stage="weights", fraction=0.5))
    connections.broadcast(Ready(model=MODEL, pid=os.getpid()))
    running: dict[RequestKey, Request] = {}
    threading.Thread(target=_beat, args=(arguments.listeners[1], running), daemon=True).start()
    while os.getppid() == int(arguments.parent):
        connections.flush()
        connections.wait(100)
        for command in connections.receive():
            if isinstance(command, Shutdown):
                return
            _apply(connections, running, command)
        _look(connections, running)


def _apply(
    connections: ServiceConnections, running: dict[RequestKey, Request], command: Command
) -> None:
    match command:
        case Submit(request=request) if isinstance(request.task, QuerySpec):
            connections.post(started(request))
            if request.task.question == "wait" or request.task.question.startswith(UNTIL):
                running[request.request_id] = request
            else:
                connections.post(done(request, QueryOutput(answer=request.task.question)))
        case Abort(request_id=request_id):
            running.pop(request_id, None)
        case Stop(request_id=request_id) if request_id in running:
            reason = FinishReason.CANCELLED
            connections.post(done(running.pop(request_id), QueryOutput(answer=""), reason))


def _look(connections: ServiceConnections, running: dict[RequestKey, Request]) -> None:
    for request in list(running.values()):
        assert isinstance(request.task, QuerySpec)
        path = request.task.question.removeprefix(UNTIL)
        if os.path.exists(path):
            del running[request.request_id]
            connections.post(done(request, QueryOutput(answer=path)))


def _beat(listener_fd: int, running: dict[RequestKey, Request]) -> None:
    subscribers, pause = Subscribers(listener_fd), threading.Event()
    step = 0
    while not pause.wait(0.1):
        step += 1
        load = SchedulerLoad(running=len(running))
        subscribers.send(Heartbeat(step=step, load=load, estimated_wait=0.0))


if __name__ == "__main__":
    main()
