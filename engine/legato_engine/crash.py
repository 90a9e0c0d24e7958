"""Flight recorder and crash bundles of an engine.

The engine writes records of fixed sizes to a mapping of a file in shared memory, so that nothing is
lost whatever ends it, and nothing is allocated but tuples. Records hold shapes, never contents. A
bundle is a folder with `bundle.json`, stacks and a timeline of a dead engine.

- Requests: one slot by sequence id; a newer sequence replaces one that is `_REQUESTS` older.
- Launches: the latest `NUM_LAUNCHES`, each written before its forward pass is enqueued.
- Steps: the times of the latest `_STEPS` committed launches, in nanoseconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import operator
import os
import pathlib
import platform
import shutil
import signal
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import msgspec

from legato_engine import failpoints
from legato_engine.config import EngineConfig

if TYPE_CHECKING:
    from legato_engine.scheduler.batch import Launch
    from legato_engine.scheduler.interfaces import Step
    from legato_engine.sequence import Sequence

NUM_LAUNCHES = 256
_REQUESTS = 1024
_STEPS = 4096
_ROWS = 64  # recorded rows per launch
_MAGIC = b"legato1\0"

_HEADER = struct.Struct("<8sQ")  # magic, steps written
_REQUEST = struct.Struct("<QB15sIIIIII")
_LAUNCH = struct.Struct("<QQ?B7xHH")
_ROW = struct.Struct("<QIIHH")
_STEP = struct.Struct("<QB7xHHI12q")
_LAUNCH_SIZE = _LAUNCH.size + _ROWS * _ROW.size

_REQUESTS_AT = _HEADER.size
_LAUNCHES_AT = _REQUESTS_AT + _REQUESTS * _REQUEST.size
_STEPS_AT = _LAUNCHES_AT + NUM_LAUNCHES * _LAUNCH_SIZE
_SIZE = _STEPS_AT + _STEPS * _STEP.size

STEP_TIMES = (
    "plan_start",
    "plan_end",
    "launch_end",
    "sample_start",
    "sample_end",
    "wait_start",
    "wait_end",
    "commit_end",
    "forward_start",
    "forward_end",
    "device_sample_end",
    "copy_end",
)
_host_times = operator.attrgetter(*STEP_TIMES[:8])
_device_times = operator.attrgetter("forward_start", "forward_end", "sample_end", "copy_end")


class RequestShape(msgspec.Struct, frozen=True):
    """Shape of a request; `width` and `height` are of its image in pixels, 0 without one."""

    seq_id: int
    task: str
    prefix_length: int  # positions of BOS and image
    prompt_tokens: int
    max_tokens: int
    width: int
    height: int
    num_crops: int
    in_flight: bool


class RowShape(msgspec.Struct, frozen=True, array_like=True):
    """Shape of a sequence's row in a launch."""

    seq_id: int
    position: int
    num_tokens: int
    num_drafts: int
    slack: int


class LaunchShape(msgspec.Struct, frozen=True):
    """Shape of a launch; `rows` are the first `_ROWS` of `num_rows`. `at` is in nanoseconds."""

    launch_id: int
    at: int
    kind: str
    num_rows: int
    num_mixed_decodes: int
    committed: bool
    rows: tuple[RowShape, ...]


