"""An engine process without a model: it speaks the protocol and does what a question tells it.

Questions: "echo" answers, "hang" never does, "slow" sends deltas one by one without an end, "die"
exits at once, "die as unservable" says that no engine can serve, "freeze" stops the heartbeats and
everything else, "stick" everything but the heartbeats. "die once", "freeze once" and "pause" (after
one delta) answer when an engine was lost before. Model "broken" never gets ready, model "heavy" is
silent for two seconds before, and so is "reader", which reads a file all the while.
"""

import argparse
import os
import signal
import sys
import threading
import time

import msgspec
from legato_engine.config import EngineConfig
from legato_engine.errors import ImageNotFound, ImageUndecodable, to_value
from legato_engine.ipc.messages import (
    Abort,
    Done,
    DropImage,
    Failed,
    Heartbeat,
    HoldImage,
    ImageDropped,
    ImageHeld,
    Loading,
    OutputDelta,
    PrefillStarted,
    Ready,
    SchedulerLoad,
    ServedModel,
    Shutdown,
    Stop,
    Submit,
)
from legato_engine.ipc.service_connections import ServiceConnections, Subscribers
from legato_engine.shm import BlobReader
from legato_engine.types import (
    CachedImageRef,
    FinishReason,
    ImageProperties,
    QueryOutput,
    QuerySpec,
    Request,
    RequestKey,
    RequestTimings,
    TextEvent,
    TokenUsage,
)

INFO = ServedModel(
    name="fake",
    device="none",
    tasks=("query",),
    max_context_tokens=64,
    max_output_tokens=32,
    max_running=4,
    max_waiting=8,
    num_parameters=0,
    dtype="float32",
)


def question_of(request: Request) -> str:
    """The question of a request."""
    assert isinstance(request.task, QuerySpec)
    return request.task.question


def fail_as_asked(question, *, is_first):
    """Die or stop; "once" is for requests that lost no engine."""
    if question == "die" or (question == "die once" and is_first):
        os._exit(3)
    if question == "die as unservable":
        os._exit(os.EX_CONFIG)
    if question in ("freeze", "stick") or (question == "freeze once" and is_first):
        time.sleep(3600)


def run(connections, request, blobs):
    """Do what the question says."""
    name, resumed = request.request_id, request.resumed
    if isinstance(request.image, CachedImageRef):
        connections.send(Failed(request_id=name, error=to_value(ImageNotFound("not cached"))))
        return
    if request.image is not None:
        blobs.take(request.image.blob)
    connections.send(
        PrefillStarted(
            request_id=name, model="fake", input_tokens=3, cached_tokens=0, queue_time=0.0
        )
    )
    question = question_of(request)
    fail_as_asked(question, is_first=resumed is None)
    if question == "bad":
        connections.send(Failed(request_id=name, error=to_value(ImageUndecodable("no image"))))
    if question == "hang":
        return
    for index in range(0 if resumed is None else len(resumed.token_ids), 3):
        if request.deltas:
            event = TextEvent(text="abc"[index])
            connections.send(OutputDelta(request_id=name, events=(event,), token_ids=(index,)))
        if question == "pause" and resumed is None:
            return
    if question != "slow":
        connections.send(done(name, "abc", FinishReason.STOP))


def end_process(question, resumed):
    """Exit or freeze, if the question says so."""
    if question == "die" or (question == "die once" and resumed is None):
        os._exit(3)
    if question == "die as unservable":
        os._exit(os.EX_CONFIG)
    if question == "freeze once" and resumed is None:
        time.sleep(3600)


def done(name, text, reason):
    """The last output of a request."""
    return Done(
        request_id=name,
        result=QueryOutput(answer=text),
        finish_reason=reason,
        usage=TokenUsage(input_tokens=3, output_tokens=len(text)),
        timings=RequestTimings(),
    )


def run_image_command(connections, command, blobs, held):
    """Hold images other than "bad"; "hang" gets no reply and "die" exits."""
    name = command.request_id
    if isinstance(command, DropImage):
        known = command.image_id in held
        held.discard(command.image_id)
        missing = Failed(request_id=name, error=to_value(ImageNotFound("not held")))
        connections.send(ImageDropped(request_id=name) if known else missing)
        return
    match bytes(blobs.take(command.image.blob)):
        case b"die":
            os._exit(3)
        case b"hang":
            return
        case b"bad":
            connections.send(Failed(request_id=name, error=to_value(ImageUndecodable("no image"))))
        case data:
            held.add(data.decode())
            info = ImageProperties(image_id=data.decode(), width=4, height=3, cache_hit=False)
            connections.send(ImageHeld(request_id=name, image=info, until=command.ttl))


def beat(arguments, config, live, frozen):
    """Send heartbeats until frozen or orphaned."""
    subscribers = Subscribers(arguments.listeners[1])
    step = 0
    while not frozen.is_set():
        step += "stick" not in {key.name for key in live}
        if os.getppid() != int(arguments.parent):
            os._exit(1)
        subscribers.send(
            Heartbeat(step=step, load=SchedulerLoad(running=len(live)), estimated_wait=0.5)
        )
        time.sleep(config.heartbeat_interval)


def load(model):
    """Load for as long as the model says, perhaps for ever."""
    until = time.monotonic() + (2 if model in ("heavy", "reader") else 0)
    while time.monotonic() < until:
        time.sleep(0.05)
        if model == "reader":
            with open(__file__, "rb") as file:
                file.read()
    if model == "broken":
        sys.exit(1)


def main():
    """Serve until `Shutdown`."""
    parser = argparse.ArgumentParser()
    for name in ("--config", "--namespace", "--parent"):
        parser.add_argument(name, required=True)
    parser.add_argument("--listeners", required=True, type=int, nargs=2)
    arguments, _ = parser.parse_known_args()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    load(config.model)
    blobs = BlobReader(arguments.namespace)
    connections = ServiceConnections(arguments.listeners[0], os.eventfd(0))
    live: set[RequestKey] = set()
    held: set[str] = set()
    frozen = threading.Event()
    threading.Thread(target=beat, args=(arguments, config, live, frozen), daemon=True).start()
    connections.broadcast(Loading(stage="weights", fraction=0.5))
    connections.broadcast(Ready(model=INFO, pid=os.getpid()))
    while True:
        connections.flush()
        connections.wait(None)
        for command in connections.receive():
            if isinstance(command, Shutdown):
                connections.close(100)
                return
            if isinstance(command, Abort):
                live.discard(command.request_id)
                continue
            if isinstance(command, Stop):
                live.discard(command.request_id)
                connections.send(done(command.request_id, "", FinishReason.CANCELLED))
                continue
            if isinstance(command, HoldImage | DropImage):
                run_image_command(connections, command, blobs, held)
                continue
            assert isinstance(command, Submit)
            live.add(command.request.request_id)
            if question_of(command.request) == "freeze once" and command.request.resumed is None:
                frozen.set()
            run(connections, command.request, blobs)


if __name__ == "__main__":
    main()
