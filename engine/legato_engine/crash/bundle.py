"""Crash bundles: folders with `bundle.json`, stacks and a timeline of a dead engine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import signal
import stat
import tempfile
import time
from typing import IO, Any

import msgspec

from legato_engine import failpoints
from legato_engine.config import EngineConfig
from legato_engine.crash.recording import STEP_TIMES, LaunchShape, Recording, RequestShape, read

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
        """Open the stacks file for appending; only this user may read it.

        Raises:
            OSError: the file cannot be made.
        """
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
