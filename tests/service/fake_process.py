"""An engine process without a model: `python -m tests.service.fake_process`.

Ready at once; a question is answered by itself, and the question "wait" only by `Abort`.
"""

from __future__ import annotations

import argparse
import os
import threading

from legato_engine import core
from legato_engine.messages import Heartbeat, Load, Loading, Ready, Shutdown, Submit
from legato_engine.transport import CommandReceiver, ReportSender

from tests.service.fakes import MODEL, done, started


def main() -> None:
    """Serve until told to stop, or until the parent is gone."""
    parser = argparse.ArgumentParser()
    for name in ("--config", "--endpoint", "--namespace", "--parent"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    reader, _ = os.pipe()
    commands = CommandReceiver(arguments.endpoint, reader)
    reports = ReportSender(arguments.endpoint)
    reports.send(Loading(stage="weights", fraction=0.5))
    reports.send(Ready(model=MODEL, pid=os.getpid()))
    threading.Thread(target=_beat, args=(arguments.endpoint,), daemon=True).start()
    while os.getppid() == int(arguments.parent):
        commands.wait(100)
        for command in commands.receive():
            if isinstance(command, Shutdown):
                return
            if isinstance(command, Submit) and isinstance(command.request.task, core.QueryTask):
                _answer(reports, command.request, command.request.task.question)


def _answer(reports: ReportSender, request: core.Request, question: str) -> None:
    reports.send(started(request))
    if question != "wait":
        reports.send(done(request, core.QueryResult(answer=question)))


def _beat(endpoint: str) -> None:
    sender, pause = ReportSender(endpoint), threading.Event()
    step = 0
    while not pause.wait(0.1):
        step += 1
        sender.send(Heartbeat(step=step, load=Load(), estimated_wait=0.0))


if __name__ == "__main__":
    main()
