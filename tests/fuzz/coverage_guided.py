"""Coverage-guided fuzzing: `make fuzz` (ARGS="NAME", then options of libFuzzer).

NAME is images, wire, http, or a target of `test_model_files`.

A finding is written to the working folder as `crash-*` and can be given as an argument to run it
again. Needs the extra `fuzz`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(
    include=[
        "legato_client.web",
        "legato_engine.hub",
        "legato_engine.images",
        "legato_engine.models",
        "legato_service",
    ]
):
    from legato_engine.errors import LegatoError
    from legato_engine.images.decoding import decode_file
    from legato_engine.images.headers import check_scans, displayed_size, inspect
    from legato_engine.types import RequestKey
    from legato_service.convert import requests, skills
    from legato_service.images.intake import ImageIntake
    from legato_service.images.upload import UploadLimits, read_header
    from legato_service.rpc import limits
    from legato_service.session import conversion

    from tests.fuzz import test_model_files as model_files
    from tests.fuzz import test_servers

from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message
from legato.v1 import image_pb2, inference_pb2, media_pb2, session_pb2

from tests.fuzz import seeds
from tests.fuzz.messages import methods

_MAX_PIXELS = 100_000
_MAX_BYTES = 1 << 20
_SKILLS: dict[type[Message], skills.SkillConversions] = {
    inference_pb2.QueryRequest: skills.QUERY,
    inference_pb2.CaptionRequest: skills.CAPTION,
    inference_pb2.DetectRequest: skills.DETECT,
    inference_pb2.PointRequest: skills.POINT,
    inference_pb2.SegmentRequest: skills.SEGMENT,
}
_METHODS = {path: message_factory.GetMessageClass(each.input_type) for path, each in methods()}
_KINDS = tuple(_METHODS.values())
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
    """Check, parse and convert a request of the method that the first byte names."""
    if not data:
        return
    kind, body = _KINDS[data[0] % len(_KINDS)], data[1:]
    with suppress(LegatoError, DecodeError):
        limits.kind_of(kind.DESCRIPTOR).check(body)
        _convert(kind.FromString(body))


def _loaded_or_refused(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        with suppress(LegatoError):
            target(data)

    return run


def _convert(message: Message) -> None:
    match message:
        case inference_pb2.RunTasksRequest():
            _run_tasks(message)
        case inference_pb2.GenerateRequest():
            _generate(message)
        case image_pb2.PutImageRequest():
            read_header(message, _LIMITS)
        case session_pb2.SessionRequest():
            _session(message)
        case _ if type(message) in _SKILLS:
            _unary(message, _SKILLS[type(message)])


def _unary(message: Any, skill: skills.SkillConversions) -> None:
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
    requests.heartbeat(message.open)
    requests.tasks(message.update.standing_tasks)
    _check(message.frame.image)


def _check(image: media_pb2.Image) -> None:
    """The check of an image that is not shared never waits."""
    checking = _intake.check(image)
    with suppress(StopIteration):
        checking.send(None)
        raise AssertionError("the check waits")


def _wire_seeds() -> list[bytes]:
    numbers = {path: bytes((number,)) for number, path in enumerate(_METHODS)}
    return [
        numbers[path] + message.SerializeToString()
        for path, messages in seeds.messages().items()
        for message in messages
    ]


_TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], Sequence[bytes]]]] = {
    "images": (images, seeds.images),
    "http": (test_servers.body_to_task, test_servers.body_seeds),
    "wire": (wire, _wire_seeds),
    **{
        name: (_loaded_or_refused(target), make_seeds)
        for name, (target, make_seeds) in model_files.TARGETS.items()
    },
}
_MAX_LEN = 4096  # bytes of an input, unless a seed is longer


def main() -> None:
    """Fuzz one target from the seeds."""
    name = sys.argv[1] if len(sys.argv) > 1 else "images"
    target, make_seeds = _TARGETS[name]
    made = make_seeds()
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(made):
            (Path(folder) / f"seed-{number}").write_bytes(data)
        corpus = [] if any(not each.startswith("-") for each in sys.argv[2:]) else [folder]
        max_len = max(_MAX_LEN, *map(len, made))
        atheris.Setup([sys.argv[0], *sys.argv[2:], *corpus, f"-max_len={max_len}"], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
