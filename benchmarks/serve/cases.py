"""The requests that `serve` sends to its servers."""

from __future__ import annotations

import dataclasses

from google.protobuf.message import Message
from legato.v1 import inference_pb2 as pb
from legato.v1 import task_pb2
from legato_client.load.plan import LoadPlan

from benchmarks.serve.rpc import jpeg

SIZE = (640, 480)
_SERVICE = "/legato.v1.InferenceService/"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One kind of request; `name` is the RPC, `answers` how many of `counted` one request gets."""

    title: str
    name: str
    request: Message
    in_flight: int
    counted: str = "calls"
    answers: int = 1

    @property
    def streams(self) -> bool:
        """Whether messages are counted."""
        return self.name == "Generate"

    def plan(self, target: str, seconds: float, senders: int) -> LoadPlan:
        """Return a closed loop: as much load as the server answers."""
        return LoadPlan(
            target=target,
            kind="stream" if self.streams else "unary",
            path=_SERVICE + self.name,
            request=self.request.SerializeToString(),
            in_flight=self.in_flight,
            seconds=seconds,
            warm_up=0.0,
            senders=senders,
        )


def cases(length: int) -> list[Case]:
    """Return all cases; streams have `length` answers."""
    photo = pb.DetectRequest(object="red circle", max_objects=3)
    photo.image.encoded.data = jpeg(0, SIZE)
    points = task_pb2.PointTask(object="red circle", max_objects=length)
    points_request = pb.GenerateRequest(task=task_pb2.Task(point=points))
    points_request.image.encoded.data = jpeg(0, (32, 32))
    words = task_pb2.Task(query=task_pb2.QueryTask(question="What is in the picture?"))
    words.sampling.max_tokens = length
    return [
        Case("Query", "Query", pb.QueryRequest(question="What is in the picture?"), 64),
        Case(f"Detect, {len(photo.image.encoded.data) // 1024} KiB JPEG", "Detect", photo, 16),
        Case(f"Generate, {length} points", "Generate", points_request, 16, "points", length),
        Case(
            f"Generate, {length} words",
            "Generate",
            pb.GenerateRequest(task=words),
            16,
            "words",
            length,
        ),
    ]