class RecordedStepTimes(msgspec.Struct, frozen=True):
    """Times of a committed launch; `times` are nanoseconds in the order of `STEP_TIMES`."""

    launch_id: int
    kind: str
    num_rows: int
    slot: int
    tokens: int
    times: tuple[int, ...]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a recording, oldest first."""

    requests: tuple[RequestShape, ...] = ()
    launches: tuple[LaunchShape, ...] = ()
    steps: tuple[RecordedStepTimes, ...] = ()


_KINDS = ("encode", "prefill", "decode", "refine")
_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


class FlightRecorder:
    """Writer of a recording that survives the process; belongs to the scheduler's thread.

    A call takes microseconds.
    """

    def __init__(self, path: pathlib.Path) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _SIZE)  # else a write without space raises SIGBUS
            self._map = mmap.mmap(descriptor, _SIZE, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
        self._steps = 0
        _HEADER.pack_into(self._map, 0, _MAGIC, 0)

    def submitted(self, sequence: Sequence) -> None:
        inputs = sequence.inputs
        images = inputs.visual.images if inputs.visual is not None else [inputs.image]
        info = getattr(images[0], "info", None)  # of several the first
        _REQUEST.pack_into(
            self._map,
            _REQUESTS_AT + sequence.seq_id % _REQUESTS * _REQUEST.size,
            sequence.seq_id + 1,  # 0: never written
            True,
            type(sequence.request.task).__name__.removesuffix("Spec").lower().encode()[:15],
            sequence.prefix_length,
            len(sequence.prompt),
            sequence.task.max_tokens,
            0 if info is None else info.width,
            0 if info is None else info.height,
            sequence.num_crops,
        )

    def ended(self, sequence: Sequence) -> None:
        at = _REQUESTS_AT + sequence.seq_id % _REQUESTS * _REQUEST.size
        self._map[at + 8] = 0

    def launching(self, launch: Launch, at: int) -> None:
        """Record a launch before its forward pass; `at` is in nanoseconds."""
        plan = launch.plan
        offset = _LAUNCHES_AT + launch.launch_id % NUM_LAUNCHES * _LAUNCH_SIZE
        _LAUNCH.pack_into(
            self._map,
            offset,
            launch.launch_id + 1,
            at,
            False,
            _KIND_NUMBERS[plan.kind],
            len(plan.rows),
            plan.num_mixed_decodes,
        )
        offset += _LAUNCH.size
        pack, size = _ROW.pack_into, _ROW.size
        for sequence, position, num_tokens, _, num_drafts, slack, _ in plan.rows[:_ROWS]:
            pack(self._map, offset, sequence.seq_id, position, num_tokens, num_drafts, slack)
            offset += size

    def add(self, step: Step) -> None:
        """Record a committed launch."""
        record, times, launch = step.record, step.times, step.record.launch
        at = _LAUNCHES_AT + launch.launch_id % NUM_LAUNCHES * _LAUNCH_SIZE
        self._map[at + 16] = 1
        _STEP.pack_into(
            self._map,
            _STEPS_AT + self._steps % _STEPS * _STEP.size,
            launch.launch_id,
            _KIND_NUMBERS[launch.plan.kind],
            len(launch.plan.rows),
            launch.slot,
            record.tokens,
            *_host_times(record),
            *_device_times(times),
        )
        self._steps += 1
        _HEADER.pack_into(self._map, 0, _MAGIC, self._steps)


def read(path: pathlib.Path) -> Recording:
    """Read the recording of a dead engine; return an empty one if it is unreadable."""
    try:
        data = path.read_bytes()
    except OSError:
        return Recording()
    if len(data) != _SIZE or not data.startswith(_MAGIC):
        return Recording()
    launches = sorted(_launches(data), key=lambda each: each.launch_id)
    requests = sorted(_requests(data), key=lambda each: each.seq_id)
    return Recording(requests=tuple(requests), launches=tuple(launches), steps=tuple(_steps(data)))


def _requests(data: bytes) -> Iterator[RequestShape]:
    for number, in_flight, task, *sizes in _REQUEST.iter_unpack(data[_REQUESTS_AT:_LAUNCHES_AT]):
        if number:
            fields = number - 1, task.rstrip(b"\0").decode(), *sizes, bool(in_flight)
            yield RequestShape(*fields)


def _launches(data: bytes) -> Iterator[LaunchShape]:
    for offset in range(_LAUNCHES_AT, _STEPS_AT, _LAUNCH_SIZE):
        number, at, committed, kind, num_rows, mixed = _LAUNCH.unpack_from(data, offset)
        if number:
            begin = offset + _LAUNCH.size
            recorded = data[begin : begin + min(num_rows, _ROWS) * _ROW.size]
            rows = tuple(RowShape(*fields) for fields in _ROW.iter_unpack(recorded))
            yield LaunchShape(number - 1, at, _KINDS[kind], num_rows, mixed, committed, rows)


def _steps(data: bytes) -> Iterator[RecordedStepTimes]:
    _, written = _HEADER.unpack_from(data)
    for number in range(max(0, written - _STEPS), written):
        offset = _STEPS_AT + number % _STEPS * _STEP.size
        launch_id, kind, num_rows, slot, tokens, *times = _STEP.unpack_from(data, offset)
        yield RecordedStepTimes(launch_id, _KINDS[kind], num_rows, slot, tokens, tuple(times))


# ---------------------------------------------------------------- bundle

# Crash bundles: folders with `bundle.json`, stacks and a timeline of a dead engine.

PREFIX = "engine-"
_JSON, _STACKS, _TIMELINE = "bundle.json", "stacks.txt", "timeline.json"
_PACKAGES = ("legato", "torch", "numpy", "msgspec", "tokenizers", "grpcio")


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """Exit of an engine; `exit_code` is negative for a signal, `uptime` seconds since ready."""

    pid: int
    exit_code: int
    uptime: float
    restarts: int


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `bundle.json`: shapes and settings, never a prompt, an image or a result."""

    created: str
    death: Death
    signal: str  # name of the signal that ended it, or empty
    config: EngineConfig
    versions: dict[str, str]
    failpoints: str
    in_flight: tuple[RequestShape, ...]
    requests: tuple[RequestShape, ...]
    launches: tuple[LaunchShape, ...]


