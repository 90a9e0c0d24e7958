"""Coverage-guided fuzzing: `make fuzz` (ARGS="wire", "images" or "http", then libFuzzer's options).

A finding is written to the working folder as `crash-*` and can be given as an argument to run it
again. Needs the extra `fuzz`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["legato_engine.images", "legato_service", "legato_client.web"]
):
    from legato_engine.core.request_key import RequestKey
    from legato_engine.errors import LegatoError
    from legato_engine.images.decoding import decode_file
    from legato_engine.images.headers import check_scans, inspect
    from legato_engine.images.orientation import displayed_size
    from legato_service.convert import requests, skills
    from legato_service.images.intake import ImageIntake
    from legato_service.images.upload import UploadLimits, read_header
    from legato_service.session import conversion

    from tests.fuzz import test_http

from google.protobuf.message import DecodeError
from legato.v1 import image_pb2, inference_pb2, media_pb2, session_pb2

from tests.fuzz import seeds

_MAX_PIXELS = 100_000
_MAX_BYTES = 1 << 20
_SKILLS = (
    (inference_pb2.QueryRequest, skills.QUERY),
    (inference_pb2.CaptionRequest, skills.CAPTION),
    (inference_pb2.DetectRequest, skills.DETECT),
    (inference_pb2.PointRequest, skills.POINT),
    (inference_pb2.SegmentRequest, skills.SEGMENT),
)
_LIMITS = UploadLimits(max_bytes=_MAX_BYTES, max_pixels=_MAX_PIXELS, ttl=60, max_ttl=60)
_intake = ImageIntake(max_bytes=_MAX_BYTES, max_pixels=_MAX_PIXELS)


def images(data: bytes) -> None:
    """Check and decode a file."""
    with suppress(LegatoError):
        header = inspect(data, max_pixels=_MAX_PIXELS, max_bytes=_MAX_BYTES)
        width, height = displayed_size(data, header)
        check_scans(data, header, _MAX_PIXELS)
        pixels_HWC = decode_file(data, header, max_pixels=_MAX_PIXELS)
        assert pixels_HWC.shape == (height, width, 3)


def wire(data: bytes) -> None:
    """Parse a message of the kind that the first byte names, and convert it."""
    if not data:
        return
    kind, body = data[0] % (len(_SKILLS) + 4), data[1:]
    with suppress(LegatoError, DecodeError):
        match kind - len(_SKILLS):
            case 0:
                _run_tasks(inference_pb2.RunTasksRequest.FromString(body))
            case 1:
                _generate(inference_pb2.GenerateRequest.FromString(body))
            case 2:
                read_header(image_pb2.PutImageRequest.FromString(body), _LIMITS)
            case 3:
                _session(session_pb2.SessionRequest.FromString(body))
            case _:
                _unary(kind, body)


def _unary(kind: int, body: bytes) -> None:
    message_type, skill = _SKILLS[kind]
    message = message_type.FromString(body)
    requests.heartbeat(message.options)
    task = skill.task(message, "")
    requests.check_image(message.image, task)
    sampling = requests.sampling(message.sampling)
    requests.request(RequestKey("r"), task, sampling, message.options)
    _check(message.image)


def _generate(message: inference_pb2.GenerateRequest) -> None:
    task = requests.task(message.task, "task")
    requests.check_image(message.image, task, "task.query.")
    sampling = requests.sampling(message.task.sampling, "task.")
    requests.request(RequestKey("r"), task, sampling, message.options)
    _check(message.image)


def _run_tasks(message: inference_pb2.RunTasksRequest) -> None:
    for task in requests.tasks(message.tasks):
        requests.check_image(message.image, task)
    _check(message.image)


def _session(message: session_pb2.SessionRequest) -> None:
    conversion.settings(message.open, credit_timeout=30)
    conversion.heartbeat(message.open)
    requests.tasks(message.update.standing_tasks)
    _check(message.frame.image)


def _check(image: media_pb2.Image) -> None:
    """The check of an image that is not shared never waits."""
    checking = _intake.check(image)
    with suppress(StopIteration):
        checking.send(None)
        raise AssertionError("the check waits")


def _wire_seeds() -> list[bytes]:
    order = ("Query", "Caption", "Detect", "Point", "Segment", "RunTasks", "Generate")
    found = []
    for method, messages in seeds.messages().items():
        name = method.rpartition("/")[2]
        kind = {"PutImage": 7, "Session": 8}.get(name)
        kind = order.index(name) if name in order else kind
        if kind is not None:
            found += [bytes((kind,)) + message.SerializeToString() for message in messages]
    return found


_TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "http": (test_http.body_to_task, test_http.body_seeds),
    "images": (images, lambda: list(seeds.images())),
    "wire": (wire, _wire_seeds),
}


def main() -> None:
    """Fuzz one target from the seeds."""
    name = sys.argv[1] if len(sys.argv) > 1 else "images"
    target, make_seeds = _TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(make_seeds()):
            (Path(folder) / f"seed-{number}").write_bytes(data)
        corpus = [] if any(not each.startswith("-") for each in sys.argv[2:]) else [folder]
        atheris.Setup([sys.argv[0], *sys.argv[2:], *corpus, "-max_len=4096"], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