class CrashFiles:
    """Crash files of one engine process, in a folder of the service."""

    def __init__(self, prefix: pathlib.Path) -> None:
        self.prefix = prefix
        self.recording = prefix.with_name(f"{prefix.name}.recording")
        self.stacks = prefix.with_name(f"{prefix.name}.stacks")

    def open_stacks(self) -> IO[str]:
        """Open the stacks file for appending; only this user may read it."""
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self.stacks, flags, 0o600), "a")

    def remove(self) -> None:
        self.recording.unlink(missing_ok=True)
        self.stacks.unlink(missing_ok=True)


def default_folder() -> pathlib.Path:
    return pathlib.Path(tempfile.gettempdir()) / f"legato-crashes-{os.geteuid()}"


def write(
    files: CrashFiles, death: Death, config: EngineConfig, folder: pathlib.Path, keep: int
) -> pathlib.Path:
    """Write a bundle to `folder`, and remove all but the newest `keep`; return its path.

    Raises:
        OSError: the folder is another user's, or takes no files.
    """
    _require_private(folder)
    recording = read(files.recording)
    moment = time.time_ns()
    created = time.strftime("%Y%m%dT%H%M%S", time.gmtime(moment // 10**9))
    name = f"{PREFIX}{created}.{moment // 1000 % 10**6:06d}Z-{death.pid}"
    bundle = Bundle(
        created=created,
        death=death,
        signal=_signal_name(death.exit_code),
        config=config,
        versions=_versions(),
        failpoints=os.environ.get(failpoints.VARIABLE, ""),
        in_flight=tuple(each for each in recording.requests if each.in_flight),
        requests=recording.requests,
        launches=recording.launches,
    )
    draft = pathlib.Path(tempfile.mkdtemp(prefix=".", dir=folder))
    try:
        (draft / _JSON).write_bytes(msgspec.json.format(msgspec.json.encode(bundle)))
        (draft / _TIMELINE).write_text(json.dumps(_timeline(recording)))
        shutil.copyfile(files.stacks, draft / _STACKS) if files.stacks.exists() else None
        draft.rename(folder / name)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    for old in sorted(folder.glob(f"{PREFIX}*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder / name


def load(path: pathlib.Path) -> Bundle:
    """Read a bundle's folder or its `bundle.json`.

    Raises:
        OSError: there is none.
        ValueError: it is malformed.
    """
    file = path / _JSON if path.is_dir() else path
    return msgspec.json.decode(file.read_bytes(), type=Bundle)


def _require_private(folder: pathlib.Path) -> None:
    """Require a private folder: the default name is predictable and its parent shared."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat(follow_symlinks=False)
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is not a folder of this user")


def _signal_name(exit_code: int) -> str:
    try:
        return signal.Signals(-exit_code).name if exit_code < 0 else ""
    except ValueError:
        return str(-exit_code)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _timeline(recording: Recording) -> dict[str, Any]:
    """Return the launches in Chrome's trace format, in microseconds."""
    events: list[dict[str, Any]] = []
    for step in recording.steps:
        at = dict(zip(STEP_TIMES, step.times, strict=True))
        spans = (
            ("cpu plan", at["plan_start"], at["plan_end"]),
            ("cpu launch", at["plan_end"], at["launch_end"]),
            ("cpu finalize", at["sample_start"], at["sample_end"]),
            ("cpu wait", at["wait_start"], at["wait_end"]),
            ("cpu commit", at["wait_end"], at["commit_end"]),
            ("device forward", at["forward_start"], at["forward_end"]),
            ("device sample", at["forward_end"], at["device_sample_end"]),
        )
        about = {"rows": step.num_rows, "tokens": step.tokens, "slot": step.slot}
        events += [
            {
                "ph": "X",
                "pid": 1,
                "tid": lane,
                "name": f"{step.kind} {step.launch_id}",
                "ts": begin / 1000,
                "dur": max(0, end - begin) / 1000,
                "args": about,
            }
            for lane, begin, end in spans
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
